"""The scripts that compile for Hopper: what they count, and what they time.

In tests/kernels, since only these tests run where Triton and the plugin are.
"""

import json
import os
import pathlib
import subprocess
import sys

import jax
import pytest
from jax import numpy as jnp

from experiments.stages import hlo_count, kernel_bench
from kernels import hopper
from tests import script_runner
from tests.kernels import triton_interpreter

pytestmark = [
  pytest.mark.hopper,
  pytest.mark.skipif(
    triton_interpreter.unavailable() is None, reason="compiles for sm_90"
  ),
]
ROOT = pathlib.Path(__file__).parents[2]


def test_a_timed_program_launches_each_call_and_one_kernel_beside_it():
  def product(x, w):
    y = jax.nn.relu(x @ w)
    return y, jnp.sum(y, axis=-1)

  arguments = (
    jax.ShapeDtypeStruct((256, 1024), jnp.bfloat16),
    jax.ShapeDtypeStruct((1024, 512), jnp.bfloat16),
  )

  def program(copies):
    return kernel_bench.repeated(product, 10)(copies)

  compiled = hopper.compile_for_h100(
    program,
    [arguments] * 3,
    compiler_options={"xla_gpu_autotune_level": 0},
  )
  found = hlo_count.count(compiled.as_text())
  # Nothing is hoisted out of the loop, merged, or cut down to one element.
  flops = 2 * 256 * 1024 * 512
  assert hlo_count.total(found.kernels).flops == 30 * flops
  products = [k for k in found.kernels if k.flops]
  assert [k.launches for k in products] == [10] * 3
  # Product, sum and the look at the outputs; the counter of the loop.
  assert hlo_count.total(found.kernels).kernels <= 30 * 3 + 10 + 4


def test_count_round_counts_a_round_part_by_part(tmp_path):
  # A process of its own: shapes are no arrays to what checks them in tests.
  command = [
    *(sys.executable, "-m", "experiments.count_round", "--size=tiny"),
    *("--programs=round", "--implementations=xla", "--cache=64"),
    "--layers=scan",
    f"--work_dir={tmp_path}",
  ]
  environment = os.environ | {"JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    command,
    cwd=ROOT,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )
  assert done.returncode == 0, done.stderr
  programs = json.loads((tmp_path / "results.json").read_text())["programs"]
  counted = programs["round"]["xla"]
  parts = counted["parts"]
  assert sum(part["kernels"] for part in parts.values()) == counted["kernels"]
  assert parts["cache"]["kernels"] > 0
  for part in ("draft", "candidates", "verify", "commit"):
    assert parts[part]["kernels"] > 0 and parts[part]["flops"] > 0
  # Six scanned layers of the target: what is in their loop runs six times.
  assert any(one["launches"] == 6 for one in counted["largest"])
  assert counted["memory"]["arguments"] > 0 and not counted["notes"]
  assert "triton_kernel_call" not in counted["kinds"]
  assert done.stdout.startswith("round:")


def test_kernel_resources_lists_kernels_that_fit(tmp_path):
  done = script_runner.run_well(
    "kernel_resources",
    work_dir=tmp_path,
    shapes="tiny",
    ops="greedy_draft",
  )
  kernels = json.loads((tmp_path / "resources.json").read_text())["kernels"]
  assert {row["kernel"] for row in kernels} >= {"scores_message", "scores_best"}
  for row in kernels:
    assert not row["problems"] and 0 < row["registers"] <= 255
    assert row["shared"] <= hopper.SHARED_MEMORY
  assert "kernels that do not fit or spill: none" in done.stdout
  assert "| scores_message |" in (tmp_path / "resources.md").read_text()
