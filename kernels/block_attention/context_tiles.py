"""Attention of many draft blocks to the context before their anchors, in tiles.

A training pass has thousands of block slots over one context. The whole score
matrix of a layer would be its largest array, and half of it masked. Here tiles
of blocks are taken one after another; each reads only as much of the context as
its last anchor needs, and the backward pass computes its scores anew. Anchors
come sorted, so neighbours need about the same prefix; in any other order the
result is the same and only the time is not. A window hides the start of that
prefix but saves none of its time. Not here: the attention inside a block, which
is joined by `partial.merge`.
"""

import functools
from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.block_attention import masks, partial

# Scores that are taken in one piece: small enough for the cache of a core.
_WHOLE = 2**20
# Query tokens of a tile.
_TILE_TOKENS = 256
# A tile reads one of this many prefixes of the context. Each is a program of
# its own, so more of them cost compile time.
_PREFIXES = 4


def context_attention(
  q: Float[Array, "b n k q h"],
  k: Float[Array, "b g s h"],
  v: Float[Array, "b g s h"],
  visible: Int[Array, "b n"],
  starts: Int[Array, "b n k"] | None = None,
) -> partial.PartialAttention:
  """Attention of each block to the first `visible` positions of its row.

  Args:
    q: queries of all block slots.
    k: keys of the context.
    v: values of the context.
    visible: positions that a block sees, its anchor; 0 gives a part without
      weight.
    starts: first of them that a slot sees (sliding layers); None for all.

  Returns:
    Parts [B, N, Q, K, ...], as `partial.partial_attention` gives for blocks.
  """
  batch, blocks, slots, heads, _ = q.shape
  num_keys = k.shape[2]
  # One block a row (decoding) has the scores of a few slots only.
  if blocks > 1 and batch * blocks * slots * heads * num_keys > _WHOLE:
    return _tiled(q, k, v, visible, starts)
  rows = q.reshape(batch, blocks * slots, heads, -1)
  ends = jnp.repeat(visible, slots, axis=1)
  if starts is not None:
    starts = starts.reshape(batch, blocks * slots)
  mask = masks.prefix(ends, num_keys, starts)
  part = partial.partial_attention(rows, k, v, mask)

  def per_block(x):
    x = x.reshape(batch, heads, blocks, slots, x.shape[-1])
    return jnp.swapaxes(x, 1, 2)

  return jax.tree.map(per_block, part)


@jax.custom_vjp
def _tiled(q, k, v, visible, starts):
  return _tiled_forward(q, k, v, visible, starts)[0]


def _tiled_forward(q, k, v, visible, starts):
  tiles = _Tiles(q.shape, k.shape[1])
  rows = tiles.cut(jnp.swapaxes(q, 2, 3))
  bounds = _Bounds(
    ends=tiles.per_row(visible[..., None]),
    starts=None if starts is None else tiles.per_row(starts),
  )

  def request(args):
    k, v, per_tile = args
    return lax.map(lambda tile: _on_prefix(_attend, k, v, *tile), per_tile)

  parts = lax.map(request, (k, v, (bounds, rows)))
  out = jax.tree.map(tiles.join, parts)
  return out, (rows, k, v, bounds, parts.maximum)


def _tiled_backward(residuals, cotangent: partial.PartialAttention):
  rows, k, v, bounds, maximum = residuals
  batch, blocks, heads, slots, width = cotangent.weighted.shape
  tiles = _Tiles((batch, blocks, slots, heads, width), k.shape[1])
  weighted, total = map(tiles.cut, (cotangent.weighted, cotangent.total))

  def request(args):
    k, v, per_tile = args

    def add(sums, tile):
      d_rows, *more = _on_prefix(_attend_backward, k, v, *tile)
      return tuple(map(jnp.add, sums, more)), d_rows

    zero = jnp.zeros(jnp.swapaxes(k, -2, -1).shape, jnp.float32)
    return lax.scan(add, (zero, zero), per_tile)

  per_tile = (bounds, rows, maximum, weighted, total)
  (d_k, d_v), d_rows = lax.map(request, (k, v, per_tile))
  d_q = jnp.swapaxes(tiles.join(d_rows), 2, 3)
  d_k, d_v = (jnp.swapaxes(part, -2, -1) for part in (d_k, d_v))
  d_q, d_k, d_v = (
    part.astype(like.dtype) for part, like in ((d_q, rows), (d_k, k), (d_v, v))
  )
  return d_q, d_k, d_v, None, None


_tiled.defvjp(_tiled_forward, _tiled_backward)


class _Bounds(NamedTuple):
  """Context positions that the rows of tiles see: start <= position < end."""

  ends: Int[Array, "*tiles rows"]
  starts: Int[Array, "*tiles rows"] | None


class _Tiles:
  """Blocks [B, N, Q, K, x] as tiles [B, tiles, G, rows, x] and back."""

  def __init__(self, query_shape, groups: int):
    self._batch, blocks, self._slots, heads, _ = query_shape
    self._groups, self._repeat = groups, heads // groups
    most = max(1, _TILE_TOKENS // self._slots)
    self._size = max(n for n in range(1, most + 1) if blocks % n == 0)
    self._count = blocks // self._size

  def cut(self, x):
    x = x.reshape(
      self._batch,
      self._count,
      self._size,
      self._groups,
      self._repeat,
      self._slots,
      -1,
    )
    x = jnp.transpose(x, (0, 1, 3, 4, 2, 5, 6))
    return x.reshape(self._batch, self._count, self._groups, -1, x.shape[-1])

  def join(self, x):
    x = x.reshape(
      self._batch,
      self._count,
      self._groups,
      self._repeat,
      self._size,
      self._slots,
      -1,
    )
    x = jnp.transpose(x, (0, 1, 4, 2, 3, 5, 6))
    heads = self._groups * self._repeat
    return x.reshape(self._batch, -1, heads, self._slots, x.shape[-1])

  def per_row(self, x):
    """[B, N, K or 1] -> [B, tiles, rows], the value of each row."""
    x = x.reshape(self._batch, self._count, 1, self._size, -1)
    shape = (*x.shape[:2], self._repeat, self._size, self._slots)
    return jnp.broadcast_to(x, shape).reshape(*x.shape[:2], -1)


def _on_prefix(function, k, v, bounds, *rows):
  """`function(size, k, v, bounds, *rows)` with the least prefix that does."""
  num_keys = k.shape[1]
  sizes = sorted(
    {-(-num_keys * i // _PREFIXES) for i in range(1, 1 + _PREFIXES)}
  )
  branches = [functools.partial(function, size) for size in sizes]
  branch = jnp.sum(jnp.max(bounds.ends) > jnp.asarray(sizes[:-1], jnp.int32))
  return lax.switch(branch, branches, k, v, bounds, *rows)


def _scores(rows, k, bounds):
  scores = partial.product("gth,gsh->gts", rows, k) * rows.shape[-1] ** -0.5
  seen = masks.prefix(bounds.ends, k.shape[1], bounds.starts)
  return jnp.where(seen[None], scores, partial.MASKED)


def _attend(size, k, v, bounds, rows):
  k, v = k[:, :size], v[:, :size]
  return partial.weigh(_scores(rows, k, bounds), v)[0]


def _attend_backward(size, k, v, bounds, rows, maximum, weighted, total):
  rest = ((0, 0), (0, 0), (0, k.shape[1] - size))
  k, v = k[:, :size], v[:, :size]
  weights = jnp.exp(_scores(rows, k, bounds) - maximum)
  d_rows, d_k, d_v = partial.scores_backward(
    rows, k, v, weights, weighted, total
  )
  return d_rows, jnp.pad(d_k, rest), jnp.pad(d_v, rest)
