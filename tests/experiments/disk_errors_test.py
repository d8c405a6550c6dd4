"""A full disk is one line, and what was written before is whole."""

import errno
import json
import os
import pathlib
import subprocess
import sys

import numpy as np
import pytest

from dspine_jax.data import answers as answers_lib
from experiments import disk_errors, run_io
from tests import small_disk as disk
from tests import tiny_folder

ROOT = pathlib.Path(run_io.__file__).resolve().parent.parent

SCRIPT = """
import sys
from absl import flags
from experiments import run_io

_WORK_DIR = flags.DEFINE_string("work_dir", None, "Where.")


def main(argv):
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value, config={}, argv=argv, resume=True
  )
  with run_io.MetricsWriter(work_dir, start_step=1) as writer:
    for step in range(1, 10**6):
      writer.write(step, {f"loss{number}": 1.0 for number in range(20)})


if __name__ == "__main__":
  run_io.run_app(main)
"""


def test_a_full_disk_is_told_by_file_and_leaves_whole_metrics(
  small_disk, tmp_path
):
  folder = small_disk(1)
  script = tmp_path / "script.py"
  script.write_text(SCRIPT)
  done = subprocess.run(
    [sys.executable, str(script), f"--work_dir={folder}"],
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=120,
  )
  assert done.returncode == 1
  assert done.stderr.startswith(f"error: {folder}/"), done.stderr
  assert done.stderr.count("\n") == 1
  assert "No space left on device: free space there, then" in done.stderr
  rows = run_io.read_metrics(folder / "metrics.jsonl")
  steps = [row["step"] for row in rows]
  assert steps == list(range(1, len(steps) + 1)) and len(steps) > 100
  # Nothing is freed: the directory cannot even be entered.
  disk.fill(folder)
  before = {p: p.read_bytes() for p in folder.iterdir() if p.is_file()}
  assert folder / ".lock" not in before
  with pytest.raises(ValueError, match="No space left on device"):
    run_io.open_work_dir(str(folder), config={}, argv=[], resume=True)
  (folder / ".lock").unlink(missing_ok=True)
  after = {p: p.read_bytes() for p in folder.iterdir() if p.is_file()}
  assert after == before


def test_a_full_disk_leaves_the_old_results(small_disk):
  path = small_disk(0.25) / "results.json"
  with pytest.raises(OSError, match="No space") as caught:
    for size in range(10**6):
      run_io.write_json(path, {"rows": ["x" * 1000] * size})
  assert caught.value.filename == str(path)
  assert len(json.loads(path.read_text())["rows"]) == size - 1 > 50
  assert os.listdir(path.parent) == ["results.json"]


def test_a_full_disk_under_numpy_is_seen_through_its_own_errors(small_disk):
  folder = small_disk(0.25)
  path = folder / "part.npz"
  answers_lib.save(path, tiny_folder.random_answers(3))
  before = path.read_bytes()
  with pytest.raises(Exception) as caught:
    answers_lib.save(path, tiny_folder.random_answers(3000))
  message = disk_errors.message(caught.value)
  assert message is not None and "No space left on device" in message
  assert path.read_bytes() == before
  assert os.listdir(folder) == ["part.npz"]
  np.testing.assert_array_equal(answers_lib.load(path).lengths[:1], [76])


def chained(error, cause=None, context=None):
  """As after `raise error from cause`, or in the handling of `context`."""
  error.__context__ = cause or context
  if cause is not None:  # Even None would hide the context.
    error.__cause__ = cause
  return error


def full(name=None):
  return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), name)


@pytest.mark.parametrize(
  ("error", "words"),
  [
    (full("a/b"), "a/b: No space left on device: free space there"),
    (full(), "while writing: No space left on device"),
    (OSError(errno.EROFS, "ro", "a"), "a: Read-only file system: make it"),
    (OSError(errno.EDQUOT, "q", "a"), "raise the quota"),
    (chained(RuntimeError("x"), cause=full("a")), "a: No space left"),
    (chained(ValueError("x"), context=full("a")), "a: No space left"),
    (
      RuntimeError("I/O error: No space left on device (os error 28)"),
      "(os error 28): free space there",
    ),
    (chained(ValueError("told"), cause=full("a")), None),
    (OSError(errno.ENOENT, "none", "a"), None),
    (PermissionError(errno.EACCES, "no", "a"), None),
    (ValueError("--x: No space left on device"), None),
  ],
)
def test_errors_of_the_disk_are_told_from_others(error, words):
  message = disk_errors.message(error)
  if words is None:
    assert message is None
  else:
    assert message is not None and words in message
