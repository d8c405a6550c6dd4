"""A file of finished work that a killed run takes up again.

One JSON object a line: first the settings of the work, then a record for each
finished piece, in the order in which they were finished. A record is in the
kernel's hands as soon as `append` returns, so that SIGKILL loses none, and on
the disk a second later. A line that was being written is dropped on return.

What the records are made into is the caller's matter; the journal goes then.
"""

import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

type Key = int | tuple[int, ...]

_SYNC_EVERY_S = 1.0


class Journal:
  """Opens the journal at `path`, or begins it.

  Args:
    path: the file; its folder must exist.
    settings: everything that decides what the records are, as JSON.

  Raises:
    ValueError: the file is of other settings, or a line before the last is
      damaged.
  """

  def __init__(self, path: pathlib.Path, settings: Mapping[str, Any]):
    self.path = path
    self._places: dict[Key, tuple[int, int]] = {}  # Offset, bytes.
    self._file = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      self._end = self._read(json.loads(json.dumps(settings)))
      # What is torn goes now, so that the next line begins a line.
      os.ftruncate(self._file, self._end)
      if self._end == 0:
        self._write({"settings": settings})
      self._sync()
    except BaseException:
      os.close(self._file)
      raise

  def __contains__(self, key: Key) -> bool:
    return key in self._places

  def __len__(self) -> int:
    return len(self._places)

  def append(self, record: Mapping[str, Any]) -> None:
    """Adds a record; its `id`, a number or several, is its key.

    Raises:
      OSError: naming the file, for example if the disk is full. The records
        before are kept, and appending may be tried again.
    """
    self._places[_key(record)] = self._write(record)
    if time.monotonic() - self._synced_s > _SYNC_EVERY_S:
      self._sync()

  def read(self, key: Key) -> dict[str, Any]:
    """The record of a key."""
    offset, size = self._places[key]
    return json.loads(os.pread(self._file, size, offset))

  def records(self) -> Iterator[dict[str, Any]]:
    """All records, by ascending key."""
    return (self.read(key) for key in sorted(self._places))

  def close(self) -> None:
    """Closes the file, which stays. May be called again."""
    if self._file >= 0:
      self._sync()
      os.close(self._file)
      self._file = -1

  def remove(self) -> None:
    """Closes and deletes the file."""
    self.close()
    self.path.unlink(missing_ok=True)

  def _read(self, settings: Any) -> int:
    """Fills the index; returns the number of bytes in whole lines."""
    offset = 0
    with open(self._file, "rb", closefd=False) as lines:
      for number, line in enumerate(lines, start=1):
        if not line.endswith(b"\n"):
          break  # Torn. A whole line is never without its end.
        try:
          record = json.loads(line)
          name = "settings" if number == 1 else "id"
          if not isinstance(record, dict) or name not in record:
            raise ValueError(f"no object with `{name}`")
          if number > 1:
            self._places[_key(record)] = (offset, len(line))
          elif record["settings"] != settings:
            raise ValueError("it was begun with other settings or prompts")
        except ValueError as error:
          raise ValueError(
            f"{self.path}: line {number}: {error}; delete the file to begin"
            " this part again"
          ) from None
        offset += len(line)
    return offset

  def _write(self, record: Mapping[str, Any]) -> tuple[int, int]:
    text = json.dumps(record, ensure_ascii=False)
    # Halves of characters, which JSON can hold, become question marks.
    line = text.encode("utf-8", "replace") + b"\n"
    start, done = self._end, 0
    try:
      while done < len(line):
        done += os.pwrite(self._file, line[done:], start + done)
    except OSError as error:
      os.ftruncate(self._file, start)
      error.filename = os.fspath(self.path)
      raise
    self._end += len(line)
    return start, len(line)

  def _sync(self) -> None:
    os.fsync(self._file)
    self._synced_s = time.monotonic()


def _key(record: Mapping[str, Any]) -> Key:
  key = record["id"]
  return tuple(key) if isinstance(key, list | tuple) else key
