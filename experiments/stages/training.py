"""Trains one drafter on a target's answers, with progress and checkpoints."""

import functools
import pathlib
from collections.abc import Callable, Sequence

import numpy as np

from dspine_jax import configs
from dspine_jax.checkpoints import drafter_folder, orbax
from dspine_jax.data import answers as answers_lib
from dspine_jax.data import features
from dspine_jax.training import loop
from experiments import run_io, targets


def load_parts(
  folder: str | pathlib.Path, names: Sequence[str], target: targets.NamedTarget
) -> answers_lib.AnswerSet:
  """The named parts of a make_answers directory, joined.

  Raises:
    ValueError: no name, a part that is missing or damaged, or answers that are
      not of this target's vocabulary.
  """
  if not names:
    raise ValueError(f"--answers={folder}: none of its parts is named")
  paths = [pathlib.Path(folder) / f"{name}.npz" for name in names]
  for path in paths:
    if not path.exists():
      raise ValueError(f"--answers={folder}: no part {path.name} there")
  answers = answers_lib.join([answers_lib.load(path) for path in paths])
  if answers.tokens.max() >= target.model.cfg.vocab_size:
    raise ValueError(
      f"--answers={folder}: token {answers.tokens.max()} is outside the"
      f" vocab_size={target.model.cfg.vocab_size} of --target={target.name}"
    )
  return answers


def compute_features(
  target: targets.NamedTarget,
  answers: answers_lib.AnswerSet,
  taps: tuple[int, ...],
  folder: pathlib.Path | None,
) -> features.FeatureSet:
  """Features of all answers, with progress."""
  with run_io.Progress(answers.tokens.size, "features", "tokens") as progress:
    return features.compute_features(
      target.model, answers, taps, folder=folder, progress=progress.update
    )


def load_benchmarks(
  folder: str | pathlib.Path,
  names: Sequence[str] | None,
  target: targets.NamedTarget,
  *,
  limit: int,
) -> dict[str, answers_lib.AnswerSet]:
  """Parts that are no training data, cut to their first `limit` prompts.

  Args:
    folder: of make_answers.
    names: which parts; None takes all whose name does not begin with "train".
    target: that answered.
    limit: most prompts of each.

  Raises:
    ValueError: as `load_parts`.
  """
  if names is None:
    paths = sorted(pathlib.Path(folder).glob("*.npz"))
    names = [p.stem for p in paths if not p.stem.startswith("train")]
  if not names:
    raise ValueError(f"--answers={folder}: no part to decode there")
  sets = {name: load_parts(folder, [name], target) for name in names}
  return {
    name: part.select(np.arange(min(limit, len(part.lengths))))
    for name, part in sets.items()
  }


def features_on_demand(
  target: targets.NamedTarget,
  answers: answers_lib.AnswerSet,
  taps: tuple[int, ...],
  folder: pathlib.Path | None = None,
) -> Callable[[], features.FeatureSet]:
  """`compute_features`, at the first call and only once."""
  return functools.cache(
    lambda: compute_features(target, answers, taps, folder)
  )


def train_drafter(
  target: targets.NamedTarget,
  data: features.FeatureSet,
  cfg: configs.DrafterConfig,
  train_cfg: configs.TrainConfig,
  work_dir: run_io.WorkDir,
  *,
  checkpoint_every: int,
  label: str,
) -> loop.Trained:
  """Trains with progress, metrics and checkpoints; writes WORK_DIR/drafter."""
  sequences = train_cfg.batch_size * train_cfg.accumulation
  block_tokens = sequences * train_cfg.num_anchors * cfg.block_size
  total = train_cfg.optimizer.total_steps
  with (
    orbax.TrainingCheckpoints(work_dir.path / "checkpoints") as checkpoints,
    _Reporter(work_dir, label, total, block_tokens) as reporter,
  ):
    trained = loop.train(
      cfg,
      train_cfg,
      target.model.tables,
      data,
      checkpoints=checkpoints,
      checkpoint_every=checkpoint_every,
      on_start=reporter.start,
      on_metrics=reporter.report,
    )
  drafter_folder.save_drafter(
    work_dir.path / "drafter", trained.params, trained.buffers, cfg
  )
  return trained


class _Reporter:
  """Progress line and metrics files of one run."""

  def __init__(self, work_dir, label: str, total: int, block_tokens: int):
    self._work_dir, self._label = work_dir, label
    self._total, self._block_tokens = total, block_tokens
    self._writer: run_io.MetricsWriter | None = None
    self._progress: run_io.Progress | None = None

  def __enter__(self):
    return self

  def __exit__(self, *unused):
    for part in (self._progress, self._writer):
      if part is not None:
        part.close()

  def start(self, step: int) -> None:
    """Opens the files at the first step that will be run."""
    self._writer = run_io.MetricsWriter(self._work_dir, start_step=step)
    self._progress = run_io.Progress(
      self._total * self._block_tokens,
      self._label,
      "block tokens",
      start=step * self._block_tokens,
    )

  def report(self, step: int, metrics: dict[str, np.ndarray]) -> None:
    """One line of metrics; per-slot accuracies get a name each."""
    assert self._writer is not None and self._progress is not None
    scalars = {}
    for name, value in metrics.items():
      if np.ndim(value) == 0:
        scalars[name] = float(value)
      else:
        scalars |= {f"{name}/{i + 1}": float(x) for i, x in enumerate(value)}
    self._writer.write(step, scalars)
    self._progress.update(
      self._block_tokens,
      step=step,
      loss=scalars["loss"],
      advancement=scalars["expected_advancement"],
    )
