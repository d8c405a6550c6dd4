"""Trains one drafter on a target's answers, with progress and checkpoints."""

import pathlib
from collections.abc import Callable, Sequence

import jax
import numpy as np

from dspine_jax import configs
from dspine_jax.checkpoints import drafter_folder, orbax
from dspine_jax.data import answers as answers_lib
from dspine_jax.data import sources
from dspine_jax.training import loop
from experiments import run_io, targets
from experiments.stages import devices


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
      raise ValueError(
        f"--answers={folder}: no part {path.name} there{_served(folder)}"
      )
  answers = answers_lib.join([answers_lib.load(path) for path in paths])
  if answers.tokens.max() >= target.model.cfg.vocab_size:
    raise ValueError(
      f"--answers={folder}: token {answers.tokens.max()} is outside the"
      f" vocab_size={target.model.cfg.vocab_size} of --target={target.name}"
    )
  return answers


def _served(folder: str | pathlib.Path) -> str:
  """What to do with a folder that has a served model's answers alone."""
  served = sorted(
    path
    for path in pathlib.Path(folder).glob("train_t*.jsonl")
    if not path.name.endswith(".left_out.jsonl")
  )
  if not served or any(pathlib.Path(folder).glob("*.npz")):
    return ""
  return (
    f": a served model's answers, for train_drafter --chats={served[0]};"
    " answers to decode (held_out, benchmarks) come from make_answers without"
    " --server, with --target and a --work_dir of their own"
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
    raise ValueError(
      f"--answers={folder}: no part to decode there{_served(folder)}"
    )
  sets = {name: load_parts(folder, [name], target) for name in names}
  return {
    name: part.select(np.arange(min(limit, len(part.lengths))))
    for name, part in sets.items()
  }


def train_drafter(
  target: targets.NamedTarget,
  source: sources.Source,
  cfg: configs.DrafterConfig,
  train_cfg: configs.TrainConfig,
  work_dir: run_io.WorkDir,
  *,
  checkpoint_every: int,
  label: str,
  mesh: jax.sharding.Mesh | None = None,
  stop: Callable[[], bool] = lambda: False,
) -> loop.Trained:
  """Trains with progress, metrics and checkpoints; writes WORK_DIR/drafter.

  With several processes all call it; the first one shows and writes.

  Args:
    target: whose drafter it is.
    source: of the training rows.
    cfg: the drafter.
    train_cfg: the run.
    work_dir: of the run.
    checkpoint_every: steps between checkpoints.
    label: of the progress line.
    mesh: devices to train on.
    stop: whether to save and end after this step.

  Raises:
    loop.Stopped: `stop` said so.
    ValueError: as `loop.train`; the drafter cannot be written.
  """
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
      source,
      mesh=mesh,
      checkpoints=checkpoints,
      checkpoint_every=checkpoint_every,
      on_start=reporter.start,
      on_metrics=reporter.report,
      stop=stop,
    )

  def export():
    if work_dir.writes:
      drafter_folder.save_drafter(
        work_dir.path / "drafter", trained.params, trained.buffers, cfg
      )

  devices.together(export)
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
    if not self._work_dir.writes:
      return
    self._writer = run_io.MetricsWriter(self._work_dir, start_step=step)
    self._progress = run_io.Progress(
      self._total * self._block_tokens,
      self._label,
      "block tokens",
      start=step * self._block_tokens,
    )

  def report(self, step: int, metrics: dict[str, np.ndarray]) -> None:
    """One line of metrics; per-slot accuracies get a name each."""
    if not self._work_dir.writes:
      return
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
