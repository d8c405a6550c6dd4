"""Trains a small Qwen3-style target and its tokenizer on Python source.

  python -m experiments.train_target --work_dir=runs/target

The corpus is the running interpreter's standard library; 1 file in 20 is held
out by name. The result, `WORK_DIR/target`, is an ordinary Hugging Face folder
(config.json, model.safetensors, tokenizer.json) and is what `--target` takes
elsewhere. Killed runs go on where they stopped when the command is repeated.
Time: about 75 minutes on two CPU cores with the defaults.
"""

import dataclasses
import math
import pathlib
import sys

import jax
import numpy as np
import optax
import tokenizers
from absl import flags
from flax import struct
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.checkpoints import orbax, target_folder
from dspine_jax.data import corpus
from dspine_jax.target import model
from dspine_jax.training import optimizer
from dspine_jax.typing import Params, PyTree
from experiments import run_io

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/target", "Where checkpoints, metrics and the target go."
)
_CORPUS = flags.DEFINE_string(
  "corpus", None, "Folder of *.py files; default: the standard library."
)
_STEPS = flags.DEFINE_integer("steps", 1600, "Optimiser steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 16, "Rows a step.", lower_bound=1)
_LENGTH = flags.DEFINE_integer("length", 256, "Tokens a row.", lower_bound=2)
_OPTIMIZER = flags.DEFINE_enum(
  "optimizer", "muon", configs.OPTIMIZERS, "Which optimiser."
)
_LR = flags.DEFINE_float("learning_rate", 0.01, "Peak learning rate.")
_DECAY = flags.DEFINE_float("weight_decay", 0.1, "Weight decay.")
_LAYERS = flags.DEFINE_integer("num_layers", 12, "Layers of the target.")
_WIDTH = flags.DEFINE_integer("hidden_size", 192, "Width; heads have 32.")
_VOCAB = flags.DEFINE_integer("vocab_size", 2048, "Tokens of the tokenizer.")
_EVERY = flags.DEFINE_integer(
  "checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1
)
_EVAL_ROWS = flags.DEFINE_integer(
  "eval_rows", 32, "Held-out rows of the running estimate.", lower_bound=1
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of weights and data order.", lower_bound=0
)


@struct.dataclass
class _State:
  params: PyTree
  opt_state: PyTree
  step: jax.Array


def target_config(width: int, num_layers: int, vocab: int, length: int):
  """A deep and thin Qwen3: heads of 32, one key head for three query heads."""
  if width % 96:
    raise ValueError(f"--hidden_size={width}: must be a multiple of 96")
  return configs.TargetConfig(
    vocab_size=vocab,
    hidden_size=width,
    intermediate_size=width * 8 // 3,
    num_layers=num_layers,
    num_heads=width // 32,
    num_kv_heads=width // 96,
    head_dim=32,
    rope_theta=1e4,
    max_positions=max(2048, length),
    eos_token_ids=(0,),
  )


def token_losses(params: Params, rows: jax.Array, cfg) -> jax.Array:
  """Cross-entropy in nats of tokens 1.. of each row: [B, T - 1]."""
  out = model.forward(params, rows[:, :-1], cfg=cfg)
  logits = model.logits(params, out.hidden)
  return optax.softmax_cross_entropy_with_integer_labels(logits, rows[:, 1:])


def make_step(cfg, tx):
  """A jitted (state, rows) -> (state, (loss, norm of the new parameters))."""

  def train_step(state: _State, rows: jax.Array):
    def loss(params):
      return jnp.mean(token_losses(params, rows, cfg))

    value, grads = jax.value_and_grad(loss)(state.params)
    updates, opt_state = tx.update(grads, state.opt_state, state.params)
    params = optax.apply_updates(state.params, updates)
    norm = optax.tree.norm(params)
    return _State(params, opt_state, state.step + 1), (value, norm)

  return jax.jit(train_step, donate_argnums=0)


def sample_rows(stream: np.ndarray, step: int, seed: int, batch: int, length):
  """Rows at random places; a function of the step, so that runs resume."""
  generator = np.random.default_rng([seed, step])
  starts = generator.integers(0, len(stream) - length - 1, batch)
  return np.stack([stream[start : start + length + 1] for start in starts])


def bits_per_byte(params, rows, num_bytes_per_token: float, loss_fn) -> float:
  """Mean nats per token over `rows`, in bits per byte of their text."""
  losses = [float(np.mean(loss_fn(params, row[None]))) for row in rows]
  return float(np.mean(losses)) / math.log(2) / num_bytes_per_token


def run(
  work_dir: run_io.WorkDir,
  cfg,
  opt_cfg,
  text: corpus.Corpus,
  tokenizer: tokenizers.Tokenizer,
  *,
  flag,
):
  """Trains, evaluates on all held-out rows and writes the target folder."""
  folder = pathlib.Path(work_dir.path)
  stream = np.concatenate(corpus.encode_files(tokenizer, text.train))
  if len(stream) < flag.length + 2:
    raise ValueError(
      f"--length={flag.length}: the corpus has only {len(stream)} tokens"
    )
  held_out_streams = corpus.encode_files(tokenizer, text.held_out)
  held_out = corpus.windows(held_out_streams, flag.length + 1)
  held_out_bytes = sum(len(file.text.encode()) for file in text.held_out)
  bytes_per_token = held_out_bytes / sum(map(len, held_out_streams))
  tx = optimizer.make_optimizer(opt_cfg)
  params = model.init(jax.random.key(flag.seed), cfg)
  state = _State(params, tx.init(params), jnp.zeros((), jnp.int32))
  train_step = make_step(cfg, tx)
  eval_loss = jax.jit(lambda params, rows: token_losses(params, rows, cfg))

  with orbax.TrainingCheckpoints(folder / "checkpoints") as checkpoints:
    if checkpoints.latest_step() is not None:
      state, _ = checkpoints.restore(state)
    first = int(state.step)
    metrics = run_io.MetricsWriter(work_dir, start_step=first)
    progress = run_io.Progress(
      opt_cfg.total_steps * flag.batch_size * flag.length,
      "target",
      "tokens",
      start=first * flag.batch_size * flag.length,
    )
    with metrics, progress:
      for step in range(first, opt_cfg.total_steps):
        rows = sample_rows(
          stream, step, flag.seed, flag.batch_size, flag.length
        )
        state, values = train_step(state, rows)
        loss, norm = map(float, values)
        if not math.isfinite(loss) or not math.isfinite(norm):
          raise ValueError(
            f"loss is {loss} and the parameters' norm {norm} at step {step};"
            f" {checkpoints.last_good()}"
            f" in {folder / 'checkpoints'} (try a lower --learning_rate)"
          )
        scalars = {"loss": loss}
        progress.update(flag.batch_size * flag.length, step=step, loss=loss)
        done = step + 1
        last = done == opt_cfg.total_steps
        if done % flag.checkpoint_every == 0 or last:
          some = held_out[:: max(1, len(held_out) // flag.eval_rows)]
          value = bits_per_byte(state.params, some, bytes_per_token, eval_loss)
          scalars["held_out_bits_per_byte"] = value
          progress.update(0, step=done, bits_per_byte=value)
        metrics.write(step, scalars)
        # After its line of metrics, which a resumed run would not write again.
        if done % flag.checkpoint_every == 0 or last:
          checkpoints.save(done, state, {})

  final = bits_per_byte(state.params, held_out, bytes_per_token, eval_loss)
  out = folder / "target"
  target_folder.save_target(out, state.params, cfg, dtype="bfloat16")
  tokenizer.save(str(out / "tokenizer.json"))
  saved = target_folder.load_target(out)
  results = {
    "held_out_bits_per_byte": final,
    "held_out_bits_per_byte_bf16": bits_per_byte(
      saved.params, held_out, bytes_per_token, eval_loss
    ),
    "bytes_per_token": bytes_per_token,
    "train_tokens": len(stream),
    "tokens_seen": opt_cfg.total_steps * flag.batch_size * flag.length,
    "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
    "corpus": text.origin,
    "corpus_digest": text.digest,
    "held_out_files": [file.name for file in text.held_out],
  }
  run_io.write_json(folder / "results.json", results)
  run_io.write_json(out / "ORIGIN.json", results)
  return results


def main(unused_argv):
  text = (
    corpus.read_corpus(_CORPUS.value)
    if _CORPUS.value
    else corpus.standard_library()
  )
  cfg = target_config(_WIDTH.value, _LAYERS.value, _VOCAB.value, _LENGTH.value)
  opt_cfg = configs.OptimizerConfig(
    name=_OPTIMIZER.value,
    learning_rate=_LR.value,
    total_steps=_STEPS.value,
    weight_decay=_DECAY.value,
    schedule="wsd",
    warmup_ratio=0.03,
  )
  config = {
    "target": cfg,
    "optimizer": dataclasses.replace(opt_cfg, total_steps=1),
    "batch_size": _BATCH.value,
    "length": _LENGTH.value,
    "seed": _SEED.value,
    "corpus": text.origin,
    "corpus_digest": text.digest,
  }
  tokenizer = corpus.train_tokenizer(
    (file.text for file in text.train), cfg.vocab_size
  )
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value, config=config, argv=sys.argv, resume=True
  )
  results = run(work_dir, cfg, opt_cfg, text, tokenizer, flag=flags.FLAGS)
  print(f"held-out bits per byte: {results['held_out_bits_per_byte']:.4f}")


if __name__ == "__main__":
  run_io.run_app(main)
