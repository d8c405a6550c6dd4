"""Scalars for TensorBoard, written by the caller itself.

The `SummaryWriter` of tensorboardX writes in a thread; where the disk is full
the thread dies and the next steps wait for it for ever. Here the step that
cannot be written raises.
"""

import pathlib
import time
from collections.abc import Mapping
from typing import Any

from experiments import disk_errors

_FLUSH_EVERY_S = 30.0


class EventFile:
  """One file of events in a folder, which is made.

  Args:
    folder: where TensorBoard looks.
    start_step: what earlier files hold from this step on is hidden.
  """

  def __init__(self, folder: pathlib.Path, start_step: int):
    # Late: it is the one slow import here, and most scripts only read.
    from tensorboardX import event_file_writer, summary
    from tensorboardX.proto import event_pb2

    proto: Any = event_pb2  # Its classes are made when it is imported.
    self._folder = folder
    self._make_event, self._make_scalar = proto.Event, summary.scalar
    with disk_errors.naming(folder):
      folder.mkdir(exist_ok=True)
      self._file = event_file_writer.EventsWriter(str(folder / "events"))
      start = proto.SessionLog(status=proto.SessionLog.START)
      self._add(start_step, session_log=start)
      self._flush()

  def write(self, step: int, values: Mapping[str, float]) -> None:
    """Adds the scalars of a step; they reach the disk within half a minute."""
    with disk_errors.naming(self._folder):
      for name, value in values.items():
        self._add(step, summary=self._make_scalar(name, value))
      if time.monotonic() - self._flushed_s > _FLUSH_EVERY_S:
        self._flush()

  def close(self) -> None:
    """Writes what is held back."""
    with disk_errors.naming(self._folder):
      self._file.close()

  def _add(self, step: int, **content: Any) -> None:
    event = self._make_event(step=step, wall_time=time.time(), **content)
    self._file.write_event(event)

  def _flush(self) -> None:
    self._file.flush()
    self._flushed_s = time.monotonic()
