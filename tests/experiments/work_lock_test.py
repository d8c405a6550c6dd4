"""Two runs never share a work directory; real processes hold it."""

import json
import os
import pathlib
import shutil
import socket
import subprocess
import sys

import jax
import pytest

from experiments import run_io, work_lock

ROOT = pathlib.Path(work_lock.__file__).resolve().parent.parent
# A run that holds a directory until it is killed; without JAX it is quick.
HOLDER = (
  "import pathlib, sys, time\n"
  "from experiments import work_lock\n"
  "work_lock.hold(pathlib.Path(sys.argv[1]))\n"
  "print('held', flush=True)\n"
  "time.sleep(600)\n"
)


@pytest.fixture(autouse=True)
def fixture_given_back():
  yield
  work_lock.release_all()


@pytest.fixture(name="holder")
def fixture_holder(tmp_path):
  command = [sys.executable, "-c", HOLDER, str(tmp_path)]
  with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE) as process:
    assert process.stdout is not None
    assert process.stdout.readline() == b"held\n"
    yield process
    process.kill()


def open_dir(path, steps=1, resume=True):
  return run_io.open_work_dir(
    str(path), config={"steps": steps}, argv=["a"], resume=resume
  )


def contents(folder):
  return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_a_second_process_is_told_who_is_at_work_and_touches_nothing(
  tmp_path, holder
):
  (tmp_path / "config.json").write_text("mine")
  before = contents(tmp_path)
  for resume in (True, False):
    with pytest.raises(ValueError) as caught:
      open_dir(tmp_path, resume=resume)
    message = str(caught.value)
    assert message.startswith(f"--work_dir={tmp_path}: process {holder.pid}")
    assert socket.gethostname() in message
    assert "wait until it ends, or name another directory" in message
  assert contents(tmp_path) == before


def test_a_killed_process_leaves_no_lock(tmp_path, holder):
  holder.kill()
  holder.wait()
  assert (tmp_path / ".lock").exists()
  open_dir(tmp_path)
  who = json.loads((tmp_path / ".lock").read_text())
  assert who["pid"] == os.getpid()


def test_a_process_may_enter_its_directory_again_and_gives_it_back(tmp_path):
  open_dir(tmp_path)
  open_dir(tmp_path)
  open_dir(tmp_path / "cell")
  assert work_lock.held() == [tmp_path, tmp_path / "cell"]
  work_lock.release_all()
  assert not work_lock.held() and not (tmp_path / ".lock").exists()
  assert sorted(contents(tmp_path / "cell")) == [
    *("command.txt", "config.json", "provenance.json")
  ]


def test_a_directory_that_was_deleted_and_made_again_is_locked_again(tmp_path):
  folder = tmp_path / "run"
  open_dir(folder)
  shutil.rmtree(folder)
  open_dir(folder)
  assert (folder / ".lock").exists()


def test_who_waited_for_a_lock_that_was_given_back_locks_the_new_file(
  tmp_path, monkeypatch
):
  real = os.open

  def open_then_deleted(path, *args):
    """Between opening and locking, the holder deletes the file."""
    monkeypatch.setattr(os, "open", real)
    descriptor = real(path, *args)
    os.unlink(path)
    return descriptor

  monkeypatch.setattr(os, "open", open_then_deleted)
  work_lock.hold(tmp_path)
  assert work_lock._is_file(work_lock._held[tmp_path], tmp_path / ".lock")


def test_a_lock_without_a_signature_is_a_lock(tmp_path, holder):
  (tmp_path / ".lock").write_text("")
  with pytest.raises(ValueError, match="another process is at work"):
    open_dir(tmp_path)
  holder.kill()


def test_only_the_first_of_several_processes_writes(tmp_path, monkeypatch):
  monkeypatch.setattr(jax, "process_index", lambda: 1)
  folder = tmp_path / "run"
  work_dir = open_dir(folder)
  with run_io.MetricsWriter(work_dir) as writer:
    writer.write(0, {"loss": 1.0})
  assert not work_dir.writes
  assert not folder.exists()
