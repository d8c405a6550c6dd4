"""Where the features of training rows come from.

For every position of a row the target's tapped layers and its final-normed
state: computed once and kept in memory (`FeatureSet`) or on disk
(`feature_cache`), or computed for each window anew (`OnTheFly`). Not here: in
which order rows are read (`loader`), and where arrays lie on devices.
"""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import NamedTuple, Protocol, runtime_checkable

import jax
import numpy as np
from jax import numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec

from dspine_jax import sharding as sharding_lib
from dspine_jax.data import answers as answers_lib
from dspine_jax.data import rows as rows_lib
from dspine_jax.decoding import round as round_lib
from dspine_jax.target import model
from dspine_jax.training import anchors
from dspine_jax.typing import PyTree


@runtime_checkable
class Source(Protocol):
  """Training rows with a way to their features, in two stages.

  Disk is read in threads, while passes of the target run in the main thread in
  a fixed order: with several hosts they are collective.
  """

  @property
  def row_bytes(self) -> int:
    """Bytes of host memory that `read` takes for one row."""
    ...

  def __len__(self) -> int:
    """Rows."""
    ...

  def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    """What the host gives for rows [n]; called from any thread.

    Returns:
      Arrays with leading axis n.

    Raises:
      ValueError: something on disk is damaged.
    """
    ...

  def features(self, placed: PyTree) -> anchors.TrainBatch:
    """The batch; called in the main thread.

    Args:
      placed: what `read` gave, on devices; [B, ...] or, as the window of a
        step, [A, B, ...].
    """
    ...


def batch(source: Source, rows: np.ndarray) -> anchors.TrainBatch:
  """The given rows [n] as one batch on the default device."""
  return source.features(jax.tree.map(jnp.asarray, source.read(rows)))


def read_tokens(
  rows: rows_lib.Rows, index: np.ndarray
) -> dict[str, np.ndarray]:
  """The part of `Source.read` that all sources share."""
  picked = rows.select(index)
  found = {"tokens": picked.tokens, "loss_mask": picked.loss_mask}
  if picked.documents is not None:
    found["documents"] = picked.documents
  return found


def token_bytes(rows: rows_lib.Rows) -> int:
  """Bytes of a row of `read_tokens`."""
  found = read_tokens(rows, np.zeros((0,), np.int32))
  return sum(x.dtype.itemsize * x.shape[1] for x in found.values())


@dataclasses.dataclass(frozen=True, kw_only=True)
class FeatureSet:
  """Rows with what the target computed for them, in memory.

  Attributes:
    rows: tokens, mask, lengths.
    context_features: [n, S, taps * D]; what lies behind the end of a row is
      read by nothing.
    last_hidden: [n, S, D], likewise.
  """

  rows: rows_lib.Rows
  context_features: np.ndarray
  last_hidden: np.ndarray

  @property
  def row_bytes(self) -> int:
    arrays = self.context_features, self.last_hidden
    states = sum(x.dtype.itemsize * int(np.prod(x.shape[1:])) for x in arrays)
    return token_bytes(self.rows) + states

  def __len__(self) -> int:
    return len(self.rows.tokens)

  def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    return read_tokens(self.rows, rows) | {
      "context_features": self.context_features[rows],
      "last_hidden": self.last_hidden[rows],
    }

  def features(self, placed: PyTree) -> anchors.TrainBatch:
    return anchors.TrainBatch(**placed)


class OnTheFly:
  """Rows whose features the target computes for each window anew.

  For data whose features no disk holds. Costs a pass of the target a step, and
  no memory beyond the features of one window.
  """

  def __init__(
    self,
    target: round_lib.TargetModel,
    rows: rows_lib.Rows,
    tap_layers: tuple[int, ...],
  ):
    """Takes the target, its rows, and which layers are tapped, ascending."""
    self._target, self._rows, self._taps = target, rows, tap_layers

  @property
  def row_bytes(self) -> int:
    return token_bytes(self._rows)

  def __len__(self) -> int:
    return len(self._rows.tokens)

  def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    return read_tokens(self._rows, rows)

  def features(self, placed: PyTree) -> anchors.TrainBatch:
    tokens = placed["tokens"]
    run = _window_pass(self._taps, tokens.ndim, _rows_sharding(tokens))
    context_features, last_hidden = run(
      self._target, tokens, placed.get("documents")
    )
    return anchors.TrainBatch(
      **placed, context_features=context_features, last_hidden=last_hidden
    )


def _rows_sharding(tokens: jax.Array) -> NamedSharding | None:
  """How features of tokens [..., S] are placed: as these, row by row."""
  if not isinstance(tokens.sharding, NamedSharding):
    return None
  axes = tokens.sharding.spec[: tokens.ndim - 1]
  return NamedSharding(tokens.sharding.mesh, PartitionSpec(*axes))


@functools.lru_cache(maxsize=8)
def _window_pass(taps, ndim: int, where: NamedSharding | None):
  """The jitted pass over a batch [B, S] or a window [A, B, S]."""

  def one(target, tokens, documents):
    if where is not None:
      rows = NamedSharding(where.mesh, sharding_lib.TARGET_ROWS)
      tokens, documents = jax.lax.with_sharding_constraint(
        (tokens, documents), rows
      )
    return target_pass(target, tokens, documents, tap_layers=taps)

  def run(target, tokens, documents):
    if ndim == 2:
      return one(target, tokens, documents)
    # One micro-batch after the other, as the trainer takes them.
    return jax.lax.map(lambda micro: one(target, *micro), (tokens, documents))

  return _jit(run, where)


def _jit(function, out_shardings):
  if out_shardings is None:
    return jax.jit(function)
  return jax.jit(function, out_shardings=out_shardings)


def target_pass(
  target: round_lib.TargetModel,
  tokens: jax.Array,
  documents: jax.Array | None,
  *,
  tap_layers: tuple[int, ...],
) -> tuple[jax.Array, jax.Array]:
  """Tapped features [B, S, taps * D] and final-normed states [B, S, D]."""
  out = model.forward(
    target.params,
    tokens,
    cfg=target.cfg,
    tap_layers=tap_layers,
    documents=documents,
  )
  return out.features, out.hidden


class Computed(NamedTuple):
  """What one pass gave.

  Attributes:
    rows: [B] indices of the rows.
    fresh: how many of them, at the end, were not computed before.
    context_features: [B, T, taps * D]; T covers the longest of the rows.
    last_hidden: [B, T, D].
  """

  rows: np.ndarray
  fresh: int
  context_features: np.ndarray
  last_hidden: np.ndarray


def compute(
  target: round_lib.TargetModel,
  rows: rows_lib.Rows,
  tap_layers: tuple[int, ...],
  *,
  batch_size: int,
  dtype: str,
  mesh: jax.sharding.Mesh | None = None,
) -> Iterator[Computed]:
  """Runs the target over all rows, short ones first.

  The device has the next batch to compute while one is looked at. With several
  processes all of them must call it alike; each gets everything.

  Args:
    target: the model whose layers are tapped.
    rows: what it reads.
    tap_layers: which layers, ascending.
    batch_size: rows a pass; fewer rows are repeated to that many.
    dtype: of the arrays.
    mesh: on which the target lies.
  """
  run = _batch_pass(tap_layers, dtype, mesh)
  most = rows.tokens.shape[1]
  by_length = np.argsort(rows.lengths, kind="stable")
  # So that a few programs serve all.
  grid = -(-most // _LENGTHS // _LENGTH_GRID) * _LENGTH_GRID
  pending = None
  for places, fresh in answers_lib.batches(len(by_length), batch_size):
    index = np.resize(by_length[places], batch_size)
    longest = int(rows.lengths[index].max())
    size = min(most, -(-longest // grid) * grid)
    picked = rows.select(index)
    arrays = picked.tokens, picked.documents
    arrays = jax.tree.map(lambda x, n=size: x[:, :n], arrays)
    if mesh is not None:
      arrays = sharding_lib.place(arrays, sharding_lib.whole(mesh))
    started = run(target, *arrays)
    if pending is not None:
      yield _fetch(*pending)
    pending = index, fresh, started
  if pending is not None:
    yield _fetch(*pending)


# Lengths of batches are rounded up to so many positions or, of long rows, to
# one of so many lengths.
_LENGTH_GRID = 64
_LENGTHS = 8


@functools.lru_cache(maxsize=8)
def _batch_pass(taps, dtype: str, mesh: jax.sharding.Mesh | None):
  """The jitted pass of `compute`."""

  def run(target, tokens, documents):
    if mesh is not None:
      rows = NamedSharding(mesh, sharding_lib.TARGET_ROWS)
      tokens, documents = jax.lax.with_sharding_constraint(
        (tokens, documents), rows
      )
    found = target_pass(target, tokens, documents, tap_layers=taps)
    return tuple(x.astype(dtype) for x in found)

  return _jit(run, None if mesh is None else sharding_lib.whole(mesh))


def _fetch(index, fresh, started) -> Computed:
  return Computed(index, fresh, *map(np.asarray, started))


def compute_features(
  target: round_lib.TargetModel,
  rows: rows_lib.Rows,
  tap_layers: tuple[int, ...],
  *,
  batch_size: int = 32,
  progress: Callable[[int], None] = lambda tokens: None,
) -> FeatureSet:
  """Runs the target over all rows and keeps everything in memory.

  Args:
    target: the model whose layers are tapped.
    rows: what it reads.
    tap_layers: which layers, ascending.
    batch_size: rows a pass.
    progress: called with the number of new tokens after each batch.

  Returns:
    Features in the target's own dtype.
  """
  count, length = rows.tokens.shape
  width, dtype = target.cfg.hidden_size, jnp.dtype(target.cfg.dtype)
  features = np.zeros((count, length, len(tap_layers) * width), dtype)
  hidden = np.zeros((count, length, width), dtype)
  for found in compute(
    target,
    rows,
    tap_layers,
    batch_size=min(batch_size, count),
    dtype=target.cfg.dtype,
  ):
    size = found.last_hidden.shape[1]
    features[found.rows, :size] = found.context_features
    hidden[found.rows, :size] = found.last_hidden
    progress(found.fresh * length)
  return FeatureSet(rows=rows, context_features=features, last_hidden=hidden)
