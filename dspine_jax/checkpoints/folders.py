"""A folder that takes the place of another one in a single step.

`replacing` is how checkpoints are exported: whoever looks at the folder, also
after the export was killed, sees the old one or the new one. Not here: what is
in the folder (`tensors.py`), and checkpoints of a running training, which Orbax
replaces by itself (`orbax.py`).
"""

import contextlib
import ctypes
import errno
import fcntl
import os
import pathlib
import shutil
from collections.abc import Generator

_AT_FDCWD, _RENAME_EXCHANGE = -100, 2  # Of Linux's renameat2.


@contextlib.contextmanager
def replacing(folder: pathlib.Path | str) -> Generator[pathlib.Path]:
  """A new folder beside `folder` that takes its place at the end.

  Files of the old folder that are no weights (`*.safetensors` and their index)
  and were not written anew are carried over: tokenizer, chat template. What a
  killed export left behind, `.NAME.partial` beside the folder, is removed by
  the next one.

  Args:
    folder: need not exist; nor need its parents.

  Yields:
    The empty folder to write into. If the block raises, it is removed and
    `folder` stays as it was.

  Raises:
    ValueError: another process is exporting to `folder`, `folder` is a file, or
      the folder cannot be made or put in place (full disk, no permission).
  """
  folder = pathlib.Path(os.path.realpath(folder))
  if folder.exists() and not folder.is_dir():
    raise ValueError(f"{folder}: is a file, not a folder")
  fresh = folder.with_name(f".{folder.name}.partial")
  with contextlib.ExitStack() as locks, _named_errors(folder):
    _make_locked(fresh, folder, locks)
    _restore(folder)
    try:
      yield fresh
      if folder.exists():
        # Locked, too: it bears the other name while it is removed.
        _lock(folder, folder, locks)
        _carry_over(folder, fresh)
      for path in (*fresh.rglob("*"), fresh):
        sync(path)
      _swap(fresh, folder)
    except BaseException:
      shutil.rmtree(fresh, ignore_errors=True)
      raise
    # From here on, what bears the name of `fresh` is another export's.
    sync(folder.parent)


def sync(path: pathlib.Path) -> None:
  """Waits until a file or folder is on the disk; links are left alone."""
  if path.is_symlink():
    return
  handle = os.open(path, os.O_RDONLY)
  try:
    os.fsync(handle)
  finally:
    os.close(handle)


@contextlib.contextmanager
def _named_errors(folder: pathlib.Path) -> Generator[None]:
  try:
    yield
  except OSError as error:
    raise ValueError(
      f"{folder}: cannot be written ({error}); what was there before is"
      " unchanged"
    ) from None


def _make_locked(
  fresh: pathlib.Path, folder: pathlib.Path, locks: contextlib.ExitStack
) -> None:
  """Makes `fresh`, empty and locked until this process ends or is done."""
  while True:
    fresh.mkdir(parents=True, exist_ok=True)
    handle = _lock(fresh, folder, locks)
    # Its last owner may have put it in place before the lock was ours.
    with contextlib.suppress(FileNotFoundError):
      if os.path.samestat(os.fstat(handle), fresh.stat()):
        break
  for path in fresh.iterdir():
    if path.is_dir() and not path.is_symlink():
      shutil.rmtree(path)
    else:
      path.unlink()


def _lock(
  path: pathlib.Path, folder: pathlib.Path, locks: contextlib.ExitStack
) -> int:
  handle = os.open(path, os.O_RDONLY)
  locks.callback(os.close, handle)
  if not try_lock(handle):
    raise ValueError(
      f"{folder}: another process is exporting to it; wait for it or choose"
      " another folder"
    )
  return handle


# What `flock` says on file systems without locks.
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


def try_lock(handle: int) -> bool:
  """Locks an open file until it is closed or its process ends.

  Returns:
    False if another process has the lock; True also where there are no locks.
  """
  try:
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
  except BlockingIOError:
    return False
  except OSError as error:
    if error.errno not in _NO_LOCKS:
      raise
  return True


def _carry_over(folder: pathlib.Path, fresh: pathlib.Path) -> None:
  """Links what was not written anew into `fresh`."""

  def leave(where: str, names: list[str]) -> set[str]:
    if pathlib.Path(where) != folder:
      return set()
    weights = (".safetensors", ".safetensors.index.json", ".partial")
    return {
      name
      for name in names
      if name.endswith(weights) or (fresh / name).exists()
    }

  shutil.copytree(
    folder,
    fresh,
    symlinks=True,
    ignore=leave,
    copy_function=_link,
    dirs_exist_ok=True,
  )


def _link(source: str, to: str) -> None:
  try:
    os.link(source, to)
  except OSError:  # A file system without hard links.
    shutil.copy2(source, to)


def _old(folder: pathlib.Path) -> pathlib.Path:
  return folder.with_name(f".{folder.name}.old")


def _restore(folder: pathlib.Path) -> None:
  """Undoes a swap that was killed between its two renames."""
  old = _old(folder)
  if not old.exists():
    return
  if folder.exists():
    shutil.rmtree(old)
  else:
    old.rename(folder)


def _swap(fresh: pathlib.Path, folder: pathlib.Path) -> None:
  """Puts `fresh` in the place of `folder`."""
  if not folder.exists():
    fresh.rename(folder)
  elif _exchange(fresh, folder):
    shutil.rmtree(fresh, ignore_errors=True)
  else:
    # Not one step: `_restore` and `missing` know what a kill leaves here.
    old = _old(folder)
    folder.rename(old)
    fresh.rename(folder)
    shutil.rmtree(old)


def _exchange(first: pathlib.Path, second: pathlib.Path) -> bool:
  """Exchanges two paths in one step; False where the system cannot."""
  rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
  if rename is None:
    return False
  paths = os.fsencode(first), os.fsencode(second)
  arguments = _AT_FDCWD, paths[0], _AT_FDCWD, paths[1], _RENAME_EXCHANGE
  if rename(*arguments) == 0:
    return True
  code = ctypes.get_errno()
  if code in (errno.EINVAL, errno.ENOSYS, errno.ENOTSUP):
    return False
  raise OSError(code, os.strerror(code), str(second))


def missing(folder: pathlib.Path) -> str:
  """Why there is no `folder`, for an error message."""
  old = _old(folder)
  if old.is_dir():
    return (
      f"{folder}: no such folder: an export was killed while it replaced it;"
      f" {old} is the one before: rename it, or export again"
    )
  return f"{folder}: no such folder"
