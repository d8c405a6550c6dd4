"""The scripts around the kernels, in small and on a CPU.

No kernel runs here: what is tested is the counting, the timing, the search and
the checks, with plain functions in the place of kernels, and that scripts say
why they skip what they skip.
"""

import dataclasses
import importlib.util
import json
import math
import re

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from experiments.stages import (
  kernel_bench,
  kernel_cases,
  kernel_ops,
  kernel_runs,
  kernel_tuning,
  suite_models,
)
from kernels import block_sizes, cost
from kernels.block_sizes import BlockSizes
from tests import script_runner

TINY = kernel_ops.SIZES["tiny"]


def read_json(path):
  return json.loads(path.read_text())


def doubled_case(wrong=0.0, raises=None):
  """A case whose "triton" is 2 x + 1 with a relative error."""

  def call(implementation, unused_sizes):
    def double(x):
      if implementation == "triton" and raises is not None:
        raise raises
      factor = 1.0 + (wrong if implementation == "triton" else 0.0)
      return (2 * x + 1) * jnp.asarray(factor, x.dtype)

    return double

  stage = cost.Stage("double", 1e3, 1e3)
  return kernel_cases.Case(
    op="double",
    name="double tiny",
    call=call,
    arguments=(kernel_cases.Spec((4, 8), jnp.float32),),
    differentiable=(0,),
    cost=cost.OpCost(stage, [stage], [stage, stage]),
  )


# Timing


def test_a_timed_program_makes_every_call():
  calls = []

  def watched(x):
    shape = jax.ShapeDtypeStruct(x.shape, x.dtype)

    def host(x):
      calls.append(float(x[0]))
      return np.asarray(x)

    return jax.pure_callback(host, shape, x), jnp.ones(3)

  copies = [(jnp.full((2,), value),) for value in (1.0, 2.0)]
  program = kernel_bench.repeated(watched, 3)
  assert float(program(copies)) == 3 * (1 + 2) + 6 * 1
  assert calls == [1.0, 2.0] * 3


def test_programs_take_turns_and_medians_ignore_one_hiccup(monkeypatch):
  order, clock = [], [0.0]
  lasting = {"a": iter([1, 50, 1, 1]), "b": iter([4, 4, 4, 4])}

  def program(name):
    def call():
      order.append(name)
      clock[0] += next(lasting[name])
      return jnp.zeros(())

    return call

  monkeypatch.setattr(kernel_bench.time, "perf_counter", lambda: clock[0])
  times = kernel_bench.compare(
    {"a": program("a"), "b": program("b")}, calls=2, samples=4
  )
  assert order == ["a", "b"] * 4
  assert times["a"].seconds == 0.5 and times["b"].seconds == 2.0
  assert times["a"].samples == 4


def test_a_program_that_the_device_refuses_stops_no_other():
  def refused():
    raise jax.errors.JaxRuntimeError("Shared memory requested exceeds")

  ran, why = kernel_bench.that_run({"bad": refused, "good": jnp.zeros(2).sum})
  assert list(ran) == ["good"]
  assert "Shared memory" in str(why["bad"])


def test_a_program_that_does_not_compile_is_told_and_stops_no_other():
  def broken(x):
    raise NotImplementedError("op: implementation='triton': no GPU")

  compiled = kernel_bench.compile_all(
    {
      "good": (jax.jit(jnp.sin), (jnp.ones(2),)),
      "bad": (jax.jit(broken), (jnp.ones(2),)),
    }
  )
  assert isinstance(compiled["bad"], NotImplementedError)
  np.testing.assert_allclose(compiled["good"](jnp.ones(2)), np.sin(1.0))


def test_measured_rows_hold_the_ratio_and_the_share_of_the_floor():
  device = cost.Device("here", flops=1e12, bandwidth=1e9)
  good, refused = doubled_case(), doubled_case(raises=NotImplementedError("x"))
  refused = refused._replace(name="refused")
  rows = kernel_runs.measure(
    [good, refused], ("xla", "triton"), device, seconds=0, samples=3
  )
  timed = rows[0]["implementations"]
  seconds = {name: one["seconds"] for name, one in timed.items()}
  assert timed["triton"]["ratio_to_xla"] == pytest.approx(
    seconds["xla"] / seconds["triton"]
  )
  # 1,000 bytes at 1 GB/s.
  assert rows[0]["floor_seconds"] == pytest.approx(1e-6)
  assert timed["xla"]["floor_fraction"] == pytest.approx(1e-6 / seconds["xla"])
  assert rows[0]["predicted_gain"] == pytest.approx(2.0)
  assert rows[1]["skipped"] == {"triton": "x"}
  assert set(rows[1]["implementations"]) == {"xla"}


# Cases


@pytest.mark.parametrize("op", kernel_ops.OPS)
def test_cases_count_all_arguments_as_read_at_least_once(op):
  for case in kernel_ops.cases(TINY, (op,)):
    specs = kernel_cases.arguments_of(case)
    arguments = kernel_cases.values(specs)
    function = kernel_cases.function_of(case, "xla")
    out = jax.eval_shape(function, *arguments)
    tables = {TINY.model.vocab}
    read = [x for x in jax.tree.leaves(arguments) if x.shape[0] not in tables]
    large = sum(x.nbytes for x in read if x.dtype == jnp.bfloat16)
    assert case.cost.floor.bytes >= 0.95 * large, case.name
    assert jax.tree.leaves(out)
    if case.differentiable:
      _, gradients = out
      for position, gradient in zip(
        case.differentiable, gradients, strict=True
      ):
        shapes = jax.tree.map(jnp.shape, arguments[position])
        assert jax.tree.map(jnp.shape, gradient) == shapes
      assert cost.gain(case.cost) > 0


def test_the_loss_in_chunks_is_the_loss_at_once():
  (case,) = kernel_ops.cases(TINY, ("draft_loss",), jnp.float32)
  arguments = kernel_cases.values(kernel_cases.arguments_of(case))
  whole = jax.jit(kernel_cases.function_of(case, "xla"))(*arguments)
  case = case._replace(chunks=3)
  function = kernel_cases.function_of(case, "xla")
  assert "scan" in str(jax.make_jaxpr(function)(*arguments))
  parts = jax.jit(function)(*arguments)
  jax.tree.map(
    lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-6),
    parts,
    whole,
  )


# Checks


def test_a_right_kernel_passes_and_a_wrong_one_does_not():
  (right,) = kernel_runs.check([doubled_case(wrong=1e-6)], ("triton",))
  (wrong,) = kernel_runs.check([doubled_case(wrong=1e-3)], ("triton",))
  assert right["passed"] is True and wrong["passed"] is False
  # Values and the gradient.
  assert len(wrong["errors"]) == 2
  for error in wrong["errors"].values():
    assert error == pytest.approx(1e-3, rel=0.01)


def test_a_nan_is_wrong_and_a_refusal_is_none():
  (nan,) = kernel_runs.check([doubled_case(wrong=math.nan)], ("triton",))
  assert nan["passed"] is False
  refusal = NotImplementedError("op: implementation='triton': no GPU")
  (refused,) = kernel_runs.check([doubled_case(raises=refusal)], ("triton",))
  assert refused["passed"] is None and refused["reason"] == "no GPU"
  crash = RuntimeError("illegal address")
  (crashed,) = kernel_runs.check([doubled_case(raises=crash)], ("triton",))
  assert crashed["passed"] is False and "illegal address" in crashed["reason"]


# The search


def sizes(**changes):
  start = BlockSizes(rows=64, cols=64, inner=64, num_warps=4, num_stages=3)
  return dataclasses.replace(start, **changes)


def test_neighbours_differ_in_one_number_and_stay_in_range():
  start = sizes(rows=16, num_warps=8)
  for other in kernel_tuning.neighbours(start):
    old, new = dataclasses.asdict(start), dataclasses.asdict(other)
    assert sum(old[name] != new[name] for name in old) == 1
  assert sizes(rows=16, num_warps=16) not in kernel_tuning.neighbours(start)
  assert len(kernel_tuning.neighbours(start)) == 2 + 2 + 2 + 1 + 2


def test_the_search_finds_the_fastest_and_passes_over_what_cannot_run():
  def trial(options):
    return [
      None if one.cols > 64 else 64 / one.rows + abs(one.num_stages - 2)
      for one in options
    ]

  deadline = kernel_bench.Deadline(60)
  best, report = kernel_tuning.tune(sizes(), trial, deadline)
  assert best == sizes(rows=64, num_stages=2) or best == sizes(
    rows=128, num_stages=2
  )
  assert best == sizes(rows=128, num_stages=2)  # Two turns.
  assert report["gain"] == pytest.approx(2.0 / 0.5)
  out_of_time = kernel_bench.Deadline(-1)
  best, _ = kernel_tuning.tune(sizes(), trial, out_of_time)
  assert best == sizes()


def rows_of(**ratios):
  return [
    {
      "op": "op",
      "dtype": "bfloat16",
      "implementations": {
        name: {"ratio_to_xla": ratio} for name, ratio in one.items()
      },
    }
    for one in ratios["rows"]
  ]


def test_the_default_is_the_kernel_unless_xla_is_faster():
  def chosen(*rows):
    return kernel_tuning.defaults(rows_of(rows=rows))["op"]["bfloat16"]

  assert chosen({"xla": 1.0, "triton": 1.3}) == "triton"
  assert chosen({"xla": 1.0, "triton": 0.9}) == "xla"
  # The geometric mean: 2 and 0.4 are 0.89 together.
  assert chosen({"xla": 1, "triton": 2.0}, {"xla": 1, "triton": 0.4}) == "xla"
  # One that ran only once is none, however fast.
  assert chosen({"xla": 1, "triton": 9.0}, {"xla": 1}) == "xla"
  assert chosen({"xla": 1, "triton": 1.1, "pallas": 1.2}) == "pallas"


def test_tuned_sizes_are_what_kernels_then_take(tmp_path, monkeypatch):
  def heuristic():
    return sizes()

  def chosen_by_an_op(given=()):
    return block_sizes.choose("op", "kernel", "rows=64", given, heuristic)

  with block_sizes.recording() as choices:
    chosen_by_an_op()
  assert choices == [block_sizes.Choice("op", "kernel", "rows=64", sizes())]
  monkeypatch.setattr(block_sizes, "FOLDER", tmp_path / "tuned")
  monkeypatch.setattr(block_sizes, "device_kind", lambda: "nvidia_h200")
  try:
    assert chosen_by_an_op() == sizes()
    folder, best = tmp_path / "tuned", sizes(rows=128)
    kernel_tuning.write(folder, "nvidia_h200", {choices[0]: best}, {})
    measured = {"op": {"bfloat16": "triton"}}
    kernel_tuning.write(folder, "nvidia_h200", {}, measured)
    assert chosen_by_an_op() == best
    assert block_sizes.measured_default("op", jnp.bfloat16) == "triton"
    assert block_sizes.measured_default("op", jnp.float32) is None
    given = (("kernel", sizes(cols=32)),)
    assert chosen_by_an_op(given) == sizes(cols=32)
  finally:
    block_sizes.tuned.cache_clear()


# The scripts


def test_floors_are_the_longer_of_flops_and_bytes(tmp_path):
  done = script_runner.run_well(
    "kernel_floors", work_dir=tmp_path, shapes="8B,tiny", ops="greedy_draft"
  )
  results = read_json(tmp_path / "floors.json")
  rows = {row["case"]: row for row in results["rows"]}
  assert len(rows) == 4 + 2
  row = rows["greedy_draft 8B decode 16"]
  for name, device in (("H100", cost.H100), ("H200", cost.H200)):
    assert row["floor"]["seconds"][name] == pytest.approx(
      max(
        row["floor"]["flops"] / device.flops,
        row["floor"]["bytes"] / device.bandwidth,
      )
    )
    assert row["gain"][name] == pytest.approx(
      row["xla"]["seconds"][name] / row["triton"]["seconds"][name]
    )
  assert row["default"] == "triton" and row["gain"]["H100"] > 1.2
  assert "greedy_draft 8B decode 16" in done.stdout
  assert "| greedy_draft 8B decode 16 |" in (tmp_path / "floors.md").read_text()


@pytest.mark.parametrize(
  "script", ["kernel_floors", "kernel_resources", "benchmark_kernels"]
)
def test_unknown_shapes_and_ops_are_refused(script, tmp_path):
  done = script_runner.run(script, work_dir=tmp_path, shapes="9B")
  assert done.status == 1 and "--shapes=9B: choose from 8B" in done.error
  done = script_runner.run(script, work_dir=tmp_path, ops="adding")
  assert done.status == 1 and "--ops=adding: choose from" in done.error


def without(monkeypatch, package):
  real = importlib.util.find_spec

  def find_spec(name, *rest):
    return None if name.split(".")[0] == package else real(name, *rest)

  monkeypatch.setattr(importlib.util, "find_spec", find_spec)


def test_what_needs_triton_or_the_plugin_says_how_to_get_it(
  tmp_path, monkeypatch
):
  without(monkeypatch, "triton")
  done = script_runner.run("kernel_resources", work_dir=tmp_path, shapes="tiny")
  assert done.status == 1 and "Triton is not installed" in done.error
  assert "make test-hopper" in done.error
  without(monkeypatch, "jax_plugins")
  done = script_runner.run("count_round", work_dir=tmp_path, size="tiny")
  assert done.status == 1 and "make test-hopper" in done.error
  done = script_runner.run("count_round", work_dir=tmp_path, programs="prefill")
  assert done.status == 1 and "--programs=prefill" in done.error


def test_benchmark_kernels_times_xla_and_goes_on_where_it_was(tmp_path):
  flags = {
    "work_dir": tmp_path,
    "shapes": "tiny",
    "ops": "adjacent_injection",
    "samples": 3,
    "seconds": 0,
  }
  done = script_runner.run_well("benchmark_kernels", **flags)
  results = read_json(tmp_path / "results.json")
  assert [row["case"] for row in results["rows"]] == [
    "adjacent_injection tiny decode 1",
    "adjacent_injection tiny decode 2",
    "adjacent_injection tiny training",
  ]
  for row in results["rows"]:
    assert set(row["implementations"]) == {"xla"}
    assert row["implementations"]["xla"]["ratio_to_xla"] == 1.0
    assert row["implementations"]["xla"]["seconds"] > 0
  reason = "it needs an NVIDIA GPU, and this is traced for 'cpu'"
  assert results["rows"][0]["skipped"] == {"triton": reason, "pallas": reason}
  assert f"skipped triton: {reason} (3 of 3)" in done.stdout
  assert "| xla |" in (tmp_path / "kernels.md").read_text()
  cut = dict(results, rows=results["rows"][:2])
  (tmp_path / "results.json").write_text(json.dumps(cut))
  again = script_runner.run_well("benchmark_kernels", **flags)
  new = read_json(tmp_path / "results.json")
  assert new["rows"][:2] == results["rows"][:2]
  assert len(new["rows"]) == 3 and "3/3" in again.stderr
  done = script_runner.run(
    "benchmark_kernels", **flags | {"implementations": "triton"}
  )
  assert done.status == 1 and "--implementations" in done.error


def test_the_suite_runs_every_part_on_a_cpu(tmp_path):
  script_runner.run_well(
    "gpu_suite", work_dir=tmp_path, tuned_dir=tmp_path / "tuned", tiny=True
  )
  parts = read_json(tmp_path / "results.json")["parts"]
  assert list(parts) == [name for name, _, _ in suite_models.PARTS]
  assert all(part["ok"] for part in parts.values())
  reason = "it needs an NVIDIA GPU, and this is traced for 'cpu'"
  assert parts["tuning"]["skipped"] == reason
  assert not (tmp_path / "tuned").exists()
  checked = parts["parity"]["rows"]
  assert {row["dtype"] for row in checked} == {"float32", "bfloat16"}
  assert {row["op"] for row in checked} == set(kernel_ops.OPS)
  assert all(row["passed"] is None for row in checked)
  timed = parts["kernels"]["rows"]
  assert {row["op"] for row in timed} == set(kernel_ops.OPS)
  assert parts["decoding"]["models"]["tiny"]["round_seconds"]["xla"] > 0
  assert parts["training"]["step_seconds"]["xla"] > 0


def test_a_part_that_fails_stops_no_other_and_the_status_tells(
  tmp_path, monkeypatch
):
  def breaks(context, deadline):
    raise RuntimeError("no such\nkernel")

  def wrong(context, deadline):
    return {"failed": ["op decode 1"]}

  def slow(context, deadline):
    return {"left_out": ["all of it"], "share": deadline.left()}

  parts = (("a", 0.5, breaks), ("b", 0.25, wrong), ("c", 0.25, slow))
  monkeypatch.setattr(suite_models, "PARTS", parts)
  done = script_runner.run("gpu_suite", work_dir=tmp_path, minutes=4, tiny=True)
  assert done.status == 1
  results = read_json(tmp_path / "results.json")["parts"]
  assert results["a"]["error"] == "RuntimeError: no such kernel"
  assert [one["ok"] for one in results.values()] == [False, False, True]
  assert "FAILED" in done.stdout and "wrong: op decode 1" in done.stdout
  # What others did not use is its own, too.
  assert 230 < results["c"]["share"] <= 240
  assert re.search(r"^c .*left out for time: 1$", done.stdout, re.MULTILINE)
  for flag, options in {
    "--parts=d": {"parts": "d", "tiny": True},
    "--minutes=nan": {"minutes": "nan", "tiny": True},
    "--tiny=false": {},
  }.items():
    done = script_runner.run("gpu_suite", work_dir=tmp_path, **options)
    assert done.status == 1 and flag in done.error
