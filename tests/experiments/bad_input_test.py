"""Mistakes of the user: one clear line, status 1, and nothing lost or left."""

import pathlib
import shutil

import pytest

from dspine_jax.data import answers as answers_lib
from dspine_jax.data import corpus
from experiments import run_io
from tests import script_runner, tiny_folder

STEPS = {"steps": 2}


def good(tiny, script, work_dir):
  """Flags with which the script would work."""
  named = {"target": tiny.target}
  drafter = {"drafter": tiny.drafter}
  answers = {"answers": tiny.answers}
  text = {"corpus": tiny.corpus}
  width = {"hidden_size": 96, "num_layers": 5, "vocab_size": 300, "length": 64}
  flags = {
    "train_target": text | width | STEPS,
    "make_answers": named | text | {"train_prompts": 4, "eval_prompts": 2},
    "train_drafter": named | answers | STEPS | {"transfer_rank": 16},
    "evaluate_drafter": named | drafter | answers,
    "benchmark_training": {"preset": "tiny", "repeats": 1},
    "benchmark_decode": named | drafter | answers,
    "generate": named | drafter | {"prompt": "import os"},
    "compare_drafters": named
    | answers
    | STEPS
    | {"methods": ["dflash"], "transfer_rank": 16, "speed_batches": ""},
    "quickstart": named | text | STEPS,
  }
  flags = flags[script]
  return flags if script == "generate" else flags | {"work_dir": work_dir}


def fail(tiny, script, work_dir, **changes):
  """The error line of a run that must fail."""
  flags = good(tiny, script, work_dir) | changes
  flags = {name: value for name, value in flags.items() if value is not None}
  done = script_runner.run(script, **flags)
  assert done.status == 1, done
  assert "Traceback" not in done.stderr
  return done.error


WITH_TARGET = [
  *("make_answers", "train_drafter", "evaluate_drafter", "benchmark_decode"),
  *("compare_drafters", "generate", "quickstart"),
]
WITH_CORPUS = ["train_target", "make_answers", "quickstart"]
WITH_DRAFTER = ["evaluate_drafter", "benchmark_decode", "generate"]
WITH_WORK_DIR = ["train_target", "benchmark_training", *WITH_TARGET[:5]]


# Files.


@pytest.mark.parametrize("script", WITH_TARGET)
def test_a_missing_target_is_named_and_leaves_no_work_dir(
  tiny, tmp_path, script
):
  missing = tmp_path / "nowhere"
  error = fail(tiny, script, tmp_path / "run", target=missing)
  assert error == f"{missing}: no such folder"
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", WITH_DRAFTER)
def test_a_missing_drafter_is_named(tiny, tmp_path, script):
  missing = tmp_path / "nowhere"
  error = fail(tiny, script, tmp_path / "run", drafter=missing)
  assert error == f"{missing}: no such folder"
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  "script", ["train_target", "make_answers", "quickstart"]
)
def test_a_missing_corpus_is_named(tiny, tmp_path, script):
  missing = tmp_path / "nowhere"
  error = fail(tiny, script, tmp_path / "run", corpus=missing)
  assert error == f"corpus folder {missing} does not exist"
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
  ("name", "content"),
  [
    ("model.safetensors", "truncated"),
    ("model.safetensors", None),
    ("config.json", "truncated"),
    ("tokenizer.json", "truncated"),
    ("tokenizer.json", None),
  ],
)
def test_a_damaged_target_is_told_by_its_file(tiny, tmp_path, name, content):
  target = shutil.copytree(tiny.target, tmp_path / "target")
  path = target / name
  if content is None:
    path.unlink()
  else:
    path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
  error = fail(tiny, "generate", None, target=target)
  assert str(target) in error and name in error


def test_a_tokenizer_larger_than_the_vocabulary_is_told(tiny, tmp_path):
  target = tmp_path / "target"
  text = corpus.read_corpus(tiny.corpus)
  tiny_folder.write_target(target, text, vocab_size=290)
  error = fail(tiny, "generate", None, target=target)
  path = target / "tokenizer.json"
  assert error == f"{path}: 300 tokens, but the target's vocab_size is 290"


@pytest.mark.parametrize(
  "changes",
  [{"hidden_size": 48}, {"vocab_size": 320}, {"num_layers": 6}],
  ids=str,
)
@pytest.mark.parametrize("script", WITH_DRAFTER)
def test_a_drafter_of_another_target_is_refused_with_both_sizes(
  tiny, tmp_path, script, changes
):
  other = tiny_folder.target_config(**changes)
  drafter = tiny_folder.write_drafter(
    tmp_path / "drafter", tiny_folder.drafter_config(other)
  )
  error = fail(tiny, script, tmp_path / "run", drafter=drafter)
  name, value = next(iter(changes.items()))
  assert f"--drafter={drafter} --target={tiny.target}: " in error
  assert f"{name}".removeprefix("num_") in error and f"={value}" in error
  assert not (tmp_path / "run").exists()


def test_answers_of_a_served_model_are_not_decoded(tiny, tmp_path):
  for name in ("train_t0.jsonl", "train_t0.left_out.jsonl"):
    (tmp_path / name).write_text("{}\n")
  error = fail(tiny, "evaluate_drafter", tmp_path / "run", answers=tmp_path)
  assert "no part held_out.npz there: a served model's answers" in error
  assert f"--chats={tmp_path / 'train_t0.jsonl'};" in error
  assert "make_answers without --server" in error


def test_a_part_that_the_answers_do_not_have_is_named(tiny, tmp_path):
  run = tmp_path / "run"
  error = fail(tiny, "train_drafter", run, parts=["train_t0", "train_t7"])
  assert error == f"--answers={tiny.answers}: no part train_t7.npz there"
  error = fail(tiny, "train_drafter", run, parts="")
  assert f"--answers={tiny.answers}" in error
  for script in ("evaluate_drafter", "benchmark_decode"):
    error = fail(tiny, script, run, answers=tmp_path)
    assert error == f"--answers={tmp_path}: no part held_out.npz there"
  error = fail(tiny, "compare_drafters", run, answers=tmp_path)
  assert error == f"--answers={tmp_path}: no part train_t0.npz there"
  error = fail(tiny, "benchmark_decode", run, answers=None)
  assert "--answers" in error and "--preset" in error
  assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("script", ["train_drafter", "evaluate_drafter"])
def test_answers_of_a_larger_vocabulary_are_refused(tiny, tmp_path, script):
  folder = tmp_path / "answers"
  folder.mkdir()
  for name in ("train_t0", "train_t1", "held_out"):
    part = tiny_folder.random_answers(3)
    part.tokens[1, 2] = 300
    answers_lib.save(folder / f"{name}.npz", part)
  error = fail(tiny, script, tmp_path / "run", answers=folder)
  assert f"--answers={folder}: token 300 is outside" in error
  assert f"vocab_size=300 of --target={tiny.target}" in error


def test_damaged_answers_are_told_by_their_file(tiny, tmp_path):
  folder = shutil.copytree(tiny.answers, tmp_path / "answers")
  path = folder / "held_out.npz"
  path.write_bytes(path.read_bytes()[:100])
  error = fail(tiny, "evaluate_drafter", tmp_path / "run", answers=folder)
  assert error.startswith(f"{path}: not an answer set")
  # The same file as a finished part: it is told, not silently made anew.
  run = tmp_path / "run"
  run.mkdir()
  for name in ("train_t0", "train_t1", "held_out"):
    (run / f"{name}.npz").write_bytes(b"")
  error = fail(tiny, "make_answers", run)
  assert error.startswith(f"{run / 'train_t0.npz'}: not an answer set")


@pytest.mark.parametrize("script", [*WITH_WORK_DIR, "quickstart"])
def test_a_work_dir_that_cannot_be_made_is_told_at_once(tiny, tmp_path, script):
  (tmp_path / "file").write_text("mine")
  work_dir = tmp_path / "file" / "run"
  error = fail(tiny, script, work_dir)
  assert error.startswith(f"--work_dir={work_dir}: cannot make or write")
  assert (tmp_path / "file").read_text() == "mine"


@pytest.mark.parametrize("script", [*WITH_WORK_DIR, "quickstart"])
def test_a_work_dir_must_be_named(tiny, script):
  assert "--work_dir must name a directory" in fail(tiny, script, "")


# Prompts.


def test_a_folder_of_turns_is_told_by_file_and_line(tiny, tmp_path):
  folder = tmp_path / "prompts"
  folder.mkdir()
  run = tmp_path / "run"
  options = {"prompts": folder, "corpus": None, "prompt_tokens": 64}
  options["longest_prompt"] = 64
  error = fail(tiny, "make_answers", run, **options)
  assert error.startswith(f"--prompts={folder}: train.jsonl and a file")
  (folder / "train.jsonl").write_text('{"turns": ["hello"]}\n')
  for text, place in (("", "no conversation in it"), ("{}\n", "line 1")):
    (folder / "one.jsonl").write_text(text)
    error = fail(tiny, "make_answers", run, **options)
    assert error.startswith(f"{folder / 'one.jsonl'}") and place in error
  (folder / "one.jsonl").write_text('{"turns": ["a"]}\n{"turns": [1]}\n')
  assert "line 2: turns=[1]" in fail(tiny, "make_answers", run, **options)
  (folder / "one.jsonl").write_text('{"turns": ["hello"]}\n')
  error = fail(tiny, "make_answers", run, **options)
  assert error == f"target {tiny.target}: no chat template"
  both = {"prompts": folder}
  assert "not with --corpus" in fail(tiny, "make_answers", run, **both)


def test_generate_needs_a_prompt_that_fits(tiny):
  assert fail(tiny, "generate", None, prompt="") == "--prompt is empty"
  assert fail(tiny, "generate", None, prompt=None) == "--prompt is needed"
  for changes in ({"prompt": "{}[]" * 100}, {"max_new_tokens": 256}):
    error = fail(tiny, "generate", None, **changes)
    assert "max_positions=256" in error and "max_new_tokens" in error


def test_prompts_that_the_corpus_does_not_hold_are_told(tiny, tmp_path):
  error = fail(tiny, "make_answers", tmp_path / "run", train_prompts=10**7)
  assert "windows of 64 tokens, 10000000 prompts were asked for" in error


@pytest.mark.parametrize("script", ["make_answers", "quickstart"])
def test_answers_that_the_target_has_no_positions_for_are_told(
  tiny, tmp_path, script
):
  error = fail(tiny, script, tmp_path / "run", new_tokens=200)
  assert "--new_tokens=200" in error and "max_positions=256" in error
  assert not (tmp_path / "run").exists()


# Flags.

IMPOSSIBLE = [
  ("train_drafter", {"block_size": 1}, "block_size=1"),
  ("train_drafter", {"steps": 0}, "steps"),
  ("train_drafter", {"steps": "many"}, "steps"),
  ("train_drafter", {"batch_size": 0}, "batch_size=0"),
  ("train_drafter", {"accumulation": -1}, "accumulation=-1"),
  ("train_drafter", {"num_anchors": 0}, "num_anchors=0"),
  ("train_drafter", {"chunk_blocks": 0}, "chunk_blocks=0"),
  ("train_drafter", {"learning_rate": 0}, "learning_rate=0.0"),
  ("train_drafter", {"learning_rate": "nan"}, "learning_rate=nan"),
  ("train_drafter", {"num_layers": 8}, "--num_layers=8: "),
  ("train_drafter", {"cache_gb": "nan"}, "--cache_gb=nan: must be a finite"),
  ("train_drafter", {"top_k": 301}, "top_k=301: cannot exceed vocab_size=300"),
  ("train_drafter", {"top_k": 0}, "top_k=0"),
  ("train_drafter", {"transfer_rank": 33}, "transfer_rank=33"),
  ("train_drafter", {"mask_token_id": 300}, "mask_token_id=300"),
  ("train_drafter", {"method": "medusa"}, "method"),
  ("train_drafter", {"method": "dflash", "objective": "tv"}, "objective"),
  ("train_drafter", {"objective": "d_pace"}, "--objective=d_pace: --method=ds"),
  ("train_drafter", {"block_attention": "none"}, "block_attention"),
  ("train_drafter", {"sliding_window": 15}, "sliding_window=15: must be an"),
  ("train_drafter", {"sliding_window_convention": "vllm"}, "convention"),
  (
    "train_drafter",
    {"sliding_window_convention": "specforge"},
    "sliding_window_convention='specforge': needs a sliding_window",
  ),
  ("train_drafter", {"seed": -1}, "seed"),
  ("train_drafter", {"stepz": 3}, "stepz"),
  ("train_target", {"steps": 0}, "steps"),
  ("train_target", {"hidden_size": 100}, "--hidden_size=100"),
  ("train_target", {"num_layers": 0}, "num_layers=0"),
  ("train_target", {"vocab_size": 100}, "vocab_size=100"),
  ("train_target", {"learning_rate": -1}, "learning_rate=-1.0"),
  ("make_answers", {"temperatures": ["0", "hot"]}, "--temperatures=0,hot"),
  ("make_answers", {"temperatures": ["0", "-1"]}, "--temperatures=0,-1"),
  ("make_answers", {"temperatures": ["0", "inf"]}, "--temperatures=0,inf"),
  ("make_answers", {"temperatures": ""}, "--temperatures: at least one"),
  ("make_answers", {"new_tokens": 1}, "new_tokens"),
  ("evaluate_drafter", {"temperatures": ["0", "-1"]}, "--temperatures=0,-1"),
  ("evaluate_drafter", {"sampling_top_p": 0}, "top_p=0.0"),
  ("evaluate_drafter", {"sampling_top_k": -1}, "top_k=-1"),
  ("evaluate_drafter", {"batch_size": 0}, "batch_size"),
  ("compare_drafters", {"seeds": ["0", "x"]}, "--seeds=0,x"),
  ("compare_drafters", {"methods": ["dflash3"]}, "--methods=dflash3"),
  ("compare_drafters", {"speed_batches": [0]}, "--speed_batches=0"),
  ("compare_drafters", {"benchmarks": ["gsm8k"]}, "no part gsm8k.npz"),
  ("compare_drafters", {"block_size": 1}, "block_size=1"),
  ("benchmark_training", {"methods": ["medusa"]}, "--methods=['medusa']"),
  ("benchmark_training", {"preset": "huge"}, "preset"),
  ("benchmark_training", {"repeats": 0}, "repeats"),
  ("benchmark_decode", {"repeats": 0}, "repeats"),
  ("benchmark_decode", {"max_new_tokens": 1}, "max_new_tokens"),
  ("generate", {"temperature": -1}, "temperature=-1.0"),
  ("generate", {"temperature": 1, "sampling_top_p": 0}, "top_p=0.0"),
  ("generate", {"temperature": 1, "sampling_top_p": 1.5}, "top_p=1.5"),
  ("generate", {"temperature": 1, "rule": "greedy"}, "rule='greedy'"),
  ("generate", {"temperature": 1, "proposal": "base"}, "proposal='base'"),
  ("generate", {"rule": "rejection"}, "rule='rejection'"),
  ("generate", {"max_new_tokens": 0}, "max_new_tokens"),
  ("generate", {"color": "red"}, "color"),
  ("quickstart", {"block_size": 1}, "block_size=1"),
  ("quickstart", {"num_layers": 8}, "--num_layers=8: "),
  ("quickstart", {"speed_prompts": 0}, "speed_prompts"),
  ("quickstart", {"seed": -1}, "seed"),
]


@pytest.mark.parametrize(("script", "changes", "words"), IMPOSSIBLE, ids=str)
def test_an_impossible_flag_is_told_before_any_work(
  tiny, tmp_path, script, changes, words
):
  error = fail(tiny, script, tmp_path / "run", **changes)
  assert words in error
  assert not (tmp_path / "run").exists()


# A work directory of another run.

OTHER = [
  ("train_target", {"seed": 1}, "seed is 0 there and 1 now"),
  ("train_target", {"num_layers": 6}, "target.num_layers is 5 there and 6"),
  ("make_answers", {"seed": 1}, "seed is 0 there and 1 now"),
  ("make_answers", {"eval_prompts": 3}, "eval_prompts is 2 there and 3 now"),
  ("train_drafter", {"seed": 1}, "train.seed is 0 there and 1 now"),
  ("train_drafter", {"steps": 3}, "total_steps is 2 there and 3 now"),
  ("train_drafter", {"block_size": 4}, "block_size is 16 there and 4 now"),
  (
    "train_drafter",
    {"features": "on_the_fly"},
    'features.choice is "auto" there and "on_the_fly" now',
  ),
  ("quickstart", {"steps": 3}, "steps is 2 there and 3 now"),
]


@pytest.fixture(name="started")
def fixture_started(tiny, tmp_path, monkeypatch):
  """Starts a good run that ends right after its work directory is made."""

  def start(script):
    work_dir = tmp_path / "run"
    open_work_dir = run_io.open_work_dir

    def stop_after(*args, **kwargs):
      open_work_dir(*args, **kwargs)
      raise ValueError("stopped")

    with monkeypatch.context() as patch:
      patch.setattr(run_io, "open_work_dir", stop_after)
      assert fail(tiny, script, work_dir) == "stopped"
    return work_dir

  return start


@pytest.mark.parametrize(("script", "changes", "words"), OTHER, ids=str)
def test_a_work_dir_of_another_config_is_left_as_it_is(
  tiny, started, script, changes, words
):
  work_dir: pathlib.Path = started(script)
  (work_dir / "metrics.jsonl").write_text('{"step": 0}\n')
  before = {path: path.read_bytes() for path in work_dir.iterdir()}
  error = fail(tiny, script, work_dir, **changes)
  assert f"--work_dir={work_dir} holds a run with another config" in error
  assert words in error
  assert {path: path.read_bytes() for path in work_dir.iterdir()} == before
