"""The scripts one after the other, as the README chains them, in small.

Shapes and configurations agree from script to script where they can, so that
programs compiled for one serve the next.
"""

import json
import re

import jax
import matplotlib.image
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.checkpoints import drafter_folder, target_folder
from dspine_jax.data import answers as answers_lib
from dspine_jax.decoding import generate
from experiments import run_io
from tests import script_runner, tiny_folder

STEPS, NEW = 4, tiny_folder.NEW
WIDTH, BLOCK = 96, 8
COLOR = re.compile(r"\x1b\[(\d*)m")


def read_json(path):
  return json.loads(path.read_text())


def check_work_dir(path, script):
  """What every run leaves, whatever it did."""
  assert f"{script}.py" in (path / "command.txt").read_text()
  provenance = read_json(path / "provenance.json")
  assert provenance["versions"]["jax"] and provenance["device_kind"]
  assert read_json(path / "config.json")


@pytest.fixture(name="root", scope="module")
def fixture_root(tmp_path_factory):
  return tmp_path_factory.mktemp("runs")


@pytest.fixture(name="text", scope="module")
def fixture_text(root):
  return tiny_folder.write_corpus(root / "corpus")


@pytest.fixture(name="target_run", scope="module")
def fixture_target_run(root, text):
  script_runner.run_well(
    "train_target",
    work_dir=root / "target",
    corpus=text,
    steps=STEPS,
    checkpoint_every=2,
    batch_size=2,
    length=64,
    num_layers=5,
    hidden_size=WIDTH,
    vocab_size=tiny_folder.VOCAB,
    eval_rows=2,
  )
  return root / "target"


@pytest.fixture(name="target", scope="module")
def fixture_target(target_run):
  return target_run / "target"


@pytest.fixture(name="answers", scope="module")
def fixture_answers(root, text, target):
  done = script_runner.run_well(
    "make_answers",
    work_dir=root / "answers",
    target=target,
    corpus=text,
    train_prompts=8,
    eval_prompts=4,
    prompt_tokens=tiny_folder.PROMPT,
    new_tokens=NEW,
    batch_size=8,
  )
  assert "held_out" in done.stdout
  return root / "answers"


def train(root, target, answers, method, **flags):
  path = root / method
  script_runner.run_well(
    "train_drafter",
    work_dir=path,
    target=target,
    answers=answers,
    method=method,
    block_size=BLOCK,
    transfer_rank=WIDTH,
    steps=STEPS,
    checkpoint_every=2,
    batch_size=2,
    num_anchors=4,
    **flags,
  )
  return path


@pytest.fixture(name="dflash", scope="module")
def fixture_dflash(root, target, answers):
  return train(
    root,
    target,
    answers,
    "dflash",
    accumulation=2,
    objective="forward_kl",
    block_attention="causal",
    sliding_window=40,
    sliding_window_convention="speculators",
  )


@pytest.fixture(name="dspine", scope="module")
def fixture_dspine(root, target, answers):
  return train(root, target, answers, "dspine")


@pytest.fixture(name="drafter", scope="module")
def fixture_drafter(dspine):
  return dspine / "drafter"


def test_train_target_writes_an_ordinary_folder_and_its_results(target_run):
  check_work_dir(target_run, "train_target")
  loaded = target_folder.load_target(target_run / "target")
  assert loaded.cfg.hidden_size == WIDTH
  assert (target_run / "target" / "tokenizer.json").exists()
  results = read_json(target_run / "results.json")
  assert results == read_json(target_run / "target" / "ORIGIN.json")
  # Guessing among 300 tokens of about two bytes is some 4 bits a byte; a few
  # steps may be worse than that.
  assert 1 < results["held_out_bits_per_byte"] < 8
  assert results["held_out_bits_per_byte_bf16"] == pytest.approx(
    results["held_out_bits_per_byte"], rel=0.01
  )
  assert results["tokens_seen"] == STEPS * 2 * 64
  assert results["held_out_files"] == ["getopt.py", "secrets.py"]


def test_train_target_evaluates_with_every_checkpoint(target_run):
  rows = run_io.read_metrics(target_run / "metrics.jsonl")
  assert [row["step"] for row in rows] == list(range(STEPS))
  evaluated = [row["step"] for row in rows if "held_out_bits_per_byte" in row]
  assert evaluated == [1, 3]
  kept = {path.name for path in (target_run / "checkpoints").iterdir()}
  assert kept == {"2", "4"}


def test_make_answers_writes_a_part_each_and_keeps_finished_ones(
  root, text, target, answers
):
  check_work_dir(answers, "make_answers")
  results = read_json(answers / "results.json")
  assert list(results) == ["train_t0", "train_t1", "held_out"]
  before = {}
  for name, one in results.items():
    part = answers_lib.load(answers / f"{name}.npz")
    count = 4 if name == "held_out" else 8
    assert part.tokens.shape == (count, tiny_folder.PROMPT + NEW)
    assert one["answers"] == count
    assert one["answer_tokens"] == part.loss_mask.sum()
    assert set(part.temperatures) == {float(name == "train_t1")}
    before[name] = (answers / f"{name}.npz").stat().st_mtime_ns
  (answers / "train_t1.npz").unlink()
  done = script_runner.run_well(
    "make_answers",
    work_dir=answers,
    target=target,
    corpus=text,
    train_prompts=8,
    eval_prompts=4,
    prompt_tokens=tiny_folder.PROMPT,
    new_tokens=NEW,
    batch_size=8,
  )
  assert "train_t1" in done.stderr and "held_out" not in done.stderr
  assert read_json(answers / "results.json") == results
  for name in ("train_t0", "held_out"):
    assert (answers / f"{name}.npz").stat().st_mtime_ns == before[name]


@pytest.mark.parametrize("method", ["dflash", "dspine"])
def test_train_drafter_writes_a_drafter_metrics_and_tensorboard(
  request, method
):
  path = request.getfixturevalue(method)
  check_work_dir(path, "train_drafter")
  loaded = drafter_folder.load_drafter(path / "drafter")
  assert (loaded.cfg.method, loaded.cfg.hidden_size) == (method, WIDTH)
  rows = run_io.read_metrics(path / "metrics.jsonl")
  assert [row["step"] for row in rows] == list(range(STEPS))
  if method == "dflash":
    cfg = loaded.cfg
    assert cfg.is_causal and cfg.layer_types == ("sliding_attention",) * 2
    assert cfg.sliding_window == 40
    assert cfg.sliding_window_convention == "speculators"
    assert cfg.dflash.objective == "forward_kl"
    terms = {"ce", "kl"}
  else:
    terms = {"ce", "l1", "refinement", "alignment"}
  means = {"accuracy", "base_accuracy", "coverage", "expected_advancement"}
  per_slot = {f"slot_accuracy/{i}" for i in range(1, BLOCK)}
  norms = {"loss", "grad_norm", "param_norm", "step", "data_wait"}
  assert set(rows[0]) == terms | means | per_slot | norms
  events = list((path / "tensorboard").glob("events*"))
  assert events and all(event.stat().st_size > 1000 for event in events)


@pytest.fixture(name="evaluation", scope="module")
def fixture_evaluation(root, target, answers, drafter):
  done = script_runner.run_well(
    "evaluate_drafter",
    work_dir=root / "evaluation",
    target=target,
    drafter=drafter,
    answers=answers,
    temperatures=[0],
    batch_size=4,
  )
  return root / "evaluation", done


def test_evaluate_drafter_finds_greedy_output_equal(evaluation):
  path, done = evaluation
  check_work_dir(path, "evaluate_drafter")
  assert "equal outputs: 4 of 4" in done.stdout
  results = read_json(path / "results.json")
  assert list(results) == ["T=0 greedy"]
  report = results["T=0 greedy"]
  assert report["lossless"] == {"prompts": 4, "equal": 4, "differing": []}
  assert report["all"]["prompts"] == 4
  lengths = report["round_lengths"]
  pooled = report["all"]["mean_advancement"]["pooled"]
  assert pooled == pytest.approx(
    sum(map(sum, lengths)) / sum(map(len, lengths))
  )
  groups = [report[name]["prompts"] for name in ("looping", "non_looping")]
  assert sum(groups) == 4
  assert len(report["all"]["acceptance_by_position"]) == BLOCK - 1


def test_evaluate_drafter_takes_every_rule_at_a_temperature(
  root, target, answers, dflash
):
  done = script_runner.run_well(
    "evaluate_drafter",
    work_dir=root / "evaluation_t1",
    target=target,
    drafter=dflash / "drafter",
    answers=answers,
    temperatures=[1],
    sampling_top_k=20,
    batch_size=4,
  )
  results = read_json(root / "evaluation_t1" / "results.json")
  assert list(results) == [
    "T=1 rejection, sampled",
    "T=1 exact_match, greedy",
    "T=1 exact_match, sampled",
  ]
  for name, report in results.items():
    assert "lossless" not in report
    assert name in done.stdout


def test_benchmark_decode_times_both_ways_and_the_parts(
  root, target, answers, drafter
):
  path = root / "benchmark_decode"
  done = script_runner.run_well(
    "benchmark_decode",
    work_dir=path,
    target=target,
    drafter=drafter,
    answers=answers,
    prompts=2,
    max_new_tokens=NEW,
    repeats=1,
  )
  check_work_dir(path, "benchmark_decode")
  results = read_json(path / "results.json")
  assert results["equal_outputs"] == results["prompts"] == 2
  assert "equal outputs: 2 of 2" in done.stdout
  parts = results["part_seconds"]
  assert list(parts) == [
    *("draft", "candidates", "cache", "walk", "verify", "commit", "round")
  ]
  assert all(seconds >= 0 for seconds in parts.values())
  for name in ("ratio", "rounds_per_second", "round_flops", "floor_fraction"):
    assert results[name] > 0


@pytest.mark.slow
def test_benchmark_decode_needs_no_files_with_a_preset(root):
  script_runner.run_well(
    "benchmark_decode",
    work_dir=root / "benchmark_preset",
    preset="tiny",
    method="dflash",
    prompts=1,
    prompt_tokens=8,
    max_new_tokens=4,
    repeats=1,
  )
  results = read_json(root / "benchmark_preset" / "results.json")
  assert results["equal_outputs"] == 1
  assert "cache" not in results["part_seconds"]


@pytest.mark.slow
def test_benchmark_training_measures_the_named_methods(root):
  path = root / "benchmark_training"
  named = ["dflash", "dspine"]
  done = script_runner.run_well(
    "benchmark_training",
    work_dir=path,
    preset="tiny",
    repeats=1,
    methods=named,
  )
  check_work_dir(path, "benchmark_training")
  results = read_json(path / "results.json")
  assert [one["method"] for one in results["methods"]] == named
  for one in results["methods"]:
    assert one["flops"] > 0 and one["fastest"] > 0
    assert 0 < one["peak_fraction"] < 1
    assert one["method"] in done.stdout


def test_generate_prints_the_prompt_and_colours_rounds_only_if_told(
  target, drafter
):
  prompt = "def read_config(path):\n"
  flags = {
    "prompt": prompt,
    "target": target,
    "drafter": drafter,
    "max_new_tokens": 24,
  }
  plain = script_runner.run_well(
    "generate", color="never", compare=True, **flags
  )
  coloured = script_runner.run_well("generate", color="always", **flags)
  assert plain.stdout.startswith(prompt)
  assert "outputs are equal" in plain.stdout
  assert "autoregressive:" in plain.stdout
  assert not COLOR.search(plain.stdout)
  assert len(set(COLOR.findall(coloured.stdout)) - {""}) > 1
  # Without the colours it is the same text.
  text = COLOR.sub("", coloured.stdout)
  assert text.split("\n\n")[:-1] == plain.stdout.split("\n\n")[:-1]
  assert re.search(r"\d+ tokens in \d+ rounds: mean advancement", text)


QUICKSTART = {
  "train_prompts": 8,
  "eval_prompts": 4,
  "speed_prompts": 1,
  "new_tokens": NEW,
  "steps": STEPS,
  "block_size": BLOCK,
}


@pytest.fixture(name="quickstart", scope="module")
def fixture_quickstart(root, text, target):
  path = root / "quickstart"
  done = script_runner.run_well(
    "quickstart", work_dir=path, target=target, corpus=text, **QUICKSTART
  )
  return path, done


def test_quickstart_prints_a_table_and_equal_greedy_outputs(quickstart):
  _, done = quickstart
  lines = done.stdout.splitlines()
  assert lines[0].split()[:2] == ["mean", "advancement"]
  assert {line.rsplit("  ")[0] for line in lines[2:6]} == {
    f"{method} {temperature}"
    for method in ("dflash", "dspine")
    for temperature in ("T=0", "T=1")
  }
  for method in ("dflash", "dspine"):
    assert f"{method}: 4 of 4 greedy outputs equal the target's" in done.stdout
  assert re.search(r"DSpine over DFlash at T=0, all prompts: x\d", done.stdout)


def test_quickstart_writes_results_and_two_pictures(quickstart):
  path, _ = quickstart
  check_work_dir(path, "quickstart")
  results = read_json(path / "results.json")
  assert {"answers", "parameters", "reports", "gain", "speed", "device"} <= set(
    results
  )
  backbones = {one["backbone"] for one in results["parameters"].values()}
  assert len(backbones) == 1
  assert results["parameters"]["dspine"]["injection"] > 0
  for method in ("dflash", "dspine"):
    report = results["reports"]["T=0"][method]
    assert report["lossless"]["equal"] == report["lossless"]["prompts"] == 4
    assert results["speed"][method]["equal_outputs"] == 1
  for name in ("acceptance.png", "advancement.png"):
    picture = matplotlib.image.imread(path / name)
    assert picture.ndim == 3 and min(picture.shape[:2]) > 300
    assert picture[..., :3].std() > 0.01  # Something is drawn.


def test_quickstart_reuses_what_is_finished(quickstart, text, target):
  path, _ = quickstart
  parts = [
    *path.glob("answers/*.npz"),
    *path.glob("*/drafter/model.safetensors"),
    *path.glob("cells/*.json"),
  ]
  assert len(parts) == 2 + 2 + 4
  before = {part: part.stat().st_mtime_ns for part in parts}
  old = read_json(path / "results.json")
  done = script_runner.run_well(
    "quickstart", work_dir=path, target=target, corpus=text, **QUICKSTART
  )
  assert done.stderr == ""  # No progress line: nothing was done again.
  assert {part: part.stat().st_mtime_ns for part in parts} == before
  new = read_json(path / "results.json")
  for name in ("answers", "parameters", "reports", "gain"):
    assert new[name] == old[name]


def test_a_drafter_and_its_target_decode_as_the_library_says(
  target, answers, drafter, evaluation
):
  """The numbers of the script are those of the library's own calls."""
  loaded = target_folder.load_target(target)
  part = answers_lib.load(answers / "held_out.npz")
  checkpoint = drafter_folder.load_drafter(drafter)
  out = generate.generate(
    generate.TargetModel(loaded.params, loaded.cfg),
    generate.DrafterModel(*checkpoint),
    jnp.asarray(part.tokens[:, : tiny_folder.PROMPT]),
    jnp.asarray(part.prompt_lengths),
    decode=configs.DecodeConfig(
      max_new_tokens=NEW, stop_tokens=loaded.cfg.eos_token_ids
    ),
    keys=jax.random.split(jax.random.key(9), 4),
  )
  lengths = [[int(x) for x in row if x] for row in out.round_lengths]
  report = read_json(evaluation[0] / "results.json")["T=0 greedy"]
  assert report["round_lengths"] == lengths
  np.testing.assert_array_equal(
    part.lengths - part.prompt_lengths, out.num_tokens
  )
