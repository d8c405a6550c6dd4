"""Launches of the Triton kernels of block attention, forward and gradient.

Arrays may have any leading axes in the place of B: a mapped axis is more
programs of the grid. Not here: the kernels (`triton_forward.py`,
`triton_backward.py`), their tiles (`heuristics.py`).
"""

import functools
import math
from typing import Any

import jax
from jax import numpy as jnp

from kernels import batching, block_sizes, triton_call
from kernels.block_attention import (
  heuristics,
  triton_backward,
  triton_forward,
)


def forward(given: block_sizes.Given, *arguments):
  """(out [*b, N, K, Q, H], log-sum-exp [*b, N, K, Q] in base two).

  Args:
    given: block sizes.
    *arguments: q, own_k, own_v, context_k, context_v, visible, starts (or
      None), own_mask, as `api.block_attention` takes them.
  """
  return _mapped(_forward, given, *arguments)


def backward(given: block_sizes.Given, out, lse, d_out, *arguments):
  """Cotangents of q, own_k, own_v, context_k and context_v.

  Args:
    given: block sizes.
    out: from `forward`.
    lse: from `forward`.
    d_out: cotangent of `out`.
    *arguments: of `forward`.
  """
  d_q, d_own_k, d_own_v, delta = _mapped(
    _backward_q, given, out, lse, d_out, *arguments
  )
  d_k, d_v = _mapped(_backward_context, given, delta, lse, d_out, *arguments)
  return d_q, d_own_k, d_own_v, d_k, d_v


def _mapped(function, given, *arguments):
  """`function` with a rule for vmap; all but the mask have the batch axis."""
  *rows, starts, own_mask = arguments
  function = functools.partial(function, given, starts is not None)
  if starts is not None:
    rows.append(starts)
  # As numbers, since kernels take no booleans.
  mapped = batching.rows_first(function, len(rows))
  return mapped(*rows, own_mask.astype(jnp.int8))


def _constants(
  shape: heuristics.Shape, has_starts: bool, rows: int
) -> dict[str, Any]:
  """Constants that the kernels of tiles share."""
  return {
    "BLOCKS": shape.blocks,
    "SLOTS": shape.slots,
    "GROUPS": shape.groups,
    "REPEAT": shape.repeat,
    "WIDTH": shape.width,
    "CONTEXT": shape.context,
    "HAS_STARTS": has_starts,
    "SCALE": shape.width**-0.5 * math.log2(math.e),
    "PER_TILE": rows // (shape.slots * shape.repeat),
    "ROWS": rows,
  }


def _own_keys(constants) -> int:
  """Own keys of a tile, padded to what a matrix unit takes."""
  return heuristics.power_of_two(constants["PER_TILE"] * constants["SLOTS"])


def _tiles(constants) -> int:
  return -(-constants["BLOCKS"] // constants["PER_TILE"])


def _like(*arrays):
  return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in arrays]


def _forward(
  given, has_starts, q, own_k, own_v, context_k, context_v, visible, *rest
):
  shape = heuristics.shape_of(q, context_k)
  sizes = heuristics.sizes("forward", shape, given)
  splits = sizes.inner
  constants = _constants(shape, has_starts, sizes.rows)
  lead, per_row = q.shape[:-4], q.shape[-4:-1]
  lse = jax.ShapeDtypeStruct((*lead, *per_row), jnp.float32)
  out_shape = [*_like(q), lse]
  if splits > 1:
    parts = (*lead, splits, *per_row)
    out_shape = [
      jax.ShapeDtypeStruct((*parts, shape.width), jnp.float32),
      jax.ShapeDtypeStruct(parts, jnp.float32),
    ]
  out = triton_call.call(
    triton_forward.block_attention_forward,
    *(q, own_k, own_v, context_k, context_v),
    *(visible, rest[0] if has_starts else visible, rest[-1]),
    out_shape=out_shape,
    grid=(splits * _tiles(constants), shape.groups, shape.batch),
    num_warps=sizes.num_warps,
    num_stages=sizes.num_stages,
    KEYS=_own_keys(constants),
    COLS=sizes.cols,
    SPLITS=splits,
    **constants,
  )
  if splits == 1:
    return tuple(out)
  sizes = heuristics.sizes("merge", shape, given)
  return tuple(
    triton_call.call(
      triton_forward.block_attention_merge,
      *out,
      out_shape=[*_like(q), lse],
      grid=(-(-shape.per_batch // sizes.rows), shape.batch),
      num_warps=sizes.num_warps,
      num_stages=sizes.num_stages,
      TOTAL=shape.per_batch,
      WIDTH=shape.width,
      SPLITS=splits,
      ROWS=sizes.rows,
    )
  )


def _backward_q(
  given,
  has_starts,
  out,
  lse,
  d_out,
  q,
  own_k,
  own_v,
  context_k,
  context_v,
  visible,
  *rest,
):
  shape = heuristics.shape_of(q, context_k)
  sizes = heuristics.sizes("backward_q", shape, given)
  constants = _constants(shape, has_starts, sizes.rows)
  return tuple(
    triton_call.call(
      triton_backward.block_attention_backward_q,
      *(q, own_k, own_v, context_k, context_v, out, lse, d_out),
      *(visible, rest[0] if has_starts else visible, rest[-1]),
      out_shape=_like(q, own_k, own_v, lse),
      grid=(_tiles(constants), shape.groups, shape.batch),
      num_warps=sizes.num_warps,
      num_stages=sizes.num_stages,
      ROOT=shape.width**-0.5,
      KEYS=_own_keys(constants),
      COLS=sizes.cols,
      **constants,
    )
  )


def _backward_context(
  given,
  has_starts,
  delta,
  lse,
  d_out,
  q,
  unused_own_k,
  unused_own_v,
  context_k,
  context_v,
  visible,
  *rest,
):
  shape = heuristics.shape_of(q, context_k)
  sizes = heuristics.sizes("backward_context", shape, given)
  starts = lowest = visible
  if has_starts:
    starts, lowest = rest[0], jnp.min(rest[0], axis=-1)
  return tuple(
    triton_call.call(
      triton_backward.block_attention_backward_context,
      *(q, context_k, context_v, lse, delta, d_out, visible, starts, lowest),
      out_shape=_like(context_k, context_v),
      grid=(shape.groups, shape.batch, -(-shape.context // sizes.cols)),
      num_warps=sizes.num_warps,
      num_stages=sizes.num_stages,
      ROOT=shape.width**-0.5,
      COLS=sizes.cols,
      PADDED_BLOCKS=heuristics.power_of_two(shape.blocks),
      **_constants(shape, has_starts, sizes.rows),
    )
  )
