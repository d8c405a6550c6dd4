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


def run_script(script, *arguments):
  """What it prints."""
  # A process of its own: shapes are no arrays to what checks them in tests.
  command = [sys.executable, "-m", f"experiments.{script}", *arguments]
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
  return done.stdout


def count_round(tmp_path, *arguments):
  """What the script prints, and its programs."""
  printed = run_script("count_round", *arguments, f"--work_dir={tmp_path}")
  results = json.loads((tmp_path / "results.json").read_text())
  return printed, results["programs"]


def test_whole_programs_launch_the_kernels_by_default(tmp_path):
  printed, programs = count_round(
    tmp_path,
    *("--size=8B-shallow", "--batch=64", "--implementations=default"),
  )
  ours = {name: found["default"]["custom"] for name, found in programs.items()}
  injection = ("read", "message", "write")
  backward = ("message_backward", "read_backward", "input_backward")
  layers, target_layers = 2, 6
  assert ours["round"] == {
    "block_attention_forward": layers + target_layers,
    **{f"injection_{name}": layers for name in injection},
    **dict.fromkeys(
      (
        *("scores_receiver", "scores_message", "scores_through"),
        *("scores_best", "scores_walk"),
      ),
      1,
    ),
  }
  # Another write gives the reads of the written states.
  assert ours["train"] == {
    **{
      f"block_attention_{name}": layers
      for name in ("forward", "backward_q", "backward_context")
    },
    **{f"injection_{name}": layers for name in (*injection, *backward)},
    "injection_write": 2 * layers,
  }
  # Neither scores of a layer (3 GB in training) nor rows of logits (5 GB).
  temporary = {
    name: found["default"]["memory"]["temporary"]
    for name, found in programs.items()
  }
  assert temporary["round"] < 1e9 and temporary["train"] < 6e9
  assert "GB temporary" in printed


def test_count_round_counts_a_round_part_by_part(tmp_path):
  printed, programs = count_round(
    tmp_path,
    *("--size=tiny", "--programs=round", "--implementations=xla"),
    *("--cache=64", "--layers=scan"),
  )
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
  assert not counted["custom"]
  assert printed.startswith("round:")


def test_a_plan_s_memory_is_that_of_the_compiled_step(tmp_path):
  """All widths of the 8B recipe, two layers."""
  printed = run_script(
    "plan_training",
    *("--recipe=qwen3_8b_dspine", "--check", f"--out={tmp_path}"),
    *("--num_layers=2", "--batch_size=1", "--accumulation=1"),
  )
  results = json.loads((tmp_path / "qwen3_8b_dspine.json").read_text())
  found = results["check"]
  for name in ("arguments", "temporaries"):
    assert found[f"planned_{name}"] == pytest.approx(found[name], rel=0.1)
  # Activations of 8,192 slots, not only parameters.
  assert found["temporaries"] > 3e9
  assert "compiled for H100" in printed
  assert (tmp_path / "qwen3_8b_dspine.png").stat().st_size > 0


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
