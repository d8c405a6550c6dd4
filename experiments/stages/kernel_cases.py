"""A case: one op at one shape, to be counted, timed or checked.

It knows the arguments (shapes, or random values), how to call an
implementation, and the counted work. Which there are: `kernel_ops.py`.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from kernels import cost as cost_lib
from kernels import triton_resources
from kernels.block_sizes import BlockSizes


class Spec(NamedTuple):
  """An array to make: normal numbers, or integers in [low, high).

  Attributes:
    shape: of the array.
    dtype: of the array.
    scale: standard deviation of floating-point numbers.
    low: least integer.
    high: bound of the integers; 0 where numbers are no integers.
    is_sorted: whether integers rise along the last axis.
  """

  shape: tuple[int, ...]
  dtype: Any
  scale: float = 1.0
  low: int = 0
  high: int = 0
  is_sorted: bool = False


class Case(NamedTuple):
  """One op at one shape.

  Attributes:
    op: one of `kernel_ops.OPS`.
    name: what is called, where, at which size.
    call: (implementation, block sizes) -> function of the arguments.
    arguments: trees of `Spec`.
    differentiable: positions of arguments with a gradient; () times the
      forward pass alone.
    cost: counted work, of the gradient too if there is one.
    chunked: XLA takes rows of the first three arguments in this many chunks.
  """

  op: str
  name: str
  call: Callable[..., Callable]
  arguments: tuple
  differentiable: tuple[int, ...]
  cost: cost_lib.OpCost
  chunks: int = 1


def groups(of: Sequence[Case], size: int = 4) -> list[list[Case]]:
  """Cases of one op at a time, few enough to be compiled together."""
  found: list[list[Case]] = []
  for case in of:
    if not found or found[-1][0].op != case.op or len(found[-1]) == size:
      found.append([])
    found[-1].append(case)
  return found


def function_of(
  case: Case,
  implementation: str | None,
  block_sizes: Mapping[str, BlockSizes] | None = None,
) -> Callable:
  """The function that is timed: of `arguments_of(case)`.

  With a gradient it takes the cotangents of the results last, so that XLA
  cannot make anything of their values.
  """
  call = case.call(implementation, block_sizes)
  function = _with_gradient(case, call) if case.differentiable else call
  if case.chunks > 1 and implementation == "xla":
    function = _in_chunks(case, function)
  return function


def _with_gradient(case: Case, call: Callable) -> Callable:
  def value_and_gradient(*arguments):
    *arguments, cotangents = arguments
    chosen = [arguments[i] for i in case.differentiable]

    def of_chosen(*chosen):
      full = list(arguments)
      for i, argument in zip(case.differentiable, chosen, strict=True):
        full[i] = argument
      return call(*full)

    out, vjp = jax.vjp(of_chosen, *chosen)
    return out, vjp(cotangents)

  return value_and_gradient


def _in_chunks(case: Case, function: Callable) -> Callable:
  """Rows of the first three arguments and the cotangents, a part at a time."""

  def split(x):
    return x.reshape(case.chunks, -1, *x.shape[1:])

  def chunked(*arguments):
    *rows, head, cotangents = arguments
    parts = jax.tree.map(split, (tuple(rows), cotangents))
    out = lax.map(lambda part: function(*part[0], head, part[1]), parts)
    return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), out)

  return chunked


def arguments_of(case: Case) -> tuple:
  """Specs of what `function_of` takes: the cotangents last, if any."""
  if not case.differentiable:
    return case.arguments
  out = jax.eval_shape(case.call("xla", None), *structs(case.arguments))
  cotangents = jax.tree.map(lambda x: Spec(x.shape, x.dtype), out)
  return (*case.arguments, cotangents)


def _is_spec(x: Any) -> bool:
  return isinstance(x, Spec)


def structs(specs: Any) -> Any:
  """Specs as `jax.ShapeDtypeStruct`."""
  return jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(spec.shape, spec.dtype),
    specs,
    is_leaf=_is_spec,
  )


def dtype_of(case: Case) -> str:
  """The dtype of the case's numbers, that of its first array of them."""
  for leaf in jax.tree.leaves(structs(case.arguments)):
    if jnp.issubdtype(leaf.dtype, jnp.floating):
      return leaf.dtype.name
  raise ValueError(f"{case.name}: has no array of numbers")


def values(specs: Any, seed: int = 0) -> Any:
  """Specs as random arrays, large ones made on the device."""
  leaves, tree = jax.tree.flatten(specs, is_leaf=_is_spec)
  generator = np.random.default_rng(seed)
  return jax.tree.unflatten(tree, [_value(leaf, generator) for leaf in leaves])


_LARGE = 2**20


def _value(spec: Spec, generator: np.random.Generator) -> jax.Array:
  if jnp.dtype(spec.dtype) == jnp.bool_:
    return jnp.asarray(generator.random(spec.shape) < 0.5)
  if not jnp.issubdtype(spec.dtype, jnp.floating):
    drawn = generator.integers(spec.low, spec.high, spec.shape)
    drawn = np.sort(drawn, axis=-1) if spec.is_sorted else drawn
    return jnp.asarray(drawn, spec.dtype)
  if math.prod(spec.shape) > _LARGE:
    key = jax.random.key(int(generator.integers(2**31)))
    return _normal(key, spec.shape, spec.dtype, spec.scale)
  drawn = spec.scale * generator.standard_normal(spec.shape, np.float32)
  return jnp.asarray(drawn.astype(spec.dtype))


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def _normal(key, shape, dtype, scale):
  return (scale * jax.random.normal(key, shape, jnp.float32)).astype(dtype)


def distinct_launches(cases) -> dict:
  """Launches that compile differently, and the cases that have them."""
  found: dict = {}
  for case in cases:
    function = function_of(case, "triton")
    arguments = structs(arguments_of(case))
    for recorded in triton_resources.launches(function, *arguments):
      launch, dtypes = recorded
      key = (
        launch.kernel.__name__,
        dtypes,
        tuple(sorted(launch.constants.items())),
        launch.num_warps,
        launch.num_stages,
      )
      names = found.setdefault(key, (recorded, []))[1]
      if case.name not in names:
        names.append(case.name)
  return found
