"""The op on the CPU: its specification, and what XLA runs, by default."""

import functools

import chex
import jax
import jaxtyping
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp
from jax.sharding import PartitionSpec

from kernels import cost as cost_lib
from kernels.block_attention import api, cost, heuristics, reference
from kernels.block_sizes import BlockSizes
from tests.kernels import block_attention_inputs as inputs_lib

TOLERANCE = 5e-6  # float32 against float64, outputs of order one.
ARRAYS = inputs_lib.ARRAYS
# Sizes that differ, with a window and without, and the smallest ones.
CASES = {
  "causal": {},
  "bidirectional": {"is_causal": False},
  "window": {"window": 7},
  "one slot": {"slots": 1, "groups": 1, "window": 4},
  "decoding": {"blocks": 1, "groups": 4},
}
IMPLEMENTATIONS = {
  "reference": reference.block_attention,
  "xla": functools.partial(api.block_attention, implementation="xla"),
}


def value(q, own_k, own_v, context_k, context_v, *rest):
  """A scalar with a weight for every element."""
  out = api.block_attention(q, own_k, own_v, context_k, context_v, *rest)
  return jnp.sum(jnp.sin(out))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_it_equals_every_query_by_itself(name, case):
  arguments = inputs_lib.inputs(**CASES[case])
  want = inputs_lib.attention(*inputs_lib.double(arguments))
  got = jax.jit(IMPLEMENTATIONS[name])(*arguments)
  np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_gradients_are_slopes_of_the_oracle(name):
  arguments = inputs_lib.inputs(window=9)
  exact = inputs_lib.double(arguments)
  rng = np.random.default_rng(3)
  weight = rng.standard_normal(arguments[0].shape)

  def total(*arguments):
    out = IMPLEMENTATIONS[name](*arguments)
    return jnp.sum(out * jnp.asarray(weight, jnp.float32))

  grads = jax.jit(jax.grad(total, ARRAYS))(*arguments)
  for i, grad in enumerate(grads):
    direction = rng.standard_normal(exact[i].shape)

    def moved(step, i=i, direction=direction):
      changed = exact[i] + step * direction
      out = inputs_lib.attention(*exact[:i], changed, *exact[i + 1 :])
      return np.sum(out * weight)

    slope = (moved(1e-4) - moved(-1e-4)) / 2e-4
    assert np.vdot(grad, direction) == pytest.approx(slope, rel=2e-5, abs=1e-4)


@pytest.mark.parametrize("name", IMPLEMENTATIONS)
def test_a_slot_that_sees_nothing_gives_zeros_and_no_gradient(name):
  *arrays, visible, starts, own_mask = inputs_lib.inputs()
  own_mask = own_mask.at[0].set(False)

  def total(*arrays):
    out = IMPLEMENTATIONS[name](*arrays, visible, starts, own_mask)
    return jnp.sum(jnp.cos(out)), out

  grads, out = jax.jit(jax.grad(total, ARRAYS, has_aux=True))(*arrays)
  assert not out[0, 0, 0].any() and out[0, 0, 1].all()
  assert not grads[0][0, 0, 0].any()
  assert all(np.isfinite(grad).all() and grad.any() for grad in grads)


def test_what_is_not_seen_never_matters():
  arguments = inputs_lib.inputs(window=7)
  q, own_k, own_v, context_k, context_v, visible, starts, own_mask = arguments
  attend = jax.jit(api.block_attention)
  before = attend(*arguments)
  # Slots behind the last in the own block, positions of the context outside
  # of what block 0 of row 1 sees.
  own_k = own_k.at[:, :, -1].set(1e4)
  end, start = int(visible[1, 0]), max(0, int(starts[1, 0].min()))
  outside = jnp.ones(context_k.shape[2], bool).at[start:end].set(False)
  outside = outside[None, None, :, None]
  context_v = jnp.where(outside, 1e4, context_v)
  after = attend(
    q, own_k, own_v, context_k, context_v, visible, starts, own_mask
  )
  np.testing.assert_array_equal(after[1, 0, :-1], before[1, 0, :-1])
  assert np.abs(after - before)[1, 1:].max() > 1.0


def test_it_is_the_same_under_jit_vmap_and_scan():
  cases = [inputs_lib.inputs(window=7, seed=seed) for seed in range(2)]
  # The mask is common to all.
  stacked = [jnp.stack(x) for x in zip(*(c[:-1] for c in cases), strict=True)]
  mask = cases[0][-1]
  both = jax.value_and_grad(value, ARRAYS)
  many = jax.jit(jax.vmap(both, in_axes=(*[0] * 7, None)))(*stacked, mask)

  def step(carry, arguments):
    return carry, both(*arguments, mask)

  _, scanned = lax.scan(step, 0, tuple(stacked))
  for index, case in enumerate(cases):
    want = jax.jit(both)(*case)
    for got in (many, scanned):
      got = jax.tree.map(lambda x, i=index: x[i], got)
      chex.assert_trees_all_close(got, want, rtol=2e-5, atol=2e-5)


def test_it_runs_inside_a_shard_map():
  arguments = inputs_lib.inputs(window=7)
  mesh = jax.make_mesh(
    (1,), ("data",), axis_types=(jax.sharding.AxisType.Auto,)
  )
  rows, whole = PartitionSpec("data"), PartitionSpec()
  sharded = jax.shard_map(
    jax.grad(value, ARRAYS),
    mesh=mesh,
    in_specs=(*[rows] * 7, whole),
    out_specs=rows,
  )
  want = jax.jit(jax.grad(value, ARRAYS))(*arguments)
  chex.assert_trees_all_close(jax.jit(sharded)(*arguments), want, atol=2e-6)


def test_bfloat16_is_rounded_at_the_end():
  arguments = inputs_lib.inputs(dtype=jnp.bfloat16)
  want = inputs_lib.attention(*inputs_lib.double(arguments))
  grads = jax.jit(jax.grad(value, ARRAYS))(*arguments)
  for attend in IMPLEMENTATIONS.values():
    got = jax.jit(attend)(*arguments)
    assert got.dtype == jnp.bfloat16
    # Weights and output are rounded once each (2^-9 relative).
    np.testing.assert_allclose(np.asarray(got, float), want, atol=0.02)
  assert all(grad.dtype == jnp.bfloat16 for grad in grads)


def test_names_that_are_unknown_or_cannot_run_here_are_refused():
  arguments = inputs_lib.inputs()
  attend = functools.partial(api.block_attention, *arguments)
  with pytest.raises(ValueError, match="implementation='cuda'"):
    attend(implementation="cuda")
  with pytest.raises(NotImplementedError, match="traced for 'cpu'"):
    attend(implementation="triton")
  with pytest.raises(NotImplementedError, match="there is no such kernel"):
    attend(implementation="pallas")
  with pytest.raises(ValueError, match=r"\['middle'\] are none of"):
    attend(block_sizes={"middle": BlockSizes(rows=16, cols=16, inner=1)})


@pytest.mark.parametrize(
  "index, change, error",
  [
    (0, lambda x: x[..., :3, :], r"3 heads are no multiple of the 2 key"),
    (0, lambda x: x[0], r"q: has shape \(3, 3, 4, 16\), must have 5 axes"),
    (1, lambda x: x[..., :1, :], r"own_k: has shape \(2, 3, 3, 1, 16\), must"),
    (2, lambda x: x[:, :2], r"own_v: has shape"),
    (3, lambda x: x.astype(int), "context_k: is int32, must be one of"),
    (3, lambda x: x[:, :, :0], r"context_k: has shape .* an axis is empty"),
    (5, lambda x: x.astype(float), "visible: is float32, must hold integers"),
    # The mask that others add to scores would mean its opposite here.
    (7, lambda x: jnp.where(x, 0.0, -1e9), "own_mask: is float32, must be boo"),
    (3, lambda x: x[..., :8], r"context_k: has shape \(2, 2, 21, 8\), must be"),
    (4, lambda x: x[:, :, :5], r"context_v: has shape"),
    (5, lambda x: x[0], r"visible: has shape \(3,\), must be \(2, 3\)"),
    (6, lambda x: x[..., 0], r"starts: has shape"),
    (7, lambda x: x[:2], r"own_mask: has shape \(2, 3\), must be \(3, 3\)"),
  ],
)
def test_arguments_that_do_not_fit_are_refused(index, change, error):
  arguments = list(inputs_lib.inputs(window=7))
  arguments[index] = change(arguments[index])
  # Users have no checked annotations.
  jaxtyping.config.update("jaxtyping_disable", True)
  try:
    with pytest.raises(ValueError, match=error):
      api.block_attention(*arguments)
  finally:
    jaxtyping.config.update("jaxtyping_disable", False)


SHAPE = heuristics.Shape(
  batch=1,
  blocks=512,
  slots=16,
  groups=8,
  repeat=4,
  width=128,
  context=3072,
  itemsize=2,
)
BF16 = jnp.dtype("bfloat16")


@pytest.mark.parametrize(
  "changes, dtypes, reason",
  [
    ({}, [BF16] * 5, None),
    ({"width": 80}, [BF16] * 5, "head dimension of 16, 32, 64 or 128, not 80"),
    ({"slots": 33}, [BF16] * 5, "not 33 slots x 4 heads"),
    ({"context": 0}, [BF16] * 5, "an element along every axis"),
    ({}, [BF16, jnp.dtype("float32")], "one dtype, bfloat16 or float32, not"),
    ({}, [jnp.dtype("float16")] * 5, "one dtype, bfloat16 or float32, not"),
  ],
)
def test_what_the_kernels_cannot_do_is_said(changes, dtypes, reason):
  got = heuristics.unsupported(SHAPE._replace(**changes), dtypes)
  assert got is None if reason is None else reason in got


def test_tiles_hold_whole_blocks():
  for slots, repeat in ((16, 4), (5, 3), (1, 1), (32, 4), (43, 2)):
    shape = SHAPE._replace(slots=slots, repeat=repeat)
    for kernel in ("forward", "backward_q", "backward_context"):
      assert heuristics.sizes(kernel, shape, ()).rows >= slots * repeat
  for name, changes in (("rows", {"rows": 32}), ("cols", {"cols": 8})):
    size = BlockSizes(**({"rows": 64, "cols": 64, "inner": 1} | changes))
    with pytest.raises(ValueError, match=rf"'forward'\]: {name}="):
      heuristics.sizes("forward", SHAPE, (("forward", size),))


@pytest.mark.parametrize(
  "batch, splits", [(1, 16), (4, 8), (16, 2), (64, 1), (200, 1)]
)
def test_few_requests_share_their_contexts_among_more_programs(batch, splits):
  shape = SHAPE._replace(batch=batch, blocks=1, context=4096)
  assert heuristics.splits(shape) == splits
  assert heuristics.splits(shape._replace(context=256)) == 1


def test_counted_work_is_at_least_the_floor():
  sizes = (16, 32, 8, 128)
  train = (1, 512, *sizes, 3072)
  decode = [(batch, 1, *sizes, 4096) for batch in (1, 4, 16, 64)]
  for call in (train, *decode):
    counted = cost.cost(*call, backward=call is train)
    floor, triton, xla = (
      cost_lib.seconds(stages, cost_lib.H100)
      for stages in ([counted.floor], counted.triton, counted.xla)
    )
    assert floor <= triton < xla / 1.2
  # 16 slots x 32 heads x 4096 positions x 128, multiplied and added, twice.
  whole = cost.cost(*decode[0], backward=False).floor
  assert whole.flops == 4.0 * 16 * 32 * (4096 + 16) * 128
  half = cost.cost(*decode[0], mean_visible=2048, backward=False).floor
  assert half.flops == 4.0 * 16 * 32 * (2048 + 16) * 128
