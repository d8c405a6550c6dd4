"""Drafter folders from one form to another, and the exports that are killed."""

import json
import pathlib
import signal
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest

from dspine_jax.checkpoints import (
  drafter_conversion,
  drafter_folder,
  target_folder,
  tensors,
)
from dspine_jax.drafters import methods
from tests import drafter_files, tiny_models

TABLES = ("embed_tokens.weight", "lm_head.weight")
GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize("method", sorted(methods.DRAFTERS))
def test_a_golden_folder_is_converted_to_itself(method, tmp_path):
  source = drafter_conversion.inspect(GOLDEN / method)
  drafter_conversion.convert(source, tmp_path / "out", source.form)
  assert drafter_files.raw(tmp_path / "out") == drafter_files.raw(
    GOLDEN / method
  )
  assert drafter_files.read_config(
    tmp_path / "out"
  ) == drafter_files.read_config(GOLDEN / method)


def tiny_target(folder, tables, **changes):
  cfg = tiny_models.target_config(**changes)
  params = tiny_models.target_params(cfg)
  params = params | {"embed_tokens": tables.embedding, "lm_head": tables.head}
  target_folder.save_target(folder, params, cfg)
  return folder


def test_tables_come_from_the_target_and_go_only_if_they_are_its(tmp_path):
  setup = drafter_files.save(
    tmp_path / "own", "dspark", "deepspec", dtype="float32"
  )
  target = tiny_target(tmp_path / "target", setup.tables)
  source = drafter_conversion.inspect(tmp_path / "own")
  assert source.form == "deepspec" and source.dtype == "float32"
  with pytest.raises(ValueError, match="has its own; name the target"):
    drafter_conversion.convert(source, tmp_path / "x", "specforge")
  written = drafter_conversion.convert(
    source, tmp_path / "bare", "specforge", target=target
  )
  assert len(written) == len(source.found) - 2
  assert not set(TABLES) & set(drafter_files.raw(tmp_path / "bare"))
  bare = drafter_conversion.inspect(tmp_path / "bare")
  with pytest.raises(ValueError, match="has none of its own; name the target"):
    drafter_conversion.convert(bare, tmp_path / "x", "deepspec")
  drafter_conversion.convert(bare, tmp_path / "back", "deepspec", target=target)
  assert drafter_files.raw(tmp_path / "back") == drafter_files.raw(
    tmp_path / "own"
  )
  tables = setup.tables.replace(head=setup.tables.head.at[60, 3].add(1e-3))
  other = tiny_target(tmp_path / "other", tables)
  with pytest.raises(ValueError, match="lm_head.weight is not the target's"):
    drafter_conversion.convert(
      source, tmp_path / "x", "specforge", target=other
    )
  deeper = tiny_target(tmp_path / "deeper", tables, num_layers=6)
  with pytest.raises(
    ValueError, match="num_target_layers=4, this target has 6"
  ):
    drafter_conversion.convert(
      source, tmp_path / "x", "deepspec", target=deeper
    )
  assert not (tmp_path / "x").exists()


def test_tables_are_compared_to_their_last_row(tmp_path, monkeypatch):
  setup = drafter_files.save(
    tmp_path / "own", "dspark", "deepspec", dtype="float32"
  )
  source = drafter_conversion.inspect(tmp_path / "own")
  # Several chunks, the last one of a single row.
  monkeypatch.setattr(drafter_conversion, "_ROWS", 20)
  last = setup.tables.head.shape[0] - 1
  assert last % 20 == 0
  tables = setup.tables.replace(head=setup.tables.head.at[last].add(1e-3))
  for name, given in (("same", setup.tables), ("other", tables)):
    target = tiny_target(tmp_path / name, given)
    if name == "same":
      drafter_conversion.convert(
        source, tmp_path / "bare", "specforge", target=target
      )
      continue
    with pytest.raises(ValueError, match="lm_head.weight is not the target's"):
      drafter_conversion.convert(
        source, tmp_path / "x", "specforge", target=target
      )


@pytest.mark.parametrize("keys", [["torch_dtype"], ["dtype"], []])
def test_the_same_form_keeps_its_key_of_the_dtype(keys, tmp_path):
  drafter_files.save(tmp_path / "a", "dflash", "zlab")
  config = drafter_files.read_config(tmp_path / "a")
  assert config.pop("dtype") == "bfloat16"
  config |= dict.fromkeys(keys, "bfloat16")
  # As others may format it.
  text = json.dumps(config, indent=4)
  (tmp_path / "a" / "config.json").write_text(text)
  source = drafter_conversion.inspect(tmp_path / "a")
  drafter_conversion.convert(source, tmp_path / "b", "zlab")
  assert (tmp_path / "b" / "config.json").read_text() == text
  drafter_conversion.convert(source, tmp_path / "c", "zlab", dtype="float16")
  want = config | dict.fromkeys(keys or ["dtype"], "float16")
  assert drafter_files.read_config(tmp_path / "c") == want
  stored = drafter_files.raw(tmp_path / "c").values()
  assert {dtype for dtype, _, _ in stored} == {"float16"}


@pytest.mark.parametrize(
  ("method", "changes", "form", "match"),
  [
    ("dspine", {}, "speculators", "has no dspine"),
    ("domino", {}, "zlab", "has no domino"),
    ("dflash", {"is_causal": True}, "speculators", "this drafter is causal"),
    (
      "dflash2",
      {"dflash2": {"output_multiplier": 0.5}},
      "speculators",
      "has no option output_multiplier",
    ),
    (
      "dflash",
      tiny_models.windowed("speculators"),
      "zlab",
      "trained by 'speculators'",
    ),
    (
      "dflash",
      tiny_models.windowed("automodel"),
      "speculators",
      "trained by 'automodel'",
    ),
    ("dflash", {}, "gguf", "not one of"),
  ],
)
def test_conversions_that_change_the_drafter_are_refused(
  method, changes, form, match, tmp_path
):
  drafter_files.save(tmp_path / "a", method, **changes)
  source = drafter_conversion.inspect(tmp_path / "a")
  with pytest.raises(ValueError, match=f"form='{form}'.*{match}"):
    drafter_conversion.convert(source, tmp_path / "b", form)
  assert not (tmp_path / "b").exists()


def test_depth_is_asked_for_where_speculators_did_not_tell_it(tmp_path):
  setup = drafter_files.save(tmp_path / "a", "dflash", "speculators")
  source = drafter_conversion.inspect(tmp_path / "a")
  with pytest.raises(ValueError, match="num_target_layers is not known"):
    drafter_conversion.convert(source, tmp_path / "b", "zlab")
  target = tiny_target(tmp_path / "target", setup.tables)
  drafter_conversion.convert(source, tmp_path / "b", "zlab", target=target)
  assert drafter_folder.load_drafter(tmp_path / "b").cfg == setup.cfg


def test_mixed_dtypes_prefixes_and_shards_are_kept_bit_by_bit(tmp_path):
  drafter_files.save(tmp_path / "a", "dspine", dtype="float32")

  def mixed(arrays):
    for name in list(arrays):
      array = arrays.pop(name)
      if array.dtype == np.float32 and name != "transfer_codes":
        array = array.astype(ml_dtypes.bfloat16)
      arrays[f"model.{name}"] = array

  drafter_files.rewrite(tmp_path / "a", mixed)
  drafter_files.edit_config(tmp_path / "a", pad_token_id=3, dtype="bfloat16")
  before = {
    name.removeprefix("model."): value
    for name, value in drafter_files.raw(tmp_path / "a").items()
  }
  source = drafter_conversion.inspect(tmp_path / "a")
  assert (source.dtype, len(source.found)) == ("bfloat16", len(before) - 1)
  sizes = []
  drafter_conversion.convert(
    source,
    tmp_path / "b",
    "specforge",
    max_shard_bytes=20_000,
    on_bytes=sizes.append,
  )
  shards = list((tmp_path / "b").glob("model-*-of-*.safetensors"))
  assert len(shards) > 1 and (tmp_path / "b" / tensors.INDEX).exists()
  assert drafter_files.raw(tmp_path / "b") == before
  assert sum(sizes) == source.num_bytes
  assert drafter_files.read_config(tmp_path / "b") == drafter_files.read_config(
    tmp_path / "a"
  )
  again = drafter_conversion.inspect(tmp_path / "b")
  drafter_conversion.convert(again, tmp_path / "b", "specforge")
  assert drafter_files.raw(tmp_path / "b") == before
  assert [path.name for path in (tmp_path / "b").glob("*.safetensors")] == [
    tensors.SINGLE
  ]


def test_keys_that_nothing_computes_with_move_along(tmp_path):
  drafter_files.save(tmp_path / "a", "dflash", "zlab")
  drafter_files.edit_config(
    tmp_path / "a", pad_token_id=3, initializer_range=0.01
  )
  source = drafter_conversion.inspect(tmp_path / "a")
  drafter_conversion.convert(source, tmp_path / "b", "speculators")
  nested = drafter_files.read_config(tmp_path / "b")["transformer_layer_config"]
  assert (nested["pad_token_id"], nested["initializer_range"]) == (3, 0.01)
  assert "pad_token_id" not in drafter_files.read_config(tmp_path / "b")


# Stops where all weights are written and config.json is not.
_EXPORT = """
import sys
from dspine_jax.checkpoints import drafter_conversion, hf_config
source, destination = sys.argv[1:]
write = hf_config.write_json
def stop_before_config(path, config):
  if path.name == "config.json":
    print("writing", flush=True)
    sys.stdin.read()
  write(path, config)
hf_config.write_json = stop_before_config
drafter_conversion.convert(
  drafter_conversion.inspect(source), destination, "specforge",
  dtype="bfloat16", max_shard_bytes=5000)
"""


@pytest.mark.slow
def test_a_killed_export_leaves_the_old_one(tmp_path):
  drafter_files.save(tmp_path / "new", "dspine", "specforge")
  old = drafter_files.save(tmp_path / "out", "dflash", "zlab", dtype="float32")
  before = drafter_files.raw(tmp_path / "out")
  process = subprocess.Popen(
    [sys.executable, "-c", _EXPORT, tmp_path / "new", tmp_path / "out"],
    stdin=subprocess.PIPE,
    stdout=subprocess.PIPE,
  )
  assert process.stdout is not None and process.stdin is not None
  try:
    assert process.stdout.readline() == b"writing\n"
  finally:
    process.send_signal(signal.SIGKILL)
    process.wait()
    process.stdout.close()
    process.stdin.close()
  assert drafter_files.raw(tmp_path / "out") == before
  loaded = drafter_folder.load_drafter(tmp_path / "out")
  jax.tree.map(np.testing.assert_array_equal, loaded.params, old.params)
  # The next export takes its place and removes what the killed one left.
  source = drafter_conversion.inspect(tmp_path / "new")
  drafter_conversion.convert(source, tmp_path / "out", "specforge")
  assert drafter_files.raw(tmp_path / "out") == drafter_files.raw(
    tmp_path / "new"
  )
  assert sorted(path.name for path in tmp_path.iterdir()) == ["new", "out"]
