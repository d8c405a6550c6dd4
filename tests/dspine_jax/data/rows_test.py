import numpy as np
import pytest

from dspine_jax.data import rows as rows_lib
from tests import tiny_folder


def documents(lengths, seed=0):
  """Random ones; a token tells its document, its number and its mask."""
  rng = np.random.default_rng(seed)
  tokens = np.concatenate(
    [1000 * (i + 1) + np.arange(n) for i, n in enumerate(lengths)]
  )
  mask = rng.random(len(tokens)) < 0.5
  return rows_lib.Documents(
    tokens.astype(np.int32), mask, np.asarray(lengths, np.int32)
  )


def parts(rows):
  """(tokens, mask) of the documents of packed rows, by a plain loop."""
  found = {}
  assert rows.documents is not None
  for tokens, mask, length, owner in zip(*rows, strict=True):
    at = 0
    while at < length:
      end = at
      while end < length and owner[end] == at:
        end += 1
      assert end > at
      found[tokens[at] // 1000 - 1] = (tokens[at:end], mask[at:end])
      at = end
    assert (owner[length:] == length).all()
    assert not tokens[length:].any() and not mask[length:].any()
  return found


LENGTHS = [7, 3, 10, 1, 4, 6, 9, 2, 2, 5, 10, 8]


def test_every_document_lies_whole_in_one_row():
  given = documents(LENGTHS)
  rows = rows_lib.pack(given, 10)
  found = parts(rows)
  assert sorted(found) == list(range(len(LENGTHS)))
  starts = np.cumsum(LENGTHS) - LENGTHS
  for index, (tokens, mask) in found.items():
    where = slice(starts[index], starts[index] + LENGTHS[index])
    np.testing.assert_array_equal(tokens, given.tokens[where])
    np.testing.assert_array_equal(mask, given.loss_mask[where])
  assert rows.lengths.sum() == sum(LENGTHS) == 67
  # 67 tokens need 7 rows of 10.
  assert rows.tokens.shape == (7, 10) and rows.fill == pytest.approx(
    0.957, abs=1e-3
  )


def best_fit(lengths, capacity):
  """The rule by a plain search: rows as lists of document numbers."""
  rows = []
  for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
    rooms = [capacity - sum(lengths[i] for i in row) for row in rows]
    fitting = [room for room in rooms if room >= lengths[index]]
    if not fitting:
      rows.append([index])
      continue
    rows[rooms.index(min(fitting))].append(index)
  return rows


@pytest.mark.parametrize("seed", range(3))
def test_rows_are_as_full_as_a_plain_best_fit_makes_them(seed):
  lengths = np.random.default_rng(seed).integers(1, 40, 200).tolist()
  rows = rows_lib.pack(documents(lengths), 64)
  # Which of equally full rows takes a document does not change their number.
  expected = best_fit(lengths, 64)
  assert len(rows.tokens) == len(expected)
  full = sorted(sum(lengths[i] for i in row) for row in expected)
  assert sorted(rows.lengths) == full
  assert rows.fill > 0.97


def test_packing_depends_on_the_documents_only_and_keeps_their_order():
  given = documents(LENGTHS)
  first, again = (rows_lib.pack(given, 12) for _ in range(2))
  for a, b in zip(first, again, strict=True):
    np.testing.assert_array_equal(a, b)
  heads = first.tokens[:, 0]
  assert (np.diff(heads) > 0).all()
  for tokens, length in zip(first.tokens, first.lengths, strict=True):
    assert (np.diff(tokens[:length]) > 0).all()


def test_a_document_longer_than_a_row_is_refused():
  with pytest.raises(ValueError, match="11 tokens is longer than a row of 10"):
    rows_lib.pack(documents([3, 11]), 10)


def test_padded_rows_are_as_long_as_the_longest_document():
  given = documents([3, 1, 5])
  rows = rows_lib.pad(given)
  assert rows.tokens.tolist() == [
    [1000, 1001, 1002, 0, 0],
    [2000, 0, 0, 0, 0],
    [3000, 3001, 3002, 3003, 3004],
  ]
  held = rows.tokens > 0
  np.testing.assert_array_equal(rows.loss_mask[held], given.loss_mask)
  assert not rows.loss_mask[~held].any()
  assert rows.documents is None and rows.fill == 9 / 15


def test_rows_are_selected_with_and_without_documents():
  packed = rows_lib.pack(documents(LENGTHS), 10)
  picked = packed.select(np.array([2, 0]))
  assert picked.documents is not None and packed.documents is not None
  np.testing.assert_array_equal(picked.documents, packed.documents[[2, 0]])
  answers = tiny_folder.random_answers(3)
  rows = rows_lib.from_answers(answers).select(np.array([1]))
  assert rows.documents is None
  np.testing.assert_array_equal(rows.loss_mask, answers.loss_mask[1:2])
