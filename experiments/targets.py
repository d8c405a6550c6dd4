"""Targets by name or folder, with their tokenizer.

`--target=embedded` is the one that ships with the package; anything else is a
Hugging Face folder (config.json, safetensors, tokenizer.json).
"""

import pathlib
from importlib import resources
from typing import NamedTuple

import tokenizers

from dspine_jax.checkpoints import target_folder
from dspine_jax.decoding import generate

EMBEDDED = "embedded"


class NamedTarget(NamedTuple):
  """A loaded target.

  Attributes:
    name: as given.
    folder: where it lies.
    model: parameters and configuration.
    tokenizer: its tokenizer.
  """

  name: str
  folder: pathlib.Path
  model: generate.TargetModel
  tokenizer: tokenizers.Tokenizer


def embedded_folder(name: str = "target") -> pathlib.Path:
  """The folder of an embedded model inside the installed package."""
  return pathlib.Path(str(resources.files("dspine_jax") / "assets" / name))


def load(name: str) -> NamedTarget:
  """Loads a target and its tokenizer.

  Raises:
    ValueError: naming the folder or file at fault.
  """
  folder = embedded_folder() if name == EMBEDDED else pathlib.Path(name)
  loaded = target_folder.load_target(folder)
  path = folder / "tokenizer.json"
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:
    # The library raises plain Exception for missing and malformed files.
    raise ValueError(f"{path}: not a readable tokenizer ({error})") from None
  if tokenizer.get_vocab_size() > loaded.cfg.vocab_size:
    raise ValueError(
      f"{path}: {tokenizer.get_vocab_size()} tokens, but the target's"
      f" vocab_size is {loaded.cfg.vocab_size}"
    )
  return NamedTarget(
    name=name,
    folder=folder,
    model=generate.TargetModel(loaded.params, loaded.cfg),
    tokenizer=tokenizer,
  )


def mask_token_id(target: NamedTarget, flag_value: int | None) -> int:
  """The mask token: as given, else `<|mask|>`, else the first unused row.

  Raises:
    ValueError: the target has neither.
  """
  if flag_value is not None:
    return flag_value
  token = target.tokenizer.token_to_id("<|mask|>")
  if token is not None:
    return token
  unused = target.tokenizer.get_vocab_size()
  if unused >= target.model.cfg.vocab_size:
    raise ValueError(
      f"target {target.name}: no <|mask|> token and no unused embedding row;"
      " name one with --mask_token_id"
    )
  return unused
