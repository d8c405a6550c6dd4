"""The kernels of the injection: interpreted, and compiled for sm_90."""

import functools

import chex
import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from kernels import block_sizes, hopper, shapes, triton_call, triton_resources
from kernels.adjacent_injection import api, reference
from kernels.block_sizes import BlockSizes
from tests.kernels import adjacent_injection_inputs as inputs_lib
from tests.kernels import triton_interpreter

pytestmark = pytest.mark.hopper
needs_compiler = pytest.mark.skipif(
  triton_interpreter.unavailable() is None,
  reason="compiles kernels: needs Triton without TRITON_INTERPRET",
)

# Several tiles along every axis of `inputs_lib.inputs`, none of them whole.
SIZES = {
  name: BlockSizes(rows=8, cols=16, inner=16)
  for name in api.KERNELS
  if not name.startswith("pallas")
}

# Float32 sums of the same products in another order, through a few norms.
CLOSE = {"rtol": 5e-5, "atol": 5e-5}


def loss(arguments, cotangent, implementation, with_feature=True):
  """A scalar with a weight for every element, and the result itself."""
  out = api.adjacent_injection(
    *arguments,
    with_feature=with_feature,
    implementation=implementation,
    block_sizes=SIZES if implementation == "triton" else None,
  )
  value = jnp.sum(out.h * cotangent.h)
  if with_feature:
    value += jnp.sum(out.feature * cotangent.feature)
  return value, out


def both(arguments, cotangent, implementation, with_feature=True):
  """The result, and the gradients of states and weights."""
  h, *rest, weights = arguments

  def varied(h, weights):
    return loss((h, *rest, weights), cotangent, implementation, with_feature)

  (_, out), gradient = jax.value_and_grad(varied, (0, 1), has_aux=True)(
    h, weights
  )
  return out, gradient


def cotangent_of(arguments, seed=1):
  """Random numbers of the result's shapes."""
  rng = np.random.default_rng(seed)
  h, rank = arguments[0], arguments[3].shape[1]
  shapes = reference.Injected(h.shape, (*h.shape[:-1], rank))
  return reference.Injected(
    *(jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in shapes)
  )


@functools.cache
def compiled_for_xla(function, **options):
  """One function for all tests, since JAX's cache goes by the function."""
  return jax.jit(functools.partial(function, implementation="xla", **options))


def run(
  function,
  arguments,
  cotangent,
  launcher=triton_interpreter.launcher,
  **options,
):
  """What Triton gives by `launcher`, and what XLA gives."""
  # Jitted, which spares the compilation of every single operation.
  jitted = jax.jit(
    functools.partial(function, implementation="triton", **options)
  )
  with triton_call.launching_with(launcher):
    found = jax.block_until_ready(jitted(arguments, cotangent))
  return found, compiled_for_xla(function, **options)(arguments, cotangent)


def compare(arguments, launcher=triton_interpreter.launcher, **options):
  """Interpreted kernels against XLA: results and gradients."""
  cotangent = cotangent_of(arguments)
  expected = jax.jit(functools.partial(both, implementation="xla", **options))(
    arguments, cotangent
  )
  with triton_call.launching_with(launcher):
    found = both(arguments, cotangent, "triton", **options)
  chex.assert_trees_all_close(found, expected, **CLOSE)


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize("with_feature", [True, False])
def test_kernels_equal_the_reference(with_feature):
  compare(inputs_lib.inputs(), with_feature=with_feature)


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize("lead, slots", [((2,), 1), ((), 2)])
def test_short_blocks(lead, slots):
  compare(inputs_lib.inputs(lead, slots, width=32, rank=16, message=16))


@triton_interpreter.needs_interpreter
def test_without_a_gradient_the_result_is_the_same():
  # The root of the rank is exact in bfloat16.
  h, *rest = inputs_lib.inputs(rank=16)
  # Codes of another dtype than the states, tokens that count from the end.
  tokens, replaced, codes, weights = rest
  rest = (tokens - 13, replaced, codes.astype(jnp.bfloat16), weights)
  expected = jax.jit(api.adjacent_injection)(h, *rest)
  launched = []

  def launcher(launch, arrays, out_shape):
    launched.append(launch.kernel.__name__)
    return triton_interpreter.launcher(launch, arrays, out_shape)

  with triton_call.launching_with(launcher):
    found = api.adjacent_injection(
      h, *rest, implementation="triton", block_sizes=SIZES
    )
  chex.assert_trees_all_close(found, expected, **CLOSE)
  names = ["injection_read", "injection_message", "injection_write"]
  assert launched == names


@triton_interpreter.needs_interpreter
def test_zero_states_saturated_gates_and_codes_of_another_dtype():
  h, tokens, replaced, codes, weights = inputs_lib.inputs(rank=16)
  h = h.at[:, 2].set(0.0).at[:, 3].multiply(1e4)
  sign = jnp.where(jnp.arange(len(weights.bias)) % 2, 1.0, -1.0)
  weights = weights._replace(bias=jnp.where(sign > 0, 200.0, weights.bias))
  # A feature of a zero state has a gradient of 1e12.
  cotangent = cotangent_of((h, tokens, replaced, codes))
  cotangent = jax.tree.map(lambda x: x.at[:, 2:].set(0.0), cotangent)
  arguments = h, tokens, replaced, codes.astype(jnp.bfloat16), weights
  found, expected = run(both, arguments, cotangent)
  chex.assert_tree_all_finite(found)
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


def per_block(arguments, cotangent, implementation):
  """Results and gradients of single blocks, weights' included."""
  rows, constants = arguments[:3], arguments[3:]

  def one(rows, cotangent):
    return both((*rows, *constants), cotangent, implementation)

  return jax.vmap(one)(rows, cotangent)


@triton_interpreter.needs_interpreter
def test_vmap_makes_programs_of_the_mapped_axis():
  arguments = inputs_lib.inputs(width=32, rank=16, message=16)
  cotangent = cotangent_of(arguments)
  launched = []

  def launcher(launch, arrays, out_shape):
    launched.append(launch.constants["ROWS"])
    return triton_interpreter.launcher(launch, arrays, out_shape)

  found, expected = run(per_block, arguments, cotangent, launcher)
  chex.assert_trees_all_close(found, expected, **CLOSE)
  # A mapped function is traced for one block, too.
  assert launched.count(15) == 7


@triton_interpreter.needs_interpreter
def test_shards_add_up_the_gradients_of_weights():
  arguments = inputs_lib.inputs((2,), 3, width=16, rank=16, message=16)
  cotangent = cotangent_of(arguments)
  mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
  rows, whole = PartitionSpec("x"), PartitionSpec()

  def of_shard(arguments, cotangent, implementation):
    return jax.shard_map(
      lambda *x: both(x[:5], x[5], implementation),
      mesh=mesh,
      in_specs=(rows, rows, rows, whole, whole, rows),
      out_specs=(rows, (rows, whole)),
    )(*arguments, cotangent)

  found, expected = run(of_shard, arguments, cotangent)
  chex.assert_trees_all_close(found, expected, **CLOSE)


def longer_blocks(launch, arrays):
  """Messages and gradients pass from one block to the next."""
  if "SLOTS" in launch.constants:
    launch.constants["SLOTS"] = 15
  return arrays


def short_slices(launch, arrays):
  """The last squares of h are left out."""
  if "SLICE" in launch.constants:
    launch.constants["SLICE"] -= 1
  return arrays


def other_tokens(launch, arrays):
  """Codes of the receivers and not of their predecessors."""
  return [jnp.roll(x, -1) if x.shape == (15,) else x for x in arrays]


def nothing_replaced(launch, arrays):
  """Features are read where true tokens should be."""
  is_backward = "backward" in launch.kernel.__name__
  return [0 * x if is_backward and x.shape == (3,) else x for x in arrays]


def fewer_parts(launch, arrays):
  """A column tile's share of a row's sum is left out."""
  if "BLOCK_PARTS" in launch.constants:
    launch.constants["BLOCK_PARTS"] = 1
  return arrays


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize(
  "breaks",
  [
    longer_blocks,
    short_slices,
    other_tokens,
    nothing_replaced,
    fewer_parts,
  ],
)
def test_a_broken_launch_is_seen(breaks):
  def launcher(launch, arrays, out_shape):
    arrays = breaks(launch, arrays)
    return triton_interpreter.launcher(launch, arrays, out_shape)

  with pytest.raises(AssertionError, match="not approximately equal"):
    compare(inputs_lib.inputs(), launcher, with_feature=False)


def described(blocks, model, codes=jnp.bfloat16):
  """Arguments in bfloat16, with float32 masters of the weights."""
  shape = jax.ShapeDtypeStruct
  rank, message = shapes.RANK, shapes.MESSAGE
  square = shape((rank, message), jnp.float32)
  return (
    shape((blocks, shapes.BLOCK, model.width), jnp.bfloat16),
    shape((blocks, shapes.BLOCK), jnp.int32),
    shape((blocks,), jnp.bool_),
    shape((model.vocab, rank), codes),
    reference.Weights(
      shape((model.width, rank), jnp.float32),
      shape((message, model.width), jnp.float32),
      *(square, square, square),
      shape((message,), jnp.float32),
    ),
  )


def training(h, tokens, replaced, codes, weights, **options):
  """Gradients of a loss of states and features."""

  def value(h, weights):
    out = api.adjacent_injection(
      h,
      tokens,
      replaced,
      codes,
      weights,
      with_feature=True,
      implementation="triton",
      **options,
    )
    return jnp.sum(out.h.astype(jnp.float32)) + jnp.sum(
      out.feature.astype(jnp.float32)
    )

  return jax.value_and_grad(value, argnums=(0, 1))(h, weights)


def decoding(*arguments):
  return api.adjacent_injection(*arguments, implementation="triton")


@needs_compiler
@pytest.mark.parametrize(
  "function, arguments, names",
  [
    (
      training,
      described(shapes.ANCHORS, shapes.QWEN3_27B, jnp.float32),
      [
        "read",
        "message",
        "write",
        "write",
        "message_backward",
        "read_backward",
        "input_backward",
      ],
    ),
    (
      decoding,
      described(64, shapes.QWEN3_8B),
      ["read", "message", "write"],
    ),
    (
      decoding,
      described(1, shapes.QWEN3_8B),
      ["read", "message", "write"],
    ),
  ],
  ids=["training", "64 requests", "1 request"],
)
def test_real_shapes_launch_each_kernel_and_codes_in_float32_fit(
  function, arguments, names
):
  launches = triton_resources.launches(function, *arguments)
  assert [f"injection_{name}" for name in names] == [
    recorded.launch.kernel.__name__ for recorded in launches
  ]
  # With codes in bfloat16 all kernels are compiled in `resources_hopper_test`.
  for recorded in launches:
    if not recorded.launch.constants.get("SAME_DTYPE", True):
      found = triton_resources.compile_launch(recorded)
      assert found.wgmma and not found.problems()


@needs_compiler
def test_a_training_step_compiles_for_an_h100():
  if hopper.unavailable() is not None:
    pytest.skip(hopper.unavailable())
  # Small tiles compile fast; the default ones are compiled above.
  sizes = dict.fromkeys(SIZES, BlockSizes(rows=16, cols=16, inner=16))
  text = hopper.compile_for_h100(
    functools.partial(training, block_sizes=sizes),
    *described(2, shapes.QWEN3_8B),
  ).as_text()
  for name in SIZES:
    assert f"injection_{name}" in text
  # Of the codes only rows are read, and never in an array of the slots.
  assert "bf16[151936,1024]" in text
  assert not any("gather(" in line for line in text.splitlines())


@needs_compiler
def test_more_rows_take_larger_tiles_and_all_multiprocessors():
  def choices(blocks):
    # A new function each time: JAX keeps what it traced.
    with block_sizes.recording() as found:
      triton_resources.launches(
        lambda *arguments: decoding(*arguments),
        *described(blocks, shapes.QWEN3_8B),
      )
    return {choice.kernel: choice.sizes for choice in found}

  tiles = [
    (sizes["read"].rows, sizes["read"].cols)
    for sizes in map(choices, (1, 4, 16, 64, 512))
  ]
  assert tiles == [(16, 16), (64, 16), (64, 32), (128, 128), (128, 256)]
