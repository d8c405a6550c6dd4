"""ablate_dspine: lines of one configuration share cells, and cells are kept."""

import json

import pytest

from experiments.stages import evaluation, proxy, training
from tests import script_runner

FULL = "+ replacement curriculum"
PLAIN = "causal DFlash with CE"
# "top-k 8" is what --top_k=8 makes of all of DSpine.
VARIANTS = [PLAIN, "full without refinement", "top-k 8"]


def options(tiny, path):
  return {
    "target": tiny.target,
    "answers": tiny.answers,
    "work_dir": path,
    "variants": VARIANTS,
    "seeds": [0],
    "steps": 2,
    "batch_size": 2,
    "num_anchors": 3,
    "block_size": 6,
    "transfer_rank": 16,
    "message_size": 8,
    "top_k": 8,
    "top_ks": [4, 8],
    "eval_prompts": 3,
  }


def read_json(path):
  return json.loads(path.read_text())


def must_not_run(*unused_args, **unused_kwargs):
  raise AssertionError("computed again")


@pytest.mark.slow  # Three trainings and as many evaluations.
def test_variants_are_compared_with_all_of_dspine_and_kept(
  tiny, tmp_path, monkeypatch
):
  script_runner.run_well("ablate_dspine", **options(tiny, tmp_path))
  results = read_json(tmp_path / "results.json")
  lines = results["variants"]
  assert list(lines) == [PLAIN, FULL, *VARIANTS[1:]]
  assert lines[FULL]["same_as"] == ["top-k 8"]
  assert lines["top-k 8"]["cell"] == lines[FULL]["cell"]
  other_name = "full without refinement"
  other = lines[other_name]
  assert other["drafter"]["dspine"]["refines"] is False
  plain = lines[PLAIN]["drafter"]
  assert plain["is_causal"] is True and plain["dspine"] is None
  cells = {lines[name]["cell"] for name in (FULL, PLAIN, other_name)}
  trained = {path.name for path in (tmp_path / "drafters").iterdir()}
  assert trained == {f"{cell}_s0" for cell in cells}
  # Paired with itself there is no change, and no doubt about it.
  same = lines["top-k 8"]["ratio"]["all"]
  assert same == {"mean": 1, "low": 1, "high": 1, "prompts": 3}
  assert other["ratio"]["all"]["prompts"] == 3
  forced = other["teacher_forced"]
  assert set(forced) == {"expected_advancement", "coverage", "base_accuracy"}
  assert forced["expected_advancement"] >= 1
  table = (tmp_path / "table.md").read_text()
  assert "| full without refinement |" in table
  assert "-6.6 to -7.1 %" in table
  picture = (tmp_path / "ablation.png").read_bytes()
  assert picture.startswith(b"\x89PNG")

  monkeypatch.setattr(training, "train_drafter", must_not_run)
  monkeypatch.setattr(evaluation, "decode_prompts", must_not_run)
  monkeypatch.setattr(proxy, "greedy_means", must_not_run)
  script_runner.run_well("ablate_dspine", **options(tiny, tmp_path))
  assert read_json(tmp_path / "results.json") == results


@pytest.mark.parametrize(
  ("changes", "error"),
  [
    ({"variants": ["+ L2"]}, "--variants=+ L2: ['+ L2'] not among ['causal"),
    ({"seeds": ["x"]}, "--seeds=x: whole numbers >= 0 are needed"),
    ({"seeds": []}, "--seeds is empty"),
    (
      {"variants": ["rank 64"], "transfer_ranks": [64]},
      "transfer_rank=64: cannot exceed hidden_size=32",
    ),
  ],
)
def test_bad_flags_are_told_before_any_work(tiny, tmp_path, changes, error):
  path = tmp_path / "work"
  done = script_runner.run("ablate_dspine", **options(tiny, path) | changes)
  assert done.status == 1 and done.error.startswith(error)
  assert not path.exists()
