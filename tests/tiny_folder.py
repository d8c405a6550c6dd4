"""A tiny target, its corpus, its answers and its drafters as real folders.

What the scripts of `experiments` read, made without running them: a Hugging
Face folder with random weights and a byte-level tokenizer, some small files of
the standard library, and answers of random tokens.
"""

import pathlib
import shutil
import sysconfig
from typing import NamedTuple

import jax
import numpy as np

from dspine_jax import configs
from dspine_jax.checkpoints import drafter_folder, target_folder
from dspine_jax.data import answers as answers_lib
from dspine_jax.data import corpus
from dspine_jax.target import model
from tests import tiny_models

VOCAB = 300
PROMPT, NEW = 64, 12


class Folders(NamedTuple):
  """Paths of one tiny world."""

  root: pathlib.Path
  corpus: pathlib.Path
  target: pathlib.Path
  answers: pathlib.Path
  drafter: pathlib.Path


def target_config(**changes) -> configs.TargetConfig:
  fields = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_layers": 5,
    "num_heads": 2,
    "num_kv_heads": 1,
    "head_dim": 16,
    "rope_theta": 1e4,
    "max_positions": 256,
    "eos_token_ids": (0,),
  }
  return configs.TargetConfig(**(fields | changes))


def drafter_config(
  target: configs.TargetConfig, method: str = "dflash", **changes
) -> configs.DrafterConfig:
  options = configs.DSpineOptions(
    transfer_rank=16, message_size=8, top_k=8, replacement_layers=1
  )
  fields = {"num_layers": 2, "mask_token_id": 1, "block_size": 6}
  return configs.drafter_for(
    target,
    method,
    dspine=options if method == "dspine" else None,
    **(fields | changes),
  )


def write_corpus(folder: pathlib.Path) -> pathlib.Path:
  """Thirty small files of the standard library, two of them held out."""
  folder.mkdir(parents=True)
  library = pathlib.Path(sysconfig.get_path("stdlib"))
  sizes = {path: path.stat().st_size for path in library.glob("*.py")}
  small = sorted((size, path) for path, size in sizes.items() if size > 1000)
  paths = [path for _, path in small]
  held_out = [path for path in paths if corpus.is_held_out(path.name)][:2]
  train = [path for path in paths if not corpus.is_held_out(path.name)][:28]
  for path in held_out + train:
    shutil.copy(path, folder / path.name)
  return folder


def write_target(
  folder: pathlib.Path, text: corpus.Corpus, *, seed: int = 0, **changes
) -> pathlib.Path:
  """config.json, model.safetensors and tokenizer.json with random weights."""
  cfg = target_config(**changes)
  params = model.init(jax.random.key(seed), cfg)
  target_folder.save_target(folder, params, cfg)
  tokenizer = corpus.train_tokenizer((file.text for file in text.train), VOCAB)
  tokenizer.save(str(folder / "tokenizer.json"))
  return folder


def write_drafter(
  folder: pathlib.Path, cfg: configs.DrafterConfig
) -> pathlib.Path:
  setup = tiny_models.drafter(cfg)
  drafter_folder.save_drafter(folder, setup.params, setup.buffers, cfg)
  return folder


def random_answers(
  count: int, *, vocab: int = VOCAB, prompt: int = PROMPT, new: int = NEW
) -> answers_lib.AnswerSet:
  """Random tokens; every second answer is one token shorter."""
  tokens = np.random.default_rng(count).integers(
    2, vocab, (count, prompt + new)
  )
  lengths = np.full((count,), prompt + new, np.int32)
  lengths[1::2] -= 1
  tokens[np.arange(prompt + new) >= lengths[:, None]] = 0
  return answers_lib.AnswerSet(
    tokens=tokens.astype(np.int32),
    prompt_lengths=np.full((count,), prompt, np.int32),
    lengths=lengths,
    temperatures=np.zeros((count,), np.float32),
  )


def write_answers(folder: pathlib.Path) -> pathlib.Path:
  folder.mkdir(parents=True)
  for name, count in (("train_t0", 6), ("train_t1", 5), ("held_out", 3)):
    answers_lib.save(folder / f"{name}.npz", random_answers(count))
  return folder


def write_all(root: pathlib.Path) -> Folders:
  text = corpus.read_corpus(write_corpus(root / "corpus"))
  return Folders(
    root=root,
    corpus=root / "corpus",
    target=write_target(root / "target", text),
    answers=write_answers(root / "answers"),
    drafter=write_drafter(
      root / "drafter", drafter_config(target_config(), "dflash")
    ),
  )
