"""Triton kernels that ask for too much are seen by their resources."""

import jax
import pytest
from jax import numpy as jnp

from kernels import shapes, triton_resources
from kernels.adjacent_injection import api, reference
from kernels.block_sizes import BlockSizes
from tests.kernels import triton_interpreter

pytestmark = [
  pytest.mark.hopper,
  pytest.mark.skipif(
    triton_interpreter.unavailable() is None,
    reason="compiles kernels: needs a process without TRITON_INTERPRET=1",
  ),
]

WIDTH, BLOCKS = shapes.QWEN3_8B.width, 64


def arguments():
  def numbers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  rank, size = shapes.RANK, shapes.MESSAGE
  weights = reference.Weights(
    numbers(WIDTH, rank),
    numbers(size, WIDTH),
    *(numbers(rank, size) for _ in range(3)),
    numbers(size),
  )
  return (
    numbers(BLOCKS, shapes.BLOCK, WIDTH),
    jax.ShapeDtypeStruct((BLOCKS, shapes.BLOCK), jnp.int32),
    jax.ShapeDtypeStruct((BLOCKS,), jnp.bool_),
    numbers(shapes.QWEN3_8B.vocab, rank),
    weights,
  )


def injection(**block_sizes):
  def run(*arguments):
    out = api.adjacent_injection(
      *arguments, implementation="triton", block_sizes=block_sizes
    )
    return out.h

  return run


def resources(kernel, sizes):
  """Of the injection's `kernel`, with these sizes."""
  pytest.importorskip("triton", reason="make test-hopper installs it")
  found = triton_resources.launches(injection(**{kernel: sizes}), *arguments())
  name = f"injection_{kernel}"
  (launch,) = (r for r in found if r.launch.kernel.__name__ == name)
  return triton_resources.compile_launch(launch)


def test_a_kernel_that_spills_is_seen():
  sizes = BlockSizes(rows=64, cols=128, inner=32, num_warps=1, num_stages=2)
  (problem,) = resources("write", sizes).problems()
  assert "registers spill" in problem


def test_a_kernel_with_too_much_shared_memory_is_seen():
  # Four stages of (128 x 128 + 128 x 128) bfloat16 wait while one is used.
  sizes = BlockSizes(rows=128, cols=128, inner=128, num_warps=8, num_stages=5)
  (problem,) = resources("write", sizes).problems()
  assert "bytes of shared memory, 232448 at most" in problem
