"""Features of training rows on disk, computed once.

A folder with `index.json` and files of `feature_shards`. A file is complete
before the index names it, and the index is replaced in one step: a killed
computation goes on behind its last complete file. The index says by a digest
what the features were computed from; `folder_for` gives each digest a folder of
its own, so that features of other targets, rows or layers are neither read nor
overwritten. Nothing here decides whether features are kept at all.
"""

import concurrent.futures
import contextlib
import functools
import json
import os
import pathlib
from collections.abc import Callable, Generator
from typing import Any

import jax
import numpy as np
from jax import numpy as jnp
from jax.experimental import multihost_utils

from dspine_jax.checkpoints import folders
from dspine_jax.data import feature_contents, feature_shards, sources
from dspine_jax.training import anchors
from dspine_jax.typing import PyTree

_INDEX = "index.json"
_LOCK = "lock"
# Rows from which on the rows of a window are read by several threads.
_LARGE_ROW_BYTES = 8 << 20
_READERS = 8


def folder_for(
  parent: pathlib.Path, contents: feature_contents.Contents
) -> pathlib.Path:
  """Where features of these contents lie below a folder for features."""
  return parent / contents.digest[:16]


def missing_bytes(
  folder: pathlib.Path, contents: feature_contents.Contents
) -> int:
  """Bytes that `write` would write; 0 if everything is there.

  Raises:
    ValueError: as `FeatureCache`.
  """
  missing = _missing(
    folder, _read_index(folder, contents), feature_contents.shards_of(contents)
  )
  if not missing:
    return 0
  return feature_contents.estimate_bytes(
    contents.rows.lengths[np.concatenate([shard.rows for shard in missing])],
    contents.target.cfg,
    contents.tap_layers,
    contents.dtype,
  )


def _missing(
  folder: pathlib.Path,
  index: dict[str, Any],
  shards: list[feature_contents.Shard],
) -> list[feature_contents.Shard]:
  """Files that were not completed, or were deleted since."""
  return [
    shard
    for shard in shards
    if shard.file not in index["shards"] or not (folder / shard.file).exists()
  ]


def _read_index(
  folder: pathlib.Path, contents: feature_contents.Contents
) -> dict[str, Any]:
  """The index, or that of a folder with nothing in it."""
  path = folder / _INDEX
  fresh = {
    "version": 1,
    "digest": contents.digest,
    "dtype": contents.dtype,
    "widths": contents.layout.widths,
    "tap_layers": list(contents.tap_layers),
    "rows": len(contents.rows.lengths),
    "positions": int(np.sum(contents.rows.lengths, dtype=np.int64)),
    "shards": {},
  }
  if not path.exists():
    return fresh
  try:
    index = json.loads(path.read_text(encoding="utf-8"))
    found = index | {"shards": {}}
    for entry in index["shards"].values():
      int(entry["bytes"]), int(entry["checksum"])
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
    raise ValueError(
      f"{path}: no index of features ({error}); delete it and repeat the"
      " command, which computes the features again"
    ) from None
  if found != fresh:
    raise ValueError(
      f"{folder}: holds features of another target, other rows or other layers;"
      " name another folder, or delete it and repeat the command"
    )
  return index


def _write_index(folder: pathlib.Path, index: dict[str, Any]) -> None:
  partial = folder / f"{_INDEX}.partial"
  with partial.open("w", encoding="utf-8") as file:
    json.dump(index, file, indent=1)
    file.flush()
    os.fsync(file.fileno())
  partial.replace(folder / _INDEX)
  folders.sync(folder)


def write(
  folder: pathlib.Path,
  contents: feature_contents.Contents,
  *,
  batch_size: int = 32,
  mesh: jax.sharding.Mesh | None = None,
  progress: Callable[[int], None] = lambda tokens: None,
) -> None:
  """Computes the files that are missing.

  With several processes all must call it: all compute, the first one writes.

  Args:
    folder: made if it is missing.
    contents: what is to lie there.
    batch_size: rows a pass of the target.
    mesh: on which the target lies.
    progress: called with numbers of new tokens, padding included.

  Raises:
    ValueError: as `FeatureCache`; another process writes there; or it cannot be
      written, as on a full disk. Complete files are kept.
  """
  shards = feature_contents.shards_of(contents)
  length = contents.rows.tokens.shape[1]
  with contextlib.ExitStack() as stack:
    index, missing = {}, np.zeros((len(shards),), bool)
    with _agreeing():
      if jax.process_index() == 0:
        stack.enter_context(_locked(folder))
        index = _read_index(folder, contents)
        left = set(_missing(folder, index, shards))
        missing = np.array([shard in left for shard in shards], bool)
    if jax.process_count() > 1:
      missing = np.asarray(multihost_utils.broadcast_one_to_all(missing))
    for number, shard in enumerate(shards):
      if not missing[number]:
        progress((shard.stop - shard.first) * length)
        continue
      try:
        entry = _write_shard(
          folder / shard.file, contents, shard, batch_size, mesh, progress
        )
        with _agreeing():
          if entry is not None:
            index["shards"][shard.file] = entry
            _write_index(folder, index)
      except OSError as error:
        done = len(shards) - int(missing[number:].sum())
        raise ValueError(
          f"{folder}: features cannot be written ({error}); {done} of"
          f" {len(shards)} files are complete and stay: free space or name"
          " another folder, and repeat the command"
        ) from None


@contextlib.contextmanager
def _agreeing() -> Generator[None]:
  """What fails in the first process fails in all, as none goes on alone."""
  failure = None
  try:
    yield
  except (OSError, ValueError) as error:
    failure = error
  failed = failure is not None
  if jax.process_count() > 1:
    failed = multihost_utils.broadcast_one_to_all(np.asarray(failed))
  if failure is not None:
    raise failure
  if failed:
    raise ValueError("features cannot be written; the first process says why")


def _write_shard(
  path,
  contents: feature_contents.Contents,
  shard: feature_contents.Shard,
  batch_size,
  mesh,
  progress,
) -> dict[str, int] | None:
  """Computes one file; its entry in the index, in the process that writes."""
  part = contents.rows.select(shard.rows)
  length = contents.rows.tokens.shape[1]
  writer, written, entry = None, [], None
  with contextlib.ExitStack() as stack:
    with _agreeing():
      if jax.process_index() == 0:
        writer = feature_shards.Writer(
          path, contents.layout, part.lengths, contents.digest
        )
        stack.callback(writer.close)
    # One batch is written while the next one is computed.
    pool = stack.enter_context(concurrent.futures.ThreadPoolExecutor(1))
    for found in sources.compute(
      contents.target,
      part,
      contents.tap_layers,
      batch_size=batch_size,
      dtype=contents.dtype,
      mesh=mesh,
    ):
      # Errors wait until all processes have computed everything.
      concurrent.futures.wait(written)
      if writer is not None:
        written.append(pool.submit(_write_rows, writer, found))
      progress(found.fresh * length)
    with _agreeing():
      for one in written:
        one.result()
      if writer is not None:
        entry = writer.finish()
  return entry


def _write_rows(writer: feature_shards.Writer, found: sources.Computed) -> None:
  for place in range(len(found.rows) - found.fresh, len(found.rows)):
    writer.write(
      int(found.rows[place]),
      {
        "context_features": found.context_features[place],
        "last_hidden": found.last_hidden[place],
      },
    )


@contextlib.contextmanager
def _locked(folder: pathlib.Path) -> Generator[None]:
  """Makes the folder, and keeps other processes from writing there."""
  with contextlib.ExitStack() as stack:
    try:
      folder.mkdir(parents=True, exist_ok=True)
      file = stack.enter_context((folder / _LOCK).open("w"))
    except OSError as error:
      raise ValueError(f"{folder}: cannot be made ({error})") from None
    if not folders.try_lock(file.fileno()):
      raise ValueError(
        f"{folder}: another process is writing these features; wait for it and"
        " repeat the command"
      )
    yield


class FeatureCache:
  """Rows whose features lie in a folder that `write` has completed."""

  def __init__(self, folder: pathlib.Path, contents: feature_contents.Contents):
    """Looks at all files' sizes; rows are checked when they are first read.

    Raises:
      ValueError: the folder holds other features or not all of them, or a file
        is damaged. Names the file, and what to do.
    """
    index, shards = (
      _read_index(folder, contents),
      feature_contents.shards_of(contents),
    )
    if _missing(folder, index, shards):
      raise ValueError(
        f"{folder}: features are incomplete, as seen from this host"
      )
    self._rows, self._layout = contents.rows, contents.layout
    self._dtype = contents.target.cfg.dtype
    self._first_rows = np.array([shard.first for shard in shards])
    self._readers = [
      feature_shards.Reader(
        folder / shard.file,
        self._layout,
        contents.rows.lengths[shard.first : shard.stop],
        contents.digest,
        size=index["shards"][shard.file]["bytes"],
        checksum=index["shards"][shard.file]["checksum"],
      )
      for shard in shards
    ]

  @property
  def row_bytes(self) -> int:
    states = self._rows.tokens.shape[1] * self._layout.position_bytes
    return sources.token_bytes(self._rows) + states

  def __len__(self) -> int:
    return len(self._rows.tokens)

  def read(self, rows: np.ndarray) -> dict[str, np.ndarray]:
    shape = len(rows), self._rows.tokens.shape[1]
    dtype = jnp.dtype(self._layout.dtype)
    states = {
      name: np.empty((*shape, width), dtype)
      for name, width in self._layout.widths.items()
    }

    def fill(place: int) -> None:
      row = int(rows[place])
      length = int(self._rows.lengths[row])
      number = int(np.searchsorted(self._first_rows, row, "right")) - 1
      self._readers[number].read(
        row - int(self._first_rows[number]),
        {name: x[place, :length] for name, x in states.items()},
      )
      for x in states.values():
        x[place, length:] = 0

    if shape[1] * self._layout.position_bytes < _LARGE_ROW_BYTES:
      for place in range(len(rows)):
        fill(place)
    else:
      list(self._pool.map(fill, range(len(rows))))
    return sources.read_tokens(self._rows, rows) | states

  @functools.cached_property
  def _pool(self) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(
      _READERS, thread_name_prefix="feature-cache"
    )

  def features(self, placed: PyTree) -> anchors.TrainBatch:
    """The batch, with states in the target's own dtype."""
    states = {name: placed[name] for name in self._layout.widths}
    if self._layout.dtype != self._dtype:
      states = _cast(states, self._dtype)
    return anchors.TrainBatch(**(placed | states))


@functools.partial(jax.jit, static_argnames="dtype")
def _cast(tree: PyTree, dtype: str) -> PyTree:
  return jax.tree.map(lambda x: x.astype(dtype), tree)
