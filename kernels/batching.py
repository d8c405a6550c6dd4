"""vmap of a kernel: the mapped axis becomes one more leading axis of its rows.

Kernels take rows with any leading axes and weights without, and flatten the
former, so that a mapped axis of rows is more programs of the grid. Mapped
weights have no such form: those calls run one after another.
"""

from collections.abc import Callable
from typing import Any

import jax
from jax import lax
from jax import numpy as jnp
from jax.custom_batching import custom_vmap


def rows_first(
  function: Callable[..., tuple[jax.Array, ...]], num_rows: int
) -> Callable[..., tuple[jax.Array, ...]]:
  """`function(*rows, *weights)` with a rule for vmap.

  Args:
    function: from arrays to a tuple of arrays that all have the leading axes
      of the rows. Sums over rows (a weight's gradient) may not be among them.
    num_rows: how many of the arguments are rows.
  """

  @custom_vmap
  def mapped(*arguments):
    return function(*arguments)

  @mapped.def_vmap
  def rule(axis_size, in_batched, *arguments):
    if any(in_batched[num_rows:]):
      out = _one_by_one(mapped, in_batched, arguments)
    else:
      rows = [
        x if is_batched else jnp.broadcast_to(x[None], (axis_size, *x.shape))
        for x, is_batched in zip(
          arguments[:num_rows], in_batched[:num_rows], strict=True
        )
      ]
      out = mapped(*rows, *arguments[num_rows:])
    return out, (True,) * len(out)

  return mapped


def _one_by_one(function, in_batched, arguments):
  batched = [
    x for x, is_batched in zip(arguments, in_batched, strict=True) if is_batched
  ]

  def one(slices):
    slices = iter(slices)
    return function(
      *(
        next(slices) if is_batched else x
        for x, is_batched in zip(arguments, in_batched, strict=True)
      )
    )

  return lax.map(one, batched)


def vary_like(tree: Any, *arrays: jax.Array) -> Any:
  """`tree` typed as different over the axes of shard_map that `arrays` are.

  Weights that are the same for all shards need it in front of a `custom_vjp`
  with rows of a shard: their cotangents are then summed over the shards.
  Outside of shard_map it does nothing.
  """
  axes = frozenset().union(*(jax.typeof(x).mat.varying for x in arrays))

  def vary(leaf):
    missing = axes - jax.typeof(leaf).mat.varying
    return lax.pcast(leaf, tuple(sorted(missing)), to="varying")

  return jax.tree.map(vary, tree) if axes else tree
