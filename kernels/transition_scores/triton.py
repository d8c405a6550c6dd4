"""Launches of the transition scores' kernels on Hopper.

The factored form: no gathered head row or code and no D-wide refined state is
ever written to device memory. Plain products with nothing to fuse stay XLA's:
u @ readout, 2 N D R FLOPs for N slots, and for the scores of many slots also
O^T u, 2 N D Z, and G = O^T O, 2 Z Z D. G does not depend on the round: from a
decode loop that is one jitted program XLA can move it out. Weights are cast to
the dtype of `u`; a server that holds them in it pays nothing for that.

Greedy drafting needs no norm of q(a): it is one positive factor for all
candidates, so it changes no argmax.

Not here: gradients (`api.py`), and the kernels themselves (`triton_rows.py`,
`triton_pairs.py`).
"""

from typing import NamedTuple

import jax
from jax import numpy as jnp

from kernels import batching, triton_call
from kernels import block_sizes as tiles
from kernels.adjacent_injection import reference as injection
from kernels.transition_scores import (
  heuristics,
  reference,
  triton_pairs,
  triton_rows,
)

OP = "transition_scores"
WIDTH_STEP = 1024  # of the sum |u|^2


class _Pairs(NamedTuple):
  """What joins to the scores of N slots; rows flattened.

  Attributes:
    u: [N, D].
    z: [N, P, Z], of each predecessor.
    through: [N, C, Z], O^T (g E_b) of each candidate.
    base: [N, C] float32, (g E_b) . u.
  """

  u: jax.Array
  z: jax.Array
  through: jax.Array
  base: jax.Array


def transition_scores(
  u, predecessors, candidates, codes, head, weights, norm_scale, eps, given
):
  """As `reference.transition_scores`; `given` block sizes."""

  def of_rows(u, predecessors, candidates, codes, head, norm_scale, *parts):
    weights = injection.Weights(*parts)
    pairs = _pairs(
      u, predecessors, candidates, codes, head, weights, norm_scale, given
    )
    out = _scores(pairs, weights.write, eps, given)
    return (out.reshape(*predecessors.shape, candidates.shape[-1]),)

  mapped = batching.rows_first(of_rows, 3)
  parts = _cast(weights, u.dtype)
  return mapped(u, predecessors, candidates, codes, head, norm_scale, *parts)[0]


def greedy_draft(
  u, anchor, candidates, codes, head, weights, norm_scale, given
):
  """As `reference.greedy_draft`, but for ties that rounding alone makes."""

  def of_rows(u, anchor, candidates, codes, head, norm_scale, *parts):
    weights = injection.Weights(*parts)
    before = reference.predecessor_ids(anchor, candidates)
    pairs = _pairs(
      u, before, candidates, codes, head, weights, norm_scale, given
    )
    tokens = _walk(_best(pairs, given), candidates)
    return (tokens.reshape(candidates.shape[:-1]),)

  mapped = batching.rows_first(of_rows, 3)
  parts = _cast(weights, u.dtype)
  return mapped(u, anchor, candidates, codes, head, norm_scale, *parts)[0]


def _cast(weights, dtype):
  return injection.Weights(*(weight.astype(dtype) for weight in weights))


def _pairs(u, predecessors, candidates, codes, head, weights, scale, given):
  """The per-row parts; any leading axes."""
  u = u.reshape(-1, u.shape[-1])
  predecessors = predecessors.reshape(-1, predecessors.shape[-1])
  candidates = candidates.reshape(-1, candidates.shape[-1])
  receiver = _receiver(u @ weights.readout, weights, given)
  z = _message(predecessors, codes, weights, receiver, given)
  through, base = _through(u, candidates, head, scale, weights.write, given)
  return _Pairs(u, z, through, base)


def _receiver(read, weights, given):
  """W_q f + b, [N, Z] float32, from the unscaled readout [N, R]."""
  (rows, rank), size = read.shape, weights.bias.shape[0]
  launch = _row_launch("scores_receiver", rows, rank, size, read.dtype, given)
  return triton_call.call(
    triton_rows.scores_receiver,
    read,
    weights.receiver_gate,
    weights.bias,
    out_shape=[_shape((rows, size), jnp.float32)],
    ROWS=rows,
    R=rank,
    Z=size,
    TINY=injection.TINY,
    **launch,
  )[0]


def _message(predecessors, codes, weights, receiver, given):
  """z of each predecessor, [N, P, Z]."""
  dtype, (rank, size) = weights.message.dtype, weights.message.shape
  rows, count = predecessors.size, predecessors.shape[-1]
  return triton_call.call(
    triton_rows.scores_message,
    predecessors,
    codes,
    weights.predecessor_gate,
    weights.message,
    receiver,
    out_shape=[_shape((*predecessors.shape, size), dtype)],
    ROWS=rows,
    P=count,
    R=rank,
    Z=size,
    CODE_SCALE=rank**0.5,
    **_row_launch("scores_message", rows, rank, size, dtype, given),
  )[0]


def _through(u, candidates, head, scale, write, given):
  """O^T (g E_b), [N, C, Z], and (g E_b) . u, [N, C] float32."""
  (size, width), rows = write.shape, candidates.size
  return triton_call.call(
    triton_rows.scores_through,
    u,
    candidates,
    head,
    scale,
    write,
    out_shape=[
      _shape((*candidates.shape, size), u.dtype),
      _shape(candidates.shape, jnp.float32),
    ],
    ROWS=rows,
    C=candidates.shape[-1],
    D=width,
    Z=size,
    **_row_launch("scores_through", rows, width, size, u.dtype, given),
  )


def _length(pairs, write, given):
  """Parts of u . O z and |O z|^2, [2, parts, N, P] float32."""
  u, z = pairs.u, pairs.z
  slots, count, size = z.shape
  matrix, beside = write, u
  by_gram = heuristics.by_gram(slots, count, u.shape[-1], size)
  if by_gram:
    matrix, beside = reference.gram(write), u @ write.T
  rows, cols = slots * count, matrix.shape[-1]
  launch = _row_launch("scores_length", rows, size, cols, u.dtype, given)
  num_parts = -(-cols // launch["BLOCK_COLS"])
  return triton_call.call(
    triton_rows.scores_length,
    z,
    matrix,
    beside,
    out_shape=[_shape((2, num_parts, slots, count), jnp.float32)],
    ROWS=rows,
    P=count,
    Z=size,
    COLS=cols,
    BY_GRAM=by_gram,
    **launch,
  )[0]


def _scores(pairs, write, eps, given):
  """Scores of the slots, [N, P, C] float32."""
  u, z, through, base = pairs
  slots, count, size = z.shape
  parts = _length(pairs, write, given)
  return triton_call.call(
    triton_pairs.scores_pairs,
    u,
    z,
    through,
    base,
    parts,
    out_shape=[_shape((slots, count, base.shape[-1]), jnp.float32)],
    SLOTS=slots,
    P=count,
    C=base.shape[-1],
    D=u.shape[-1],
    Z=size,
    PARTS=parts.shape[1],
    BLOCK_PARTS=heuristics.padded(parts.shape[1], 1),
    EPS=eps,
    TINY=injection.TINY,
    **_pair_launch("scores_pairs", pairs, given),
  )[0]


def _best(pairs, given):
  """Index of the best candidate of each predecessor, [N, P] int32."""
  u, z, through, base = pairs
  slots, count, size = z.shape
  return triton_call.call(
    triton_pairs.scores_best,
    u,
    z,
    through,
    base,
    out_shape=[_shape((slots, count), jnp.int32)],
    P=count,
    C=base.shape[-1],
    D=u.shape[-1],
    Z=size,
    TINY=injection.TINY,
    **_pair_launch("scores_best", pairs, given),
  )[0]


def _walk(best, candidates):
  """The tokens on the path, [N] int32; `best` is [N, C]."""
  slots, count = candidates.shape[-2:]
  requests = best.shape[0] // slots
  return triton_call.call(
    triton_pairs.scores_walk,
    best,
    candidates,
    out_shape=[_shape((requests, slots), jnp.int32)],
    grid=(requests,),
    num_warps=1,
    num_stages=1,
    M=slots,
    P=count,
    C=count,
    BLOCK_M=heuristics.padded(slots),
    BLOCK_P=heuristics.padded(count),
  )[0]


def _row_launch(kernel, rows, inner, cols, dtype, given):
  """Grid and tiles of a product [rows, inner] x [inner, cols].

  Columns vary fastest.
  """
  itemsize = jnp.dtype(dtype).itemsize
  sizes = tiles.choose(
    OP,
    kernel,
    tiles.bucket_of(dtype, rows, inner=inner, cols=cols),
    given,
    lambda: heuristics.row_tiles(kernel, rows, cols, itemsize),
  )
  return {
    "grid": (-(-rows // sizes.rows) * -(-cols // sizes.cols),),
    "num_warps": sizes.num_warps,
    "num_stages": sizes.num_stages,
    "BLOCK_ROWS": sizes.rows,
    "BLOCK_COLS": sizes.cols,
    "BLOCK_INNER": sizes.inner,
    "PRECISION": _precision(dtype),
  }


def _pair_launch(kernel, pairs, given):
  """Grid and tiles of a kernel that takes a slot a program."""
  slots, count, size = pairs.z.shape
  others = pairs.base.shape[-1]
  sizes = tiles.choose(
    OP,
    kernel,
    tiles.bucket_of(pairs.u.dtype, slots, p=count, c=others, z=size),
    given,
    lambda: heuristics.pair_tiles(count, others),
  )
  return {
    "grid": (slots,),
    "num_warps": sizes.num_warps,
    "num_stages": sizes.num_stages,
    "BLOCK_P": heuristics.padded(count),
    "BLOCK_C": heuristics.padded(others),
    "BLOCK_INNER": sizes.inner,
    "BLOCK_WIDTH": WIDTH_STEP,
    "PRECISION": _precision(pairs.u.dtype),
  }


def _precision(dtype):
  """float32 stays float32: no rounding to TF32."""
  return "ieee" if dtype == jnp.float32 else "tf32"


def _shape(shape, dtype):
  return jax.ShapeDtypeStruct(tuple(shape), dtype)
