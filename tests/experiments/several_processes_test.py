"""Two processes on this machine train as one does, through the script."""

import os
import pathlib
import signal
import subprocess
import sys
import time

import numpy as np
import pytest
from safetensors import numpy as safetensors

from experiments import run_io
from tests import on_devices, script_runner

ROOT = pathlib.Path(run_io.__file__).resolve().parent.parent


def values_of(tiny, **changes):
  return {
    "target": tiny.target,
    "answers": tiny.answers,
    "method": "dspine",
    "block_size": 5,
    "num_anchors": 3,
    "num_layers": 1,
    "transfer_rank": 16,
    "top_k": 8,
    "batch_size": 2,
    "accumulation": 2,
    "steps": 2,
    "optimizer": "adamw",
    "learning_rate": 0.001,
  } | changes


def start_both(**values):
  """Two processes of `train_drafter`, one device each."""
  command = [sys.executable, "-m", "experiments.train_drafter"]
  names = ("coordinator", "num_processes", "process_id")
  settings = {
    "JAX_PLATFORMS": "cpu",
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
    "JAX_DEFAULT_MATMUL_PRECISION": "float32",
  }
  return [
    subprocess.Popen(
      [
        *command,
        *script_runner.arguments(
          **values, **dict(zip(names, connection, strict=True))
        ),
      ],
      cwd=ROOT,
      env=os.environ | settings,
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for connection in on_devices.connections(2)
  ]


def ends(processes):
  """(status, stdout, stderr) of each."""
  try:
    said = [process.communicate(timeout=300) for process in processes]
  finally:
    for process in processes:
      process.kill()
  return [(p.returncode, *s) for p, s in zip(processes, said, strict=True)]


@pytest.mark.slow
def test_two_processes_train_the_drafter_that_one_trains(tiny, tmp_path):
  alone, both = tmp_path / "alone", tmp_path / "both"
  values = values_of(tiny)
  script_runner.run_well("train_drafter", work_dir=alone, **values)
  first, second = ends(start_both(work_dir=both, mesh="1,2,1", **values))
  assert first[0] == second[0] == 0, (first, second)
  assert "drafter written" in first[1]
  assert "train dspine" in first[2]
  # The other process says and writes nothing.
  assert "drafter" not in second[1]
  assert "train dspine" not in second[2]
  expected = run_io.read_metrics(alone / "metrics.jsonl")
  found = run_io.read_metrics(both / "metrics.jsonl")
  assert [row["step"] for row in found] == [0, 1]
  for row, other in zip(found, expected, strict=True):
    del row["data_wait"], other["data_wait"]
    assert row == pytest.approx(other, rel=1e-5)
  assert [path.name for path in (both / "checkpoints").iterdir()] == ["2"]
  assert len((both / "command.txt").read_text().splitlines()) == 1
  files = [folder / "drafter/model.safetensors" for folder in (both, alone)]
  trained, other = map(safetensors.load_file, files)
  assert set(trained) == set(other)
  for name, array in trained.items():
    # An Adam step of an element without a gradient to speak of has any sign.
    far = np.abs(array.astype(float) - other[name]) > 2e-5
    assert far.mean() < 0.01, name


@pytest.mark.slow
def test_sigterm_to_one_process_stops_both_at_one_step(tiny, tmp_path):
  values = values_of(tiny, method="dflash", steps=100_000)
  processes = start_both(work_dir=tmp_path, **values)
  metrics = tmp_path / "metrics.jsonl"
  while not metrics.exists() or not metrics.read_text():
    assert all(p.poll() is None for p in processes), ends(processes)
    time.sleep(0.05)
  processes[1].send_signal(signal.SIGTERM)
  (status, _, first), (other_status, _, second) = ends(processes)
  assert status == other_status == 128 + signal.SIGTERM, (first, second)
  (step,) = [path.name for path in (tmp_path / "checkpoints").iterdir()]
  line = f"stopped at step {step} after SIGTERM; repeat the command to go on"
  assert line in first
  assert line in second
  assert len(run_io.read_metrics(metrics)) == int(step)
