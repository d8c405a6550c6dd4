"""compare_seeds: seeds are independent, pooled, and added to finished ones."""

import json

import numpy as np
import pytest

from tests import script_runner, tiny_folder


def read_json(path):
  return json.loads(path.read_text())


@pytest.mark.slow  # Four trainings and as many evaluations.
def test_a_seed_is_added_to_finished_ones(tiny, tmp_path):
  script_runner.run_well(
    "make_answers",
    work_dir=tmp_path / "answers",
    target=tiny.target,
    corpus=tiny.corpus,
    train_prompts=8,
    eval_prompts=4,
    prompt_tokens=tiny_folder.PROMPT,
    new_tokens=tiny_folder.NEW,
    temperatures=[0],
    batch_size=8,
  )
  path = tmp_path / "seeds"
  options = {
    "target": tiny.target,
    "answers": tmp_path / "answers",
    "work_dir": path,
    "steps": 3,
    "eval_prompts": 4,
  }
  done = script_runner.run_well("compare_seeds", seeds=[0], **options)
  assert "8 of 8 greedy outputs equal the target's own" in done.stdout
  first = read_json(path / "results.json")
  done = script_runner.run_well("compare_seeds", seeds=[0, 1], **options)
  assert "16 of 16 greedy outputs equal the target's own" in done.stdout
  results = read_json(path / "results.json")
  assert results["gain_by_seed"][0] == first["gain_by_seed"][0]
  seeds = [path / f"seed{seed}" for seed in (0, 1)]
  weights = [
    (seed / "dspine/drafter/model.safetensors").read_bytes() for seed in seeds
  ]
  assert weights[0] != weights[1]
  cells = [read_json(seed / "cells/dspine_T0.json") for seed in seeds]
  rounds = [
    length for cell in cells for one in cell["round_lengths"] for length in one
  ]
  means = results["mean_advancement"]["T=0"]["dspine"]["all"]
  assert means["pooled"] == pytest.approx(np.mean(rounds))
