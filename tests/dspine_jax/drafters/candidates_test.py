import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.drafters import candidates
from tests import oracles

SLOTS, CHOICES = 5, 4


def tables(seed, batch=(3,), rows=CHOICES):
  rng = np.random.default_rng(seed)
  scores = rng.standard_normal((*batch, SLOTS, rows, CHOICES))
  ids = rng.permuted(
    np.broadcast_to(np.arange(50), (*batch, SLOTS, 50)), axis=-1
  )[..., :CHOICES]
  return scores.astype(np.float32), ids.astype(np.int32)


def test_candidates_come_in_descending_order():
  logits = jnp.array([[0.0, 3.0, -1.0, 3.0, 2.0]])
  values, ids = candidates.top_candidates(logits, 3)
  np.testing.assert_array_equal(values, [[3.0, 3.0, 2.0]])
  np.testing.assert_array_equal(ids, [[1, 3, 4]])


def test_the_first_slots_predecessor_is_the_anchor_in_every_row():
  _, ids = tables(0, batch=(2, 3))
  anchor = np.arange(6, dtype=np.int32).reshape(2, 3) + 90
  got = candidates.predecessor_ids(jnp.asarray(anchor), jnp.asarray(ids))
  np.testing.assert_array_equal(
    got[..., 0, :], np.repeat(anchor[..., None], CHOICES, axis=-1)
  )
  np.testing.assert_array_equal(got[..., 1:, :], ids[..., :-1, :])


@pytest.mark.parametrize("seed", range(3))
def test_the_walk_follows_the_best_candidate_of_the_row_it_came_from(seed):
  scores, ids = tables(seed)
  got = candidates.greedy_walk(jnp.asarray(scores), jnp.asarray(ids))
  for row in range(3):
    assert list(got[row]) == oracles.greedy_walk(scores[row], ids[row])


def test_the_walk_takes_the_first_of_equal_scores():
  _, ids = tables(0)
  scores = np.zeros((3, SLOTS, CHOICES, CHOICES), np.float32)
  got = candidates.greedy_walk(jnp.asarray(scores), jnp.asarray(ids))
  np.testing.assert_array_equal(got, ids[..., 0])


def test_the_walk_is_not_a_search_for_the_best_path():
  # Greedy takes 2 then 0; the best sum would be 1 then 9.
  scores = np.array([[[[1.0, 2.0]] * 2, [[9.0, 0.0], [0.0, -1.0]]]])
  ids = np.array([[[10, 11], [20, 21]]])
  got = candidates.greedy_walk(jnp.asarray(scores), jnp.asarray(ids))
  np.testing.assert_array_equal(got, [[11, 20]])


def test_a_sampled_walk_draws_from_the_row_it_came_from():
  scores, ids = tables(4)
  log_law = np.log(oracles.softmax(scores)).astype(np.float32)
  noise = np.random.default_rng(1).gumbel(size=(3, SLOTS, CHOICES))
  noise = noise.astype(np.float32)
  tokens, laws = candidates.sampled_walk(
    jnp.asarray(log_law), jnp.asarray(ids), jnp.asarray(noise)
  )
  for row in range(3):
    index = 0
    for slot in range(SLOTS):
      law = log_law[row, slot, index]
      np.testing.assert_array_equal(laws[row, slot], law)
      index = int(np.argmax(law + noise[row, slot]))
      assert int(tokens[row, slot]) == ids[row, slot, index]


def test_values_are_put_at_the_candidates_and_nowhere_else():
  _, ids = tables(0)
  probs = np.random.default_rng(0).random((3, SLOTS, 50)).astype(np.float32)
  values = -np.ones((3, SLOTS, CHOICES), np.float32)
  got = candidates.with_candidates(
    jnp.asarray(probs), jnp.asarray(ids), jnp.asarray(values)
  )
  want = probs.copy()
  np.put_along_axis(want, ids, -1.0, axis=-1)
  np.testing.assert_array_equal(got, want)


def test_slices_of_the_ids_leave_top_k_what_it_is():
  # XLA:CPU recognises top-k by its slice; if a later one is merged with it,
  # the whole vocabulary is sorted.
  def ids_and_best(logits):
    _, ids = candidates.top_candidates(logits, 4)
    return ids, ids[..., 0], ids[:, :-1]

  lowered = jax.jit(ids_and_best).lower(jnp.ones((2, 3, 500)))
  text = lowered.compile().as_text()
  assert "TopK" in text and " sort(" not in text
