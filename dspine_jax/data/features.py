"""Context features and teacher states of answered prompts, computed once.

For every position the target's tapped layers and its final-normed state, in
memory or in memory-mapped files, which are found again by what they were made
from. A sharded cache is not here.
"""

import hashlib
import json
import pathlib
from collections.abc import Callable
from typing import NamedTuple

import grain
import jax
import numpy as np
from jax import numpy as jnp
from numpy.lib import format as npy_format

from dspine_jax.data import answers as answers_lib
from dspine_jax.decoding import round as round_lib
from dspine_jax.target import model
from dspine_jax.training import anchors


class FeatureSet(NamedTuple):
  """Answered prompts with what the target computed for them.

  Attributes:
    answers: tokens and lengths.
    loss_mask: [n, S] bool.
    context_features: [n, S, taps * D] float32.
    last_hidden: [n, S, D] float32.
  """

  answers: answers_lib.AnswerSet
  loss_mask: np.ndarray
  context_features: np.ndarray
  last_hidden: np.ndarray

  def batch(self, rows: np.ndarray) -> anchors.TrainBatch:
    """The given rows as one batch on the device."""
    return anchors.TrainBatch(
      tokens=jnp.asarray(self.answers.tokens[rows]),
      loss_mask=jnp.asarray(self.loss_mask[rows]),
      context_features=jnp.asarray(self.context_features[rows]),
      last_hidden=jnp.asarray(self.last_hidden[rows]),
    )


def compute_features(
  target: round_lib.TargetModel,
  answers: answers_lib.AnswerSet,
  tap_layers: tuple[int, ...],
  *,
  batch_size: int = 32,
  folder: pathlib.Path | None = None,
  progress: Callable[[int], None] = lambda tokens: None,
) -> FeatureSet:
  """Runs the target over all rows.

  Args:
    target: the model whose layers are tapped.
    answers: prompts and answers.
    tap_layers: which layers, ascending.
    batch_size: rows a pass.
    folder: where memory-mapped files go, and are read from if they are of this
      target, these answers and these layers; None keeps the arrays in memory.
    progress: called with the number of new tokens after each batch.
  """
  count, length = answers.tokens.shape
  width = target.cfg.hidden_size
  origin = _origin(target, answers, tap_layers) if folder is not None else ""
  if folder is not None and _is_finished(folder, origin):
    arrays = [np.load(folder / f"{n}.npy", mmap_mode="r") for n in _ARRAYS]
    progress(count * length)
    return FeatureSet(answers, answers.loss_mask, *arrays)

  @jax.jit
  def run(target, tokens):
    out = model.forward(
      target.params, tokens, cfg=target.cfg, tap_layers=tap_layers
    )
    return out.features, out.hidden

  if folder is not None:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / _INDEX).unlink(missing_ok=True)
  shapes = (count, length, len(tap_layers) * width), (count, length, width)
  features, hidden = (
    _array(folder, name, shape)
    for name, shape in zip(_ARRAYS, shapes, strict=True)
  )
  for rows, fresh, size in answers_lib.batches_by_length(
    answers.lengths, batch_size, length
  ):
    found = run(target, jnp.asarray(answers.tokens[rows, :size]))
    features[rows, :size], hidden[rows, :size] = found
    progress(fresh * length)
  if folder is not None:
    (folder / _INDEX).write_text(json.dumps({"origin": origin}))
  return FeatureSet(answers, answers.loss_mask, features, hidden)


_ARRAYS = ("context_features", "last_hidden")
_INDEX = "index.json"


def _origin(target, answers, tap_layers) -> str:
  """A digest of everything that the features depend on."""
  digest = hashlib.sha256(repr((target.cfg, tap_layers)).encode())
  for array in (*answers, *jax.tree.leaves(target.params)):
    digest.update(np.ascontiguousarray(array))
  return digest.hexdigest()


def _is_finished(folder: pathlib.Path, origin: str) -> bool:
  try:
    return json.loads((folder / _INDEX).read_text())["origin"] == origin
  except (OSError, ValueError, KeyError, TypeError):
    return False


def _array(
  folder: pathlib.Path | None, name: str, shape: tuple[int, ...]
) -> np.ndarray:
  """Zeros, since positions behind the end of a row are not computed."""
  if folder is None:
    return np.zeros(shape, np.float32)
  return npy_format.open_memmap(
    folder / f"{name}.npy", mode="w+", dtype=np.float32, shape=shape
  )


class RowOrder:
  """Which rows each step trains on: a function of the step alone.

  Every epoch is a new permutation; steps do not depend on earlier calls, so a
  resumed run needs only its step.
  """

  def __init__(self, count: int, rows_per_step: int, seed: int):
    if count < 1:
      raise ValueError("the training set is empty")
    # Grain adds the epoch to its seed: without the hash, epoch 1 of one seed
    # would be epoch 0 of the next.
    mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
    self._order = grain.MapDataset.range(count).shuffle(seed=mixed).repeat()
    self._rows = rows_per_step

  def rows(self, step: int) -> np.ndarray:
    """Row indices of a step, [rows_per_step]."""
    first = step * self._rows
    return np.asarray([self._order[first + i] for i in range(self._rows)])
