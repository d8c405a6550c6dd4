"""Runs Triton kernels on the CPU, through Triton's interpreter and NumPy.

Only in a process that was started with TRITON_INTERPRET=1 (`make test-hopper`
starts one), since Triton reads it when kernels are defined. Outputs start as
NaN (or a wild integer), so that a place which no program writes shows. float32
only: the interpreter's bfloat16 products are wrong.
"""

import contextlib
import importlib.util
import os
from unittest import mock

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


@contextlib.contextmanager
def _bounds_of_one_element():
  """Lets loops end at loaded numbers.

  The interpreter turns them into Python's by `int(array)`, which NumPy 2.5
  refuses for an array of one element.
  """
  from triton.runtime import interpreter

  patch_lang_tensor = interpreter._patch_lang_tensor

  def patch(tensor, scope):
    patch_lang_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: self.handle.data.item())

  with mock.patch.object(interpreter, "_patch_lang_tensor", patch):
    yield


def launcher(launch, arrays, out_shape):
  """A `triton_call.Launcher` that interprets, also under jit, vmap and grad."""

  def run(*inputs):
    inputs = [np.array(x) for x in inputs]
    outputs = [_fresh(shape) for shape in out_shape]
    tensors = [_HostTensor(x) for x in (*inputs, *outputs)]
    with _bounds_of_one_element():
      launch.kernel[launch.grid](*tensors, **launch.constants)
    return tuple(outputs)

  shapes = tuple(
    jax.ShapeDtypeStruct(shape.shape, shape.dtype) for shape in out_shape
  )
  return jax.pure_callback(run, shapes, *arrays, vmap_method="sequential")


def _fresh(shape):
  wild = np.nan if np.issubdtype(shape.dtype, np.floating) else 2**30 + 7
  return np.full(shape.shape, wild, shape.dtype)


def interpreting():
  """A context in which Triton kernels are interpreted."""
  return triton_call.launching_with(launcher)
