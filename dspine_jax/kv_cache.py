"""Keys and values of committed positions, one length per row.

A pass reads the first `lengths` positions and never writes while it runs; its
own keys and values are appended afterwards at each row's length. Cropping is
therefore only a matter of how far the length advances: what was rejected lies
beyond it and is overwritten by the next append. Layout: heads before positions,
so that scores are one matrix product a head.
"""

import dataclasses

import jax
from flax import struct
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

from dspine_jax.typing import Lengths, PyTree
from kernels import dispatch

KeysValues = tuple[Float[Array, "b g s h"], Float[Array, "b g s h"]]

# On the CPU, up to this many rows are each written by their own dynamic slice,
# in place: XLA:CPU would turn the batched form into a loop over positions.
_UNROLLED_ROWS = 32


@struct.dataclass
class KVCache:
  """A cache of all layers.

  Attributes:
    layers: tuple of (k, v), each [B, G, S, H]; or one (k, v) with a leading
      layer axis where the layers are scanned.
    lengths: [B] int32, committed positions of each row.
  """

  layers: PyTree
  lengths: Lengths

  @property
  def capacity(self) -> int:
    return _first(self.layers).shape[-2]


def _first(kv_layers: PyTree):
  return kv_layers[0][0] if isinstance(kv_layers[0], tuple) else kv_layers[0]


def init(
  cfg,
  batch_size: int,
  capacity: int,
  *,
  num_layers: int,
  stacked: bool = False,
) -> KVCache:
  """An empty cache; `cfg` gives num_kv_heads, head_dim and dtype."""
  shape = (batch_size, cfg.num_kv_heads, capacity, cfg.head_dim)
  if stacked:
    shape = (num_layers, *shape)
    kv_layers = (jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))
  else:
    kv_layers = tuple(
      (jnp.zeros(shape, cfg.dtype), jnp.zeros(shape, cfg.dtype))
      for _ in range(num_layers)
    )
  return KVCache(layers=kv_layers, lengths=jnp.zeros((batch_size,), jnp.int32))


def _write(cache, new, starts):
  """Writes new [B, G, T, H] into cache [B, G, S, H] at each row's start."""
  new = new.astype(cache.dtype)
  batch = cache.shape[0]
  if batch <= _UNROLLED_ROWS and dispatch.platform() == "cpu":
    for row in range(batch):
      index = (row, 0, starts[row], 0)
      cache = lax.dynamic_update_slice(cache, new[row : row + 1], index)
    return cache
  positions = starts[:, None] + jnp.arange(new.shape[2])[None, :]
  rows = jnp.arange(batch)[:, None]
  values = jnp.swapaxes(new, 1, 2)
  return cache.at[rows, :, positions].set(
    values, mode="drop", unique_indices=True
  )


def write(cache: KVCache, new_layers: PyTree) -> KVCache:
  """Puts the keys and values of T new tokens behind each row's length.

  The lengths do not change: `advance` decides how many of them are kept. The
  caller leaves room for T positions, since a slice that does not fit would be
  moved back over committed ones.

  Args:
    cache: the cache that the pass read.
    new_layers: keys and values of the pass, [B, G, T, H], in the cache's form.
  """
  starts = cache.lengths
  if isinstance(cache.layers[0], tuple):
    written = tuple(
      (_write(k, new_k, starts), _write(v, new_v, starts))
      for (k, v), (new_k, new_v) in zip(cache.layers, new_layers, strict=True)
    )
  else:
    written = tuple(
      jax.vmap(_write, in_axes=(0, 0, None))(old, new, starts)
      for old, new in zip(cache.layers, new_layers, strict=True)
    )
  return dataclasses.replace(cache, layers=written)


def advance(cache: KVCache, counts: Lengths) -> KVCache:
  """Commits the first `counts` of the positions written last, row by row."""
  return dataclasses.replace(cache, lengths=cache.lengths + counts)


def crop(cache: KVCache, lengths: Lengths) -> KVCache:
  """Forgets everything behind `lengths`, row by row."""
  return dataclasses.replace(cache, lengths=jnp.minimum(cache.lengths, lengths))
