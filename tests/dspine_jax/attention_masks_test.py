import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import attention_masks
from tests import oracles

anchor_blocks = jax.jit(
  attention_masks.anchor_blocks,
  static_argnames=(
    "context_length",
    "block_size",
    "is_causal",
    "window",
    "convention",
  ),
)
CONVENTIONS = sorted(attention_masks.WINDOW_CONVENTIONS)


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


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("convention", CONVENTIONS)
# Equal to the block, narrower than the context, wider than it.
@pytest.mark.parametrize("window", [3, 5, 20])
def test_sliding_layers_agree_with_brute_force(window, convention, is_causal):
  # Anchors closer to each other, and to the start, than the window.
  anchors = np.array([[0, 1, 2, 8], [3, 4, 4, 5]])
  keep = np.array([[True] * 4, [True, True, False, True]])
  rule = {
    "context_length": 9,
    "block_size": 3,
    "is_causal": is_causal,
    "window": window,
    "convention": convention,
  }
  got = dense(anchors, keep, **rule)
  for row in range(2):
    want = oracles.anchor_block_mask(
      anchors[row], keep[row], padding_sees_itself=False, **rule
    )
    np.testing.assert_array_equal(got[row], want)


# Context 0 to 4 | own slots 0, 1; window 2, anchor 4, both slots.
SLIDING_ROWS = {
  "automodel": [[0, 0, 0, 1, 0, 1, 1], [0, 0, 0, 0, 0, 1, 1]],
  "specforge": [[0, 0, 0, 1, 0, 1, 0], [0, 0, 0, 0, 0, 1, 1]],
  "speculators": [[0, 0, 1, 1, 0, 1, 0], [0, 0, 1, 1, 0, 1, 1]],
  "speculators_non_causal": [[0, 0, 1, 1, 0, 1, 1]] * 2,
}


@pytest.mark.parametrize("convention", CONVENTIONS)
def test_each_convention_shows_what_its_tool_shows(convention):
  got = dense(
    [[4]],
    [[True]],
    context_length=5,
    block_size=2,
    is_causal=False,
    window=2,
    convention=convention,
  )
  np.testing.assert_array_equal(got[0], SLIDING_ROWS[convention])


@pytest.mark.parametrize("convention", CONVENTIONS)
@pytest.mark.parametrize("is_causal", [True, False])
def test_a_window_that_reaches_the_start_is_none(convention, is_causal):
  rule = {"context_length": 9, "block_size": 4, "is_causal": is_causal}
  anchors, keep = [[0, 3, 8]], [[True] * 3]
  wide = dense(anchors, keep, **rule, window=12, convention=convention)
  full = dense(anchors, keep, **rule)
  np.testing.assert_array_equal(wide[..., :9], full[..., :9])
  # Slot 3 of the last block, at position 11, is the first to lose one.
  less = dense(anchors, keep, **rule, window=11, convention=convention)
  moves = attention_masks.WINDOW_CONVENTIONS[convention].moves_with_slot
  assert (full[..., :9] & ~less[..., :9]).sum() == moves


def test_a_window_begins_where_the_documented_example_says():
  anchors = jnp.array([[6]])
  for convention, want in (
    ("automodel", [3, 4, 5]),
    ("specforge", [3, 4, 5]),
    ("speculators", [2, 2, 2]),
    ("speculators_non_causal", [2, 2, 2]),
  ):
    got = attention_masks.window_starts(anchors, 3, 4, convention)
    np.testing.assert_array_equal(got[0, 0], want)


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
  for convention, contexts in (
    ("specforge", [[0, 1, 0], [0, 0, 0]]),
    ("speculators", [[1, 1, 0], [1, 1, 0]]),
  ):
    got = dense(
      [[1, 2]],
      [[True, True]],
      context_length=3,
      block_size=2,
      is_causal=True,
      window=2,
      convention=convention,
    )
    np.testing.assert_array_equal(got[0, 2:, :3], contexts)


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
