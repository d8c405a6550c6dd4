import collections
import itertools

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from scipy import stats

from dspine_jax.drafters import dflash, dspine
from dspine_jax.training import anchors
from tests import oracles, tiny_models

sample = jax.jit(anchors.sample_anchors, static_argnums=2)


def mask_of(text):
  return jnp.asarray([[c == "1" for c in row] for row in text.split()])


def test_anchors_lie_where_they_and_their_successor_are_supervised():
  mask = mask_of("0011101100 1111111111 0101010101 0000000011")
  candidates = [{2, 3, 6}, set(range(9)), set(), {8}]
  for seed in range(20):
    positions, keep = sample(jax.random.key(seed), mask, 4)
    assert positions.dtype == jnp.int32
    for row, allowed in enumerate(candidates):
      kept = np.asarray(positions[row])[np.asarray(keep[row])]
      assert set(kept) <= allowed
      # As many as there are, without replacement, ascending.
      assert len(kept) == min(4, len(allowed))
      assert (np.diff(kept) > 0).all()


def test_padding_blocks_come_last_with_anchor_zero():
  positions, keep = sample(jax.random.key(0), mask_of("0011100000"), 4)
  np.testing.assert_array_equal(positions, [[2, 3, 0, 0]])
  np.testing.assert_array_equal(keep, [[True, True, False, False]])


def test_more_anchors_than_positions_leave_padding():
  positions, keep = sample(jax.random.key(0), mask_of("111"), 7)
  np.testing.assert_array_equal(positions, [[0, 1, 0, 0, 0, 0, 0]])
  np.testing.assert_array_equal(keep, [[True, True] + [False] * 5])


def test_the_last_position_is_never_an_anchor():
  # It has no successor to predict, whatever would wrap around.
  for seed in range(10):
    positions, keep = sample(jax.random.key(seed), mask_of("1111"), 4)
    np.testing.assert_array_equal(positions, [[0, 1, 2, 0]])
    np.testing.assert_array_equal(keep, [[True] * 3 + [False]])


def test_every_subset_of_candidates_is_equally_likely():
  mask = jnp.broadcast_to(mask_of("0111011110"), (6000, 10))
  # Candidates 1, 2, 5, 6, 7: ten pairs, 600 expected of each.
  positions, keep = sample(jax.random.key(7), mask, 2)
  assert keep.all()
  counts = collections.Counter(map(tuple, np.asarray(positions).tolist()))
  pairs = list(itertools.combinations([1, 2, 5, 6, 7], 2))
  assert set(counts) == set(pairs)
  # The seed is fixed, so the test cannot fail by chance.
  assert stats.chisquare([counts[pair] for pair in pairs]).pvalue > 0.01


def test_other_keys_give_other_anchors_and_the_same_key_the_same():
  mask = jnp.ones((3, 40), bool)
  first, _ = sample(jax.random.key(0), mask, 5)
  again, _ = sample(jax.random.key(0), mask, 5)
  other, _ = sample(jax.random.key(1), mask, 5)
  np.testing.assert_array_equal(first, again)
  assert (first != other).any()
  assert (first[0] != first[1]).any()


def test_a_block_holds_its_true_tokens_clipped_at_the_end():
  tokens = jnp.asarray([[10, 11, 12, 13, 14], [20, 21, 22, 23, 24]])
  at = jnp.asarray([[0, 3], [2, 4]], jnp.int32)
  got = anchors.block_tokens(tokens, at, 3)
  want = [[[10, 11, 12], [13, 14, 14]], [[22, 23, 24], [24, 24, 24]]]
  np.testing.assert_array_equal(got, want)


def supervise(cfg, rule):
  batch = tiny_models.train_batch(cfg)
  return batch, anchors.supervise(
    batch,
    jnp.asarray(tiny_models.ANCHORS),
    jnp.asarray(tiny_models.KEEP),
    rule,
    cfg=cfg,
  )


@pytest.mark.parametrize(
  ("rule", "stop_at_hole"),
  [(dflash.supervised, False), (dspine.supervised, True)],
  ids=["dflash", "dspine"],
)
@pytest.mark.parametrize("shift", [False, True])
def test_labels_and_weights_agree_with_a_plain_loop(rule, stop_at_hole, shift):
  cfg = tiny_models.drafter_config("dflash", sample_from_anchor=shift)
  batch, got = supervise(cfg, rule)
  for row in range(2):
    labels, valid, weights = oracles.supervision(
      batch.tokens[row],
      batch.loss_mask[row],
      tiny_models.ANCHORS[row],
      tiny_models.KEEP[row],
      num_proposals=5 if shift else 4,
      gamma=cfg.decay_gamma,
      stop_at_hole=stop_at_hole,
    )
    np.testing.assert_array_equal(got.labels[row], labels)
    np.testing.assert_array_equal(got.valid[row], valid)
    np.testing.assert_allclose(got.weights[row], weights, rtol=1e-6)


def test_slot_k_is_taught_token_anchor_plus_k_by_the_state_before_it():
  # SpecForge #455: labels off by one train well and accept nothing.
  cfg = tiny_models.drafter_config("dspine")
  batch, got = supervise(cfg, dspine.supervised)
  for row, block in zip(*np.nonzero(tiny_models.KEEP), strict=True):
    anchor = int(tiny_models.ANCHORS[row, block])
    for k in range(1, cfg.block_size):
      if anchor + k >= tiny_models.LENGTH:
        continue
      at = (row, block, k - 1)
      assert got.labels[at] == batch.tokens[row, anchor + k]
      assert got.predecessors[at] == batch.tokens[row, anchor + k - 1]
      np.testing.assert_array_equal(
        got.teacher[at], batch.last_hidden[row, anchor + k - 1]
      )


def test_dspine_weights_after_a_gap_are_zero_and_dflash_goes_on():
  # Row 0 has its hole at position 6: slot 2 of the block with anchor 4.
  cfg = tiny_models.drafter_config("dspine")
  _, stopped = supervise(cfg, dspine.supervised)
  _, going_on = supervise(cfg, dflash.supervised)
  decay = np.exp(-np.arange(4) / cfg.decay_gamma)
  np.testing.assert_allclose(
    stopped.weights[0, 1], decay * [1, 0, 0, 0], rtol=1e-6
  )
  np.testing.assert_allclose(
    going_on.weights[0, 1], decay * [1, 0, 1, 1], rtol=1e-6
  )


def test_slots_behind_the_row_and_padding_blocks_are_not_supervised():
  cfg = tiny_models.drafter_config("dspine")
  _, got = supervise(cfg, dspine.supervised)
  # Anchor 15 of a row of 18: slots 1 and 2 have labels.
  np.testing.assert_array_equal(got.valid[0, 3], [True, True, False, False])
  assert not got.valid[1, 2:].any() and not got.weights[1, 2:].any()
