import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels import cost as device_cost
from kernels import shapes
from kernels.block_sizes import BlockSizes
from kernels.draft_loss import api, cost, reference

ROWS, WIDTH, VOCAB = 5, 6, 23


def problem(rows=(ROWS,), width=WIDTH, vocab=VOCAB, dtype=jnp.float32):
  """hidden, teacher, labels, head with logits of order one."""
  rng = np.random.default_rng(0)
  hidden, teacher = rng.normal(size=(2, *rows, width))
  labels = rng.integers(vocab, size=rows)
  head = rng.normal(size=(vocab, width))
  hidden, teacher, head = (
    jnp.asarray(x, dtype) for x in (hidden, teacher, head)
  )
  return hidden, teacher, jnp.asarray(labels, jnp.int32), head


def oracle(hidden, teacher, labels, head):
  """(ce, l1, both normalisers) of each row, token by token in float64."""
  out = []
  for h, g, label in zip(hidden, teacher, labels, strict=True):
    z = [sum(a * b for a, b in zip(row, h, strict=True)) for row in head]
    t = [sum(a * b for a, b in zip(row, g, strict=True)) for row in head]
    log_z, log_t = np.logaddexp.reduce(z), np.logaddexp.reduce(t)
    l1 = 0.0
    for z_v, t_v in zip(z, t, strict=True):
      l1 += abs(np.exp(z_v - log_z) - np.exp(t_v - log_t))
    out.append((log_z - z[label], l1, log_z, log_t))
  return np.asarray(out).T


def float64(arrays):
  return [
    np.asarray(x, np.float64 if jnp.issubdtype(x.dtype, jnp.floating) else int)
    for x in arrays
  ]


def weighted(hidden, teacher, labels, head, weights):
  """A scalar in which each row's ce and l1 have weights of their own."""
  terms = api.draft_loss(hidden, teacher, labels, head)
  return jnp.sum(weights[0] * terms.ce + weights[1] * terms.l1)


def weights_of(rows):
  # The sixth row of ten has no weight.
  values = np.linspace(-1.0, 1.0, 2 * rows).reshape(2, rows)
  return jnp.asarray(values, jnp.float32).at[:, rows // 2].set(0.0)


def test_terms_are_those_of_an_oracle_token_by_token():
  arrays = problem()
  got = api.draft_loss(*arrays)
  assert all(x.dtype == jnp.float32 for x in got)
  np.testing.assert_allclose(np.stack(got), oracle(*float64(arrays)), rtol=1e-5)


def test_the_gradient_is_the_oracles_slope():
  arrays, weights = problem(), weights_of(ROWS)
  got = np.asarray(jax.jit(jax.grad(weighted))(*arrays, weights))
  hidden, *others = float64(arrays)
  weights = np.asarray(weights, np.float64)
  step = 1e-6
  want = np.zeros_like(got)
  for i, d in np.ndindex(want.shape):
    moved = np.zeros_like(hidden)
    moved[i, d] = step
    up, down = (oracle(hidden + x, *others) for x in (moved, -moved))
    want[i, d] = np.sum(weights * (up - down)[:2]) / (2 * step)
  np.testing.assert_allclose(got, want, atol=2e-5)
  assert not got[ROWS // 2].any()


def test_equal_states_have_no_distance_and_no_slope():
  hidden, _, labels, head = problem()
  assert not np.asarray(api.draft_loss(hidden, hidden, labels, head).l1).any()
  weights = jnp.stack([jnp.zeros(ROWS), jnp.ones(ROWS)])
  got = jax.grad(weighted)(hidden, hidden, labels, head, weights)
  np.testing.assert_allclose(got, 0.0, atol=1e-6)


@pytest.mark.parametrize("function", [api.draft_loss, reference.draft_loss])
def test_only_the_draft_has_a_gradient_and_only_through_ce_and_l1(function):
  arrays = problem()

  def loss(hidden, teacher, head):
    terms = function(hidden, teacher, arrays[2], head)
    return jnp.sum(terms.ce + terms.l1)

  def normalisers(hidden):
    terms = function(hidden, *arrays[1:])
    return jnp.sum(terms.log_normaliser + terms.teacher_log_normaliser)

  hidden, teacher, _, head = arrays
  grads = jax.grad(loss, argnums=(0, 1, 2))(hidden, teacher, head)
  assert [bool(jnp.any(x != 0)) for x in grads] == [True, False, False]
  assert not np.asarray(jax.grad(normalisers)(hidden)).any()


def test_huge_logits_stay_finite():
  hidden, teacher, labels, head = problem()
  arrays = 1e4 * hidden, -1e4 * teacher, labels, head
  got = api.draft_loss(*arrays)
  np.testing.assert_allclose(np.stack(got), oracle(*float64(arrays)), rtol=1e-5)
  grad = jax.grad(weighted)(*arrays, weights_of(ROWS))
  assert np.isfinite(grad).all()


def test_transformations_agree():
  """Value and gradient under jit, vmap (over grad, too), scan, shard_map."""
  hidden, teacher, labels, head = problem(rows=(3, 4))
  weights = weights_of(12).reshape(2, 3, 4)
  grad = jax.value_and_grad(weighted)
  rows = hidden, teacher, labels
  want_value, want = jax.jit(grad)(*rows, head, weights)
  np.testing.assert_allclose(
    weighted(*rows, head, weights), want_value, rtol=1e-6
  )

  over_rows = jax.jit(jax.vmap(grad, in_axes=(0, 0, 0, None, 1)))
  values, got = over_rows(*rows, head, weights)
  np.testing.assert_allclose(jnp.sum(values), want_value, rtol=1e-5)
  np.testing.assert_allclose(got, want, atol=1e-6)

  def body(total, row):
    *row, weights = row
    value, got = grad(*row, head, weights)
    return total + value, got

  scanned = jax.lax.scan(body, 0.0, (*rows, jnp.swapaxes(weights, 0, 1)))
  np.testing.assert_allclose(scanned[0], want_value, rtol=1e-5)
  np.testing.assert_allclose(scanned[1], want, atol=1e-6)

  mesh = Mesh(np.asarray(jax.devices()[:1]), ("data",))
  split, whole = PartitionSpec("data"), PartitionSpec()
  sharded = jax.shard_map(
    jax.grad(weighted),
    mesh=mesh,
    in_specs=(split, split, split, whole, PartitionSpec(None, "data")),
    out_specs=split,
  )
  got = jax.jit(sharded)(*rows, head, weights)
  np.testing.assert_allclose(got, want, atol=1e-6)


def test_bfloat16_states_give_float32_terms_and_a_bfloat16_gradient():
  arrays = problem(dtype=jnp.bfloat16)
  got = api.draft_loss(*arrays)
  assert all(x.dtype == jnp.float32 for x in got)
  # Products of bfloat16 are exact in float32, so that terms are as close.
  np.testing.assert_allclose(np.stack(got), oracle(*float64(arrays)), rtol=1e-5)
  weights = weights_of(ROWS)
  got = jax.grad(weighted)(*arrays, weights)
  assert got.dtype == jnp.bfloat16
  hidden, teacher, labels, head = arrays
  exact = jax.grad(weighted)(
    *(x.astype(jnp.float32) for x in (hidden, teacher)),
    labels,
    head.astype(jnp.float32),
    weights,
  )
  # 2**-8 of rounding for each summand and for the sum.
  np.testing.assert_allclose(
    got.astype(jnp.float32), exact, atol=2**-7 * float(jnp.max(jnp.abs(exact)))
  )


def test_states_and_head_may_have_different_dtypes():
  hidden, teacher, labels, head = problem(dtype=jnp.bfloat16)
  weights = weights_of(ROWS)
  same = hidden, teacher, labels, head, weights
  wider = jnp.float32
  mixed = hidden, teacher.astype(wider), labels, head.astype(wider), weights
  want, got = (jax.value_and_grad(weighted)(*x) for x in (same, mixed))
  jax.tree.map(np.testing.assert_array_equal, got, want)
  assert got[1].dtype == jnp.bfloat16


def test_names_are_checked():
  arrays = problem()
  with pytest.raises(ValueError, match="implementation='cuda' is none of"):
    api.draft_loss(*arrays, implementation="cuda")
  sizes = {"distances": BlockSizes(rows=16, cols=32, inner=32)}
  with pytest.raises(ValueError, match=r"block_sizes: \['distances'\] are"):
    api.draft_loss(*arrays, block_sizes=sizes)


@pytest.mark.parametrize("name", ["triton", "pallas"])
def test_a_kernel_that_cannot_run_here_says_so(name):
  with pytest.raises(NotImplementedError, match="draft_loss: .*NVIDIA GPU"):
    api.draft_loss(*problem(), implementation=name)


@pytest.mark.parametrize(
  "broken, message",
  [
    ({"teacher": (4, WIDTH)}, r"teacher: its shape \(4, 6\) is not that of"),
    ({"labels": (4,)}, r"labels: the shape \(4,\) is not that of the rows"),
    ({"head": (VOCAB, 7)}, r"head: the shape \(23, 7\) is not \[V, 6\]"),
    ({"head": (0, WIDTH)}, r"head: has shape \(0, 6\), an axis is empty"),
  ],
)
def test_shapes_that_do_not_fit_are_named(broken, message):
  names = ("hidden", "teacher", "labels", "head")
  arrays = dict(zip(names, problem(), strict=True))
  arrays |= {
    name: jnp.zeros(shape, arrays[name].dtype) for name, shape in broken.items()
  }
  with pytest.raises(ValueError, match=message):
    api.check(**arrays)


@pytest.mark.parametrize("model", shapes.MODELS, ids=lambda x: x.name)
@pytest.mark.parametrize("chunk_rows", [512, 7680])
def test_the_kernels_are_counted_as_slower_so_that_xla_is_the_default(
  model, chunk_rows
):
  count = functools.partial(
    cost.cost, 15 * shapes.ANCHORS, model.width, model.vocab
  )
  for device in (device_cost.H100, device_cost.H200):
    counted = count(backward=True, chunk_rows=chunk_rows)
    assert 0.6 < device_cost.gain(counted, device) < 0.8
    floor = device_cost.seconds([counted.floor], device)
    assert floor <= device_cost.seconds(counted.xla, device)
    forward = count(backward=False, chunk_rows=chunk_rows)
    for name in ("triton", "xla"):
      whole, part = (
        sum(stage.flops for stage in getattr(x, name))
        for x in (counted, forward)
      )
      # Six products with the head against four, three against two.
      assert whole == pytest.approx(1.5 * part)


def test_few_rows_at_a_time_make_xla_read_the_head_too_often():
  model = shapes.QWEN3_8B
  gains = [
    device_cost.gain(
      cost.cost(
        7680, model.width, model.vocab, backward=True, chunk_rows=chunk_rows
      )
    )
    for chunk_rows in (512, 240, 120)
  ]
  assert gains == sorted(gains)
  assert gains[1] < 1 < gains[2]
