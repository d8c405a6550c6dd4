"""What a cache of features holds: its digest, its files, its size on disk.

Nothing here reads or writes a file (`feature_cache`).
"""

import dataclasses
import functools
import hashlib
from typing import NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from dspine_jax import target_config
from dspine_jax.data import feature_shards
from dspine_jax.data import rows as rows_lib
from dspine_jax.decoding import round as round_lib

SHARD_BYTES = 4 << 30
# Part of every digest.
_VERSION = 1


@dataclasses.dataclass(frozen=True, kw_only=True)
class Contents:
  """What a cache holds.

  Attributes:
    target: that computes the features.
    rows: what it reads.
    tap_layers: which layers are tapped, ascending.
    dtype: of the features on disk, one of `feature_shards.DTYPES`.
    shard_bytes: of a file, unless one row is larger; what a killed computation
      loses at most.
  """

  target: round_lib.TargetModel
  rows: rows_lib.Rows
  tap_layers: tuple[int, ...]
  dtype: str = "bfloat16"
  shard_bytes: int = SHARD_BYTES

  @functools.cached_property
  def layout(self) -> feature_shards.Layout:
    return _layout(self.target.cfg, self.tap_layers, self.dtype)

  @functools.cached_property
  def digest(self) -> str:
    """Of everything that the features depend on, in hexadecimal."""
    rows = self.rows
    options = _VERSION, self.tap_layers, self.dtype, self.shard_bytes
    found = hashlib.sha256(repr(options).encode())
    found.update(target_digest(self.target).encode())
    for array in (rows.tokens, rows.lengths, rows.documents):
      if array is not None:
        found.update(f"{array.shape} {array.dtype}".encode())
        found.update(np.ascontiguousarray(array))
    return found.hexdigest()


def target_digest(target: round_lib.TargetModel) -> str:
  """Of configuration and parameters, in hexadecimal.

  Parameters are summed up where they lie, so that split ones stay split; the
  order of the sums does not matter, since they are of integers. With several
  processes all must call it.
  """
  found = hashlib.sha256(repr(target.cfg).encode())
  for path, leaf in jax.tree_util.tree_leaves_with_path(target.params):
    found.update(f"{path} {leaf.shape} {leaf.dtype}".encode())
    found.update(np.asarray(_fingerprint(leaf)))
  return found.hexdigest()


class Shard(NamedTuple):
  """One file: its name, and the first row in it and behind it."""

  file: str
  first: int
  stop: int

  @property
  def rows(self) -> np.ndarray:
    return np.arange(self.first, self.stop)


def shards_of(contents: Contents) -> list[Shard]:
  """The files of a cache, of consecutive rows each."""
  ends = np.cumsum(contents.rows.lengths, dtype=np.int64)
  ends *= contents.layout.position_bytes
  cuts, begin = [0], 0
  while cuts[-1] < len(ends):
    cut = int(np.searchsorted(ends, begin + contents.shard_bytes, "right"))
    cuts.append(max(cut, cuts[-1] + 1))
    begin = int(ends[cuts[-1] - 1])
  count = len(cuts) - 1
  return [
    Shard(f"features-{i:05}-of-{count:05}.safetensors", *cuts[i : i + 2])
    for i in range(count)
  ]


def _layout(
  cfg: target_config.TargetConfig, tap_layers: tuple[int, ...], dtype: str
) -> feature_shards.Layout:
  return feature_shards.Layout(
    dtype=dtype,
    context_width=len(tap_layers) * cfg.hidden_size,
    hidden_width=cfg.hidden_size,
  )


@jax.jit
def _fingerprint(leaf: jax.Array) -> jax.Array:
  """[2] uint32: two sums of a leaf's bits with weights by place."""
  bits = lax.bitcast_convert_type(leaf, f"uint{8 * leaf.dtype.itemsize}")
  bits = bits.astype(jnp.uint32)
  place = jnp.zeros(leaf.shape, jnp.uint32)
  for axis, size in enumerate(leaf.shape):
    along = lax.broadcasted_iota(jnp.uint32, leaf.shape, axis)
    place = place * jnp.uint32(size) + along
  # Odd weights: one changed element always changes the sum.
  mixed = (place + 1) * jnp.uint32(2654435761)
  mixed = (mixed ^ (mixed >> 15)) * jnp.uint32(2246822519)
  return jnp.stack(
    [
      jnp.sum(bits * (2 * place + 1), dtype=jnp.uint32),
      jnp.sum(bits * (mixed | 1), dtype=jnp.uint32),
    ]
  )


def estimate_bytes(
  lengths: np.ndarray,
  cfg: target_config.TargetConfig,
  tap_layers: tuple[int, ...],
  dtype: str = "bfloat16",
) -> int:
  """Bytes on disk, known before anything is computed.

  Args:
    lengths: [n], positions of each row.
    cfg: of the target.
    tap_layers: which layers are tapped.
    dtype: of the features on disk.
  """
  position = _layout(cfg, tap_layers, dtype).position_bytes
  files = 1 + int(np.sum(lengths, dtype=np.int64)) * position // SHARD_BYTES
  return (
    int(np.sum(lengths, dtype=np.int64)) * position
    + 8 * len(lengths)
    + 1024 * files
  )
