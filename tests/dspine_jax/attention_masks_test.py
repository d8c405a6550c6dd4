import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import attention_masks
from tests import oracles

anchor_blocks = jax.jit(
  attention_masks.anchor_blocks,
  static_argnames=("context_length", "block_size", "is_causal"),
)


def dense(anchors, keep, **options):
  anchors, keep = jnp.asarray(anchors, jnp.int32), jnp.asarray(keep, bool)
  return np.asarray(anchor_blocks(anchors, keep, **options))


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("block_size", [2, 4])
@pytest.mark.parametrize("seed", range(3))
def test_anchor_blocks_agree_with_brute_force(is_causal, block_size, seed):
  # Anchors are drawn freely: closer than a block, equal to one another, at 0,
  # and so late that the block reaches behind the row.
  rng = np.random.default_rng(seed)
  context_length = 9
  anchors = np.sort(rng.integers(0, context_length, (3, 4)))
  keep = rng.random((3, 4)) < 0.7
  keep[0] = True
  keep[2, 1:] = False
  got = dense(
    anchors,
    keep,
    context_length=context_length,
    block_size=block_size,
    is_causal=is_causal,
  )
  for row in range(3):
    want = oracles.anchor_block_mask(
      anchors[row],
      keep[row],
      context_length=context_length,
      block_size=block_size,
      is_causal=is_causal,
      padding_sees_itself=False,
    )
    np.testing.assert_array_equal(got[row], want)


def test_the_documented_example_holds():
  got = dense(
    [[1, 2]], [[True, True]], context_length=3, block_size=2, is_causal=True
  )
  want = [
    [1, 0, 0, 1, 0, 0, 0],
    [1, 0, 0, 1, 1, 0, 0],
    [1, 1, 0, 0, 0, 1, 0],
    [1, 1, 0, 0, 0, 1, 1],
  ]
  np.testing.assert_array_equal(got[0], np.array(want, bool))


def test_context_is_cut_at_the_anchor_and_not_at_the_block_index():
  # SpecForge #470: with anchors 5 and 6 and blocks of 4, visibility by block
  # index would show block 1 its own answers, or hide position 5 from it.
  got = dense(
    [[5, 6]],
    [[True, True]],
    context_length=12,
    block_size=4,
    is_causal=False,
  )[0]
  for block, anchor in ((0, 5), (1, 6)):
    for slot in range(4):
      seen = np.flatnonzero(got[block * 4 + slot, :12])
      np.testing.assert_array_equal(seen, np.arange(anchor))


def test_no_block_sees_a_slot_of_another():
  got = dense(
    [[3, 3, 4]],
    [[True] * 3],
    context_length=6,
    block_size=3,
    is_causal=False,
  )[0, :, 6:]
  want = np.kron(np.eye(3), np.ones((3, 3))).astype(bool)
  np.testing.assert_array_equal(got, want)


def test_causal_and_in_block_masks_are_what_they_say():
  for size in (1, 2, 5):
    want = [[key <= query for key in range(size)] for query in range(size)]
    np.testing.assert_array_equal(attention_masks.causal(size), want)
    np.testing.assert_array_equal(
      attention_masks.in_block(size, is_causal=True), want
    )
    full = attention_masks.in_block(size, is_causal=False)
    assert full.shape == (size, size) and full.all()


def test_prefix_shows_exactly_the_first_positions_of_each_row():
  lengths = np.array([[0, 1], [3, 4]], np.int32)
  got = np.asarray(attention_masks.prefix(jnp.asarray(lengths), 4))
  for row in range(2):
    for column in range(2):
      want = [s < lengths[row, column] for s in range(4)]
      np.testing.assert_array_equal(got[row, column], want)
