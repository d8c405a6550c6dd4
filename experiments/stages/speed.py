"""Timing on the device at hand: medians, the matmul peak, counted FLOPs."""

import time
from collections.abc import Callable
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs


def seconds(call: Callable[[], object], *, repeats: int) -> np.ndarray:
  """Wall-clock of each of `repeats` calls, after one that is not counted."""
  jax.block_until_ready(call())
  return np.asarray([timed(call)[0] for _ in range(repeats)])


def timed(call: Callable[[], Any]) -> tuple[float, Any]:
  """Seconds of one call, and its result."""
  start = time.perf_counter()
  result = jax.block_until_ready(call())
  return time.perf_counter() - start, result


def matmul_peak(size: int = 1536, repeats: int = 8) -> float:
  """FLOP/s of a large float32 matrix product, the best of some tries."""
  x = jnp.ones((size, size))
  product = jax.jit(lambda a, b: a @ b)
  return 2 * size**3 / seconds(lambda: product(x, x), repeats=repeats).min()


def layer_flops(cfg, tokens: int, keys: float) -> float:
  """Matmul FLOPs of one decoder layer's forward pass.

  Args:
    cfg: a target's or drafter's configuration.
    tokens: query tokens.
    keys: keys that each of them attends to.
  """
  queries = cfg.num_heads * cfg.head_dim
  groups = cfg.num_kv_heads * cfg.head_dim
  per_token = cfg.hidden_size * (2 * queries + 2 * groups)
  per_token += 3 * cfg.hidden_size * cfg.intermediate_size
  return 2 * tokens * (per_token + 2 * keys * queries)


def head_flops(cfg, rows: int) -> float:
  """Matmul FLOPs of the LM head over `rows` states."""
  return 2 * rows * cfg.hidden_size * cfg.vocab_size


def draft_flops(
  cfg: configs.DrafterConfig, blocks: int, keys: float, new_context: int
) -> float:
  """Matmul FLOPs of a drafter's forward pass without the head.

  Args:
    cfg: the drafter.
    blocks: number of blocks.
    keys: context keys each slot attends to (own block excluded).
    new_context: positions whose context keys and values are computed.
  """
  slots = blocks * cfg.block_size
  total = cfg.num_layers * layer_flops(cfg, slots, keys + cfg.block_size)
  fused = len(cfg.target_layer_ids) * cfg.hidden_size
  groups = cfg.num_kv_heads * cfg.head_dim
  total += 2 * new_context * fused * cfg.hidden_size
  total += 4 * new_context * cfg.num_layers * cfg.hidden_size * groups
  if cfg.dspine is not None:
    rank, size = cfg.dspine.transfer_rank, cfg.dspine.message_size
    per_slot = 3 * rank * size + size * cfg.hidden_size
    per_slot += 2 * rank * cfg.hidden_size
    total += 2 * cfg.num_layers * slots * per_slot
  if cfg.dflash2 is not None:
    options = cfg.dflash2
    groups = cfg.hidden_size // options.conv_group_size
    # Two sublayers with two sides each.
    columns = 4 * options.conv_kernel_size * groups
    total += 2 * cfg.num_layers * slots * cfg.hidden_size * columns
  return total


def selection_flops(cfg: configs.DrafterConfig, rows: int) -> float:
  """Matmul FLOPs of what corrects the logits of `rows` slots.

  Given their predecessors; DSpine's refinement is not counted.
  """
  width, per_row = cfg.hidden_size, 0
  if cfg.dflash2 is not None:
    per_row = cfg.dflash2.selector_rank * (width + cfg.dflash2.selector_top_k)
  if cfg.domino is not None:
    size, rank = cfg.domino.gru_hidden_dim, cfg.domino.emb_dim
    per_row = (width + size) * (3 * size + rank) + rank * cfg.vocab_size
  if cfg.dspark is not None:
    rank = cfg.dspark.markov_rank
    mixer = {
      "vanilla": 0,
      "gated": (width + rank) * rank,
      "rnn": (width + 2 * rank) * 3 * rank,
    }
    per_row = rank * cfg.vocab_size + mixer[cfg.dspark.markov_head_type]
  return 2 * rows * per_row
