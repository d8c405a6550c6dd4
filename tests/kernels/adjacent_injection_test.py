import functools

import chex
import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from kernels import cost as device_cost
from kernels import shapes
from kernels.adjacent_injection import api, cost, reference
from kernels.block_sizes import BlockSizes
from tests.kernels import adjacent_injection_inputs as inputs_lib

with_feature = functools.partial(api.adjacent_injection, with_feature=True)

# Float32 against float64: sums of a few dozen products.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}


def cotangent_of(arguments, seed=1):
  rng = np.random.default_rng(seed)
  out = jax.eval_shape(with_feature, *arguments)
  return jax.tree.map(
    lambda x: jnp.asarray(rng.normal(size=x.shape), x.dtype), out
  )


def objective(h, tokens, replaced, codes, weights, cotangent):
  """A scalar in which every element of the result has its own weight."""
  out = with_feature(h, tokens, replaced, codes, weights)
  parts = jax.tree.map(lambda x, y: jnp.sum(x * y), out, cotangent)
  return parts.h + parts.feature


gradient = jax.grad(objective, argnums=(0, 4))


@pytest.mark.parametrize("lead, slots", [((2, 2), 4), ((), 3), ((2,), 1)])
def test_values_are_the_formulas(lead, slots):
  arguments = inputs_lib.inputs(lead, slots)
  found = jax.jit(with_feature)(*arguments)
  states, features = inputs_lib.oracle(*arguments)
  np.testing.assert_allclose(found.h, states, **CLOSE)
  np.testing.assert_allclose(found.feature, features, **CLOSE)
  only = jax.jit(api.adjacent_injection)(*arguments)
  assert only.feature is None
  np.testing.assert_allclose(only.h, found.h, rtol=1e-6)


def test_gradients_are_the_slopes_of_the_formulas():
  arguments = inputs_lib.inputs()
  cotangent = cotangent_of(arguments)
  found = jax.jit(gradient)(*arguments, cotangent)
  # Products of a float64 array with one of JAX are float32.
  found, cotangent = jax.tree.map(
    lambda x: np.asarray(x, np.float64), (found, cotangent)
  )
  leaves, tree = jax.tree.flatten((arguments[0], arguments[4]))
  rng = np.random.default_rng(2)
  for index, slopes in enumerate(jax.tree.leaves(found)):
    direction = rng.normal(size=slopes.shape)

    def at(step, index=index, direction=direction):
      moved = [np.asarray(leaf, np.float64) for leaf in leaves]
      moved[index] = moved[index] + step * direction
      h, weights = jax.tree.unflatten(tree, moved)
      out = inputs_lib.oracle(h, *arguments[1:4], weights)
      return sum(np.sum(x * y) for x, y in zip(out, cotangent, strict=True))

    np.testing.assert_allclose(
      np.sum(slopes * direction),
      (at(1e-5) - at(-1e-5)) / 2e-5,
      rtol=1e-4,
      atol=1e-3,
    )


def test_codes_are_constants():
  h, tokens, replaced, codes, weights = inputs_lib.inputs()

  def value(codes):
    return jnp.sum(with_feature(h, tokens, replaced, codes, weights).h)

  assert not np.any(jax.jit(jax.grad(value))(codes))


def test_gradients_are_finite_at_a_zero_state():
  arguments = inputs_lib.inputs()
  zero = (jnp.zeros_like(arguments[0]), *arguments[1:])
  found = jax.jit(gradient)(*zero, cotangent_of(zero))
  chex.assert_tree_all_finite(found)


def test_a_slot_sees_itself_its_predecessor_and_the_anchors_token():
  h, tokens, replaced, codes, weights = inputs_lib.inputs()
  replaced = jnp.zeros_like(replaced)
  run = jax.jit(
    lambda h, tokens: with_feature(h, tokens, replaced, codes, weights).h
  )
  out = run(h, tokens)
  np.testing.assert_array_equal(out[:, 0], h[:, 0])
  moved = run(h.at[:, 2].add(1.0), tokens) != out
  assert moved.any((0, 2)).tolist() == [False, False, True, True, False]
  renamed = run(h, (tokens + 1) % 13) != out
  assert renamed.any((0, 2)).tolist() == [False, True, False, False, False]


def test_zero_writes_leave_the_states():
  *rest, weights = inputs_lib.inputs()
  silent = weights._replace(write=jnp.zeros_like(weights.write))
  found = jax.jit(api.adjacent_injection)(*rest, silent)
  np.testing.assert_array_equal(found.h, rest[0])


def test_vmap_and_scan_are_the_loop():
  arguments = inputs_lib.inputs()
  *rows, codes, weights = arguments
  cotangent = cotangent_of(arguments)
  expected = jax.jit(with_feature)(*arguments)
  axes = (0, 0, 0, None, None)
  mapped = jax.jit(jax.vmap(with_feature, axes))(*arguments)
  chex.assert_trees_all_close(mapped, expected, rtol=1e-5, atol=1e-5)

  def step(carry, row):
    return carry, with_feature(*row, codes, weights)

  scanned = jax.jit(lambda rows: jax.lax.scan(step, 0, rows)[1])(tuple(rows))
  chex.assert_trees_all_close(scanned, expected, rtol=1e-5, atol=1e-5)

  d_h, d_weights = jax.jit(gradient)(*arguments, cotangent)
  each = jax.vmap(gradient, (*axes, 0))
  mapped_h, of_blocks = jax.jit(each)(*arguments, cotangent)
  summed = jax.tree.map(lambda x: jnp.sum(x, axis=0), of_blocks)
  chex.assert_trees_all_close(mapped_h, d_h, rtol=1e-4, atol=1e-4)
  chex.assert_trees_all_close(summed, d_weights, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("outside", [True, False])
def test_shard_map_gives_the_same_gradients(outside):
  """With the gradient taken around the sharded op, and inside of the shard."""
  arguments = inputs_lib.inputs()
  cotangent = cotangent_of(arguments)
  mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
  rows, whole = PartitionSpec("x"), PartitionSpec()
  specs = (rows, rows, rows, whole, whole)

  def value(*arguments):
    sharded = jax.shard_map(
      with_feature, mesh=mesh, in_specs=specs, out_specs=rows
    )
    out = sharded(*arguments)
    parts = jax.tree.map(lambda x, y: jnp.sum(x * y), out, cotangent)
    return parts.h + parts.feature

  if outside:
    found = jax.jit(jax.grad(value, argnums=(0, 4)))(*arguments)
  else:
    inside = jax.shard_map(
      gradient, mesh=mesh, in_specs=(*specs, rows), out_specs=(rows, whole)
    )
    found = jax.jit(inside)(*arguments, cotangent)
  expected = jax.jit(gradient)(*arguments, cotangent)
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_states_give_bfloat16_near_the_exact_result():
  h, tokens, replaced, codes, weights = inputs_lib.inputs()
  arguments = (h.astype(jnp.bfloat16), tokens, replaced, codes, weights)
  found = jax.jit(with_feature)(*arguments)
  assert found.h.dtype == found.feature.dtype == jnp.bfloat16
  # Some roundings of 2**-9, of sums with random signs.
  for got, exact in zip(found, inputs_lib.oracle(*arguments), strict=True):
    error = np.abs(np.asarray(got, np.float64) - exact)
    assert np.max(error) < 0.02 * np.max(np.abs(exact))
  d_h, d_weights = jax.jit(gradient)(*arguments, cotangent_of(arguments))
  assert d_h.dtype == jnp.bfloat16
  assert all(x.dtype == jnp.float32 for x in d_weights)


def test_on_a_cpu_the_default_is_xla_and_a_kernel_says_why_not():
  arguments = inputs_lib.inputs()
  default = str(jax.make_jaxpr(api.adjacent_injection)(*arguments))
  named = functools.partial(api.adjacent_injection, implementation="xla")
  assert default == str(jax.make_jaxpr(named)(*arguments))
  for name in ("triton", "pallas"):
    with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
      api.adjacent_injection(*arguments, implementation=name)
  with pytest.raises(ValueError, match="implementation='cuda' is none of"):
    api.adjacent_injection(*arguments, implementation="cuda")
  sizes = {"reads": BlockSizes(rows=16, cols=16, inner=16)}
  with pytest.raises(ValueError, match=r"\['reads'\] are none of the kernels"):
    api.adjacent_injection(*arguments, block_sizes=sizes)


@pytest.mark.parametrize(
  "name, value, message",
  [
    ("h", jnp.zeros(3), r"h: has shape \(3,\), needs 2 axes"),
    ("h", jnp.zeros((3, 5, 40), jnp.float16), "h: is float16, must be one of"),
    ("codes", jnp.zeros(24), r"codes: has shape \(24,\), must be \[V, R\]"),
    ("tokens", jnp.zeros((3, 4), jnp.int32), r"tokens: .*must be \(3, 5\)"),
    ("replaced", jnp.zeros(2, bool), r"replaced: .*must be \(3,\)"),
    ("codes", jnp.zeros((13, 8)), r"weights.readout: .*must be \(40, 8\)"),
  ],
)
def test_arguments_that_do_not_fit_are_named(name, value, message):
  names = ("h", "tokens", "replaced", "codes", "weights")
  arguments = dict(zip(names, inputs_lib.inputs(), strict=True))
  with pytest.raises(ValueError, match=message):
    api.check(**arguments | {name: value})


@pytest.mark.parametrize("model", shapes.MODELS, ids=lambda x: x.name)
def test_counts_make_the_kernels_the_default_beyond_a_few_requests(model):
  def count(blocks, **options):
    options = {"with_feature": False, "backward": False} | options
    return cost.cost(
      shapes.BLOCK * blocks, model.width, shapes.RANK, shapes.MESSAGE, **options
    )

  gains = [device_cost.gain(count(blocks)) for blocks in (1, 4, 16, 64, 512)]
  assert gains == sorted(gains)
  assert gains[1] < 1.2 < gains[2] and gains[4] > 1.7
  training = count(shapes.ANCHORS, with_feature=True, backward=True)
  for device in (device_cost.H100, device_cost.H200):
    assert 1.8 < device_cost.gain(training, device) < 2.2
    floor = device_cost.seconds([training.floor], device)
    assert floor < device_cost.seconds(training.triton, device) < 1.3 * floor
  # The feature takes nearly no FLOPs; XLA reads all of the states again.
  plain = count(shapes.ANCHORS, backward=True)
  of = {
    name: sum(stage.flops for stage in getattr(training, name))
    / sum(stage.flops for stage in getattr(plain, name))
    for name in ("triton", "xla")
  }
  assert of["triton"] < 1.15 and of["xla"] > 1.5


def test_weights_and_reference_are_those_of_the_op():
  """The gradient of "xla" is autodiff of the specification."""
  arguments = inputs_lib.inputs()
  cotangent = cotangent_of(arguments)
  h, *rows, weights = arguments

  def value(h, weights):
    out = reference.adjacent_injection(h, *rows, weights, True)
    return jnp.sum(out.h * cotangent.h) + jnp.sum(
      out.feature * cotangent.feature
    )

  expected = jax.jit(jax.grad(value, argnums=(0, 1)))(h, weights)
  found = jax.jit(gradient)(*arguments, cotangent)
  chex.assert_trees_all_close(found, expected, rtol=1e-5, atol=1e-5)
