"""Registers, spills and shared memory of Mosaic GPU kernels, without a GPU.

Compiles a function for a described H100 (`hopper.py`), has Mosaic write what it
hands to ptxas and what ptxas says, and reads that. Not a check that a kernel is
right. Resources of Triton kernels: `triton_resources.py`.
"""

import contextlib
import os
import pathlib
import re
import tempfile
from collections.abc import Callable, Generator
from typing import Any, NamedTuple

import jax

from kernels import hopper


class Resources(NamedTuple):
  """What a compiled kernel takes.

  Attributes:
    kernel: its name, as given to `plgpu.kernel`.
    registers: of a thread at launch; `set_max_registers` moves them between
      warpgroups later.
    spilled: bytes of spilled registers, stored and loaded.
    shared: bytes of shared memory of a block, barriers not counted.
    wgmma: whether it uses Hopper's warpgroup matrix products.
    serialised: whether ptxas had to wait for each of those.
  """

  kernel: str
  registers: int
  spilled: int
  shared: int
  wgmma: bool
  serialised: bool


class Compiled(NamedTuple):
  """A program for an H100, and the Mosaic kernels that it brought along."""

  program: jax.stages.Compiled
  kernels: list[Resources]


def compile_for_h100(
  function: Callable, *arguments: Any, **jit_options: Any
) -> Compiled:
  """`hopper.compile_for_h100`, with the resources of its Mosaic kernels."""
  with (
    tempfile.TemporaryDirectory() as folder,
    _environment("MOSAIC_GPU_DUMP_TO", folder),
  ):
    program = hopper.compile_for_h100(function, *arguments, **jit_options)
    paths = sorted(pathlib.Path(folder).glob("*.ptxas"))
    return Compiled(program, [_resources(path) for path in paths])


def _resources(path: pathlib.Path) -> Resources:
  said = path.read_text()
  ptx = path.with_suffix(".ptx").read_text()
  memory = path.with_suffix(".resources.txt").read_text()
  return Resources(
    kernel=re.sub(r"_\d+$", "", path.stem),
    registers=_number(r"Used (\d+) registers", said),
    spilled=_number(r"(\d+) bytes spill stores", said)
    + _number(r"(\d+) bytes spill loads", said),
    shared=_number(r"smem_scratch_bytes=(\d+)", memory),
    wgmma="wgmma.mma_async" in ptx,
    serialised="wgmma.mma_async instructions are serialized" in said,
  )


def _number(pattern: str, text: str) -> int:
  """The number in a text, which must have it: a new format is an error."""
  found = re.search(pattern, text)
  if found is None:
    raise ValueError(f"{pattern!r} is not in {text!r}")
  return int(found[1])


@contextlib.contextmanager
def _environment(name: str, value: str) -> Generator[None]:
  before = os.environ.get(name)
  os.environ[name] = value
  try:
    yield
  finally:
    del os.environ[name]
    if before is not None:
      os.environ[name] = before
