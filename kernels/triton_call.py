"""The only place that knows jax_triton: a Triton kernel on JAX arrays.

jax_triton is imported when a kernel is first traced, since it cannot be
imported beside a JAX without GPU support. A launch can be given to something
else than jax_triton (`launching_with`): to Triton's interpreter in tests, or
to a list of launches whose resources are then looked up.
"""

import contextlib
import contextvars
import importlib.util
from collections.abc import Callable, Generator, Sequence
from typing import Any, NamedTuple

import jax

from kernels import batching, dispatch


class Launch(NamedTuple):
  """One launch of a kernel.

  Attributes:
    kernel: a `triton.jit` function: pointers to the inputs, then to the
      outputs, then constants.
    grid: number of programs along up to three axes.
    num_warps: warps of a program.
    num_stages: depth of the software pipeline.
    constants: values of the constant arguments by name.
  """

  kernel: Any
  grid: tuple[int, ...]
  num_warps: int
  num_stages: int
  constants: dict[str, Any]


# (launch, inputs, shapes of the outputs) -> outputs
Launcher = Callable[
  [Launch, Sequence[jax.Array], Sequence[jax.ShapeDtypeStruct]],
  Sequence[jax.Array],
]


def call(
  kernel: Any,
  *arrays: jax.Array,
  out_shape: Sequence[jax.ShapeDtypeStruct],
  grid: tuple[int, ...],
  num_warps: int,
  num_stages: int,
  **constants: Any,
) -> Sequence[jax.Array]:
  """Launches `kernel`; see `Launch`. It has no gradient and no batching."""
  launch = Launch(kernel, grid, num_warps, num_stages, constants)
  outputs = _launcher.get()(launch, arrays, out_shape)
  # Neither jax_triton nor the interpreter's callback know of shard_map.
  return batching.vary_like(outputs, *arrays)


def unavailable() -> str | None:
  """Why no Triton kernel can be launched here, or None."""
  if _launcher.get() is not _with_jax_triton:
    return None
  reason = dispatch.needs_hopper()
  if reason is None and importlib.util.find_spec("jax_triton") is None:
    reason = "jax_triton is not installed: pip install 'dspine-jax[cuda13]'"
  return reason


@contextlib.contextmanager
def launching_with(launcher: Launcher) -> Generator[None]:
  """Launches go to `launcher` while functions are traced in this context."""
  token = _launcher.set(launcher)
  try:
    yield
  finally:
    _launcher.reset(token)


def _with_jax_triton(launch, arrays, out_shape):
  import jax_triton

  # Without a GPU (a compile for a described one) nothing else tells it.
  described = jax.default_backend() != "gpu"
  # The scope is what a compiled program's text and a profiler show.
  with jax.named_scope(launch.kernel.__name__):
    return jax_triton.triton_call(
      *arrays,
      kernel=launch.kernel,
      out_shape=tuple(out_shape),
      grid=launch.grid,
      name=launch.kernel.__name__,
      num_warps=launch.num_warps,
      num_stages=launch.num_stages,
      compute_capability=90 if described else None,
      **launch.constants,
    )


_launcher: contextvars.ContextVar[Launcher] = contextvars.ContextVar(
  "launcher", default=_with_jax_triton
)
