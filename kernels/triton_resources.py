"""Registers, stack and shared memory of Triton kernels, compiled for sm_90.

`launches` traces a function and lists the kernels that it would launch;
`compile_launch` compiles one of them with Triton alone (no GPU, no CUDA plugin)
and reads its resources from the cubin. Not a check that a kernel is right.
"""

import functools
import pathlib
import re
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from kernels import hopper, triton_call

_MAX_REGISTERS = 255  # of a thread

_POINTERS = {
  "bfloat16": "*bf16",
  "float32": "*fp32",
  "float16": "*fp16",
  "int32": "*i32",
  "int8": "*i8",
}


class Recorded(NamedTuple):
  """A launch, and the dtypes of its pointers in order."""

  launch: triton_call.Launch
  dtypes: tuple[str, ...]


class Resources(NamedTuple):
  """What a compiled kernel takes.

  Attributes:
    kernel: its name.
    registers: of a thread.
    stack: bytes of a thread's stack; spilled registers are there.
    shared: bytes of shared memory of a program.
    wgmma: whether it uses Hopper's warpgroup matrix products.
    mma: whether it uses any matrix unit.
  """

  kernel: str
  registers: int
  stack: int
  shared: int
  wgmma: bool
  mma: bool

  def problems(self) -> list[str]:
    """What keeps the kernel from running, or from running well, on Hopper."""
    found = []
    if self.stack:
      found.append(f"{self.stack} bytes of stack: registers spill")
    if self.registers > _MAX_REGISTERS:
      found.append(f"{self.registers} registers, {_MAX_REGISTERS} at most")
    if self.shared > hopper.SHARED_MEMORY:
      found.append(
        f"{self.shared} bytes of shared memory, {hopper.SHARED_MEMORY} at most"
      )
    return [f"{self.kernel}: {problem}" for problem in found]


def launches(function: Callable, *arguments: Any) -> list[Recorded]:
  """The Triton launches of `function(*arguments)`, in order, without running.

  Arguments are trees of arrays or `jax.ShapeDtypeStruct`.
  """
  found: list[Recorded] = []

  def record(launch, arrays, out_shape):
    pointers = (*arrays, *out_shape)
    found.append(
      Recorded(launch, tuple(jnp.dtype(x.dtype).name for x in pointers))
    )
    return tuple(jnp.zeros(shape.shape, shape.dtype) for shape in out_shape)

  with triton_call.launching_with(record):
    jax.eval_shape(function, *arguments)
  return found


def compile_launch(recorded: Recorded) -> Resources:
  """Compiles a launch for sm_90."""
  launch, dtypes = recorded
  return _compile(
    launch.kernel,
    dtypes,
    tuple(sorted(launch.constants.items())),
    launch.num_warps,
    launch.num_stages,
  )


@functools.cache
def _compile(
  kernel: Any,
  dtypes: Sequence[str],
  constants: Sequence[tuple[str, Any]],
  num_warps: int,
  num_stages: int,
) -> Resources:
  from triton.compiler import ASTSource

  values = dict(constants)
  pointers = [name for name in kernel.arg_names if name not in values]
  assert len(pointers) == len(dtypes), (pointers, dtypes)
  kinds = dict(zip(pointers, dtypes, strict=True))
  signature = {
    name: "constexpr" if name in values else _POINTERS[kinds[name]]
    for name in kernel.arg_names
  }
  # JAX's buffers are aligned, and jax_triton tells Triton so.
  aligned = {
    (i,): [["tt.divisibility", 16]]
    for i, name in enumerate(kernel.arg_names)
    if name not in values
  }
  compiled = _to_sm90(
    ASTSource(kernel, signature, constexprs=values, attrs=aligned),
    {"num_warps": num_warps, "num_stages": num_stages},
  )
  usage = _usage(compiled.asm["cubin"])
  ptx = compiled.asm["ptx"]
  return Resources(
    kernel=kernel.__name__,
    registers=int(usage["REG"]),
    stack=int(usage["STACK"]),
    shared=compiled.metadata.shared,
    wgmma="wgmma" in ptx,
    mma="wgmma" in ptx or "mma.sync" in ptx,
  )


def _to_sm90(source: Any, options: dict[str, int]) -> Any:
  """Triton's compiled kernel, in a cache of its own that is thrown away.

  Once jax_triton is imported, Triton has no folder for a cache any more.
  """
  import triton
  from triton.backends.compiler import GPUTarget

  with triton.knobs.cache.scope(), tempfile.TemporaryDirectory() as folder:
    triton.knobs.cache.dir = folder
    return triton.compile(
      source, target=GPUTarget("cuda", 90, 32), options=options
    )


def _usage(cubin: bytes) -> dict[str, str]:
  """Registers and stack of a compiled kernel, as `cuobjdump` prints them."""
  import triton

  tools = pathlib.Path(triton.__file__).parent / "backends/nvidia/bin"
  with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
    file.write(cubin)
    file.flush()
    text = subprocess.run(
      [tools / "cuobjdump", "--dump-resource-usage", file.name],
      capture_output=True,
      text=True,
      check=True,
    ).stdout
  return dict(re.findall(r"(REG|STACK):(\d+)", text))
