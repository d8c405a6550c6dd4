"""The script that converts drafters and targets, on folders and files."""

import json
import re
import shutil

import jax
import numpy as np
import pytest

from dspine_jax.checkpoints import (
  target_folder,
  tensors,
)
from experiments import targets
from experiments.stages import evaluation
from tests import drafter_files, script_runner


def convert(**values):
  return script_runner.run("convert_checkpoint", **values)


def write_run(folder):
  """What every run leaves in its work directory."""
  folder.mkdir()
  (folder / "config.json").write_text('{"seed": 0}')
  (folder / "command.txt").write_text("train\n")


def contents(folder):
  files = (path for path in folder.rglob("*") if path.is_file())
  return {str(path): path.read_bytes() for path in files}


def read_config(folder):
  return json.loads((folder / "config.json").read_text())


def test_a_drafter_goes_to_another_form_and_back(tiny, tmp_path):
  there, back = tmp_path / "speculators", tmp_path / "zlab"
  done = script_runner.run_well(
    "convert_checkpoint",
    source=tiny.drafter,
    destination=there,
    to="speculators",
    target_name="some/target",
  )
  lines = [line.split() for line in done.stdout.splitlines()[2:]]
  assert [line[:4] for line in lines] == [
    ["source", "dflash", "zlab,", "specforge"],  # Written alike.
    ["written", "dflash", "speculators", "25"],
  ]
  assert "100.0%" in done.stderr
  verifier = read_config(there)["speculators_config"]["verifier"]
  assert verifier["name_or_path"] == "some/target"
  script_runner.run_well(
    "convert_checkpoint",
    source=there,
    destination=back,
    to="zlab",
    target=tiny.target,
    max_shard_gb=0.001,
  )
  assert read_config(back) == read_config(tiny.drafter)
  assert (back / tensors.SINGLE).read_bytes() == (
    tiny.drafter / tensors.SINGLE
  ).read_bytes()


def test_without_a_destination_it_only_looks(tiny):
  done = script_runner.run_well("convert_checkpoint", source=tiny.drafter)
  assert "dflash" in done.stdout and "float32" in done.stdout
  done = script_runner.run_well("convert_checkpoint", source=tiny.target)
  assert "qwen3" in done.stdout


def test_the_drafter_of_a_training_is_found_in_its_work_directory(
  tiny, tmp_path
):
  run = tmp_path / "run"
  shutil.copytree(tiny.drafter, run / "drafter")
  (run / "config.json").write_text("{}")  # Of the run, as every run has one.
  script_runner.run_well(
    "convert_checkpoint",
    source=run,
    destination=tmp_path / "out",
    dtype="bfloat16",
  )
  assert read_config(tmp_path / "out")["dtype"] == "bfloat16"
  reader = tensors.Reader(tmp_path / "out")
  assert {reader.dtype(name).name for name in reader.names()} == {"bfloat16"}


@pytest.mark.parametrize(
  ("values", "match"),
  [
    ({"source": None}, "--source must name what to convert"),
    ({"source": "nowhere"}, "^--source=nowhere: no such folder$"),
    ({"source": "empty"}, "^--source=.*/empty: no config.json there$"),
    ({"source": "file"}, "^--source=.*: is a file; a folder or a .*gguf"),
    ({"source": "run"}, "^--source=.*/run: the work directory of a run"),
    ({"to": "deepspec"}, "^--to=deepspec: has no dflash .*; --to=zlab or"),
    ({"max_shard_gb": "nan"}, "--max_shard_gb=nan"),
    ({"max_shard_gb": "inf"}, "--max_shard_gb=inf"),
    ({"max_shard_gb": 0}, "--max_shard_gb=0"),
    ({"max_shard_gb": -1}, "--max_shard_gb=-1"),
    ({"to": "target"}, "--to=target: --source=.* is a drafter"),
    ({"destination": "full"}, "is not empty; --overwrite replaces"),
    ({"source": "unfinished"}, "has not written its drafter yet"),
    ({"source": "target", "to": "zlab"}, "--to=zlab: --source=.* is a target"),
    ({"source": "embedded", "destination": None}, "name a --destination"),
  ],
)
def test_what_cannot_be_converted_is_one_line(tiny, tmp_path, values, match):
  (tmp_path / "unfinished" / "checkpoints").mkdir(parents=True)
  (tmp_path / "unfinished" / "config.json").write_text("{}")
  (tmp_path / "full").mkdir()
  (tmp_path / "full" / "a").write_text("kept")
  (tmp_path / "empty").mkdir()
  write_run(tmp_path / "run")
  names = ("unfinished", "empty", "run")
  places = {name: tmp_path / name for name in names}
  places |= {"target": tiny.target, "file": tmp_path / "full" / "a"}
  given = {"source": tiny.drafter, "destination": tmp_path / "out"} | values
  if given["destination"] == "full":
    given["destination"] = tmp_path / "full"
  given["source"] = places.get(given["source"], given["source"])
  done = convert(**{k: v for k, v in given.items() if v is not None})
  assert done.status == 1
  assert re.search(match, done.error), done.error
  assert not (tmp_path / "out").exists()
  assert (tmp_path / "full" / "a").read_text() == "kept"


@pytest.mark.parametrize(
  ("source", "destination", "match"),
  [
    ("drafter", "target", "its config.json is that of a target, which a draf"),
    ("target", "drafter", "its config.json is that of a drafter, which a tar"),
    ("drafter", "other", "its config.json is that of something else"),
    ("drafter", "run", "the work directory of a run .command.txt is there"),
    ("run", "run", "the work directory of a run .command.txt is there"),
    ("drafter", "saved", "the work directory of a run .checkpoints is there"),
    ("drafter", "drafter/sub", "lies inside --source="),
    ("run", "run/drafter/sub", "lies inside --source="),
    ("run/drafter", ".", "lies around --source="),
    ("target", "target/config.json", "is a file, not a folder"),
  ],
)
def test_overwrite_spares_what_is_no_such_model(
  tiny, tmp_path, source, destination, match
):
  shutil.copytree(tiny.drafter, tmp_path / "drafter")
  shutil.copytree(tiny.target, tmp_path / "target")
  write_run(tmp_path / "run")
  shutil.copytree(tiny.drafter, tmp_path / "run" / "drafter")
  (tmp_path / "saved" / "checkpoints").mkdir(parents=True)
  (tmp_path / "other").mkdir()
  (tmp_path / "other" / "config.json").write_text("{}")
  before = contents(tmp_path)
  done = convert(
    source=tmp_path / source,
    destination=tmp_path / destination,
    overwrite=True,
  )
  assert done.status == 1
  folder = re.escape(str(tmp_path / destination))
  assert re.search(f"^--destination={folder}: {match}", done.error), done.error
  assert contents(tmp_path) == before


@pytest.mark.parametrize("kind", ["drafter", "target"])
def test_a_model_is_written_anew_in_its_own_place(tiny, tmp_path, kind):
  folder = tmp_path / "model"
  shutil.copytree(getattr(tiny, kind), folder)
  before = contents(folder)
  values = {"source": folder, "destination": tmp_path / "." / "model"}
  assert "--overwrite" in convert(**values).error
  assert contents(folder) == before
  script_runner.run_well(
    "convert_checkpoint", **values, overwrite=True, dtype="bfloat16"
  )
  after = contents(folder)
  assert set(after) == set(before)
  weights = str(folder / tensors.SINGLE)
  assert len(after[weights]) < len(before[weights])


@pytest.mark.parametrize(
  ("method", "form", "to", "match"),
  [
    ("dspine", "specforge", "zlab", "has no dspine .*; --to=specforge can"),
    ("dflash", "speculators", "zlab", "name with --target=FOLDER its target"),
    ("dspark", "specforge", "deepspec", "name with --target=FOLDER the target"),
    ("dspark", "deepspec", "specforge", "name with --target=FOLDER the target"),
  ],
)
def test_a_refused_form_says_which_flag_helps(
  tmp_path, method, form, to, match
):
  drafter_files.save(tmp_path / "a", method, form)
  done = convert(source=tmp_path / "a", destination=tmp_path / "b", to=to)
  assert done.status == 1
  assert re.search(f"^--to={to}: .*{match}", done.error), done.error
  assert not (tmp_path / "b").exists()


def test_a_work_directory_is_no_drafter_and_its_own_is_named(tiny, tmp_path):
  target = targets.load(str(tiny.target))
  write_run(tmp_path / "run")
  with pytest.raises(ValueError, match="^--drafter=.*/run: the work directory"):
    evaluation.load_drafter(tmp_path / "run", target)
  shutil.copytree(tiny.drafter, tmp_path / "run" / "drafter")
  with pytest.raises(ValueError, match="its drafter is --drafter=.*/drafter$"):
    evaluation.load_drafter(tmp_path / "run", target)
  evaluation.load_drafter(tmp_path / "run" / "drafter", target)


def test_a_target_gets_other_shards_and_keeps_its_other_files(tiny, tmp_path):
  out = tmp_path / "out"
  out.mkdir()
  (out / "notes.txt").write_text("kept")
  script_runner.run_well(
    "convert_checkpoint",
    source=tiny.target,
    destination=out,
    to="target",
    dtype="bfloat16",
    max_shard_gb=0.001,
    overwrite=True,
  )
  assert {path.name for path in out.iterdir()} == {
    *("config.json", "tokenizer.json", "notes.txt", tensors.SINGLE)
  }
  assert read_config(out)["torch_dtype"] == "bfloat16"
  old = target_folder.load_target(tiny.target)
  new = target_folder.load_target(out)
  assert new.cfg == old.cfg
  table = np.asarray(old.params["embed_tokens"])
  rounded = np.asarray(new.params["embed_tokens"])
  assert (table != rounded).any()
  np.testing.assert_allclose(rounded, table, rtol=2**-8)


def test_the_embedded_target_becomes_a_folder(tmp_path):
  out = tmp_path / "out"
  script_runner.run_well(
    "convert_checkpoint", source="embedded", destination=out
  )
  loaded = target_folder.load_target(out)
  assert loaded.cfg.num_layers == 12 and (out / "tokenizer.json").exists()


def test_a_gguf_file_becomes_a_folder_with_its_tokenizer(tmp_path):
  from tests import tiny_gguf  # Skips where a package is missing.

  file = tiny_gguf.write(
    tmp_path / "t.gguf", tiny_gguf.target_config(num_layers=1)
  )
  out = tmp_path / "out"
  done = script_runner.run_well(
    "convert_checkpoint", source=file, destination=out, to="target"
  )
  assert "written" in done.stdout and "float32" in done.stdout
  old, new = targets.load(str(file)), targets.load(str(out))
  assert new.chat_template == old.chat_template
  assert new.tokenizer.get_vocab() == old.tokenizer.get_vocab()
  jax.tree.map(
    np.testing.assert_array_equal, new.model.params, old.model.params
  )


@pytest.mark.slow
def test_evaluate_drafter_takes_a_speculators_folder(tiny, tmp_path):
  script_runner.run_well(
    "convert_checkpoint",
    source=tiny.drafter,
    destination=tmp_path / "drafter",
    to="speculators",
  )
  results = []
  for drafter in (tiny.drafter, tmp_path / "drafter"):
    work_dir = tmp_path / f"evaluation_{len(results)}"
    script_runner.run_well(
      "evaluate_drafter",
      work_dir=work_dir,
      target=tiny.target,
      drafter=drafter,
      answers=tiny.answers,
      temperatures=[0],
      batch_size=4,
    )
    results.append(json.loads((work_dir / "results.json").read_text()))
  assert results[0] == results[1]
  assert results[0]["T=0 greedy"]["all"]["rounds"] > 0
