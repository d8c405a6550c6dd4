"""The energy scripts as their users run them."""

import csv
import json

import jax
import numpy as np
import pytest

from energy import architecture, laws, measurements, prediction
from experiments.stages import energy_inputs
from tests import script_runner
from tests.energy import fake_nvml

WORKED = {
  "model": "Llama 3.1 8B",
  "input_tokens": "68k",
  "output_tokens": "247",
  "cached_tokens": "63,000",
  "law": "simple",
}

MADE = (2e-12, 1e-9, 5e-10, 5e-7, 4.0)


def read_json(path):
  return json.loads(path.read_text())


def test_predict_gives_the_worked_example_and_says_that_it_extrapolates():
  done = script_runner.run_well("predict_energy", **WORKED)
  assert "668.7" in done.stdout and "86 %" in done.stdout
  assert "0.1857" in done.stdout  # kWh of a thousand such requests.
  assert "note: extrapolation: input_tokens=68,000" in done.stdout
  assert "no request with a cached prefix was fitted" in done.stdout
  done = script_runner.run_well("predict_energy", **WORKED, json=True)
  found = json.loads(done.stdout)
  assert found["joules"] == pytest.approx(668.7, abs=0.1)
  assert found["parts"]["prefill"] == pytest.approx(88.81, abs=0.01)
  assert found["low"] < found["joules"] < found["high"]
  assert found["kwh_per_1000_requests"] == pytest.approx(0.18575, abs=1e-4)


def test_predict_reads_a_configuration_and_sweeps(tmp_path):
  config = {
    "model_type": "qwen3",
    "hidden_size": 4096,
    "num_hidden_layers": 36,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "intermediate_size": 12288,
    "vocab_size": 151936,
    "tie_word_embeddings": False,
  }
  path = tmp_path / "config.json"
  path.write_text(json.dumps(config))
  picture = tmp_path / "deep" / "sweep.png"
  done = script_runner.run_well(
    "predict_energy",
    config=path,
    input_tokens=64,
    output_tokens=0,
    sweep=picture,
  )
  assert "8.19 B parameters" in done.stdout
  assert picture.read_bytes().startswith(b"\x89PNG")
  swept = read_json(picture.with_suffix(".json"))
  curve = swept["joules_per_output_token"]
  lengths = swept["output_tokens"]
  lowest = lengths[curve.index(min(curve))]
  assert lowest == pytest.approx(swept["optimum_output_tokens"], rel=0.15)


@pytest.mark.parametrize(
  ("changes", "error"),
  [
    ({"model": "GPT-5"}, "--model=GPT-5: not among"),
    ({"input_tokens": "many"}, "--input_tokens=many: a number of tokens"),
    ({"input_tokens": "-5"}, "--input_tokens=-5: must be finite"),
    (
      {"cached_tokens": "69k"},
      "--cached_tokens=69k: more than --input_tokens=68k",
    ),
    ({"law": "cubic"}, "--law=cubic: not among ['capacity', 'simple'"),
    ({"config": "a.json"}, "one of --model and --config is needed"),
    ({"coefficients": "none.json"}, "none.json: no such file"),
    ({"sweep": "a.pdf"}, "--sweep=a.pdf: must end in .png"),
  ],
)
def test_predict_refuses_what_cannot_be(changes, error):
  done = script_runner.run("predict_energy", **WORKED | changes)
  assert done.status == 1
  assert error in done.error


@pytest.mark.parametrize(
  ("text", "tokens"),
  [("68000", 68e3), ("68k", 68e3), ("1.5M", 1.5e6), ("1,024", 1024)],
)
def test_numbers_of_tokens(text, tokens):
  assert energy_inputs.parse_tokens(text, "x") == tokens


def test_fit_of_the_grid_is_what_ships(tmp_path):
  options = {"law": "simple", "replicates": 20, "work_dir": tmp_path}
  done = script_runner.run_well("fit_energy", **options)
  assert "reconstructed from published fits: 637 rows, 13 models" in done.stdout
  results = read_json(tmp_path / "results.json")
  assert results["in_sample"]["mape"] == pytest.approx(12.16, abs=0.01)
  assert results["held_out"]["mape"] == pytest.approx(13.44, abs=0.01)
  assert (tmp_path / "fit.png").read_bytes().startswith(b"\x89PNG")
  done = script_runner.run_well(
    "predict_energy",
    **WORKED | {"coefficients": tmp_path / "results.json"},
    json=True,
  )
  assert json.loads(done.stdout)["joules"] == pytest.approx(667.1, abs=0.1)


def test_fit_of_single_models(tmp_path):
  done = script_runner.run_well(
    "fit_energy", law="sweetspot", holdout="none", work_dir=tmp_path
  )
  assert "mean MAPE of a model: 0.00 %" in done.stdout
  theta = read_json(tmp_path / "results.json")["theta"]
  published = measurements.sweetspot_coefficients()
  for name, values in published.items():
    assert theta[name] == pytest.approx(values.tolist(), rel=1e-6)


def test_fit_refuses_what_cannot_be(tmp_path):
  path = tmp_path / "a.csv"
  path.write_text("model,input_tokens,output_tokens,E\nOPT 1.3B,1,2,3\n")
  for changes, error in (
    ({"data": path}, "no column 'joules' (energy)"),
    (
      {"data": path, "columns": "energy"},
      "--columns=energy: KEY=VALUE is needed",
    ),
    ({"data": path, "where": "E"}, "--where=E: KEY=VALUE is needed"),
    (
      {"data": path, "columns": "energy=E"},
      "--holdout=model: the rows are all of OPT 1.3B",
    ),
    ({"law": "flops"}, "law flops has coefficients of its own"),
    ({"configs": "x"}, "--configs=x: NAME=FILE is needed"),
  ):
    if "configs" in changes:
      changes = {"data": path} | changes
    done = script_runner.run("fit_energy", work_dir=tmp_path / "run", **changes)
    assert done.status == 1, changes
    assert error in done.error


def write_leaderboard(path):
  """Rows as ML.ENERGY has them, made by a capacity law at 300 tokens in."""
  law, models = laws.LAWS["capacity"], architecture.shipped_models()
  names = ("google/gemma-2-9b-it", "OPT 6.7B", "Qwen3 8B", "OPT 1.3B")
  with path.open("w", newline="") as file:
    writer = csv.writer(file)
    writer.writerow(
      ["Model", "Avg Output Tokens", "Energy/req (J)", "Avg BS (reqs)"]
      + ["GPU", "TP", "PP"]
    )
    for gpu in ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB"):
      for name in names:
        for batch in (4, 16, 64, 250):
          outputs = 200 + batch
          sizes = models[name].architecture
          joules = law(MADE, sizes, 300, outputs, concurrency=batch)
          row = [name, outputs, float(joules), batch, gpu, 1, 1]
          writer.writerows([row, [*row[:-2], 2, 1]])
      writer.writerow(["unknown", 1, 1, 1, gpu, 1, 1])


@pytest.mark.slow  # Dozens of fits of many shapes, each compiled.
def test_study_gives_the_figures_that_ship(tmp_path):
  path = tmp_path / "leaderboard.csv"
  write_leaderboard(path)
  script_runner.run_well(
    "study_energy", replicates=10, mlenergy=path, work_dir=tmp_path
  )
  results = read_json(tmp_path / "results.json")
  assert results["our_law"]["nested_mape"] <= 7.5
  assert results["single_models"]["largest_change_of_table_5"] < 1e-6
  simple = results["shared_laws"]["SIMPLE, relative"]
  assert simple["in_sample"]["mape"] == pytest.approx(12.16, abs=0.01)
  assert results["shared_laws"]["SIMPLE, absolute, J"]["not_positive"] == 68
  for one in results["batch_term"]:
    assert one["rows"] == 16
    if one["input_tokens"] == 300:
      assert one["theta"]["weights"] == pytest.approx(MADE[2], rel=1e-3)
      assert one["mape"] < 0.1 < one["mape_without"]
  made = read_json(tmp_path / "fitted_laws.json")
  for name, fitted in prediction.shipped().items():
    assert made[name]["theta"] == pytest.approx(fitted.theta, rel=1e-6)
    assert made[name]["band"]["low"] == pytest.approx(fitted.band.low)
  assert "reconstructed from published fits" in (
    tmp_path / "table.md"
  ).read_text(encoding="utf-8")


def test_plan_says_where_drafting_pays(tmp_path):
  done = script_runner.run_well(
    "plan_serving", model="Qwen3 8B", work_dir=tmp_path
  )
  assert "It is a model. It assumes:" in done.stdout
  plan = read_json(tmp_path / "plan.json")
  for quantity in ("joules", "seconds"):
    one = plan["plan"][quantity]
    assert one["gain"] == pytest.approx(
      plan["advancement"] / one["break_even_advancement"], rel=1e-4
    )
    assert one["gain"] > 1
    assert one["pays"]["concurrency"]["pays"] == "below"
    assert 8 < one["pays"]["concurrency"]["at"] < 4096
  assert (tmp_path / "break_even.png").read_bytes().startswith(b"\x89PNG")
  for changes, error in (
    ({"advancement": 20}, "--verify_width=16"),
    ({"concurrency": 0}, "--concurrency=0: must be at least 1"),
    ({"law": "simple"}, "law 'simple' does not tell weights"),
  ):
    done = script_runner.run(
      "plan_serving", model="Qwen3 8B", work_dir=tmp_path / "bad", **changes
    )
    assert done.status == 1
    assert error in done.error


@pytest.mark.slow  # A decode loop for each point.
def test_measured_fitted_predicted(tiny, tmp_path, monkeypatch):
  fake_nvml.FakeGpu(watts=100.0).install(monkeypatch)
  done = script_runner.run(
    "measure_energy", target=tiny.target, work_dir=tmp_path / "cpu"
  )
  assert done.error.startswith("JAX computes on cpu, not on the GPU")
  monkeypatch.setattr(jax, "default_backend", lambda: "gpu")
  options = {
    "target": tiny.target,
    "name": "tiny",
    "input_tokens": [4, 8],
    "output_tokens": [2, 6],
    "batch_size": 2,
    "seconds": 0.02,
    "work_dir": tmp_path / "measured",
  }
  script_runner.run_well("measure_energy", **options)
  path = tmp_path / "measured" / "measured.csv"
  with path.open() as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 4
  for row in rows:
    assert row["source"] == "energy counter"
    per_request = 100 * float(row["seconds"]) / int(row["requests"])
    assert float(row["joules"]) == pytest.approx(per_request, rel=0.1, abs=0.02)
  before = path.read_text()
  script_runner.run_well("measure_energy", **options)
  assert path.read_text() == before  # Finished points are kept.

  config = tmp_path / "measured" / "model_config.json"
  script_runner.run_well(
    "fit_energy",
    data=path,
    configs=f"tiny={config}",
    law="baseline4",
    holdout="none",
    work_dir=tmp_path / "fit",
  )
  done = script_runner.run_well(
    "predict_energy",
    config=config,
    coefficients=tmp_path / "fit" / "results.json",
    input_tokens=8,
    output_tokens=6,
    json=True,
  )
  found = json.loads(done.stdout)
  assert found["law"] == "baseline4"
  # Relative least squares of what was measured, at the last of its points.
  columns = ("input_tokens", "output_tokens", "joules")
  inputs, outputs, joules = np.asarray(
    [[float(row[key]) for key in columns] for row in rows]
  ).T
  terms = np.stack([outputs, inputs, inputs * outputs], axis=1)
  theta = np.linalg.lstsq(terms / joules[:, None], np.ones(4), rcond=None)[0]
  expected = np.asarray([6, 8, 48]) @ theta
  assert found["joules"] == pytest.approx(expected, rel=1e-6)


def test_measuring_without_a_gpu_is_an_error(tiny, tmp_path, monkeypatch):
  fake_nvml.FakeGpu(present=False).install(monkeypatch)
  done = script_runner.run(
    "measure_energy", target=tiny.target, work_dir=tmp_path
  )
  assert done.status == 1
  assert done.error.startswith("no GPU 0 to measure")
