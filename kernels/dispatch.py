"""Which implementation of an op runs: XLA, Triton, or Pallas on Mosaic GPU.

`None` always works: it is the kernel where measurement on this kind of device,
or until then the counted work, says that it pays, and XLA everywhere else. A
name works, or raises `NotImplementedError` with the reason. The choice is made
when a function is traced, for the device that it is traced for. Not here: the
implementations themselves, and block sizes (`block_sizes.py`).
"""

import contextlib
import contextvars
from collections.abc import Callable, Generator, Mapping
from typing import Any

import jax
from jax.sharding import get_abstract_mesh

from kernels import block_sizes

IMPLEMENTATIONS = ("xla", "triton", "pallas")

# A kernel must promise this much over XLA to be taken unmeasured.
WORTHWHILE = 1.2

# Why an implementation cannot do this call, or None if it can.
Limits = Mapping[str, Callable[[], str | None]]


_only_xla = contextvars.ContextVar("only_xla", default=False)


@contextlib.contextmanager
def only_xla() -> Generator[None]:
  """Where no implementation is named, XLA is taken: for "before and after".

  Like every choice here it is made when a function is traced, and is no part
  of the key of `jax.jit`'s cache: compare functions that are jitted inside.
  """
  token = _only_xla.set(True)
  try:
    yield
  finally:
    _only_xla.reset(token)


def platform() -> str:
  """ "cpu" or "gpu": what the function being traced will run on.

  An abstract mesh with a described device (a compile without that device)
  comes before the default backend.
  """
  device = get_abstract_mesh().abstract_device
  if device is not None and device.platform is not None:
    return "gpu" if device.platform in ("gpu", "cuda") else device.platform
  return jax.default_backend()


def needs_hopper() -> str | None:
  """Why no kernel for Hopper can run here, or None."""
  if platform() != "gpu":
    return f"it needs an NVIDIA GPU, and this is traced for {platform()!r}"
  kind = block_sizes.device_kind()
  if kind not in block_sizes.HOPPER:
    return f"it is written for Hopper (sm_90), and this device is {kind!r}"
  return None


def resolve(
  op: str,
  implementation: str | None,
  dtype: Any,
  limits: Limits,
  predicted: Callable[[], float],
) -> str:
  """The name of the implementation that is to run.

  Args:
    op: name of the op, for messages and measurements.
    implementation: a name, or None for the default.
    dtype: of the op's products; measurements hold for one.
    limits: for each kernel that the op has, why it cannot do this call.
    predicted: expected time of XLA over that of the Triton kernel.

  Raises:
    ValueError: `implementation` is no known name.
    NotImplementedError: the named one cannot do this call.
  """
  if implementation is None:
    if _only_xla.get():
      return "xla"
    name = block_sizes.measured_default(op, dtype)
    if name is None:
      # On other devices nothing is counted.
      able = limits["triton"]() is None
      return "triton" if able and predicted() >= WORTHWHILE else "xla"
    return name if name in limits and limits[name]() is None else "xla"
  if implementation not in IMPLEMENTATIONS:
    raise ValueError(
      f"{op}: implementation={implementation!r} is none of "
      f"{', '.join(IMPLEMENTATIONS)} or None"
    )
  if implementation == "xla":
    return implementation
  if implementation not in limits:
    raise NotImplementedError(
      f"{op}: implementation={implementation!r}: there is no such kernel"
    )
  reason = limits[implementation]()
  if reason is not None:
    raise NotImplementedError(
      f"{op}: implementation={implementation!r}: {reason}"
    )
  return implementation
