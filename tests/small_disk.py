"""A disk of a few megabytes, for tests of what a full one does.

A tmpfs is a real file system that answers ENOSPC, and only the superuser may
mount one: elsewhere the tests that ask for it are skipped. The fixture is known
to every test (`pytest_plugins` in conftest.py).
"""

import os
import pathlib
import subprocess
from collections.abc import Callable, Iterator

import pytest

_PAGE = 4096


@pytest.fixture(name="small_disk")
def fixture_small_disk(
  tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[Callable[[float], pathlib.Path]]:
  """`small_disk(size_mb)`: an empty folder of that many megabytes (2^20)."""
  mounted: list[pathlib.Path] = []

  def mount(size_mb: float) -> pathlib.Path:
    folder = tmp_path_factory.mktemp("small_disk")
    size = f"size={int(size_mb * 2**20)}"
    done = _run("mount", "-t", "tmpfs", "-o", size, "tmpfs", str(folder))
    if done is None or done.returncode:
      reason = done.stderr.strip() if done else "there is no mount command"
      pytest.skip(f"a small disk needs a superuser who may mount: {reason}")
    mounted.append(folder)
    return folder

  try:
    yield mount
  finally:
    for folder in reversed(mounted):
      # Lazily: a process that the test has killed may still hold a file.
      _run("umount", "--lazy", str(folder))


def fill(folder: pathlib.Path, *, leave_kb: int = 0) -> pathlib.Path:
  """Fills the disk of `folder` up but for `leave_kb` (2^10, in whole pages).

  Returns:
    The file that does so, `ballast`; deleting it frees the disk again.
  """
  free = os.statvfs(folder).f_bavail * os.statvfs(folder).f_frsize
  ballast = folder / "ballast"
  size = (free - leave_kb * 2**10) // _PAGE * _PAGE
  ballast.write_bytes(b"\0" * max(size, 0))
  return ballast


def _run(*command: str) -> subprocess.CompletedProcess[str] | None:
  try:
    return subprocess.run(command, capture_output=True, text=True, timeout=60)
  except FileNotFoundError:
    return None
