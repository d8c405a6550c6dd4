"""Resources of every Triton kernel at every real shape, and of misfits."""

import jax
import pytest
from jax import numpy as jnp

from experiments.stages import kernel_cases, kernel_ops
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

# Their tiles of queries have 64 rows at least.
WITH_ROWS = ("block_attention_forward", "block_attention_backward")
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


@pytest.mark.parametrize("op", kernel_ops.OPS)
def test_kernels_fit_at_every_real_shape_and_use_the_tensor_cores(op):
  cases = kernel_ops.chosen(["8B", "27B"], [op])
  launches = kernel_cases.distinct_launches(cases).values()
  assert launches
  for recorded, _ in launches:
    found = triton_resources.compile_launch(recorded)
    assert not found.problems()
    constants = recorded.launch.constants
    rows = max(constants.get(name, 0) for name in ("BLOCK_ROWS", "TILE_ROWS"))
    if rows >= 64 or found.kernel.startswith(WITH_ROWS):
      assert found.wgmma, (found, constants)
