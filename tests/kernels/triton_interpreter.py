"""Runs Triton kernels on the CPU, through Triton's interpreter and NumPy.

Only in a process that was started with TRITON_INTERPRET=1 (`make test-hopper`
starts one), since Triton reads it when kernels are defined. Outputs start as
NaN (or a wild integer), so that a place which no program writes shows. float32
only: the interpreter's bfloat16 products are wrong.
"""

import importlib.util
import os

import jax
import numpy as np
import pytest

from kernels import triton_call


def unavailable() -> str | None:
  """Why nothing can be interpreted in this process, or None."""
  if importlib.util.find_spec("triton") is None:
    return "triton is not installed: make test-hopper installs it"
  if os.environ.get("TRITON_INTERPRET") != "1":
    return "interprets kernels: needs TRITON_INTERPRET=1 (make test-hopper)"
  return None


# Marks a module or test that interprets kernels.
needs_interpreter = pytest.mark.skipif(
  unavailable() is not None, reason=unavailable() or ""
)


class _HostTensor:
  """What Triton's interpreter asks of a tensor, over a NumPy array."""

  def __init__(self, array):
    self.array = array

  dtype = property(lambda self: self.array.dtype)
  shape = property(lambda self: self.array.shape)

  def data_ptr(self):
    return self.array.ctypes.data

  def untyped_storage(self):
    return self

  def cpu(self):
    return self

  def copy_(self, other):
    pass  # It is the same memory.

  def new_empty(self, size, device=None):
    return _HostTensor(np.empty(size, self.dtype))

  def set_(self, storage, offset, size, stride):
    self.array = storage.array
    return self

  def storage_offset(self):
    return 0

  def size(self):
    return self.array.shape

  def stride(self):
    return tuple(s // self.array.itemsize for s in self.array.strides)

  def element_size(self):
    return self.array.itemsize


def launcher(launch, arrays, out_shape):
  """A `triton_call.Launcher` that interprets, also under jit, vmap and grad."""

  def run(*inputs):
    inputs = [np.array(x) for x in inputs]
    outputs = [_fresh(shape, launch.zeroed) for shape in out_shape]
    tensors = [_HostTensor(x) for x in (*inputs, *outputs)]
    launch.kernel[launch.grid](*tensors, **launch.constants)
    return tuple(outputs)

  shapes = tuple(
    jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in out_shape
  )
  return jax.pure_callback(run, shapes, *arrays, vmap_method="sequential")


def _fresh(shape, zeroed):
  if zeroed:
    return np.zeros(shape.shape, shape.dtype)
  wild = np.nan if np.issubdtype(shape.dtype, np.floating) else 2**30 + 7
  return np.full(shape.shape, wild, shape.dtype)


def interpreting():
  """A context in which Triton kernels are interpreted."""
  return triton_call.launching_with(launcher)
