"""Killed runs go on to the same bits; damaged checkpoints are told."""

import os
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import pytest

from experiments import run_io
from tests import script_runner

ROOT = pathlib.Path(run_io.__file__).resolve().parent.parent

# Training flags of a script, and the file that holds what was trained.
RESULT = {
  "train_target": "target/model.safetensors",
  "train_drafter": "drafter/model.safetensors",
}
STEPS, EVERY = 24, 4


def flags(tiny, script, **changes):
  training = {
    "train_target": {
      "corpus": tiny.corpus,
      "num_layers": 2,
      "hidden_size": 96,
      "vocab_size": 260,
      "length": 32,
      "eval_rows": 1,
    },
    "train_drafter": {
      "target": tiny.target,
      "answers": tiny.answers,
      "method": "dflash",
      "block_size": 5,
      "num_anchors": 3,
      "transfer_rank": 16,
    },
  }
  common = {"steps": STEPS, "checkpoint_every": EVERY, "batch_size": 2}
  return common | training[script] | changes


def contents(work_dir, script):
  """Trained parameters and every line of metrics, but for measured times."""
  rows = run_io.read_metrics(work_dir / "metrics.jsonl")
  for row in rows:
    row.pop("data_wait", None)
  return (work_dir / RESULT[script]).read_bytes(), rows


class Killed(Exception):
  pass


def run_until(script, step, monkeypatch, **values):
  """Ends a run, without a word, when it has metrics of `step` to write."""
  write = run_io.MetricsWriter.write

  def write_or_die(self, now, metrics):
    if now == step:
      raise Killed
    write(self, now, metrics)

  with monkeypatch.context() as patch:
    patch.setattr(run_io.MetricsWriter, "write", write_or_die)
    with pytest.raises(Killed):
      script_runner.run(script, **values)


@pytest.fixture(name="whole", scope="module", params=sorted(RESULT))
def fixture_whole(tiny, tmp_path_factory, request):
  """(script, its flags, what a run that nothing disturbs leaves)."""
  work_dir = tmp_path_factory.mktemp("whole")
  values = flags(tiny, request.param)
  script_runner.run_well(request.param, work_dir=work_dir, **values)
  return request.param, values, contents(work_dir, request.param)


def test_a_stopped_run_goes_on_to_the_same_bits(whole, tmp_path, monkeypatch):
  script, values, expected = whole
  run_until(script, 14, monkeypatch, work_dir=tmp_path, **values)
  kept = run_io.read_metrics(tmp_path / "metrics.jsonl")
  assert [row["step"] for row in kept] == list(range(14))
  assert not (tmp_path / RESULT[script]).exists()
  script_runner.run_well(script, work_dir=tmp_path, **values)
  assert contents(tmp_path, script) == expected
  assert len((tmp_path / "command.txt").read_text().splitlines()) == 2


def largest(folder):
  files = [path for path in folder.rglob("*") if path.is_file()]
  return max(files, key=lambda path: path.stat().st_size)


def test_a_damaged_checkpoint_is_told_and_the_one_before_still_serves(
  whole, tmp_path, monkeypatch
):
  script, values, expected = whole
  run_until(script, 14, monkeypatch, work_dir=tmp_path, **values)
  newest = tmp_path / "checkpoints" / "12"
  largest(newest).unlink()
  before = (tmp_path / "metrics.jsonl").read_bytes()
  done = script_runner.run(script, work_dir=tmp_path, **values)
  assert done.status == 1
  assert done.error.startswith(f"{newest}: checkpoint is damaged")
  assert (tmp_path / "metrics.jsonl").read_bytes() == before
  shutil.rmtree(newest)
  script_runner.run_well(script, work_dir=tmp_path, **values)
  assert contents(tmp_path, script) == expected


@pytest.mark.parametrize("script", sorted(RESULT))
def test_a_learning_rate_that_overflows_names_step_and_checkpoint(
  tiny, tmp_path, script
):
  values = flags(tiny, script, learning_rate=1e38, checkpoint_every=1)
  done = script_runner.run(script, work_dir=tmp_path, **values)
  assert done.status == 1
  assert "at step 1" in done.error
  assert "last good checkpoint is of step 1" in done.error
  kept = sorted(path.name for path in (tmp_path / "checkpoints").iterdir())
  assert kept == ["1"]
  assert not (tmp_path / RESULT[script]).parent.exists()


# With a real kill.


def start(script, **values):
  command = [sys.executable, "-m", f"experiments.{script}"]
  return subprocess.Popen(
    [*command, *script_runner.arguments(**values)],
    cwd=ROOT,
    env=os.environ
    | {"JAX_PLATFORMS": "cpu", "JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
    stdout=subprocess.DEVNULL,
    stderr=subprocess.PIPE,
    text=True,
  )


def finish(script, **values):
  process = start(script, **values)
  _, errors = process.communicate(timeout=600)
  assert process.returncode == 0, errors


def kill_while_saving(process, checkpoints):
  """Ends it, once a checkpoint is complete, while the next one is written."""

  def is_saving():
    names = [path.name for path in checkpoints.glob("*")]
    saved = any(name.isdigit() for name in names)
    return saved and any("tmp" in name for name in names)

  while True:
    assert process.poll() is None, process.communicate()[1]
    if is_saving():
      process.send_signal(signal.SIGSTOP)
      if is_saving():
        process.kill()
        return
      process.send_signal(signal.SIGCONT)
    time.sleep(0.0005)


@pytest.mark.slow  # Three starts of Python.
def test_a_run_killed_while_it_saves_goes_on_to_the_same_bits(tiny, tmp_path):
  script = "train_drafter"
  values = flags(tiny, script, steps=60, method="dspine", top_k=8)
  work_dir = tmp_path / "killed"
  process = start(script, work_dir=work_dir, **values)
  kill_while_saving(process, work_dir / "checkpoints")
  process.communicate()
  assert process.returncode == -signal.SIGKILL
  assert not (work_dir / RESULT[script]).exists()
  finish(script, work_dir=work_dir, **values)
  finish(script, work_dir=tmp_path / "whole", **values)
  assert contents(work_dir, script) == contents(tmp_path / "whole", script)
