"""The kernels of the transition scores: right, and fit for Hopper.

Interpreted on the CPU against the specification, in float32; compiled for sm_90
at the shapes of decoding. Nothing here runs on a GPU.
"""

import functools

import chex
import jax
import numpy as np
import pytest
from jax import numpy as jnp

from kernels import hopper, shapes, triton_resources
from kernels.adjacent_injection import reference as injection
from kernels.block_sizes import BlockSizes
from kernels.transition_scores import api, heuristics, reference
from kernels.triton_call import launching_with
from tests.kernels import transition_scores_inputs as inputs_lib
from tests.kernels import triton_interpreter
from tests.kernels.transition_scores_inputs import EPS, Sizes

pytestmark = pytest.mark.hopper

needs_compiler = pytest.mark.skipif(
  triton_interpreter.unavailable() is None,
  reason="compiles kernels: needs a process without TRITON_INTERPRET=1",
)

# Several tiles along every axis, the last of each only partly filled.
TILES = dict.fromkeys(api.KERNELS, BlockSizes(rows=16, cols=16, inner=16))

BY_WRITE = Sizes()
BY_GRAM = Sizes(slots=12, message=18, predecessors=6, width=137)

# float32 sums in another order.
CLOSE = {"rtol": 1e-4, "atol": 2e-5}

triton_scores = functools.partial(
  api.transition_scores, eps=EPS, implementation="triton", block_sizes=TILES
)
triton_draft = functools.partial(
  api.greedy_draft, eps=EPS, implementation="triton", block_sizes=TILES
)


def interpreted(function, *arguments):
  # A function of its own: traces of others had other launchers.
  with triton_interpreter.interpreting():
    return jax.jit(lambda *x: function(*x))(*arguments)


def specified(arguments):
  return jax.jit(reference.transition_scores, static_argnums=7)(*arguments, EPS)


def check_scores(arguments, scores=None):
  found = interpreted(triton_scores, *arguments) if scores is None else scores
  expected = specified(arguments)
  scale = np.max(np.abs(expected))
  np.testing.assert_allclose(found / scale, expected / scale, **CLOSE)


def check_draft(arguments):
  found = interpreted(triton_draft, *arguments)
  expected = jax.jit(reference.greedy_draft, static_argnums=7)(*arguments, EPS)
  np.testing.assert_array_equal(found, expected)


def test_the_sizes_take_both_ways_to_a_length():
  for sizes, expected in ((BY_WRITE, False), (BY_GRAM, True)):
    found = heuristics.by_gram(
      sizes.slots, sizes.predecessors, sizes.width, sizes.message
    )
    assert found is expected


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize(
  "sizes",
  [
    BY_WRITE,
    BY_GRAM,
    Sizes(slots=1, predecessors=1, candidates=1),
    Sizes(slots=2, predecessors=17, candidates=16, width=16, message=16),
    Sizes(slots=1, predecessors=1, candidates=32, rank=3, message=2),
  ],
  ids=["by_write", "by_gram", "one_of_each", "one_outside", "known"],
)
def test_scores_are_those_of_the_specification(sizes):
  check_scores(inputs_lib.inputs(sizes))


@triton_interpreter.needs_interpreter
def test_gradients_are_those_of_the_specification():
  arguments = inputs_lib.inputs(Sizes(slots=2))
  constants = arguments[1:5]
  weight = jnp.asarray(np.random.default_rng(1).normal(size=(2, 5, 4)))

  def value(scores_of, u, weights, norm_scale):
    scores = scores_of(u, *constants, weights, norm_scale)
    return jnp.sum(scores * weight)

  of = arguments[0], arguments[5], arguments[6]
  found, expected = (
    interpreted(
      jax.value_and_grad(
        functools.partial(value, scores_of), argnums=(0, 1, 2)
      ),
      *of,
    )
    for scores_of in (
      triton_scores,
      functools.partial(reference.transition_scores, eps=EPS),
    )
  )
  chex.assert_trees_all_close(found, expected, rtol=1e-4, atol=1e-4)


@triton_interpreter.needs_interpreter
def test_vmap_is_the_loop():
  arguments = inputs_lib.inputs(lead=(2,))
  axes = (0, 0, 0, None, None, None, None)
  mapped = jax.vmap(triton_scores, axes)
  check_scores(arguments, interpreted(mapped, *arguments))
  # Weights of their own take one launch after the other.
  weights = jax.tree.map(lambda x: jnp.stack([x, 2 * x]), arguments[5])
  each = (*arguments[:5], weights, arguments[6])
  found = interpreted(jax.vmap(triton_scores, (*axes[:5], 0, None)), *each)
  for i in range(2):
    one = jax.tree.map(lambda x, i=i: x[i], (*arguments[:3], weights))
    of_one = (*one[:3], *arguments[3:5], one[3], arguments[6])
    check_scores(of_one, found[i])


@pytest.mark.parametrize(
  ("sizes", "match"),
  [
    (
      Sizes(predecessors=33),
      "33 tokens a slot of float32: the kernels take 32",
    ),
    (Sizes(slots=0), "an array is empty"),
  ],
  ids=["many", "empty"],
)
def test_what_the_kernels_cannot_do_is_refused(sizes, match):
  arguments = inputs_lib.inputs(sizes)
  with pytest.raises(NotImplementedError, match=match):
    triton_resources.launches(triton_scores, *arguments)
  default = functools.partial(api.transition_scores, eps=EPS)
  assert not triton_resources.launches(default, *arguments)
  half = (arguments[0].astype(jnp.float16), *arguments[1:])
  with pytest.raises(ValueError, match="u: is float16"):
    triton_resources.launches(triton_scores, *half)


def test_vmap_is_more_rows_of_one_launch():
  one, batch = inputs_lib.inputs(lead=(1,)), inputs_lib.inputs(lead=(1, 2))
  mapped = jax.vmap(triton_scores, (1, 1, 1, None, None, None, None))
  single = triton_resources.launches(triton_scores, *one)
  found = triton_resources.launches(mapped, *batch)
  assert len(single) == len(api.KERNELS) - 1
  # The last ones are those of the whole batch: JAX traces one row before.
  for of_one, of_two in zip(single, found[-len(single) :], strict=True):
    rows = "SLOTS" if "SLOTS" in of_one.launch.constants else "ROWS"
    twice = 2 * of_one.launch.constants[rows]
    assert of_two.launch.constants[rows] == twice


@triton_interpreter.needs_interpreter
@pytest.mark.filterwarnings("ignore:overflow encountered in exp")  # sigmoid
def test_saturated_gates_and_huge_logits_stay_exact():
  u, before, ids, codes, head, weights, scale = inputs_lib.inputs()
  bias = jnp.where(jnp.arange(len(weights.bias)) % 2, 300.0, -300.0)
  weights = weights._replace(bias=bias)
  arguments = u * 1e4, before, ids, codes, head * 1e3, weights, scale
  check_scores(arguments)


@triton_interpreter.needs_interpreter
def test_a_zero_state_has_zero_scores():
  arguments = inputs_lib.inputs(Sizes(slots=1))
  zero = (jnp.zeros_like(arguments[0]), *arguments[1:])
  assert np.max(np.abs(interpreted(triton_scores, *zero))) < 1e-5


@triton_interpreter.needs_interpreter
def test_a_write_that_cancels_the_state_gives_finite_scores():
  scores = interpreted(triton_scores, *inputs_lib.cancelling())
  assert np.all(np.isfinite(scores))


@triton_interpreter.needs_interpreter
def test_the_draft_can_be_part_of_a_differentiated_function():
  batch = inputs_lib.inputs(Sizes(slots=1), draft=True)

  def value(u):
    return jnp.sum(u) + jnp.sum(triton_draft(u, *batch[1:]))

  np.testing.assert_array_equal(interpreted(jax.grad(value), batch[0]), 1.0)


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize("slots", [1, 7])
def test_the_draft_is_that_of_the_specification(slots):
  sizes = Sizes(slots=slots, candidates=6)
  check_draft(inputs_lib.inputs(sizes, lead=(3,), draft=True))


@triton_interpreter.needs_interpreter
def test_candidates_that_all_score_below_zero_are_not_lost_to_padding():
  batch = inputs_lib.inputs(Sizes(slots=1, candidates=5), draft=True)
  u, anchor, ids, codes, head, weights, scale = batch
  weights = weights._replace(write=jnp.zeros_like(weights.write))
  # Every score is -(1 + id) times the same positive number.
  head = -(1.0 + jnp.arange(len(head)))[:, None] * jnp.sign(u * scale[None])
  ids = jnp.asarray([[9, 4, 8, 20, 30]])
  found = interpreted(triton_draft, u, anchor, ids, codes, head, weights, scale)
  np.testing.assert_array_equal(found, [4])


@triton_interpreter.needs_interpreter
def test_the_first_of_equal_candidates_is_taken():
  batch = inputs_lib.inputs(Sizes(slots=2, candidates=5), draft=True)
  u, anchor, ids, codes, head, *rest = batch
  ids = jnp.broadcast_to(jnp.asarray([7, 3, 7, 3, 3]), ids.shape)
  head = head.at[7].set(head[3])
  found = interpreted(triton_draft, u, anchor, ids, codes, head, *rest)
  np.testing.assert_array_equal(found, [7, 7])


def broken(kernel, **change):
  """The interpreter, but constants of a kernel are changed."""

  def launcher(launch, arrays, out_shape):
    if launch.kernel.__name__ == kernel:
      constants = dict(launch.constants)
      for name, by in change.items():
        constants[name] += by
      launch = launch._replace(constants=constants)
    return triton_interpreter.launcher(launch, arrays, out_shape)

  return launcher


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize(
  ("check", "draft", "kernel", "change"),
  [
    (check_scores, False, "scores_receiver", {"TINY": 1e3}),
    (check_scores, False, "scores_receiver", {"ROWS": -1}),
    (check_scores, False, "scores_message", {"P": 1}),
    (check_scores, False, "scores_through", {"C": 1}),
    (check_scores, False, "scores_length", {"P": 1}),
    (check_scores, False, "scores_pairs", {"PARTS": -1}),
    (check_draft, True, "scores_best", {"C": -1}),
    (check_draft, True, "scores_walk", {"M": -1}),
  ],
  ids=lambda x: x if isinstance(x, str) else None,
)
def test_a_broken_kernel_is_seen(check, draft, kernel, change, monkeypatch):
  arguments = inputs_lib.inputs(lead=(2,) if draft else (), draft=draft)
  monkeypatch.setattr(
    triton_interpreter,
    "interpreting",
    lambda: launching_with(broken(kernel, **change)),
  )
  with pytest.raises(AssertionError):
    check(arguments)


def described(requests, model):
  """Arguments of `transition_scores` and the anchors, bfloat16."""
  width, rank, message = model.width, shapes.RANK, shapes.MESSAGE
  slots, count = shapes.BLOCK - 1, shapes.CANDIDATES

  def numbers(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.bfloat16)

  def ids(*shape):
    return jax.ShapeDtypeStruct(shape, jnp.int32)

  weights = injection.Weights(
    readout=numbers(width, rank),
    write=numbers(message, width),
    message=numbers(rank, message),
    receiver_gate=numbers(rank, message),
    predecessor_gate=numbers(rank, message),
    bias=numbers(message),
  )
  arguments = (
    numbers(requests, slots, width),
    ids(requests, slots, count),
    ids(requests, slots, count),
    numbers(model.vocab, rank),
    numbers(model.vocab, width),
    weights,
    numbers(width),
  )
  return arguments, ids(requests)


def value_and_gradient(u, before, ids, codes, head, weights, norm_scale):
  def value(u, weights, norm_scale):
    return jnp.sum(
      api.transition_scores(
        u,
        before,
        ids,
        codes,
        head,
        weights,
        norm_scale,
        eps=EPS,
        implementation="triton",
      )
    )

  return jax.value_and_grad(value, argnums=(0, 1, 2))(u, weights, norm_scale)


def launches_of(requests, model):
  """All launches of the scores with their gradient, and of the draft."""
  arguments, anchors = described(requests, model)
  draft = functools.partial(api.greedy_draft, eps=EPS, implementation="triton")
  found = triton_resources.launches(value_and_gradient, *arguments)
  return found + triton_resources.launches(
    draft, arguments[0], anchors, *arguments[2:]
  )


def test_kernels_are_the_default_for_bfloat16_alone():
  arguments, anchors = described(1, shapes.QWEN3_8B)
  scores = functools.partial(api.transition_scores, eps=EPS)
  draft = functools.partial(api.greedy_draft, eps=EPS)
  of_draft = (arguments[0], anchors, *arguments[2:])
  assert len(triton_resources.launches(scores, *arguments)) == 5
  assert len(triton_resources.launches(draft, *of_draft)) == 5

  def exact(x):
    dtype = jnp.float32 if x.dtype == jnp.bfloat16 else x.dtype
    return jax.ShapeDtypeStruct(x.shape, dtype)

  in_float32 = jax.tree.map(exact, arguments)
  assert not triton_resources.launches(scores, *in_float32)


@needs_compiler
def test_scores_and_draft_launch_each_kernel():
  found = launches_of(64, shapes.QWEN3_8B)
  names = [recorded.launch.kernel.__name__ for recorded in found]
  assert set(names) == {*api.KERNELS, "scores_walk"}


@needs_compiler
@pytest.mark.skipif(
  hopper.unavailable() is not None, reason=hopper.unavailable() or ""
)
def test_a_program_for_h100_launches_the_kernels():
  arguments, anchors = described(1, shapes.QWEN3_27B)

  def both(anchors, *arguments):
    tokens = api.greedy_draft(
      arguments[0],
      anchors,
      *arguments[2:],
      eps=EPS,
      implementation="triton",
    )
    return tokens, value_and_gradient(*arguments)

  text = hopper.compile_for_h100(
    both,
    anchors,
    *arguments,
    compiler_options={"xla_gpu_autotune_level": 0},
  ).as_text()
  for kernel in (*api.KERNELS, "scores_walk"):
    assert kernel in text
