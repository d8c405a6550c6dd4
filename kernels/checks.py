"""Checks of arguments that all ops share: kinds of numbers, empty axes.

Shapes are each op's own. Values are not looked at: they are not there when a
function is traced.
"""

import jax
from jax import numpy as jnp

FLOATS = ("bfloat16", "float32")


def floats(**arrays: jax.Array | None) -> None:
  """ValueError for the first array that is neither bfloat16 nor float32."""
  for name, array in arrays.items():
    if array is not None and array.dtype not in FLOATS:
      raise ValueError(f"{name}: is {array.dtype}, must be one of {FLOATS}")


def integers(**arrays: jax.Array | None) -> None:
  """ValueError for the first array that does not hold integers."""
  for name, array in arrays.items():
    if array is not None and not jnp.issubdtype(array.dtype, jnp.integer):
      raise ValueError(f"{name}: is {array.dtype}, must hold integers")


def booleans(**arrays: jax.Array | None) -> None:
  """ValueError for the first array that is not boolean."""
  for name, array in arrays.items():
    if array is not None and array.dtype != jnp.bool_:
      raise ValueError(f"{name}: is {array.dtype}, must be boolean")


def not_empty(**arrays: jax.Array) -> None:
  """ValueError for the first array with an axis of no elements."""
  for name, array in arrays.items():
    if 0 in array.shape:
      raise ValueError(f"{name}: has shape {array.shape}, an axis is empty")
