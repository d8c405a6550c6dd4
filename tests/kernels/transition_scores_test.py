"""The specification of the transition scores, and what its public ops promise.

The oracle is `transition_scores_inputs`, loops in float64. The kernels are
compared with the specification in `transition_scores_hopper_test.py`.
"""

import dataclasses
import functools
import inspect
import re

import chex
import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from kernels import cost as device_cost
from kernels.block_sizes import BlockSizes
from kernels.transition_scores import api, cost, heuristics, reference
from tests.kernels import transition_scores_inputs as inputs_lib
from tests.kernels.transition_scores_inputs import EPS, Sizes

# float32 sums of some tens of products, against float64.
CLOSE = {"rtol": 2e-5, "atol": 2e-5}

scores_of = functools.partial(api.transition_scores, eps=EPS)
draft_of = functools.partial(api.greedy_draft, eps=EPS)


@pytest.fixture(scope="module")
def arguments():
  return inputs_lib.inputs()


@pytest.fixture(scope="module")
def cotangent():
  sizes = Sizes()
  shape = (sizes.slots, sizes.predecessors, sizes.candidates)
  return np.random.default_rng(1).normal(size=shape).astype(np.float32)


def varied(arguments):
  """What the scores have gradients for: u, weights, norm_scale."""
  return arguments[0], arguments[5], arguments[6]


def objective(arguments, cotangent):
  def value(u, weights, norm_scale):
    scores = scores_of(u, *arguments[1:5], weights, norm_scale)
    return jnp.sum(scores * cotangent)

  return value


@pytest.mark.parametrize(
  "form", [reference.transition_scores, reference.factored_transition_scores]
)
def test_both_forms_are_the_formulas(form, arguments):
  found = jax.jit(form, static_argnums=7)(*arguments, EPS)
  assert found.dtype == jnp.float32
  np.testing.assert_allclose(found, inputs_lib.oracle(*arguments), **CLOSE)


def test_the_factored_form_survives_a_write_that_cancels_the_state():
  """Its mean square is a sum that may round to less than zero."""
  form = jax.jit(reference.factored_transition_scores, static_argnums=7)
  assert np.all(np.isfinite(form(*inputs_lib.cancelling(), EPS)))


def test_gradients_are_the_slopes_of_the_formulas(arguments, cotangent):
  of = varied(arguments)
  gradients = jax.jit(
    jax.grad(objective(arguments, cotangent), argnums=(0, 1, 2))
  )(*of)
  leaves, tree = jax.tree.flatten(of)
  rng = np.random.default_rng(2)
  for index, gradient in enumerate(jax.tree.leaves(gradients)):
    direction = rng.normal(size=gradient.shape)

    def at(step, index=index, direction=direction):
      moved = [np.asarray(leaf, np.float64) for leaf in leaves]
      moved[index] = moved[index] + step * direction
      u, weights, scale = jax.tree.unflatten(tree, moved)
      found = inputs_lib.oracle(u, *arguments[1:5], weights, scale)
      return np.sum(found * cotangent)

    slope = (at(1e-5) - at(-1e-5)) / 2e-5
    np.testing.assert_allclose(
      np.sum(gradient * direction), slope, rtol=1e-4, atol=1e-4
    )


def test_no_array_of_vocabulary_size_is_made(arguments, cotangent):
  """Head and codes are only read: not copied, and without a gradient."""
  gradient = jax.grad(objective(arguments, cotangent), argnums=(0, 1, 2))
  text = str(jax.make_jaxpr(gradient)(*varied(arguments)))
  made = re.compile(r":\w+\[211[^\]]*\][^=\n]* = (?!stop_gradient )")
  assert not made.search(text)
  assert made.search(":f32[211,37] = mul b c")


def test_head_and_codes_are_constants(arguments):
  def value(codes, head):
    return jnp.sum(scores_of(*arguments[:3], codes, head, *arguments[5:]))

  gradients = jax.jit(jax.grad(value, argnums=(0, 1)))(*arguments[3:5])
  for gradient in gradients:
    assert not np.any(gradient)


def test_gradients_are_finite_at_a_zero_state(arguments):
  zero = (jnp.zeros_like(arguments[0]), *arguments[1:])
  gradient = jax.jit(jax.grad(objective(zero, 1.0), argnums=(0, 1, 2)))
  gradient = gradient(*varied(zero))
  chex.assert_tree_all_finite(gradient)


def test_a_saturated_gate_passes_or_stops_the_message(arguments):
  *rest, weights, scale = arguments
  bias = jnp.where(jnp.arange(len(weights.bias)) % 2, 200.0, -200.0)
  changed = (*rest, weights._replace(bias=bias), scale)
  jitted = jax.jit(scores_of)
  found = jitted(*changed)
  np.testing.assert_allclose(found, inputs_lib.oracle(*changed), **CLOSE)
  written = weights._replace(bias=jnp.full_like(bias, -200.0))
  stopped = jitted(*rest, written, scale)
  np.testing.assert_allclose(stopped[:, :1], stopped[:, 1:2], **CLOSE)


def test_vmap_and_scan_are_the_loop(cotangent):
  batch = inputs_lib.inputs(lead=(2,))
  u, before, ids, *rest = batch
  one = jax.jit(scores_of)
  expected = jnp.stack([one(u[i], before[i], ids[i], *rest) for i in range(2)])
  axes = (0, 0, 0, None, None, None, None)
  mapped = jax.jit(jax.vmap(scores_of, axes))
  np.testing.assert_allclose(mapped(*batch), expected, **CLOSE)
  np.testing.assert_allclose(one(*batch), expected, **CLOSE)

  def step(carry, rows):
    return carry, scores_of(*rows, *rest)

  scanned = jax.jit(lambda rows: jax.lax.scan(step, 0, rows)[1])
  np.testing.assert_allclose(scanned((u, before, ids)), expected, **CLOSE)

  def gradient(u, before, ids):
    one = (u, before, ids, *rest)
    return jax.grad(objective(one, cotangent), argnums=(0, 1))(u, *rest[2:])

  jitted = jax.jit(gradient)
  looped = [jitted(u[i], before[i], ids[i]) for i in range(2)]
  looped = jax.tree.map(lambda *x: jnp.stack(x), *looped)
  chex.assert_trees_all_close(
    jax.jit(jax.vmap(gradient))(u, before, ids), looped, rtol=1e-4, atol=1e-4
  )


def test_shard_map_gives_the_same_scores_and_gradients(arguments, cotangent):
  mesh = jax.make_mesh((1,), ("x",), (jax.sharding.AxisType.Auto,))
  rows, whole = PartitionSpec("x"), PartitionSpec()

  def value(u, weights, norm_scale):
    sharded = jax.shard_map(
      scores_of,
      mesh=mesh,
      in_specs=(rows, rows, rows, whole, whole, whole, whole),
      out_specs=rows,
    )
    scores = sharded(u, *arguments[1:5], weights, norm_scale)
    return jnp.sum(scores * cotangent)

  of = varied(arguments)
  found = jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2)))(*of)
  expected = jax.jit(
    jax.value_and_grad(objective(arguments, cotangent), argnums=(0, 1, 2))
  )(*of)
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


def test_bfloat16_states_give_float32_scores_near_the_exact_ones(arguments):
  low = jax.tree.map(
    lambda x: x.astype(jnp.bfloat16) if x.dtype == jnp.float32 else x, arguments
  )
  found = jax.jit(scores_of)(*low)
  assert found.dtype == jnp.float32
  exact = inputs_lib.oracle(*low)
  # Some roundings of 2**-9 each, of states that are summed with random signs.
  assert np.max(np.abs(found - exact)) < 0.02 * np.max(np.abs(exact))
  # Masters of the weights in float32, and gradients in their dtype.
  mixed = (low[0], *arguments[1:])
  gradients = jax.eval_shape(
    jax.grad(objective(mixed, 1.0), argnums=(0, 1)), *varied(mixed)
  )
  assert gradients[0].dtype == jnp.bfloat16
  assert gradients[1].write.dtype == jnp.float32


def test_the_draft_is_sequential_refinement():
  sizes = Sizes(slots=6, candidates=5)
  batch = inputs_lib.inputs(sizes, lead=(3,), draft=True)
  u, anchor, ids, *rest = batch
  expected = np.stack(
    [
      inputs_lib.sequential_draft(u[i], anchor[i], ids[i], *rest)
      for i in range(3)
    ]
  )
  found = jax.jit(draft_of)(*batch)
  assert found.dtype == jnp.int32
  np.testing.assert_array_equal(found, expected)
  mapped = jax.vmap(draft_of, (0, 0, 0, None, None, None, None))
  np.testing.assert_array_equal(jax.jit(mapped)(*batch), expected)
  one = jax.jit(draft_of)(u[0, :1], anchor[0], ids[0, :1], *rest)
  np.testing.assert_array_equal(one, expected[0, :1])


def test_the_first_of_equal_candidates_is_taken():
  batch = inputs_lib.inputs(Sizes(slots=2), draft=True)
  u, anchor, ids, codes, head, *rest = batch
  head = head.at[7].set(head[3])
  jitted = jax.jit(draft_of)
  for row in ([3, 7, 3, 7], [7, 3, 7, 3]):
    ids = jnp.broadcast_to(jnp.asarray(row, jnp.int32), ids.shape)
    found = jitted(u, anchor, ids, codes, head, *rest)
    np.testing.assert_array_equal(found, [row[0]] * 2)


def test_the_draft_can_be_part_of_a_differentiated_function():
  batch = inputs_lib.inputs(Sizes(slots=2), draft=True)

  def value(u):
    return jnp.sum(u) + jnp.sum(draft_of(u, *batch[1:]))

  np.testing.assert_array_equal(jax.jit(jax.grad(value))(batch[0]), 1.0)


def test_on_a_cpu_the_default_is_xla_and_a_kernel_says_why_not(arguments):
  default = str(jax.make_jaxpr(scores_of)(*arguments))
  named = functools.partial(scores_of, implementation="xla")
  assert default == str(jax.make_jaxpr(named)(*arguments))
  with pytest.raises(NotImplementedError, match="needs an NVIDIA GPU"):
    scores_of(*arguments, implementation="triton")
  with pytest.raises(NotImplementedError, match="there is no such kernel"):
    scores_of(*arguments, implementation="pallas")
  with pytest.raises(ValueError, match="implementation='cuda' is none of"):
    scores_of(*arguments, implementation="cuda")
  sizes = BlockSizes(rows=16, cols=16, inner=16)
  with pytest.raises(ValueError, match=r"\['scores'\] are none of the kernels"):
    scores_of(*arguments, block_sizes={"scores": sizes})


def without(array):
  return array[..., :-1]


@pytest.mark.parametrize(
  ("index", "change", "match"),
  [
    (0, without, "head has shape"),
    (1, lambda x: x[:2], r"predecessors has shape .*, expected \(3, any\)"),
    (2, lambda x: x[None], "candidates has shape"),
    (3, lambda x: x[0], "codes has shape"),
    (4, lambda x: x[1:], r"head has shape \(210, 37\), expected \(211, 37\)"),
    (5, lambda x: x._replace(bias=without(x.bias)), "weights.write has shape"),
    (5, lambda x: x._replace(write=without(x.write)), "weights.write has"),
    (6, without, "norm_scale has shape"),
  ],
)
def test_a_shape_that_does_not_fit_is_named(index, change, match, arguments):
  # Without the annotations, which this test suite checks first.
  unchecked = inspect.unwrap(api.transition_scores)
  changed = list(arguments)
  changed[index] = change(changed[index])
  with pytest.raises(ValueError, match=match):
    unchecked(*changed, eps=EPS)


def test_a_draft_needs_one_anchor_a_request():
  batch = list(inputs_lib.inputs(lead=(2,), draft=True))
  batch[1] = batch[1][:1]
  with pytest.raises(ValueError, match=r"anchor has shape \(1,\)"):
    inspect.unwrap(api.greedy_draft)(*batch, eps=EPS)
  batch[0] = batch[0][0, 0]
  with pytest.raises(ValueError, match="u has shape .*, expected 2 axes"):
    inspect.unwrap(api.greedy_draft)(*batch, eps=EPS)


# As the docstring of `cost` says.
GAINS = {
  (False, 4096): (1.36, 1.76, 2.48, 2.75),
  (False, 5120): (1.36, 1.79, 2.57, 2.87),
  (True, 4096): (1.67, 2.58, 3.01, 3.11),
  (True, 5120): (1.69, 2.65, 3.12, 3.23),
}


def test_the_expected_gain_is_what_is_written_down():
  found = {
    (draft, width): tuple(
      round(device_cost.gain(counted(requests, width, draft)), 2)
      for requests in (1, 4, 16, 64)
    )
    for draft, width in GAINS
  }
  assert found == GAINS
  rows = re.findall(r"(scores|draft), +D (\d+)((?: +[\d.]+){4})", cost.__doc__)
  written = {
    (kind == "draft", int(width)): tuple(map(float, gains.split()))
    for kind, width, gains in rows
  }
  assert written == GAINS


def counted(requests, width, draft=False):
  return cost.cost(requests, 15, 16, 16, width, 1024, 512, draft=draft)


def test_no_implementation_beats_the_floor():
  for draft in (False, True):
    work = counted(4, 4096, draft)
    floor = device_cost.seconds([work.floor], device_cost.H100)
    ours = device_cost.seconds(work.triton, device_cost.H100)
    assert floor < ours < device_cost.seconds(work.xla, device_cost.H100)
    assert work.floor.flops <= sum(stage.flops for stage in work.triton)


def test_the_cheaper_way_to_a_length_depends_on_the_number_of_slots():
  assert not heuristics.by_gram(15, 16, 4096, 512)
  assert heuristics.by_gram(60, 16, 4096, 512)
  named = {stage.name for stage in counted(1, 4096).triton}
  assert "gram" not in named
  assert "gram" in {stage.name for stage in counted(4, 4096).triton}


def test_tiles_grow_with_the_rows():
  few = heuristics.row_tiles("scores_through", 240, 512, 2)
  many = heuristics.row_tiles("scores_through", 15360, 512, 2)
  assert (few.rows, few.cols) == (64, 32)
  assert (many.rows, many.cols) == (128, 256)
  assert heuristics.pair_tiles(17, 16) == dataclasses.replace(
    heuristics.pair_tiles(16, 16), rows=32
  )
