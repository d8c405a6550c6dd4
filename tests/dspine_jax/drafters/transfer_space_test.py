import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.drafters import transfer_space
from tests import oracles

# Stored in float32; the eigenproblem is float64 on both sides.
TOLERANCE = 1e-6
VOCAB, WIDTH, RANK = 40, 10, 6


def head(seed=0):
  rows = np.random.default_rng(seed).standard_normal((VOCAB, WIDTH))
  return (rows * np.linspace(0.2, 3, VOCAB)[:, None] + 0.3).astype(np.float32)


def match_signs(got, want):
  """Eigenvectors are determined up to a sign."""
  return want * np.sign((got * want).sum(axis=0))


@pytest.mark.parametrize("rank", [1, RANK, WIDTH])
def test_codes_and_directions_follow_the_six_steps(rank):
  space = transfer_space.transfer_space(head(), rank)
  codes, directions = oracles.transfer_codes(head(), rank)
  np.testing.assert_allclose(
    space.codes, match_signs(space.codes, codes), atol=TOLERANCE
  )
  np.testing.assert_allclose(
    space.directions,
    match_signs(space.directions, directions),
    atol=TOLERANCE,
  )


def test_codes_do_not_depend_on_how_the_vocabulary_is_chunked(monkeypatch):
  want = transfer_space.transfer_space(head(), RANK)
  monkeypatch.setattr(transfer_space, "_CHUNK_ROWS", 7)
  got = transfer_space.transfer_space(head(), RANK)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(np.abs(a), np.abs(b), atol=TOLERANCE * 10)


def test_codes_ignore_the_length_of_a_head_row():
  scaled = head() * np.random.default_rng(1).uniform(0.1, 9, (VOCAB, 1))
  got = transfer_space.transfer_space(scaled, RANK).codes
  want = transfer_space.transfer_space(head(), RANK).codes
  np.testing.assert_allclose(np.abs(got), np.abs(want), atol=1e-5)


def test_codes_have_unit_norm_and_the_largest_directions():
  space = transfer_space.transfer_space(head(), RANK)
  norms = np.linalg.norm(space.codes, axis=1)
  np.testing.assert_allclose(norms, 1, atol=TOLERANCE)
  every = np.linalg.eigvalsh(space.covariance.astype(np.float64))
  np.testing.assert_allclose(space.eigenvalues, every[-RANK:], rtol=1e-5)
  np.testing.assert_allclose(
    space.directions.T @ space.directions, np.eye(RANK), atol=1e-5
  )
  for array in space:
    assert array.dtype == np.float32


def test_a_device_array_is_taken_like_a_numpy_array():
  got = transfer_space.transfer_space(jnp.asarray(head()), RANK)
  want = transfer_space.transfer_space(head(), RANK)
  np.testing.assert_array_equal(got.codes, want.codes)


@pytest.mark.parametrize("rank", [0, -1, WIDTH + 1])
def test_a_rank_out_of_range_is_refused(rank):
  with pytest.raises(ValueError, match=rf"transfer_rank={rank}: .*1\.\.10"):
    transfer_space.transfer_space(head(), rank)


def test_a_zero_row_is_named_wherever_it_is(monkeypatch):
  monkeypatch.setattr(transfer_space, "_CHUNK_ROWS", 16)
  rows = head()
  rows[23] = 0
  with pytest.raises(ValueError, match="head row 23 is zero"):
    transfer_space.transfer_space(rows, RANK)


def test_a_head_with_too_few_directions_is_refused():
  rng = np.random.default_rng(0)
  flat = rng.standard_normal((VOCAB, 3)) @ rng.standard_normal((3, WIDTH))
  assert transfer_space.transfer_space(flat, 3).codes.shape == (VOCAB, 3)
  with pytest.raises(ValueError, match="transfer_rank=5: only 3 of"):
    transfer_space.transfer_space(flat, 5)
