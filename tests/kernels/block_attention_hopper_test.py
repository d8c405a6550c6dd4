"""The kernels of block attention: interpreted, and compiled for sm_90."""

import functools

import chex
import jax
import pytest
from jax import numpy as jnp

from kernels import hopper, shapes, triton_call, triton_resources
from kernels.block_attention import api, heuristics, reference
from kernels.block_sizes import BlockSizes
from tests.kernels import block_attention_inputs as inputs_lib
from tests.kernels import triton_interpreter

pytestmark = pytest.mark.hopper
needs_compiler = pytest.mark.skipif(
  triton_interpreter.unavailable() is None,
  reason="compiles kernels: needs Triton without TRITON_INTERPRET",
)

ARRAYS = inputs_lib.ARRAYS
# Float32 sums of the same products in another order.
CLOSE = {"rtol": 2e-5, "atol": 1e-5}


def sizes(rows=16, splits=1, cols=16):
  """Small tiles: several along every axis, none of them whole."""
  size = BlockSizes(rows=rows, cols=cols, inner=1)
  return {
    "forward": BlockSizes(rows=rows, cols=cols, inner=splits),
    "merge": size,
    "backward_q": size,
    "backward_context": size,
  }


def with_gradient(attend, arguments):
  """The result, and gradients with another weight for every element."""
  *arrays, visible, starts, own_mask = arguments

  def total(*arrays):
    out = attend(*arrays, visible, starts, own_mask)
    return jnp.sum(jnp.sin(out + jnp.arange(out.size).reshape(out.shape))), out

  return jax.value_and_grad(total, ARRAYS, has_aux=True)(*arrays)


def triton(block_sizes):
  return functools.partial(
    api.block_attention, implementation="triton", block_sizes=block_sizes
  )


def compare(arguments, block_sizes, launcher=triton_interpreter.launcher):
  """Interpreted kernels against the specification: results and gradients."""
  both = functools.partial(with_gradient, triton(block_sizes))
  with triton_call.launching_with(launcher):
    found = jax.jit(both)(arguments)
  chex.assert_trees_all_close(found, specified(arguments), **CLOSE)


specified = jax.jit(functools.partial(with_gradient, reference.block_attention))

# Few programs, since every operation of each takes a millisecond.
FEW = {"batch": 1, "heads": 2, "groups": 1}
CASES = {
  # Two blocks a tile, the last one alone: 12 rows of 16, 6 own keys of 16.
  "tiles": ({}, {}),
  # Slots of the last block start at 15, 16 and 17: in two tiles of keys.
  "window": (FEW | {"window": 7, "is_causal": False}, {}),
  "splits": (FEW | {"batch": 2, "context": 70, "window": 50}, {"splits": 4}),
  "one of each": (FEW | {"slots": 1, "blocks": 1, "context": 1}, {}),
}


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize("case", CASES)
def test_kernels_equal_the_specification(case):
  changes, tile = CASES[case]
  compare(inputs_lib.inputs(**changes), sizes(**tile))


@triton_interpreter.needs_interpreter
def test_slots_that_see_nothing_give_zeros_and_no_gradient():
  *rest, own_mask = inputs_lib.inputs(**FEW, window=5)
  arguments = (*rest, own_mask.at[0].set(False))
  assert not specified(arguments)[0][1][0, 0, 0].any()
  compare(arguments, sizes(splits=2))


@triton_interpreter.needs_interpreter
def test_huge_scores_neither_overflow_nor_vanish():
  q, own_k, own_v, context_k, *rest = inputs_lib.inputs(**FEW)
  # Scores of order 1e4: one key has all the weight.
  arguments = (200 * q, 50 * own_k, own_v, 50 * context_k, *rest)
  both = functools.partial(with_gradient, triton(sizes()))
  with triton_interpreter.interpreting():
    found = jax.jit(both)(arguments)
  want = specified(arguments)
  # Scores are rounded to 1e-3 before the exponential.
  chex.assert_trees_all_close(found, want, rtol=5e-3, atol=5e-3)


@triton_interpreter.needs_interpreter
def test_what_is_not_seen_may_be_anything_finite():
  arguments = list(inputs_lib.inputs(**FEW))
  end = int(arguments[5][0, :2].max())
  assert 0 < end < 21
  arguments[5] = arguments[5].at[0, 2].set(end)
  for index in (3, 4):
    arguments[index] = arguments[index].at[:, :, end:].set(1e30)
  compare(tuple(arguments), sizes())


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize("mask_axis", [None, 0])
def test_vmap_is_more_programs(mask_axis):
  cases = [inputs_lib.inputs(**FEW, blocks=2, seed=i) for i in range(2)]
  stacked = [
    None if x[0] is None else jnp.stack(x) for x in zip(*cases, strict=True)
  ]
  if mask_axis is None:
    stacked[-1] = cases[0][-1]
  grids = []

  def launcher(launch, arrays, out_shape):
    grids.append(launch.grid)
    return triton_interpreter.launcher(launch, arrays, out_shape)

  def many(attend):
    both = functools.partial(with_gradient, attend)
    return jax.vmap(lambda *x: both(x), in_axes=(*[0] * 6, None, mask_axis))(
      *stacked
    )

  many = jax.jit(many, static_argnums=0)
  with triton_call.launching_with(launcher):
    found = many(triton(sizes()))
  want = many(reference.block_attention)
  chex.assert_trees_all_close(found, want, **CLOSE)
  if mask_axis is None:
    # The last axis but for keys, whose tiles are behind it.
    assert set(grids[-3:]) == {(1, 1, 2), (1, 2, 2)}


# Each breaks a kernel: constants, or bounds that are off by one.
BROKEN = {
  "window": ("", {"HAS_STARTS": False}, 0),
  "scale": ("forward", {"SCALE": 0.3}, 0),
  "root": ("backward_q", {"ROOT": 0.3}, 0),
  "tile": ("forward", {"PER_TILE": 1}, 0),
  "visible": ("forward", {}, 1),
  "visible of q": ("backward_q", {}, 1),
  "visible of keys": ("backward_context", {}, 1),
  "fewer blocks": ("backward_context", {"BLOCKS": 2}, 0),
}


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_kernel_is_seen(name):
  kernel, constants, shift = BROKEN[name]
  arguments = inputs_lib.inputs(**FEW, window=7)
  arguments = (*arguments[:5], arguments[5].at[0, 1].set(9), *arguments[6:])

  def launcher(launch, arrays, out_shape):
    if kernel in launch.kernel.__name__:
      changed = launch.constants | constants
      launch = launch._replace(constants=changed)
      visible = arguments[5]
      arrays = [
        x + shift if x.shape == visible.shape and x.dtype == jnp.int32 else x
        for x in arrays
      ]
    return triton_interpreter.launcher(launch, arrays, out_shape)

  with pytest.raises(AssertionError):
    compare(arguments, sizes(), launcher)


def described(batch, blocks, context, *, windows=False):
  """Arguments of Qwen3-8B's drafter, without numbers."""
  model, slots = shapes.QWEN3_8B, shapes.BLOCK

  def of(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype)

  own = of(batch, blocks, slots, model.kv_heads, model.head_dim)
  keys = of(batch, model.kv_heads, context, model.head_dim)
  starts = of(batch, blocks, slots, dtype=jnp.int32) if windows else None
  return (
    of(batch, blocks, slots, model.heads, model.head_dim),
    *(own, own, keys, keys),
    of(batch, blocks, dtype=jnp.int32),
    starts,
    of(slots, slots, dtype=bool),
  )


TRAINING = functools.partial(described, 1, shapes.ANCHORS, shapes.CONTEXT)


def loss_and_gradients(implementation, *arguments):
  def loss(*arrays):
    out = api.block_attention(
      *arrays, *arguments[5:], implementation=implementation
    )
    return jnp.sum(out.astype(jnp.float32))

  return jax.value_and_grad(loss, ARRAYS)(*arguments[:5])


def real_launches():
  """Of training, full and sliding, and of decoding one and many requests."""
  train = functools.partial(loss_and_gradients, "triton")
  attend = functools.partial(api.block_attention, implementation="triton")
  found = []
  for windows in (False, True):
    found += triton_resources.launches(train, *TRAINING(windows=windows))
  for batch in (1, 64):
    arguments = described(batch, 1, shapes.DECODE_CONTEXT)
    found += triton_resources.launches(attend, *arguments)
  return found


@needs_compiler
def test_real_shapes_launch_each_kernel_and_sliding_windows_fit():
  found = real_launches()
  names = [recorded.launch.kernel.__name__ for recorded in found]
  start = "block_attention_"
  train = [start + x for x in ("forward", "backward_q", "backward_context")]
  decode = [start + "forward", start + "merge", start + "forward"]
  assert names == train + train + decode
  # Without windows all are compiled in `resources_hopper_test`.
  for recorded in found[len(train) : 2 * len(train)]:
    used = triton_resources.compile_launch(recorded)
    assert used.wgmma and not used.problems()


@needs_compiler
@pytest.mark.skipif(
  hopper.unavailable() is not None, reason=hopper.unavailable() or ""
)
def test_training_uses_the_kernels_by_default():
  compiled = hopper.compile_for_h100(
    functools.partial(loss_and_gradients, None), *TRAINING()
  )
  text = compiled.as_text()
  for kernel in heuristics.KERNELS:
    # Training has enough tiles to need no splits.
    assert (f"block_attention_{kernel}" in text) == (kernel != "merge")
  # One layer's scores are 3 GB in bfloat16.
  assert compiled.memory_analysis().temp_size_in_bytes < 2**28
