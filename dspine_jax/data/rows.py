"""Training rows: token ids with a loss mask, padded or packed.

What a drafter is trained on before the target has seen it: answers of the
target, or chats of a file. One row holds one document padded on the right, or
several documents packed end to end; attention and anchors stay inside a
document. The target's features of a row are `data/sources.py`'s.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dspine_jax.checkpoints import folders
from dspine_jax.data import answers as answers_lib


class Documents(NamedTuple):
  """Token sequences of any lengths, one behind the other.

  Attributes:
    tokens: [t] int32.
    loss_mask: [t] bool, True on tokens that the target said.
    lengths: [n] int32, tokens of each document; their sum is t.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  lengths: np.ndarray


class Rows(NamedTuple):
  """Token rows.

  Attributes:
    tokens: [n, S] int32, zero behind the end of a row.
    loss_mask: [n, S] bool, True on tokens that the target said.
    lengths: [n] int32, tokens of a row.
    documents: [n, S] int32, position of the first token of the document that a
      position belongs to; None where every row is one document. Padding is a
      document of its own.
  """

  tokens: np.ndarray
  loss_mask: np.ndarray
  lengths: np.ndarray
  documents: np.ndarray | None = None

  @property
  def fill(self) -> float:
    """Share of the positions that hold a token."""
    return float(self.lengths.sum(dtype=np.int64) / self.tokens.size)

  def select(self, rows: np.ndarray) -> "Rows":
    """The rows of an index or mask."""
    documents = None if self.documents is None else self.documents[rows]
    return Rows(
      self.tokens[rows], self.loss_mask[rows], self.lengths[rows], documents
    )


def from_answers(answers: answers_lib.AnswerSet) -> Rows:
  """Answered prompts, one document a row."""
  return Rows(answers.tokens, answers.loss_mask, answers.lengths)


def pad(documents: Documents) -> Rows:
  """One document a row, padded to the longest."""
  lengths = documents.lengths
  width = int(lengths.max())
  tokens = np.zeros((len(lengths), width), np.int32)
  loss_mask = np.zeros(tokens.shape, bool)
  held = np.arange(width)[None] < lengths[:, None]
  tokens[held], loss_mask[held] = documents.tokens, documents.loss_mask
  return Rows(tokens, loss_mask, lengths)


def pack(documents: Documents, length: int) -> Rows:
  """Documents end to end in as few rows of `length` as best fit finds.

  The longest documents are placed first, each in the row that it leaves the
  least room in; in a row they lie in their old order. No draws: the same
  documents give the same rows.

  Args:
    documents: at least one.
    length: tokens of a row.

  Raises:
    ValueError: a document is longer than a row.
  """
  if documents.lengths.max() > length:
    raise ValueError(
      f"a document of {documents.lengths.max()} tokens is longer than a row of"
      f" {length}"
    )
  placed = _best_fit(documents.lengths, length)
  starts = np.cumsum(documents.lengths, dtype=np.int64) - documents.lengths
  tokens = np.zeros((len(placed), length), np.int32)
  loss_mask = np.zeros(tokens.shape, bool)
  owners = np.zeros(tokens.shape, np.int32)
  lengths = np.zeros(len(placed), np.int32)
  for row, indices in enumerate(placed):
    end = 0
    for index in indices:
      begin, end = end, end + int(documents.lengths[index])
      source = slice(starts[index], starts[index] + end - begin)
      tokens[row, begin:end] = documents.tokens[source]
      loss_mask[row, begin:end] = documents.loss_mask[source]
      owners[row, begin:end] = begin
    owners[row, end:] = lengths[row] = end
  return Rows(tokens, loss_mask, lengths, owners)


def _best_fit(lengths: np.ndarray, capacity: int) -> list[list[int]]:
  """Indices of the documents of each row, both in ascending order."""
  rows: list[list[int]] = []
  # Rows by the room that they have left, and which rooms there are.
  by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
  exists = np.zeros(capacity + 1, bool)
  for index in np.argsort(-lengths, kind="stable").tolist():
    size = int(lengths[index])
    room = size + int(np.argmax(exists[size:]))
    if exists[room]:
      row = by_room[room].pop()
      exists[room] = bool(by_room[room])
    else:
      row, room = len(rows), capacity
      rows.append([])
    rows[row].append(index)
    by_room[room - size].append(row)
    exists[room - size] = True
  return sorted(sorted(row) for row in rows)


_ABOUT = "about.json"


def save(folder: pathlib.Path, rows: Rows, about: Mapping[str, Any]) -> None:
  """Writes one .npy an array; the folder appears when all are there.

  Args:
    folder: need not exist.
    rows: to be kept.
    about: what else is to be known of them, for JSON.

  Raises:
    ValueError: naming the folder, as `folders.replacing`.
  """
  with folders.replacing(folder) as fresh:
    (fresh / _ABOUT).write_text(json.dumps(about), encoding="utf-8")
    for name, array in rows._asdict().items():
      if array is not None:
        np.save(fresh / f"{name}.npy", array)


def load(folder: pathlib.Path) -> tuple[Rows, dict[str, Any]]:
  """What `save` wrote: rows, memory-mapped, and what was to be known of them.

  Raises:
    ValueError: naming the folder: a file is missing, damaged or cut off.
  """
  paths = {name: folder / f"{name}.npy" for name in Rows._fields}
  try:
    rows = Rows(
      **{
        name: np.load(path, mmap_mode="r")
        for name, path in paths.items()
        if name != "documents" or path.exists()
      }
    )
    about = json.loads((folder / _ABOUT).read_text(encoding="utf-8"))
    arrays = (rows.tokens, rows.loss_mask, rows.documents)
    shapes = {array.shape for array in arrays if array is not None}
    if len(shapes) != 1 or (len(rows.lengths),) != rows.tokens.shape[:1]:
      raise ValueError(f"arrays of shapes {shapes}")
  except (OSError, EOFError, ValueError) as error:
    raise ValueError(
      f"{folder}: damaged rows ({error}); remove the folder, and they are made"
      " again"
    ) from None
  return rows, about
