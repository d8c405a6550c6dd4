"""One run at a time in a work directory.

Two runs that write the same files would mix their results, so a run holds a
lock (flock) on the file `.lock` of its directory as long as its process lives.
The kernel frees it when the process ends, however it ends: a killed run leaves
the file, but no lock. Reading a directory needs none.

A file system that knows no such locks gives no protection, and no error.
"""

import datetime
import json
import os
import pathlib
import socket

from dspine_jax.checkpoints import folders

NAME = ".lock"
# Folder -> the descriptor whose lock this process holds.
_held: dict[pathlib.Path, int] = {}


def hold(folder: pathlib.Path) -> None:
  """Takes the lock of an existing folder, or keeps it.

  Raises:
    ValueError: another process holds it; the message names that process.
    OSError: the lock file cannot be made or written.
  """
  folder = folder.resolve()
  path = folder / NAME
  if folder in _held:
    if _is_file(_held[folder], path):
      return
    os.close(_held.pop(folder))  # The folder was deleted and made again.
  while True:
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o666)
    try:
      _lock(descriptor, folder)
      # Its holder may have deleted the file before it let go.
      if _is_file(descriptor, path):
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, _signature(), 0)
        _held[folder] = descriptor
        return
    finally:
      if _held.get(folder) != descriptor:
        os.close(descriptor)


def held() -> list[pathlib.Path]:
  """The folders that this process has locked, in the order of locking."""
  return list(_held)


def release_all() -> None:
  """Gives every lock back and deletes its file."""
  while _held:
    folder, descriptor = _held.popitem()
    path = folder / NAME
    try:
      if _is_file(descriptor, path):
        path.unlink()
    except OSError:
      pass  # It says nothing without its lock.
    finally:
      os.close(descriptor)


def _lock(descriptor: int, folder: pathlib.Path) -> None:
  if not folders.try_lock(descriptor):
    raise ValueError(
      f"--work_dir={folder}: {_holder(descriptor)} is at work in it; wait until"
      " it ends, or name another directory"
    )


def _holder(descriptor: int) -> str:
  try:
    who = json.loads(os.pread(descriptor, 4096, 0))
    return f"process {who['pid']} on {who['host']} (since {who['since']})"
  except (OSError, ValueError, KeyError, TypeError):
    return "another process"  # It has the lock, but has not signed yet.


def _signature() -> bytes:
  now = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
  who = {"host": socket.gethostname(), "pid": os.getpid(), "since": now}
  return json.dumps(who).encode() + b"\n"


def _is_file(descriptor: int, path: pathlib.Path) -> bool:
  try:
    return os.path.samestat(os.fstat(descriptor), os.stat(path))
  except FileNotFoundError:
    return False
