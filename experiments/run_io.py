"""What a run leaves on disk and shows in the terminal.

Library code is pure, so everything that touches files, clocks and streams is
here: the work directory, the metrics file, the progress line, tables, and the
wrapper that turns a user's mistake into one line. A run must be explainable
from its directory alone: which command, which code, which versions, which
device (`provenance`). One run is in a directory at a time (`work_lock`), and in
a run of several processes only the first writes there.

Not here: checkpoints (`dspine_jax.checkpoints`) and any decision of a run.
"""

import contextlib
import dataclasses
import enum
import json
import math
import operator
import os
import pathlib
import shlex
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn, TextIO

import jax
import numpy as np
from absl import app, flags, logging

from experiments import (
  disk_errors,
  event_file,
  flag_parsing,
  provenance,
  run_config,
  work_lock,
)

type Rows = Sequence[Sequence[Any]]


def to_json(obj: Any) -> Any:
  """Returns `obj` as what JSON can hold: arrays as lists, NaN and inf as null.

  Args:
    obj: scalars, arrays (numpy or JAX), mappings, sequences, sets, paths,
      enums, dtypes and dataclass instances, nested at will.
  """
  if isinstance(obj, enum.Enum):
    return to_json(obj.value)
  if isinstance(obj, np.ndarray | np.generic | jax.Array):
    return to_json(np.asarray(obj).tolist())
  if isinstance(obj, float):
    return obj if math.isfinite(obj) else None
  if obj is None or isinstance(obj, bool | int | str):
    return obj
  if isinstance(obj, Mapping):
    return {str(to_json(key)): to_json(value) for key, value in obj.items()}
  if dataclasses.is_dataclass(obj) and not isinstance(obj, type):
    fields = dataclasses.fields(obj)
    return {field.name: to_json(getattr(obj, field.name)) for field in fields}
  if isinstance(obj, list | tuple):
    return [to_json(item) for item in obj]
  if isinstance(obj, set | frozenset):
    return [to_json(item) for item in sorted(obj)]
  if isinstance(obj, os.PathLike):
    return os.fspath(obj)
  if isinstance(obj, np.dtype | type) and np.dtype(obj) != object:
    return np.dtype(obj).name  # jnp.float32 and the like, as config fields.
  raise TypeError(f"no JSON for {type(obj).__name__}: {obj!r}")


def write_json(path: str | os.PathLike[str], obj: Any) -> None:
  """Writes `obj` to `path` so that a reader sees the old or the new file only.

  Args:
    path: the file; its directory must exist.
    obj: see `to_json`. Keys keep their order.
  """
  text = json.dumps(to_json(obj), indent=2, ensure_ascii=False, allow_nan=False)
  _replace_file(pathlib.Path(path), text + "\n")


def _replace_file(path: pathlib.Path, text: str) -> None:
  # Not `tempfile`: its files are private (0600) and would stay so.
  partial = path.with_name(f".{path.name}.{os.getpid()}.tmp")
  try:
    with disk_errors.naming(path), partial.open("w", encoding="utf-8") as file:
      file.write(text)
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)


@dataclasses.dataclass(frozen=True, kw_only=True)
class WorkDir:
  """The directory of one run, and the names of the files in it.

  Attributes:
    path: the directory, which exists and can be written.
    writes: whether this process writes there: the first of the run's does.
    config: the settings of the run, checked when it is resumed.
    command: the command lines, one for each start of the run.
    provenance: code, versions and device of the latest start.
    metrics: one JSON object a line, one line for each written step.
  """

  path: pathlib.Path
  writes: bool = True

  @property
  def config(self) -> pathlib.Path:
    return self.path / "config.json"

  @property
  def command(self) -> pathlib.Path:
    return self.path / "command.txt"

  @property
  def provenance(self) -> pathlib.Path:
    return self.path / "provenance.json"

  @property
  def metrics(self) -> pathlib.Path:
    return self.path / "metrics.jsonl"


def open_work_dir(
  path: str, *, config: Mapping[str, Any], argv: Sequence[str], resume: bool
) -> WorkDir:
  """Makes the directory of a run, or enters it again, and records the start.

  The directory is this process's until `run_app` ends. Of a run of several
  processes (`jax.process_index`) the first does all this, the others nothing.

  Args:
    path: the value of the flag `--work_dir`.
    config: everything that decides the run's result. Leave out what may change
      when a run goes on, such as the number of steps.
    argv: the command line, usually `sys.argv`.
    resume: whether the run goes on from what the directory holds. False starts
      anew and overwrites config, command and provenance.

  Raises:
    ValueError: the directory cannot be made or written, another process is at
      work in it, or it holds what a run of another config made.
  """
  if not path:
    raise ValueError("--work_dir must name a directory")
  work_dir = WorkDir(path=pathlib.Path(path), writes=jax.process_index() == 0)
  if not work_dir.writes:
    return work_dir
  require_writable("--work_dir", work_dir.path, lock=True)
  if resume and work_dir.config.exists():
    resume = run_config.is_same(
      work_dir.config,
      to_json(config),
      command=work_dir.command,
      records=(work_lock.NAME, "config.json", "command.txt", "provenance.json"),
    )
  write_json(work_dir.config, config)
  with (
    disk_errors.naming(work_dir.command),
    work_dir.command.open("a" if resume else "w", encoding="utf-8") as file,
  ):
    file.write(shlex.join(argv) + "\n")
  write_json(work_dir.provenance, provenance.collect())
  return work_dir


def require_writable(
  flag: str, path: pathlib.Path, *, lock: bool = False
) -> None:
  """Makes a folder and writes to it.

  Args:
    flag: that names it, such as "--out".
    path: the folder, made with its parents.
    lock: whether it is this process's until `run_app` ends.

  Raises:
    ValueError: it cannot be made or written, or another process has its lock.
  """
  # Permission bits say little (root, read-only mounts, full disks): write.
  try:
    path.mkdir(parents=True, exist_ok=True)
    if lock:
      work_lock.hold(path)
    with tempfile.TemporaryFile(dir=path) as file:
      file.write(b"x")
  except OSError as error:
    reason = error.strerror or str(error)
    raise ValueError(
      f"{flag}={path}: cannot make or write this directory ({reason})"
    ) from error


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
  """Reads a `metrics.jsonl`, less a last line that a killed run left torn.

  Raises:
    ValueError: a line before the last is no JSON.
  """
  rows: list[dict[str, Any]] = []
  lines = pathlib.Path(path).read_text(encoding="utf-8").splitlines()
  for number, line in enumerate(lines, start=1):
    try:
      rows.append(json.loads(line))
    except ValueError as error:
      if number < len(lines):
        raise ValueError(f"{path}: line {number}: {error}") from error
  return rows


class MetricsWriter(contextlib.AbstractContextManager["MetricsWriter"]):
  """Appends scalars to `metrics.jsonl` and to TensorBoard, as a `with` block.

  Every line is flushed, so that a killed run loses one line at most. A run that
  goes on at `start_step` first drops what it will write again. In a process
  that does not write (`WorkDir.writes`) it does nothing.
  """

  def __init__(self, work_dir: WorkDir, *, start_step: int = 0):
    self._work_dir = work_dir
    self._events: event_file.EventFile | None = None
    if not work_dir.writes:
      return
    kept: list[dict[str, Any]] = []
    if work_dir.metrics.exists() and start_step > 0:
      rows = read_metrics(work_dir.metrics)
      kept = [row for row in rows if row["step"] < start_step]
    _replace_file(work_dir.metrics, "".join(_json_line(row) for row in kept))
    self._events = event_file.EventFile(
      work_dir.path / "tensorboard", start_step
    )
    self._file = work_dir.metrics.open("a", encoding="utf-8")

  def write(self, step: int, metrics: Mapping[str, Any]) -> None:
    """Writes the scalars of one step.

    Args:
      step: the step that made them, from 0.
      metrics: name to scalar (Python, numpy or JAX). NaN and inf become null.
    """
    step = operator.index(step)
    if "step" in metrics:
      raise ValueError("metrics must not hold the name 'step'")
    values = {name: _scalar(name, value) for name, value in metrics.items()}
    if self._events is None:
      return
    with disk_errors.naming(self._work_dir.metrics):
      self._file.write(_json_line({"step": step, **values}))
      self._file.flush()
    self._events.write(step, values)

  def close(self) -> None:
    """Closes both files. May be called again."""
    if self._events is None:
      return
    events, self._events = self._events, None
    with contextlib.closing(events), disk_errors.naming(self._work_dir.metrics):
      self._file.close()

  def __exit__(self, *exc_info: object) -> None:
    self.close()


def _scalar(name: str, value: Any) -> float:
  if np.size(value) != 1:
    raise ValueError(f"metric {name!r} is no scalar: shape {np.shape(value)}")
  return float(np.asarray(value).reshape(()))


def _json_line(row: Mapping[str, Any]) -> str:
  return json.dumps(to_json(row), allow_nan=False) + "\n"


class Progress(contextlib.AbstractContextManager["Progress"]):
  """One line with how far, how fast and how long yet, as a `with` block.

  On a terminal the line is rewritten, at most ten times a second. Elsewhere (a
  log file, CI) a new line is printed for the first update, then at most every
  `every_s` seconds, and for the last. The rate leaves out the time up to the
  first update, which is mostly compilation, as soon as there is a second one.

  Args:
    total: how many units are to be done, those of `start` among them.
    label: what is being done, such as "train".
    unit: what is counted, such as "steps".
    stream: where to print; None is stderr.
    every_s: seconds between lines where there is no terminal.
    start: units done before, by the run that this one resumes.
    clock: seconds from any origin; for tests.
  """

  def __init__(
    self,
    total: int,
    label: str,
    unit: str,
    stream: TextIO | None = None,
    *,
    every_s: float = 10.0,
    start: int = 0,
    clock: Callable[[], float] = time.monotonic,
  ):
    self._total, self._label, self._unit = total, label, unit
    self._stream = sys.stderr if stream is None else stream
    self._terminal = self._stream.isatty()
    self._gap_s = 0.1 if self._terminal else every_s
    self._clock = clock
    self._start, self._start_s = start, clock()
    self._done, self._shown = start, {}
    self._first: tuple[int, float] | None = None  # Units, time.
    self._printed_s = -math.inf
    self._pending = self._closed = False

  def update(self, n: int = 1, **shown: Any) -> None:
    """Counts `n` more units, and shows `shown` after the numbers."""
    now_s = self._clock()
    self._done += n
    self._shown = shown
    self._pending = True
    if self._first is None:
      self._first = (self._done, now_s)
    if self._done >= self._total or now_s - self._printed_s >= self._gap_s:
      self._print(now_s)

  def close(self) -> None:
    """Prints the last state if it was held back. May be called again."""
    if self._closed:
      return
    self._closed = True
    if self._pending:
      self._print(self._clock())
    if self._terminal and self._printed_s > -math.inf:
      self._stream.write("\n")
      self._stream.flush()

  def __exit__(self, *exc_info: object) -> None:
    self.close()

  def _print(self, now_s: float) -> None:
    line = self._line(now_s)
    if self._terminal:
      columns = shutil.get_terminal_size().columns
      self._stream.write(f"\r{line[: columns - 1]}\x1b[K")
    else:
      self._stream.write(line + "\n")
    self._stream.flush()
    self._printed_s, self._pending = now_s, False

  def _line(self, now_s: float) -> str:
    rate = self._rate(now_s)
    left = max(self._total - self._done, 0)
    percent = 100.0 * self._done / self._total if self._total else 100.0
    parts = [
      f"{self._label}: {self._done}/{self._total} {self._unit}",
      f"{percent:.1f}%",
      f"{rate:.3g} {self._unit}/s" if rate else f"? {self._unit}/s",
      f"elapsed {_duration(now_s - self._start_s)}",
      f"ETA {_duration(left / rate) if rate else '?'}",
    ]
    parts += [f"{name}={_cell(value)}" for name, value in self._shown.items()]
    return "  ".join(parts)

  def _rate(self, now_s: float) -> float:
    since, since_s = self._start, self._start_s
    if self._first is not None and self._done > self._first[0]:
      since, since_s = self._first
    elapsed_s = now_s - since_s
    return (self._done - since) / elapsed_s if elapsed_s > 0 else 0.0


def _duration(seconds: float) -> str:
  minutes, rest = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def table(rows: Rows, headers: Sequence[str]) -> str:
  """Returns an aligned plain-text table: text to the left, numbers right.

  Args:
    rows: one sequence of cells each; floats get four digits, None is a dash.
    headers: one for each column.
  """
  columns = [_column(rows, headers, i) for i in range(len(headers))]
  for column, right in columns:
    width = max(map(len, column))
    column.insert(1, "-" * width)
    column[:] = [x.rjust(width) if right else x.ljust(width) for x in column]
  lines = zip(*(column for column, _ in columns), strict=True)
  return "\n".join("  ".join(line).rstrip() for line in lines)


def markdown_table(rows: Rows, headers: Sequence[str]) -> str:
  """Returns the table of `table` in Markdown."""
  columns = [_column(rows, headers, i) for i in range(len(headers))]
  for column, right in columns:
    column[:] = [cell.replace("|", "\\|") for cell in column]
    column.insert(1, "---:" if right else "---")
  lines = zip(*(column for column, _ in columns), strict=True)
  return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def _column(
  rows: Rows, headers: Sequence[str], index: int
) -> tuple[list[str], bool]:
  """Returns a column's cells, the header first, and whether it is numeric."""
  for row in rows:
    if len(row) != len(headers):
      raise ValueError(f"row {row!r} has not one cell for each of {headers!r}")
  values = [to_json(row[index]) for row in rows]
  filled = [value for value in values if value is not None]
  numeric = all(isinstance(value, int | float) for value in filled)
  cells = [headers[index], *map(_cell, values)]
  return cells, numeric and bool(filled)


def _cell(value: Any) -> str:
  value = to_json(value)
  if value is None:
    return "-"
  return f"{value:.4g}" if isinstance(value, float) else str(value)


def run_app(main: Callable[[Sequence[str]], Any]) -> None:
  """Runs `main` as absl does, with a user's mistake told in one line.

  A `ValueError` from `main`, a full or read-only disk (`disk_errors`), an
  unknown or invalid flag, or a stray argument prints `error: ...` to stderr and
  exits with status 1. With DSPINE_TRACEBACK=1 in the environment, such an error
  shows where it came from. Work directories are given back.

  Args:
    main: takes what is left of the command line: the program's name.
  """

  def guarded(argv: Sequence[str]) -> Any:
    if not flags.FLAGS["verbosity"].present:
      logging.set_verbosity(logging.WARNING)  # Start-up notes of libraries.
    try:
      if len(argv) > 1:
        raise ValueError(f"unexpected arguments: {shlex.join(argv[1:])}")
      return main(argv)
    except Exception as error:
      told = disk_errors.message(error)
      if told is None and isinstance(error, ValueError):
        told = str(error) or repr(error)
      if told is None or os.environ.get("DSPINE_TRACEBACK") == "1":
        raise
      _fail(told)
    finally:
      work_lock.release_all()

  app.run(guarded, flags_parser=_parse_flags)


def _parse_flags(argv: Sequence[str]) -> list[str]:
  try:
    return flag_parsing.parse(argv)
  except ValueError as error:
    _fail(str(error))


def _fail(message: str) -> NoReturn:
  print("error:", " ".join(message.split()), file=sys.stderr)
  sys.exit(1)
