"""Where arrays lie on many devices: one mesh, tables of rules, and moves.

The mesh has three axes. A row of the batch lies on one device, whatever the
axis. Parameters and moments of the drafter are split over "fsdp" and gathered
for the gradient; those of the frozen target are split over "tensor" (columns of
what reads the residual stream, rows of what writes it) and "fsdp". Tables that
every loss reads whole, embedding, head and codes, are whole on every device.

A rule is a pattern for the end of a leaf's path and the axes of its last
dimensions; leading dimensions (stacked layers) are not split. A dimension that
its axes do not divide stays whole: that costs memory and changes no result.
Without a mesh nothing here is called. Not here: who makes the mesh
(`experiments/stages/devices.py`), the step itself (`training/step.py`).
"""

import functools
import itertools
import re
from collections.abc import Callable, Sequence
from typing import Any

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp
from jax import sharding as jax_sharding
from jax.experimental import multihost_utils

from dspine_jax.typing import PyTree

AXES = ("data", "fsdp", "tensor")

Spec = jax_sharding.PartitionSpec
Rules = Sequence[tuple[str, Spec]]
# Rules and counts need no devices.
AnyMesh = jax_sharding.Mesh | jax_sharding.AbstractMesh

WHOLE = Spec()
# The target's pass repeats rows over "tensor", since it splits its products.
TARGET_ROWS = Spec(("data", "fsdp"))

TARGET_RULES: Rules = (
  (r"(q|k|v|gate|up)_proj/kernel", Spec("fsdp", "tensor")),
  (r"(q|k|v|gate|up)_proj/bias", Spec("tensor")),
  (r"(o|down)_proj/kernel", Spec("tensor", "fsdp")),
  (r"(o|down)_proj/bias", WHOLE),
  (r"scale", WHOLE),
  # Split by width: the rows of tokens are then looked up where they are.
  (r"embed_tokens|lm_head", Spec(None, ("fsdp", "tensor"))),
)

DRAFTER_RULES: Rules = (
  (r"kernel", Spec("fsdp", None)),
  # Vocabularies are rarely a multiple of anything; ranks are.
  (r"(predecessor|successor)_codebook", Spec(None, "fsdp")),
  (r"correction/up|markov/w[12]", Spec(None, "fsdp")),
  (r"scale|bias|base_kernel", WHOLE),
  (r"ns_coeffs", WHOLE),  # Of muon's state.
)


def spec_of(
  rules: Rules, path: Any, shape: Sequence[int], mesh: AnyMesh
) -> Spec:
  """How one array is split.

  Args:
    rules: patterns of whole names at the end of a path.
    path: names from the root, joined by "/" or as a sequence.
    shape: of the array. Scalars are whole and need no rule.
    mesh: whose axes have to divide a dimension that they are to split.

  Raises:
    ValueError: no rule fits, or several do.
  """
  if not shape:
    return WHOLE
  name = path if isinstance(path, str) else "/".join(map(str, path))
  fitting = [
    spec for pattern, spec in rules if re.search(rf"(^|/)({pattern})$", name)
  ]
  if len(fitting) != 1:
    raise ValueError(
      f"parameter {name}: {len(fitting)} sharding rules fit, there must be one"
    )
  # Aligned at the last dimension, for stacked layers.
  spec = (None,) * (len(shape) - len(fitting[0])) + tuple(fitting[0])
  divided = [
    axes if axes is not None and size % _count(axes, mesh) == 0 else None
    for axes, size in zip(spec, shape, strict=True)
  ]
  return Spec(*divided)


def _count(axes, mesh) -> int:
  axes = (axes,) if isinstance(axes, str) else axes
  return int(np.prod([mesh.shape[axis] for axis in axes]))


def specs(rules: Rules, tree: PyTree, mesh: AnyMesh) -> PyTree:
  """`spec_of` for every leaf of a tree of arrays or shapes."""

  def leaf_spec(path, leaf):
    name = jax.tree_util.keystr(path, simple=True, separator="/")
    return spec_of(rules, name, leaf.shape, mesh)

  return jax.tree_util.tree_map_with_path(leaf_spec, tree)


def shardings(rules: Rules, tree: PyTree, mesh: jax_sharding.Mesh) -> PyTree:
  """`specs` as shardings of the mesh."""
  return jax.tree.map(
    lambda spec: jax_sharding.NamedSharding(mesh, spec),
    specs(rules, tree, mesh),
    is_leaf=lambda leaf: isinstance(leaf, Spec),
  )


def for_target(
  mesh: jax_sharding.Mesh | None,
) -> Callable[[Any, Sequence[int]], jax_sharding.Sharding] | None:
  """(path, shape) -> sharding of a target's parameter; None without a mesh."""
  if mesh is None:
    return None
  return lambda path, shape: jax_sharding.NamedSharding(
    mesh, spec_of(TARGET_RULES, path, shape, mesh)
  )


def whole(mesh: jax_sharding.Mesh) -> jax_sharding.NamedSharding:
  """A copy on every device."""
  return jax_sharding.NamedSharding(mesh, WHOLE)


def place(tree: PyTree, where: PyTree) -> PyTree:
  """Puts arrays that every process has whole where the shardings say.

  Args:
    tree: NumPy or JAX arrays, PRNG keys among them. All processes must hold the
      same values.
    where: one sharding, or a tree of them.
  """
  leaves, structure = jax.tree.flatten(tree)
  if isinstance(where, jax_sharding.Sharding):
    places = [where] * len(leaves)
  else:
    places = structure.flatten_up_to(where)
  placed: dict[tuple[int, jax_sharding.Sharding], jax.Array] = {}

  def place_once(leaf, sharding):
    # One array in two places of a tree (a tied head) stays one.
    key = id(leaf), sharding
    if key not in placed:
      placed[key] = _place(leaf, sharding)
    return placed[key]

  return structure.unflatten(map(place_once, leaves, places))


def _place(leaf, sharding):
  if getattr(leaf, "sharding", None) == sharding:
    return leaf
  if sharding.is_fully_addressable:
    return jax.device_put(leaf, sharding)
  if isinstance(leaf, jax.Array) and not leaf.is_fully_addressable:
    # From one sharding of all processes to another.
    return _resharding(sharding)(leaf)
  if jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key):
    data = _place(jax.random.key_data(leaf), sharding)
    return jax.random.wrap_key_data(data, impl=jax.random.key_impl(leaf))
  array = np.asarray(leaf)
  return jax.make_array_from_callback(
    array.shape, sharding, lambda index: array[index]
  )


@functools.lru_cache(maxsize=64)
def _resharding(sharding):
  return jax.jit(lambda tree: tree, out_shardings=sharding)


def gathered(tree: PyTree, mesh: jax_sharding.Mesh) -> PyTree:
  """Arrays of the mesh, whole on every device: what a process may look at."""
  return _resharding(whole(mesh))(tree)


def any_process(flag: bool, mesh: jax_sharding.Mesh) -> jax.Array:
  """Whether the flag is set in any process: a scalar that all get.

  Like a step it is only started here; whoever looks at it waits.
  """
  where = jax_sharding.NamedSharding(mesh, Spec(AXES))
  own = np.full((len(mesh.local_devices),), flag)
  votes = jax.make_array_from_process_local_data(where, own)
  return _any(whole(mesh))(votes)


@functools.lru_cache(maxsize=8)
def _any(sharding):
  return jax.jit(jnp.any, out_shardings=sharding)


def from_first_process(tree: PyTree) -> PyTree:
  """The first process's values of what every process computed for itself.

  Eigenvectors, for one, may differ in sign between kinds of CPU. Arrays that
  already lie on the devices of several processes are left as they are.
  """
  if jax.process_count() == 1:
    return tree
  leaves, structure = jax.tree.flatten(tree)
  own = {
    index: leaf
    for index, leaf in enumerate(leaves)
    if getattr(leaf, "is_fully_addressable", True)
  }
  sent = multihost_utils.broadcast_one_to_all(own)
  return structure.unflatten(
    sent.get(index, leaf) for index, leaf in enumerate(leaves)
  )


def batch_sharding(mesh: jax_sharding.Mesh) -> jax_sharding.NamedSharding:
  """Of a window [A, B, ...]: its rows B over all axes."""
  return jax_sharding.NamedSharding(mesh, Spec(None, AXES))


def require_rows(mesh: AnyMesh, batch_size: int) -> None:
  """ValueError if the devices do not divide the rows of a micro-batch."""
  if batch_size % mesh.size:
    raise ValueError(
      f"batch_size={batch_size}: must be a multiple of the {mesh.size} devices"
      f" of the mesh {','.join(map(str, mesh.shape.values()))}"
    )


def local_rows(mesh: jax_sharding.Mesh, batch_size: int) -> slice:
  """Which rows of a micro-batch lie on this process's devices.

  Raises:
    ValueError: the devices do not divide the batch.
  """
  require_rows(mesh, batch_size)
  parts = batch_sharding(mesh).addressable_devices_indices_map((1, batch_size))
  bounds = sorted(
    index[1].indices(batch_size)[:2]
    for index in parts.values()
    if index is not None
  )
  for (_, stop), (start, _) in itertools.pairwise(bounds):
    assert stop == start, "the mesh does not keep a process's devices together"
  return slice(bounds[0][0], bounds[-1][1])


def place_rows(window: PyTree, mesh: jax_sharding.Mesh) -> PyTree:
  """A process's own rows [A, B of them, ...] as parts of global arrays."""
  where = batch_sharding(mesh)
  return jax.tree.map(
    lambda x: jax.make_array_from_process_local_data(where, np.asarray(x)),
    window,
  )


# Inside of `jax.shard_map`.


def all_sum(tree: PyTree, axes: tuple[str, ...]) -> PyTree:
  """The sum over devices; the tree itself without axes."""
  return lax.psum(tree, axes) if axes else tree


def gather(tree: PyTree, tree_specs: PyTree) -> PyTree:
  """Whole arrays from the devices' parts."""

  def leaf_gather(spec, leaf):
    for dimension, axes in enumerate(spec):
      if axes is not None:
        leaf = lax.all_gather(leaf, axes, axis=dimension, tiled=True)
    return leaf

  return _map_specs(leaf_gather, tree_specs, tree)


def sum_to_parts(tree: PyTree, tree_specs: PyTree) -> PyTree:
  """The sum over all devices, of which each keeps its part."""

  def leaf_sum(spec, leaf):
    rest = list(AXES)
    for dimension, axes in enumerate(spec):
      if axes is not None:
        leaf = lax.psum_scatter(
          leaf, axes, scatter_dimension=dimension, tiled=True
        )
        used = (axes,) if isinstance(axes, str) else axes
        rest = [axis for axis in rest if axis not in used]
    return lax.psum(leaf, tuple(rest))

  return _map_specs(leaf_sum, tree_specs, tree)


def _map_specs(function, tree_specs, tree):
  return jax.tree.map(
    function, tree_specs, tree, is_leaf=lambda leaf: isinstance(leaf, Spec)
  )
