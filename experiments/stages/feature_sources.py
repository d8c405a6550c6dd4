"""Features of training rows for the scripts: in memory, on disk or on the fly.

What `dspine_jax.data.sources` offers, with the size told beforehand, progress,
and the choice between a cache and computing each window's features anew.
"""

import functools
import pathlib
import shutil
import sys
from collections.abc import Callable

import jax
import numpy as np
from jax.experimental import multihost_utils

from dspine_jax.data import answers as answers_lib
from dspine_jax.data import feature_cache, feature_contents, sources
from dspine_jax.data import rows as rows_lib
from experiments import run_io, targets
from experiments.stages import devices

CHOICES = ("auto", "cache", "on_the_fly")
# "auto" leaves the rest of the disk to checkpoints and to others.
_SHARE_OF_FREE_SPACE = 0.9
# Of a pass of the target, for the cache.
_MOST_ROWS, _MOST_TOKENS = 32, 1 << 16


def in_memory(
  target: targets.NamedTarget,
  answers: answers_lib.AnswerSet,
  taps: tuple[int, ...],
) -> sources.FeatureSet:
  """Features of all answers, with progress."""
  with run_io.Progress(answers.tokens.size, "features", "tokens") as progress:
    return sources.compute_features(
      target.model,
      rows_lib.from_answers(answers),
      taps,
      progress=progress.update,
    )


def on_demand(
  target: targets.NamedTarget,
  answers: answers_lib.AnswerSet,
  taps: tuple[int, ...],
  folder: pathlib.Path,
) -> Callable[[], sources.Source]:
  """A float32 cache below `folder`, at the first call and only once."""

  @functools.cache
  def source():
    contents = feature_contents.Contents(
      target=target.model,
      rows=rows_lib.from_answers(answers),
      tap_layers=taps,
      dtype="float32",
    )
    return _cached(folder, contents, None)

  return source


def for_training(
  target: targets.NamedTarget,
  rows: rows_lib.Rows,
  taps: tuple[int, ...],
  *,
  choice: str,
  folder: pathlib.Path,
  dtype: str,
  most_gb: float | None = None,
  mesh: jax.sharding.Mesh | None = None,
) -> sources.Source:
  """A cache of features, or a source that computes them for each window.

  Args:
    target: whose features they are.
    rows: of training.
    taps: tapped layers, ascending.
    choice: one of `CHOICES`; "auto" takes a cache if it takes less than nine
      tenths of the free space, and no more than `most_gb`.
    folder: for caches; all processes must see it.
    dtype: of the features on disk.
    most_gb: most gigabytes (10^9 bytes) that "auto" writes; None is no limit.
    mesh: on which the target lies.

  Raises:
    ValueError: "cache" does not fit on the disk; or the cache is damaged.
  """
  if choice == "on_the_fly":
    return sources.OnTheFly(target.model, rows, taps)
  contents = feature_contents.Contents(
    target=target.model, rows=rows, tap_layers=taps, dtype=dtype
  )
  if choice == "auto" and not _fits(folder, contents, most_gb):
    return sources.OnTheFly(target.model, rows, taps)
  return _cached(folder, contents, mesh)


def _fits(
  folder: pathlib.Path,
  contents: feature_contents.Contents,
  most_gb: float | None,
) -> bool:
  """Whether "auto" takes a cache; a "no" is kept for when the run goes on.

  Features in memory and on disk differ in their last bits: a run that changed
  between them would not end at the same parameters.
  """
  own = feature_cache.folder_for(folder, contents)
  mark = own / "on_the_fly"
  missing, free = _space(folder, contents)
  most = _SHARE_OF_FREE_SPACE * free
  if most_gb is not None:
    most = min(most, most_gb * 1e9)

  def decide():
    return np.array([mark.exists(), missing > most])

  before, too_large = _of_first_process(decide)
  if before:
    _say(f"features: computed on the fly, as before (because of {mark})")
  elif too_large:
    _say(
      f"features: {_size(missing)} do not fit in {folder}"
      f" ({_size(free)} free), so they are computed on the fly"
    )
    if jax.process_index() == 0:
      own.mkdir(parents=True, exist_ok=True)
      mark.touch()
  return not before and not too_large


def _cached(
  folder: pathlib.Path,
  contents: feature_contents.Contents,
  mesh: jax.sharding.Mesh | None,
) -> feature_cache.FeatureCache:
  """The cache, computed with progress as far as it is missing."""
  own = feature_cache.folder_for(folder, contents)
  missing, free = _space(folder, contents)
  count, length = contents.rows.tokens.shape
  if missing:
    _say(f"features: {_size(missing)} to {own} ({_size(free)} free)")
    if missing > free:
      raise ValueError(
        f"{folder}: features take {_size(missing)} and"
        f" {_size(free)} are free there; free space, or for train_drafter"
        " name another folder (--feature_cache) or compute them on the fly"
        " (--features=on_the_fly)"
      )
    with run_io.Progress(count * length, "features", "tokens") as progress:
      feature_cache.write(
        own,
        contents,
        batch_size=_batch_size(count, length, mesh),
        mesh=mesh,
        progress=progress.update,
      )
  return devices.together(lambda: feature_cache.FeatureCache(own, contents))


def _batch_size(count: int, length: int, mesh: jax.sharding.Mesh | None) -> int:
  """Rows a pass, of about the same memory for short and long rows."""
  rows = min(count, _MOST_ROWS, max(1, _MOST_TOKENS // length))
  devices = 1 if mesh is None else mesh.size
  return -(-rows // devices) * devices


def _space(
  folder: pathlib.Path, contents: feature_contents.Contents
) -> tuple[int, int]:
  """Bytes yet to be written, and bytes that are free."""
  own = feature_cache.folder_for(folder, contents)

  def measure():
    parents = (folder, *folder.absolute().parents)
    existing = next(path for path in parents if path.exists())
    missing = feature_cache.missing_bytes(own, contents)
    return np.array([missing, shutil.disk_usage(existing).free], np.float64)

  missing, free = _of_first_process(measure)
  return int(missing), int(free)


def _of_first_process(action: Callable[[], np.ndarray]) -> np.ndarray:
  """What the first process finds, in all of them; or all fail."""
  found = devices.together(action)
  if jax.process_count() > 1:
    found = np.asarray(multihost_utils.broadcast_one_to_all(found))
  return found


def _size(count: float) -> str:
  """Bytes with three digits, in powers of 1000."""
  for unit in ("B", "kB", "MB", "GB"):
    if count < 999.5:
      return f"{count:.3g} {unit}"
    count /= 1000
  return f"{count:.3g} TB"


def _say(text: str) -> None:
  if jax.process_index() == 0:
    # Beside the progress; standard output is for results.
    print(text, file=sys.stderr, flush=True)
