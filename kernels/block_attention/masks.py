"""Which context positions a row may attend to, as a boolean mask."""

from jax import numpy as jnp
from jaxtyping import Array, Bool, Int


def prefix(
  lengths: Int[Array, "*b"],
  num_keys: int,
  starts: Int[Array, "*b"] | None = None,
) -> Bool[Array, "*b s"]:
  """Keys at positions < length, and from `starts` on if they are given.

  prefix([2], 4) = [[1, 1, 0, 0]], prefix([3], 4, [1]) = [[0, 1, 1, 0]]
  """
  keys = jnp.arange(num_keys).reshape((1,) * lengths.ndim + (-1,))
  mask = keys < lengths[..., None]
  return mask if starts is None else mask & (keys >= starts[..., None])
