import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.training import losses
from tests import oracles

TOLERANCE = 2e-6  # float32 against float64, values of order one.


def distributions(seed, shape=(3, 7)):
  logits = np.random.default_rng(seed).standard_normal(shape)
  return oracles.softmax(2 * logits)


@pytest.mark.parametrize("gamma", [7.0, 5.0, 4.0, 2.5])
def test_weights_decay_from_one_by_exp_of_minus_one_over_gamma(gamma):
  got = np.asarray(losses.position_decay(15, gamma), np.float64)
  want = [np.exp(-(k - 1) / gamma) for k in range(1, 16)]
  np.testing.assert_allclose(got, want, rtol=TOLERANCE)


def test_fifteen_slots_with_gamma_seven_weigh_about_6_6():
  total = float(losses.position_decay(15, 7.0).sum())
  assert total == pytest.approx(6.6, abs=0.05)


def test_cross_entropy_is_minus_the_log_of_the_labels_probability():
  q, labels = distributions(0), np.array([2, 0, 6])
  got = losses.cross_entropy(
    jnp.asarray(np.log(q), jnp.float32), jnp.asarray(labels)
  )
  want = [-np.log(q[row, label]) for row, label in enumerate(labels)]
  np.testing.assert_allclose(got, want, rtol=TOLERANCE)


def test_l1_is_twice_the_total_variation():
  p, q = distributions(1), distributions(2)
  got = losses.l1_distance(
    jnp.asarray(q, jnp.float32), jnp.asarray(p, jnp.float32)
  )
  variation = np.maximum(p - q, 0).sum(axis=-1)
  np.testing.assert_allclose(got, 2 * variation, rtol=TOLERANCE * 5)
  disjoint = losses.l1_distance(jnp.array([1.0, 0.0]), jnp.array([0.0, 1.0]))
  assert float(disjoint) == 2


def test_forward_kl_is_the_teachers_mean_log_ratio():
  p, q = distributions(3), distributions(4)
  log_p, log_q = (jnp.asarray(np.log(x), jnp.float32) for x in (p, q))
  want = (p * np.log(p / q)).sum(axis=-1)
  got = losses.forward_kl(log_p, log_q)
  np.testing.assert_allclose(got, want, rtol=TOLERANCE * 5)
  assert want.min() > 0.1
  np.testing.assert_allclose(losses.forward_kl(log_q, log_q), 0.0, atol=1e-7)


def test_d_pace_weighs_a_slot_by_all_that_comes_through_it():
  # Confidences 1/2, 1 and 1/4 with alpha 1/2: s = 3/4, 1, 5/8.
  ce = jnp.asarray(-np.log([0.5, 1.0, 0.25]), jnp.float32)
  reached = [0.75, 0.75, 0.75 * 0.625]
  got = losses.d_pace_weights(ce, jnp.array([True] * 3), 0.5)
  np.testing.assert_allclose(got, np.cumsum(reached[::-1])[::-1], rtol=1e-6)
  # A slot without supervision changes no other, and weighs nothing.
  got = losses.d_pace_weights(ce, jnp.array([True, False, True]), 0.5)
  want = [0.75 + 0.75 * 0.625, 0.0, 0.75 * 0.625]
  np.testing.assert_allclose(got, want, rtol=1e-6)


@pytest.mark.parametrize("alpha", [0.0, 0.3, 1.0])
def test_d_pace_weights_agree_with_a_loop_over_slots(alpha):
  rng = np.random.default_rng(5)
  ce, valid = rng.exponential(1.0, (2, 3, 6)), rng.random((2, 3, 6)) < 0.7
  got = losses.d_pace_weights(
    jnp.asarray(ce, jnp.float32), jnp.asarray(valid), alpha
  )
  for where in np.ndindex(2, 3):
    want = oracles.d_pace_weights(ce[where], valid[where], alpha)
    np.testing.assert_allclose(got[where], want, rtol=1e-5)
  if alpha == 1:
    left = np.cumsum(valid[..., ::-1], axis=-1)[..., ::-1] * valid
    np.testing.assert_allclose(got, left, rtol=1e-6)


def test_dividing_by_zero_gives_zero_and_no_nan_gradient():
  assert float(losses.safe_divide(3.0, jnp.asarray(0.0))) == 0
  assert float(losses.safe_divide(3.0, jnp.asarray(1.5))) == 2
  grads = jax.grad(losses.safe_divide, argnums=(0, 1))(3.0, 0.0)
  assert np.isfinite(grads).all()


def chunk_loss(params, rows, shared, constants):
  """Nonlinear in all that is differentiated; zero for zero weights."""
  hidden = jnp.tanh(rows["x"] @ params["w"]) @ shared
  value = jnp.sum(jnp.square(hidden) * constants[:, None])
  return value, {"weight": jnp.sum(constants)}


def chunk_arguments():
  rng = np.random.default_rng(0)
  return tuple(
    jax.tree.map(
      lambda shape: jnp.asarray(rng.standard_normal(shape), jnp.float32),
      ({"w": (4, 3)}, {"x": (7, 4)}, (3, 5), (7,)),
      is_leaf=lambda x: isinstance(x, tuple) and isinstance(x[0], int),
    )
  )


@functools.cache
def whole():
  """3 times the loss of all rows at once, by ordinary differentiation."""
  params, rows, shared, constants = chunk_arguments()

  def loss(params, rows):
    value, sums = chunk_loss(params, rows, shared, constants)
    return 3.0 * value, sums

  grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  return jax.jit(grad)(params, rows)


@pytest.mark.parametrize("chunk_size", [1, 3, 20])
def test_chunks_add_up_to_the_whole_with_all_gradients(chunk_size):
  params, rows, shared, constants = chunk_arguments()

  def chunked(params, rows):
    value, sums = losses.chunked_sum(
      chunk_loss, chunk_size, params, rows, shared, constants
    )
    # A factor in front, as a mean has: the stored gradient must be scaled.
    return 3.0 * value, sums

  grad = jax.value_and_grad(chunked, argnums=(0, 1), has_aux=True)
  got, want = jax.jit(grad)(params, rows), whole()
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=2e-5, atol=1e-5)
  value, sums = jax.jit(chunked)(params, rows)  # Without differentiation.
  assert float(value) == pytest.approx(float(want[0][0]), rel=2e-5)
  assert float(sums["weight"]) == pytest.approx(
    float(constants.sum()), rel=1e-5
  )


def test_shared_and_constants_get_no_gradient():
  params, rows, shared, constants = chunk_arguments()

  def value(shared, constants):
    return losses.chunked_sum(chunk_loss, 3, params, rows, shared, constants)[0]

  for leaf in jax.grad(value, argnums=(0, 1))(shared, constants):
    assert not leaf.any()
