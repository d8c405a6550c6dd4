"""Sizes of a call, what the Triton kernels can do, and their tiles.

Rows of a tile are the queries of whole blocks and one key head, so that the
cotangents of own keys need no sum over programs; a block must fit into a tile.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import jax
from jax import numpy as jnp

from kernels import block_sizes
from kernels.block_sizes import BlockSizes

OP = "block_attention"
# Kernels that block sizes may be given for. "forward": `inner` is the number of
# programs that share the context of a tile.
KERNELS = ("forward", "merge", "backward_q", "backward_context")

_MAX_ROWS = 128
# Streaming multiprocessors of an H100; fewer programs leave some of them idle.
_PROCESSORS = 132
# Context positions of a split: below it, programs mostly start and end.
_LEAST_SHARE = 256


class Shape(NamedTuple):
  """Sizes of one call.

  Attributes:
    batch: B, product of all leading axes.
    blocks: N.
    slots: K.
    groups: G, key and value heads.
    repeat: query heads of each of them.
    width: H.
    context: S.
    itemsize: bytes of an element.
  """

  batch: int
  blocks: int
  slots: int
  groups: int
  repeat: int
  width: int
  context: int
  itemsize: int

  @property
  def per_batch(self) -> int:
    """Queries of all heads in a row of the batch."""
    return self.blocks * self.slots * self.groups * self.repeat


def shape_of(q: jax.Array, context_k: jax.Array) -> Shape:
  """Sizes of queries [*b, N, K, Q, H] on a context [*b, G, S, H]."""
  *lead, blocks, slots, heads, width = q.shape
  groups, context = context_k.shape[-3:-1]
  return Shape(
    batch=math.prod(lead),
    blocks=blocks,
    slots=slots,
    groups=groups,
    repeat=heads // groups,
    width=width,
    context=context,
    itemsize=q.dtype.itemsize,
  )


def unsupported(shape: Shape, dtypes: Sequence[jnp.dtype]) -> str | None:
  """Why the Triton kernels cannot do a call, or None."""
  kinds = {jnp.dtype(dtype).name for dtype in dtypes}
  if len(kinds) > 1 or not kinds <= {"bfloat16", "float32"}:
    return f"it needs one dtype, bfloat16 or float32, not {sorted(kinds)}"
  if shape.width not in (16, 32, 64, 128):
    return f"it needs a head dimension of 16, 32, 64 or 128, not {shape.width}"
  if shape.slots * shape.repeat > _MAX_ROWS:
    return (
      f"it needs at most {_MAX_ROWS} queries of a block and key head, not "
      f"{shape.slots} slots x {shape.repeat} heads"
    )
  if min(shape.batch, shape.blocks, shape.slots, shape.context) < 1:
    return f"it needs an element along every axis: {shape}"
  return None


def power_of_two(value: int, least: int = 16) -> int:
  """`value` rounded up, and at least what a matrix unit takes."""
  return max(least, 1 << (value - 1).bit_length())


def sizes(kernel: str, shape: Shape, given: block_sizes.Given) -> BlockSizes:
  """Sizes of one of the kernels.

  Raises:
    ValueError: a given tile is too small for a block or the matrix units.
  """
  rows = shape.batch * shape.blocks * shape.slots
  bucket = block_sizes.bucket_of(
    jnp.bfloat16 if shape.itemsize == 2 else jnp.float32,
    rows,
    n=shape.blocks,
    k=shape.slots,
    q=shape.groups * shape.repeat,
    g=shape.groups,
    h=shape.width,
    s=shape.context,
  )
  chosen = block_sizes.choose(
    OP, kernel, bucket, given, lambda: _HEURISTICS[kernel](shape)
  )
  if kernel == "merge":
    return chosen
  least = power_of_two(shape.slots * shape.repeat)
  if chosen.rows < least:
    raise ValueError(
      f"block_sizes[{kernel!r}]: rows={chosen.rows}: must be at least {least}"
    )
  if chosen.cols < 16:
    raise ValueError(
      f"block_sizes[{kernel!r}]: cols={chosen.cols}: must be at least 16"
    )
  return chosen


def _rows(shape: Shape, most: int) -> int:
  """Rows that are neither too few for a block nor more than there are."""
  total = power_of_two(shape.blocks * shape.slots * shape.repeat)
  return max(power_of_two(shape.slots * shape.repeat), min(most, total))


def splits(shape: Shape) -> int:
  """Programs that share a context, where there are too few tiles."""
  per_tile = _forward_rows(shape) // (shape.slots * shape.repeat)
  programs = shape.batch * shape.groups * -(-shape.blocks // per_tile)
  count = 1
  while (
    2 * count * programs <= 2 * _PROCESSORS
    and 2 * count * _LEAST_SHARE <= shape.context
  ):
    count *= 2
  return count


def _forward_rows(shape: Shape) -> int:
  return _rows(shape, 128 if shape.itemsize == 2 else 32)


def _forward(shape: Shape) -> BlockSizes:
  rows = _forward_rows(shape)
  return BlockSizes(
    rows=rows,
    cols=64 if shape.itemsize == 2 else 16,
    inner=splits(shape),
    num_warps=8 if rows > 64 or shape.itemsize > 2 else 4,
    num_stages=3 if shape.itemsize == 2 else 2,
  )


def _merge(shape: Shape) -> BlockSizes:
  # The smallest pass has 512 queries, for 132 processors.
  return BlockSizes(rows=4, cols=shape.width, inner=1, num_warps=4)


def _backward_q(shape: Shape) -> BlockSizes:
  rows = _forward_rows(shape)
  return BlockSizes(
    rows=rows,
    cols=64 if shape.itemsize == 2 else 16,
    inner=1,
    num_warps=8 if rows > 64 or shape.itemsize > 2 else 4,
    num_stages=2,
  )


def _backward_context(shape: Shape) -> BlockSizes:
  return BlockSizes(
    rows=_rows(shape, 64 if shape.itemsize == 2 else 32),
    cols=128 if shape.itemsize == 2 else 32,
    inner=1,
    num_warps=8,
    num_stages=2,
  )


_HEURISTICS = {
  "forward": _forward,
  "merge": _merge,
  "backward_q": _backward_q,
  "backward_context": _backward_context,
}
