"""compare_drafters: cells are kept, seeds and methods are added to them."""

import json

import numpy as np
import pytest

from dspine_jax.data import answers as answers_lib
from tests import script_runner, tiny_folder


def read_json(path):
  return json.loads(path.read_text())


@pytest.fixture(name="answers")
def fixture_answers(tiny, tmp_path):
  folder = tmp_path / "answers"
  script_runner.run_well(
    "make_answers",
    work_dir=folder,
    target=tiny.target,
    corpus=tiny.corpus,
    train_prompts=8,
    eval_prompts=4,
    prompt_tokens=tiny_folder.PROMPT,
    new_tokens=tiny_folder.NEW,
    temperatures=[0],
    batch_size=8,
  )
  # A second benchmark, of the same prompts in another order.
  held_out = answers_lib.load(folder / "held_out.npz")
  answers_lib.save(folder / "another.npz", held_out.select(np.arange(4)[::-1]))
  return folder


def touched(folder):
  return {
    path: path.stat().st_mtime_ns
    for path in sorted(folder.rglob("*"))
    if path.name == "model.safetensors" or path.parent.parent.name == "cells"
  }


@pytest.mark.slow  # Four trainings, and more decodings.
def test_methods_and_seeds_are_added_to_finished_cells(tiny, tmp_path, answers):
  path = tmp_path / "compare"
  options = {
    "target": tiny.target,
    "answers": answers,
    "work_dir": path,
    "steps": 3,
    "block_size": 4,
    "transfer_rank": 16,
    "eval_prompts": 4,
    "speed_prompts": 2,
    "released_seeds": "",
  }
  done = script_runner.run_well(
    "compare_drafters",
    methods=["dflash", "dspine"],
    seeds=[0],
    speed_batches=[2],
    **options,
  )
  first = read_json(path / "results.json")
  (table,) = first["tables"]
  assert [line["method"] for line in table["methods"]] == ["dflash", "dspine"]
  for line in table["methods"]:
    assert line["lossless"] == {"prompts": 8, "equal": 8}
    assert set(line["speed"]) == {"2"}
    speed = line["speed"]["2"]
    assert speed["equal_outputs"] == speed["prompts"] == 2
    for key in ("T=0", "T=1"):
      interval = line["advancement"][key]["all"]
      assert 1 <= interval["low"] <= interval["mean"] <= interval["high"] <= 4
      assert set(line["benchmarks"][key]) == {"another", "held_out"}
      assert 1 <= line["proxy"][key][0] <= 4
  text = (path / "table.md").read_text()
  assert text in done.stdout and "1.278" in text
  assert (path / "comparison.png").stat().st_size > 10_000

  kept = touched(path)
  done = script_runner.run_well(
    "compare_drafters",
    methods=["dflash", "dspine"],
    seeds=[0, 1],
    temperatures=[0],
    speed_batches="",
    **options,
  )
  assert "train dflash_b4_s1" in done.stderr
  assert "train dflash_b4_s0" not in done.stderr
  now = touched(path)
  assert {name: now[name] for name in kept} == kept
  (table,) = read_json(path / "results.json")["tables"]
  cells = [
    read_json(path / "cells" / "held_out" / f"dspine_b4_s{seed}_T0.json")
    for seed in (0, 1)
  ]
  rounds = [n for cell in cells for row in cell["round_lengths"] for n in row]
  found = table["methods"][1]["benchmarks"]["T=0"]["held_out"]["mean"]
  assert found == pytest.approx(np.mean(rounds))
