"""A full or read-only disk, told in one line instead of a traceback.

Such an error is nobody's mistake in the code, and the person at the terminal
can mend it. It may come up anywhere, so that `run_io.run_app` asks here about
whatever ended a script; writers that know their file name it with `naming`.
"""

import contextlib
import errno
import os
from collections.abc import Generator

from experiments import work_lock

_ADVICE = {
  errno.ENOSPC: "free space there, then repeat the command",
  errno.EDQUOT: "free space or raise the quota, then repeat the command",
  errno.EROFS: "make it writable or name another place",
}


@contextlib.contextmanager
def naming(path: str | os.PathLike[str]) -> Generator[None]:
  """Errors of the disk inside name `path`: `write` does not know its file."""
  try:
    yield
  except OSError as error:
    if error.errno in _ADVICE and error.filename is None:
      error.filename = os.fspath(path)
    raise


def message(error: BaseException) -> str | None:
  """One line about a disk that is behind `error`; None if none is.

  A `ValueError` raised from an error of the disk has said what it had to say.
  """
  last: BaseException | None = error
  while last is not None:
    number = _number(last)
    if number is not None:
      return _line(last, number)
    if last.__cause__ is not None:
      last = None if isinstance(last, ValueError) else last.__cause__
    else:
      last = None if last.__suppress_context__ else last.__context__
  return None


def _number(error: BaseException) -> int | None:
  if isinstance(error, OSError):
    return error.errno if error.errno in _ADVICE else None
  if isinstance(error, ValueError):
    return None
  # Libraries in other languages pass on the text alone.
  texts = (number for number in _ADVICE if os.strerror(number) in str(error))
  return next(texts, None)


def _line(error: BaseException, number: int) -> str:
  reason = os.strerror(number)
  if not isinstance(error, OSError):
    return f"{error}: {_ADVICE[number]}"
  name = error.filename
  if name is None:
    name = ", ".join(map(str, work_lock.held())) or "while writing"
  return f"{os.fsdecode(name)}: {reason}: {_ADVICE[number]}"
