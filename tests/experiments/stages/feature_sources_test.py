"""Whether features are kept, and what is said of it beforehand."""

import collections
import shutil

import numpy as np
import pytest
import tokenizers

from dspine_jax.data import feature_cache, sources
from dspine_jax.data import rows as rows_lib
from dspine_jax.decoding import generate
from experiments import run_io, targets
from experiments.stages import feature_sources
from tests import script_runner, tiny_folder, tiny_models

TAPS = (0, 2)
ANSWERS = tiny_folder.random_answers(6, vocab=61, prompt=5, new=6)
ROWS = rows_lib.from_answers(ANSWERS)
# Three rows of 11 positions, three of 10, of three states of 24 numbers.
STATES = 63 * 3 * 24 * 2


@pytest.fixture(name="target", scope="module")
def fixture_target(tmp_path_factory):
  cfg = tiny_models.target_config()
  return targets.NamedTarget(
    name="tiny",
    folder=tmp_path_factory.mktemp("target"),
    model=generate.TargetModel(tiny_models.target_params(cfg), cfg),
    tokenizer=tokenizers.Tokenizer(tokenizers.models.BPE()),
  )


@pytest.fixture(name="free")
def fixture_free(monkeypatch):
  """Says how many bytes are free on every disk."""
  usage = collections.namedtuple("usage", "total used free")

  def give(count):
    monkeypatch.setattr(
      shutil, "disk_usage", lambda path: usage(count, 0, count)
    )

  return give


def make(target, folder, choice="auto", **options):
  return feature_sources.for_training(
    target,
    ROWS,
    TAPS,
    choice=choice,
    folder=folder,
    dtype="bfloat16",
    **options,
  )


def test_features_that_fit_are_kept_and_their_size_is_told_first(
  target, tmp_path, capsys
):
  source = make(target, tmp_path)
  assert isinstance(source, feature_cache.FeatureCache)
  (folder,) = tmp_path.iterdir()
  said = capsys.readouterr().err
  # The states, checksums and lengths, and a kilobyte for headers.
  size = f"{(STATES + 6 * 8 + 1024) / 1e3:.3g} kB"
  assert said.startswith(f"features: {size} to {folder} (")
  assert said.splitlines()[0].endswith("B free)")
  assert "features: 66/66 tokens" in said
  again = make(target, tmp_path)
  assert capsys.readouterr().err == ""
  index = np.arange(6)
  np.testing.assert_array_equal(
    again.read(index)["last_hidden"], source.read(index)["last_hidden"]
  )


@pytest.mark.parametrize("limit", ["disk", "cache_gb"])
def test_auto_computes_what_does_not_fit_on_the_fly_and_stays_with_it(
  target, tmp_path, capsys, free, limit
):
  free(int(STATES if limit == "disk" else 1e9))
  most_gb = None if limit == "disk" else STATES / 1e9
  source = make(target, tmp_path / "new", most_gb=most_gb)
  assert isinstance(source, sources.OnTheFly)
  assert "do not fit in" in capsys.readouterr().err
  free(10**9)
  # A run that goes on is not to change its numbers.
  again = make(target, tmp_path / "new")
  assert isinstance(again, sources.OnTheFly)
  assert "as before (because of" in capsys.readouterr().err
  (mark,) = (tmp_path / "new").glob("*/on_the_fly")
  mark.unlink()
  assert isinstance(make(target, tmp_path / "new"), feature_cache.FeatureCache)


def test_a_cache_that_does_not_fit_is_refused_before_anything_is_written(
  target, tmp_path, free
):
  free(STATES - 1)
  with pytest.raises(ValueError, match="features take .* free there; free sp"):
    make(target, tmp_path / "new", "cache")
  assert not (tmp_path / "new").exists()


def test_on_the_fly_touches_no_disk(target, tmp_path):
  source = make(target, tmp_path / "new", "on_the_fly")
  assert isinstance(source, sources.OnTheFly)
  assert not (tmp_path / "new").exists()


def test_features_on_demand_are_exact_and_made_once(target, tmp_path, capsys):
  source = feature_sources.on_demand(target, ANSWERS, TAPS, tmp_path)
  assert not list(tmp_path.iterdir())
  assert source() is source()
  assert capsys.readouterr().err.count(" free)") == 1
  memory = feature_sources.in_memory(target, ANSWERS, TAPS)
  index = np.array([5, 0])
  found, expected = source().read(index), memory.read(index)
  real = np.arange(11) < ROWS.lengths[index][:, None]
  for name, array in found.items():
    assert array.dtype == expected[name].dtype
    np.testing.assert_array_equal(array[real], expected[name][real])


def train(tiny, work_dir, **changes):
  script_runner.run_well(
    "train_drafter",
    target=tiny.target,
    answers=tiny.answers,
    work_dir=work_dir,
    method="dflash",
    block_size=5,
    num_anchors=3,
    batch_size=2,
    accumulation=2,
    steps=2,
    **changes,
  )
  rows = run_io.read_metrics(work_dir / "metrics.jsonl")
  return {
    name: np.array([row[name] for row in rows])
    for name in ("loss", "grad_norm", "data_wait")
  }


@pytest.mark.slow  # Trains twice through the script: 10 s of CPU time.
def test_training_on_the_fly_is_training_on_kept_features(tiny, tmp_path):
  # Float32 rounds differently in programs of other shapes, no more.
  kept = train(
    tiny, tmp_path / "kept", features="cache", feature_dtype="float32"
  )
  flown = train(tiny, tmp_path / "flown", features="on_the_fly")
  assert (tmp_path / "kept" / "features").exists()
  assert not (tmp_path / "flown" / "features").exists()
  for name in ("loss", "grad_norm"):
    np.testing.assert_allclose(flown[name], kept[name], rtol=1e-4)
  assert (flown["data_wait"] >= 0).all()
