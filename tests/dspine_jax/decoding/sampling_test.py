import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import sampling
from tests import decoding_oracles

VOCAB = 9
TOLERANCE = 1e-6  # float32 softmax against float64, probabilities up to 1.
GRID = [
  configs.SamplingConfig(temperature=t, top_k=k, top_p=p)
  for t in (0.0, 0.3, 1.0, 2.5)
  for k in (0, 1, 4, VOCAB, 50)
  for p in (1.0, 0.9, 0.35, 0.01)
]


def logits(*shape, seed=0):
  values = np.random.default_rng(seed).standard_normal((*shape, VOCAB))
  return jnp.asarray(3 * values, jnp.float32)


def laws(*shape, seed=0):
  return jax.nn.softmax(logits(*shape, seed=seed), axis=-1)


def keys(count, seed=0):
  return jax.random.split(jax.random.key(seed), count)


@pytest.mark.parametrize("cfg", GRID, ids=str)
def test_probabilities_equal_the_plain_rule(cfg):
  rows = logits(40)
  got = sampling.probabilities(rows, cfg)
  want = [decoding_oracles.probabilities(row, cfg) for row in np.array(rows)]
  np.testing.assert_allclose(got, want, atol=TOLERANCE)
  np.testing.assert_array_equal(np.asarray(got) > 0, np.array(want) > 0)


def test_any_leading_axes_are_rows():
  rows, cfg = logits(2, 3), configs.SamplingConfig(temperature=0.7, top_p=0.8)
  got = sampling.probabilities(rows, cfg)
  for b in range(2):
    for m in range(3):
      want = decoding_oracles.probabilities(np.array(rows[b, m]), cfg)
      np.testing.assert_allclose(got[b, m], want, atol=TOLERANCE)


def test_temperature_zero_is_one_hot_on_the_first_largest_logit():
  rows = jnp.array([[1.0, 5.0, 5.0, 0.0], [2.0, 2.0, 2.0, 2.0]])
  got = sampling.probabilities(rows, configs.SamplingConfig())
  np.testing.assert_array_equal(got, [[0, 1, 0, 0], [1, 0, 0, 0]])


def test_logits_tied_at_the_edge_of_top_k_are_all_kept():
  rows = jnp.array([[3.0, 1.0, 1.0, 0.0, 1.0]])
  cfg = configs.SamplingConfig(temperature=1.0, top_k=2)
  got = np.asarray(sampling.probabilities(rows, cfg))
  np.testing.assert_array_equal(got[0] > 0, [1, 1, 1, 0, 1])
  np.testing.assert_array_equal(got[0, 1], got[0, 2])


def test_probabilities_tied_at_the_edge_of_top_p_are_all_kept():
  rows = jnp.log(jnp.array([[0.4, 0.2, 0.2, 0.1, 0.1]]))
  cfg = configs.SamplingConfig(temperature=1.0, top_p=0.5)
  got = sampling.probabilities(rows, cfg)
  np.testing.assert_allclose(got, [[0.5, 0.25, 0.25, 0, 0]], atol=TOLERANCE)


@pytest.mark.parametrize(
  ("top_p", "kept"), [(0.49, 1), (0.51, 2), (0.79, 2), (0.81, 3), (0.99, 4)]
)
def test_top_p_keeps_the_smallest_set_that_reaches_its_mass(top_p, kept):
  rows = jnp.log(jnp.array([[0.05, 0.5, 0.15, 0.3]]))
  cfg = configs.SamplingConfig(temperature=1.0, top_p=top_p)
  got = np.asarray(sampling.probabilities(rows, cfg))[0]
  want = np.zeros(4)
  best = [1, 3, 2, 0][:kept]
  want[best] = np.array([0.05, 0.5, 0.15, 0.3])[best]
  np.testing.assert_allclose(got, want / want.sum(), atol=TOLERANCE)


def test_top_p_counts_the_mass_that_top_k_left():
  # Of [.4, .3, .3] top-2 leaves [.57, .43, 0]: 0.5 is then one token's mass.
  rows = jnp.log(jnp.array([[0.4, 0.31, 0.29]]))
  cfg = configs.SamplingConfig(temperature=1.0, top_k=2, top_p=0.5)
  got = sampling.probabilities(rows, cfg)
  np.testing.assert_allclose(got, [[1, 0, 0]], atol=TOLERANCE)


def test_huge_logits_and_a_tiny_temperature_stay_finite():
  rows = jnp.array([[1e4, 9e3, -1e4]])
  cfg = configs.SamplingConfig(temperature=1e-3, top_p=0.9)
  np.testing.assert_array_equal(sampling.probabilities(rows, cfg), [[1, 0, 0]])


@pytest.mark.parametrize("dtype", [np.float32, jnp.bfloat16])
def test_argmax_is_the_first_largest_entry(dtype):
  rng = np.random.default_rng(0)
  # Few different values, so that nearly every row has ties.
  x = rng.integers(-3, 3, (4, 50, 9)).astype(dtype)
  x[0, 0] = -np.inf
  x[0, 1, 4] = np.inf
  got = sampling.argmax(jnp.asarray(x))
  assert got.dtype == jnp.int32
  np.testing.assert_array_equal(got, np.argmax(x, axis=-1))


def test_argmax_of_a_row_with_nan_stays_inside_the_vocabulary():
  got = sampling.argmax(jnp.asarray([[1.0, jnp.nan, 3.0]]))
  assert 0 <= int(got[0]) < 3


def test_residual_is_the_normalised_positive_part():
  p, q = laws(30, seed=1), laws(30, seed=2)
  got = sampling.residual(p, q)
  want = [
    decoding_oracles.residual(*rows)
    for rows in zip(np.array(p), np.array(q), strict=True)
  ]
  np.testing.assert_allclose(got, want, atol=TOLERANCE)


def test_residual_of_equal_laws_is_the_law_itself():
  p = laws(3)
  np.testing.assert_array_equal(sampling.residual(p, p), p)


def test_residual_behind_the_last_proposal_is_the_target_law():
  p = laws(3)
  got = sampling.residual(p, jnp.zeros_like(p))
  np.testing.assert_allclose(got, p, atol=TOLERANCE)


def test_drawn_tokens_follow_the_given_law():
  law = jnp.array([0.4, 0.0, 0.3, 0.2, 0.1])
  rows = jnp.broadcast_to(law, (20_000, 2, 5))
  tokens = sampling.draw(keys(20_000), rows)
  assert tokens.dtype == jnp.int32
  # Both slots of a row, so that they are shown to be independent as well.
  joint = np.outer(law, law)
  assert decoding_oracles.chi_squared(tokens, joint) > 1e-3


def test_a_token_of_probability_zero_is_never_drawn():
  rows = jnp.broadcast_to(jnp.array([0.0, 1e-6, 0.0]), (500, 3))
  np.testing.assert_array_equal(sampling.draw(keys(500), rows), np.ones(500))


def test_each_row_draws_with_its_own_key_alone():
  rows, row_keys = laws(6, 4), keys(6)
  whole = sampling.draw(row_keys, rows)
  for b in range(6):
    alone = sampling.draw(row_keys[b : b + 1], rows[b : b + 1])
    np.testing.assert_array_equal(whole[b], alone[0])


def test_gumbel_noise_of_a_row_depends_on_its_key_alone():
  row_keys = keys(5)
  noise = sampling.gumbel(row_keys, (4, 3))
  assert noise.shape == (5, 4, 3)
  assert len(np.unique(noise)) == noise.size
  for b in range(5):
    alone = sampling.gumbel(row_keys[b : b + 1], (4, 3))
    np.testing.assert_array_equal(noise[b], alone[0])


def test_the_largest_gumbel_noise_picks_by_the_law():
  law = np.array([0.5, 0.3, 0.2])
  noise = np.asarray(sampling.gumbel(keys(20_000), (3,)))
  picks = np.argmax(np.log(law) + noise, axis=-1)
  assert decoding_oracles.chi_squared(picks[:, None], law) > 1e-3
