"""All tensors of a folder at once, as tests look at them."""

import pathlib

import numpy as np

from dspine_jax.checkpoints import tensors


def read(folder: pathlib.Path | str) -> dict[str, np.ndarray]:
  """By name; floating types as float32."""
  reader = tensors.Reader(folder)
  return {
    name: reader.read(
      name,
      dtype=np.float32 if tensors.is_floating(reader.dtype(name)) else None,
    )
    for name in reader.in_shard_order(reader.names())
  }
