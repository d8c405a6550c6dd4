import json
import os
import pathlib
import shutil
import subprocess
import sys

import jax
import numpy as np
import pytest
import safetensors.numpy
from absl import flags
from absl.testing import flagsaver

from experiments import check_parity
from experiments.parity import report

ROOT = pathlib.Path(check_parity.__file__).resolve().parent.parent
GOLDEN = ROOT / "tests" / "golden"

# What our run takes as an input, so that a wrong value is no wrong output.
TAKEN = {
  *("infer_row", "infer_block", "train/replace_mask", "loss_decay_gamma"),
  *("decode_token_ids", "draft_target_layer_ids"),
}


@pytest.fixture(autouse=True, scope="module")
def _quick_compilation():
  before = jax.config.read("jax_disable_most_optimizations")
  jax.config.update("jax_disable_most_optimizations", True)
  yield
  jax.config.update("jax_disable_most_optimizations", before)


def run(golden, *methods):
  lines = []
  results = check_parity.run(str(golden), methods, lines.append)
  return results, lines


def failed(results):
  return [r.name for rs in results.values() for r in rs if not r.ok]


def copy(tmp_path, *names):
  golden = tmp_path / "golden"
  for name in names:
    shutil.copytree(GOLDEN / name, golden / name)
  return golden


def edit(folder, change, file="outputs.npz"):
  with np.load(folder / file) as arrays:
    changed = change({name: arrays[name] for name in arrays.files})
  np.savez(folder / file, **changed)


def spoiled(name, array):
  """The array wrong in every entry, and beyond any bound."""
  if name in TAKEN:
    return array
  if array.dtype == bool:
    return ~array
  if np.issubdtype(array.dtype, np.integer):
    return array + 1
  if np.issubdtype(array.dtype, np.floating):
    return array + 0.01 * (1 + np.abs(array).max())
  return np.char.add(array, "_")


def scale_final_norm(folder):
  path = folder / "model.safetensors"
  tensors = safetensors.numpy.load_file(path)
  name = next(n for n in tensors if n.removeprefix("model.") == "norm.weight")
  tensors[name] = tensors[name] * np.float32(1.01)
  safetensors.numpy.save_file(tensors, path)


# One after the other, these take minutes of compilation.
FAST = ("qwen3_target", "dspine")


@pytest.mark.parametrize(
  "method",
  [
    method if method in FAST else pytest.param(method, marks=pytest.mark.slow)
    for method in check_parity.METHODS
  ],
)
def test_the_golden_set_agrees_and_no_wrong_array_or_weight_passes(
  method, tmp_path
):
  results, lines = run(GOLDEN, method)
  records = results[method]
  assert not failed(results)
  assert len(lines) == len(records) > 10
  # Far from the bounds: they allow for other sizes, not for other numbers.
  assert max(record.ratio for record in records) < 0.5

  golden = copy(tmp_path, *{"qwen3_target", method})
  folder = golden / method
  edit(folder, lambda out: {k: spoiled(k, v) for k, v in out.items()})
  wrong = failed(run(golden, method)[0])
  compared = [r.name for r in records if r.kind != "given"]
  own = [name for name in compared if not name.startswith("inputs/")]
  assert set(wrong) >= {n for n in own if n.split(" (")[0] not in TAKEN}

  shutil.copy(GOLDEN / method / "outputs.npz", folder)
  scale_final_norm(folder)
  assert "logits (unrolled)" in failed(run(golden, method)[0])


def status(**values):
  if not flags.FLAGS.is_parsed():
    flags.FLAGS.mark_as_parsed()
  with flagsaver.flagsaver(**values):
    return check_parity.main(["check_parity"])


def test_an_error_fails_from_the_bound_on(tmp_path, capsys):
  golden = copy(tmp_path, "qwen3_target")
  original = np.load(GOLDEN / "qwen3_target" / "outputs.npz")["logits"]
  bound = report.VALUE_BOUND * (1 + np.abs(original).max())
  for share, expected in ((0.8, 0), (1.2, 1)):

    def change(outputs, share=share):
      logits = original.copy()
      logits[1, 3, 5] += share * bound
      return outputs | {"logits": logits}

    edit(golden / "qwen3_target", change)
    results = tmp_path / "results.json"
    assert status(golden=str(golden), json=str(results)) == expected
    assert json.loads(results.read_text())["ok"] == (expected == 0)
    shown = capsys.readouterr().out.splitlines()
    assert shown[-1].startswith("FAIL" if expected else "PASS")
    assert "qwen3_target" in shown[-1]
    failures = [line for line in shown[:-1] if line.startswith("FAIL")]
    assert len(failures) == 2 * expected  # Unrolled and scanned.


def test_an_array_that_is_unknown_or_missing_fails(tmp_path):
  golden = copy(tmp_path, "qwen3_target")

  def change(outputs):
    del outputs["decode_logits"]
    return outputs | {"new": np.zeros(3), "draft_features_sum": np.zeros(2)}

  edit(golden / "qwen3_target", change)
  records = run(golden)[0]["qwen3_target"]
  kinds = {r.name: r.kind for r in records if not r.ok}
  assert kinds == {
    "new": "not compared",
    "decode_logits": "missing",
    "draft_features_sum": "value",  # Of another shape.
  }


def test_methods_without_code_are_named_and_fail_only_if_asked_for(tmp_path):
  golden = copy(tmp_path, "qwen3_target")
  (golden / "medusa").mkdir()
  (golden / "medusa" / "config.json").write_text("{}")
  (golden / "notes").mkdir()
  results, lines = run(golden)
  assert not failed(results)
  assert list(results) == ["qwen3_target"]
  assert "medusa: not implemented" in lines
  assert not any("notes" in line for line in lines)
  assert status(golden=str(golden), methods=["medusa"]) == 1
  with pytest.raises(ValueError, match="eagle.*not in.*medusa"):
    run(golden, "eagle")


@pytest.mark.parametrize("golden", [None, "", "nowhere", "empty"])
def test_a_golden_folder_that_is_not_there_is_an_error(golden, tmp_path):
  (tmp_path / "empty" / "inside").mkdir(parents=True)
  path = str(tmp_path / golden) if golden else golden
  with pytest.raises(ValueError, match="--golden"):
    check_parity.run(path)


def test_what_a_folder_lacks_is_named(tmp_path):
  golden = copy(tmp_path, "dflash")
  with pytest.raises(ValueError, match="qwen3_target, which is missing"):
    run(golden, "dflash")
  (golden / "dflash" / "outputs.npz").write_bytes(b"PK")
  with pytest.raises(ValueError, match="outputs.npz: not readable"):
    run(golden, "dflash")
  (golden / "dflash" / "outputs.npz").unlink()
  with pytest.raises(ValueError, match="outputs.npz: no such file"):
    run(golden, "dflash")


def test_the_command_tells_a_mistake_in_one_line_and_exits_with_1():
  done = subprocess.run(
    [sys.executable, "-m", "experiments.check_parity", "--golden=nowhere"],
    cwd=ROOT,
    env=os.environ | {"JAX_PLATFORMS": "cpu"},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 1
  assert done.stderr == "error: --golden=nowhere: no such folder\n"


README = """
## inputs.npz
- `ids` [2] int32: not an output
## outputs.npz

- `plain` [2] float32: an array
- `rare` [2] float32: an array (public set only)
- `eval/grad/<name>`: gradient of `loss`: `a.weight` [2], `b` [3, 4]
## Remarks
- `remark` [1]: not an output either
"""


def make_comparison(outputs, listed):
  folder = object.__new__(report.Folder)
  object.__setattr__(folder, "outputs", outputs)
  object.__setattr__(folder, "listed", listed)
  return report.Comparison(folder)


def test_a_readme_lists_outputs_and_which_of_them_are_optional():
  listed = report.listed_outputs(README)
  assert listed == {
    "plain": False,
    "rare": True,
    "eval/grad/a.weight": False,
    "eval/grad/b": False,
  }
  check = make_comparison({}, listed)
  kinds = {record.name: record.kind for record in check.finish()}
  assert kinds.pop("rare") == "optional"
  assert set(kinds.values()) == {"missing"}


def test_only_the_given_rows_are_compared_and_set_the_bound():
  theirs = np.array([[1.0, 2.0], [np.nan, 1e9]])
  keep = np.array([True, False])
  ours = np.array([[1.0, 2.0], [0.0, 0.0]])
  check = make_comparison({"x": theirs, "y": theirs}, {})
  check.value("x", ours, rows=keep)
  check.value("x", ours + 1e-4, rows=keep)
  check.value("y", ours)
  good, wrong, nan = check.finish()
  assert good.ok and good.bound == report.VALUE_BOUND * 3
  assert not wrong.ok and wrong.error == pytest.approx(1e-4)
  assert not nan.ok


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_a_number_that_is_not_finite_never_passes(bad):
  check = make_comparison({"x": np.ones(3), "g": np.zeros(3)}, {})
  check.value("x", np.array([1.0, bad, 1.0]))
  check.gradient("g", np.array([0.0, 0.0, bad]))
  check.norms("g", np.array([0.0, 0.0, bad]))
  assert not any(record.ok for record in check.finish())


def test_every_gradient_norm_has_the_bound_of_its_own_size():
  theirs = np.array([1.0, 1e-3, 0.0])
  check = make_comparison({"n": theirs}, {})
  check.norms("n", theirs * (1 + 4e-5))
  check.norms("n", theirs + np.array([0.0, 1e-6, 0.0]))
  check.norms("n", theirs + np.array([0.0, 0.0, 1e-6]))
  check.norms("n", theirs + np.array([0.0, 0.0, 1e-9]))
  assert [r.ok for r in check.finish()] == [True, False, False, True]


def test_the_bounds_are_those_of_the_set():
  text = " ".join((GOLDEN / "README.md").read_text().split())
  assert "2e-5 * (1 + max|array|)" in text and report.VALUE_BOUND == 2e-5
  assert "5e-5 * max|array|" in text and report.GRADIENT_BOUND == 5e-5
  assert "eigendecomposition: 2e-3" in text and report.CODE_BOUND == 2e-3
  assert report.EXACT_BOUND == 0
