import jax
import numpy as np
import pytest
from jax import numpy as jnp

from kernels.block_attention import partial
from tests import oracles

TOLERANCE = 5e-6  # float32 against float64, outputs of order one.
QUERIES, HEADS, GROUPS, WIDTH = 5, 6, 2, 4


def random(*shape, seed=0, dtype=jnp.float32):
  values = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(values, dtype)


def parts(sizes, seed=0):
  """(k, v, mask) of each key part; query 1 sees nothing at all."""
  rng = np.random.default_rng(seed)
  result = []
  for i, size in enumerate(sizes):
    mask = rng.random((QUERIES, size)) < 0.6
    mask[1] = False
    if i == 0:
      mask[2] = False  # Query 2 sees the other parts only.
    shape = (size, GROUPS, WIDTH)
    result.append((random(*shape, seed=i), random(*shape, seed=9 + i), mask))
  return result


def joined(key_parts):
  """All keys, values and masks as one part."""
  ks, vs, masks = zip(*key_parts, strict=True)
  k, v = (np.concatenate([np.asarray(x, float) for x in xs]) for xs in (ks, vs))
  return k, v, np.concatenate(masks, axis=1)


def attend(q, key_parts, dtype=jnp.float32):
  found = [
    partial.partial_attention(
      q[None],
      jnp.swapaxes(k, 0, 1)[None],
      jnp.swapaxes(v, 0, 1)[None],
      jnp.asarray(mask)[None],
    )
    for k, v, mask in key_parts
  ]
  return partial.merge(*found, dtype=jnp.dtype(dtype))[0]


@pytest.mark.parametrize("sizes", [(7,), (7, 3), (2, 1, 6)])
def test_merged_parts_equal_one_softmax_over_all_their_keys(sizes):
  q = random(QUERIES, HEADS, WIDTH, seed=3)
  key_parts = parts(sizes)
  k, v, mask = joined(key_parts)
  want = oracles.attention(np.asarray(q, np.float64), k, v, mask)
  np.testing.assert_allclose(attend(q, key_parts), want, atol=TOLERANCE)


def test_a_query_that_sees_nothing_gives_exact_zeros():
  got = attend(random(QUERIES, HEADS, WIDTH), parts((7, 3)))
  np.testing.assert_array_equal(got[1], np.zeros((HEADS, WIDTH)))


def test_a_masked_key_never_matters_however_large():
  q = random(QUERIES, HEADS, WIDTH)
  (k, v, mask), other = parts((7, 3))
  mask[:, 4] = False
  before = attend(q, [(k, v, mask), other])
  k, v = k.at[4].set(1e4), v.at[4].set(1e6)
  np.testing.assert_array_equal(attend(q, [(k, v, mask), other]), before)


def test_huge_scores_neither_overflow_nor_vanish():
  q = 100 * random(QUERIES, HEADS, WIDTH)
  key_parts = [(100 * k, v, mask) for k, v, mask in parts((7, 3))]
  k, v, mask = joined(key_parts)
  want = oracles.attention(np.asarray(q, np.float64), k, v, mask)
  # Scores of order 1e4 are rounded to 1e-3 before the exponential.
  np.testing.assert_allclose(attend(q, key_parts), want, atol=2e-3)


def test_gradients_are_finite_and_zero_for_masked_keys():
  q, key_parts = random(QUERIES, HEADS, WIDTH), parts((7, 3))
  (k, v, mask), other = key_parts
  mask[:, 4] = False

  def total(q, k, v):
    return jnp.sum(jnp.sin(attend(q, [(k, v, mask), other])))

  from_q, from_k, from_v = jax.grad(total, argnums=(0, 1, 2))(q, k, v)
  for grad in (from_q, from_k, from_v):
    assert np.isfinite(grad).all()
  assert not from_q[1].any() and from_q[0].any()
  assert not from_k[4].any() and not from_v[4].any() and from_v.any()


def test_gradients_match_finite_differences():
  # The maximum is taken without a gradient; the quotient does not depend on it.
  q, key_parts = random(QUERIES, HEADS, WIDTH), parts((4, 3))

  def total(q):
    return jnp.sum(jnp.sin(attend(q, key_parts)))

  direction = random(*q.shape, seed=5)
  step = 1e-2
  slope = (total(q + step * direction) - total(q - step * direction)) / 2 / step
  exact = jnp.vdot(jax.grad(total)(q), direction)
  assert float(slope) == pytest.approx(float(exact), rel=2e-3)


def test_bfloat16_keys_keep_float32_sums():
  q = random(QUERIES, HEADS, WIDTH, dtype=jnp.bfloat16)
  key_parts = [
    (k.astype(jnp.bfloat16), v.astype(jnp.bfloat16), mask)
    for k, v, mask in parts((7,))
  ]
  k, v, mask = (np.asarray(x) for x in key_parts[0])
  part = partial.partial_attention(
    q[None],
    jnp.swapaxes(key_parts[0][0], 0, 1)[None],
    jnp.swapaxes(key_parts[0][1], 0, 1)[None],
    jnp.asarray(mask)[None],
  )
  assert part.total.dtype == part.weighted.dtype == jnp.float32
  got = attend(q, key_parts, dtype=jnp.bfloat16)
  assert got.dtype == jnp.bfloat16
  want = oracles.attention(
    np.asarray(q, np.float64), k.astype(float), v.astype(float), mask
  )
  # Weights and output are rounded to bfloat16 once each (2^-9 relative).
  np.testing.assert_allclose(np.asarray(got, float), want, atol=0.02)
