"""Features on disk: bits, kills, damage, full disks."""

import contextlib
import dataclasses
import fcntl
import json
import os
import pickle
import signal
import subprocess
import sys
import time

import jax
import numpy as np
import pytest
import safetensors.numpy
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.data import (
  feature_cache,
  feature_contents,
  feature_shards,
  loader,
  sources,
)
from dspine_jax.data import rows as rows_lib
from dspine_jax.decoding import generate
from tests import small_disk as small_disk_lib
from tests import tiny_folder, tiny_models

TAPS = (0, 2)
COUNT, PROMPT, NEW = 23, 5, 12
LENGTHS = [17 - (i % 5) for i in range(COUNT)]
# Six rows of the longest a file, so four files; a batch is four rows.
SHARD_BYTES = 6 * 17 * 3 * 24 * 2
BATCH = 4


@pytest.fixture(name="target", scope="module")
def fixture_target():
  cfg = tiny_models.target_config()
  return generate.TargetModel(tiny_models.target_params(cfg), cfg)


@pytest.fixture(name="rows", scope="module")
def fixture_rows():
  answers = tiny_folder.random_answers(COUNT, vocab=61, prompt=PROMPT, new=NEW)
  lengths = np.array(LENGTHS, np.int32)
  return rows_lib.from_answers(answers._replace(lengths=lengths))


@pytest.fixture(name="contents", scope="module")
def fixture_contents(target, rows):
  return feature_contents.Contents(
    target=target, rows=rows, tap_layers=TAPS, shard_bytes=SHARD_BYTES
  )


@pytest.fixture(name="whole", scope="module")
def fixture_whole(contents, tmp_path_factory):
  """A folder that nothing has disturbed."""
  folder = tmp_path_factory.mktemp("whole")
  feature_cache.write(folder, contents, batch_size=BATCH)
  return folder


@pytest.fixture(name="folder")
def fixture_folder(whole, tmp_path):
  """A copy to be damaged."""
  for path in whole.iterdir():
    (tmp_path / path.name).write_bytes(path.read_bytes())
  return tmp_path


def shard_files(folder):
  return sorted(path for path in folder.iterdir() if "features-" in path.name)


def bits(folder):
  return {path.name: path.read_bytes() for path in shard_files(folder)}


def assert_same(found, expected):
  assert found.keys() == expected.keys()
  for name, array in found.items():
    assert array.dtype == expected[name].dtype
    np.testing.assert_array_equal(array, expected[name])


@pytest.mark.parametrize("dtype", feature_shards.DTYPES)
def test_what_is_read_is_what_was_computed_bit_by_bit(
  target, rows, contents, whole, tmp_path, dtype
):
  contents = dataclasses.replace(contents, dtype=dtype)
  folder, counts = whole, []
  if dtype != "bfloat16":
    folder = tmp_path / "new" / "folder"
    feature_cache.write(
      folder, contents, batch_size=BATCH, progress=counts.append
    )
    assert sum(counts) == rows.tokens.size
  cache = feature_cache.FeatureCache(folder, contents)
  assert len(cache) == COUNT and len(shard_files(folder)) > 3
  # The same programs over the same rows as in the files, in memory.
  for shard in feature_contents.shards_of(contents):
    part = rows.select(shard.rows)
    read = cache.read(shard.rows)
    for found in sources.compute(
      target, part, TAPS, batch_size=BATCH, dtype=dtype
    ):
      for row, *states in zip(found.rows, *found[2:], strict=True):
        length = part.lengths[row]
        for name, state in zip(contents.layout.widths, states, strict=True):
          stored = read[name][row]
          assert stored.dtype == jnp.dtype(dtype)
          np.testing.assert_array_equal(stored[:length], state[:length])
          assert not stored[length:].any()


def test_features_reach_the_batch_in_the_dtype_of_the_target(
  target, rows, contents, whole
):
  cache = feature_cache.FeatureCache(whole, contents)
  index = np.array([22, 3, 3, 0])
  batch = sources.batch(cache, index)
  assert batch.context_features.dtype == batch.last_hidden.dtype == jnp.float32
  memory = sources.compute_features(target, rows, TAPS)
  rounded = memory.last_hidden[index].astype(jnp.bfloat16).astype(np.float32)
  real = np.arange(rows.tokens.shape[1]) < rows.lengths[index][:, None]
  found = np.asarray(batch.last_hidden)
  # Programs for other batches may round to the neighbour.
  np.testing.assert_allclose(found[real], rounded[real], rtol=2**-7, atol=1e-5)
  np.testing.assert_array_equal(batch.loss_mask, rows.loss_mask[index])
  assert cache.row_bytes * 4 == sum(
    x.nbytes for x in cache.read(index).values()
  )


def test_large_rows_that_several_threads_read_are_the_same(
  contents, whole, monkeypatch
):
  expected = feature_cache.FeatureCache(whole, contents).read(np.arange(COUNT))
  monkeypatch.setattr(feature_cache, "_LARGE_ROW_BYTES", 1)
  cache = feature_cache.FeatureCache(whole, contents)
  assert_same(cache.read(np.arange(COUNT)), expected)
  cache._pool.shutdown()


def test_files_are_safetensors_without_padding(rows, contents, whole):
  cache = feature_cache.FeatureCache(whole, contents)
  first = 0
  for path in shard_files(whole):
    stored = safetensors.numpy.load_file(path)
    lengths = stored["lengths"]
    np.testing.assert_array_equal(
      lengths, rows.lengths[first : first + len(lengths)]
    )
    read = cache.read(np.arange(first, first + len(lengths)))
    for name in contents.layout.widths:
      ends = [x[:n] for x, n in zip(read[name], lengths, strict=True)]
      np.testing.assert_array_equal(stored[name], np.concatenate(ends))
    first += len(lengths)
  assert first == COUNT


def test_the_estimate_is_what_the_files_take(contents, whole):
  size = sum(path.stat().st_size for path in shard_files(whole))
  position = contents.layout.position_bytes
  estimate = feature_contents.estimate_bytes(
    contents.rows.lengths, contents.target.cfg, TAPS
  )
  assert position == 2 * 3 * 24
  assert estimate >= sum(LENGTHS) * position
  # Headers of the tiny files are not counted to the byte.
  assert abs(size - estimate) < 1024 * len(shard_files(whole))
  assert feature_cache.missing_bytes(whole, contents) == 0


def test_finished_features_are_not_computed_again(contents, whole, monkeypatch):
  before = {path: path.stat().st_mtime_ns for path in shard_files(whole)}
  monkeypatch.setattr(sources, "compute", None)
  feature_cache.write(whole, contents, batch_size=BATCH)
  assert before == {p: p.stat().st_mtime_ns for p in shard_files(whole)}


@pytest.mark.parametrize("what", ["tokens", "params", "taps", "cfg", "dtype"])
def test_other_contents_have_another_folder_and_are_refused_in_this(
  contents, whole, what
):
  rows, target = contents.rows, contents.target
  tokens = rows.tokens.copy()
  tokens[2, 3] += 1
  leaves, structure = jax.tree.flatten(target.params)
  leaves[3] = leaves[3].at[(0,) * leaves[3].ndim].add(1e-6)
  cfg = dataclasses.replace(target.cfg, rope_theta=2e4)
  changes = {
    "tokens": {"rows": rows._replace(tokens=tokens)},
    "params": {"target": target.replace(params=structure.unflatten(leaves))},
    "taps": {"tap_layers": (0, 1)},
    "cfg": {"target": target.replace(cfg=cfg)},
    "dtype": {"dtype": "float32"},
  }
  other = dataclasses.replace(contents, **changes[what])
  own = feature_cache.folder_for(whole, contents)
  assert feature_cache.folder_for(whole, other) != own
  with pytest.raises(ValueError, match="holds features of another target"):
    feature_cache.FeatureCache(whole, other)
  with pytest.raises(ValueError, match="holds features of another target"):
    feature_cache.write(whole, other)


def test_another_loss_mask_needs_no_other_features(contents, whole):
  rows = contents.rows._replace(loss_mask=~contents.rows.loss_mask)
  other = dataclasses.replace(contents, rows=rows)
  batch = sources.batch(feature_cache.FeatureCache(whole, other), np.array([1]))
  np.testing.assert_array_equal(batch.loss_mask, rows.loss_mask[[1]])


@pytest.mark.parametrize("change", ["swapped rows", "last bit", "sign"])
def test_the_fingerprint_of_parameters_sees_every_bit(change):
  rng = np.random.default_rng(0)
  array = rng.standard_normal((6, 50), np.float32)
  other = array.copy()
  if change == "swapped rows":
    other[[1, 4]] = other[[4, 1]]
  elif change == "last bit":
    other.view(np.uint32)[5, 49] ^= 1
  else:
    other[2, 2] *= -1
  found, changed, again = (
    np.asarray(feature_contents._fingerprint(jnp.asarray(x)))
    for x in (array, other, array)
  )
  np.testing.assert_array_equal(found, again)
  assert (found != changed).all()


# Damage.


def message_of(folder, contents):
  """What reading everything raises, through the loader's threads."""
  cfg = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=1), batch_size=COUNT
  )
  with pytest.raises(ValueError, match="damaged") as raised:
    cache = feature_cache.FeatureCache(folder, contents)
    iterator = loader.windows(cache, cfg, first_step=0, total_steps=1)
    with contextlib.closing(iterator):
      next(iterator)
  return str(raised.value)


def flip(path, place):
  with open(path, "r+b") as file:
    file.seek(place, os.SEEK_END if place < 0 else os.SEEK_SET)
    byte = file.read(1)
    file.seek(-1, os.SEEK_CUR)
    file.write(bytes([byte[0] ^ 4]))


@pytest.mark.parametrize(
  ("kind", "reason"),
  [
    ("truncated", "bytes where"),
    ("first byte of a state", "another checksum"),
    ("byte in the middle", "another checksum"),
    ("byte of a checksum", "list of checksums"),
    ("byte of the header", "header describes other rows"),
    ("another file in its place", "header describes other rows"),
  ],
)
def test_a_damaged_file_is_named_and_only_it_is_computed_again(
  contents, whole, folder, kind, reason
):
  path = shard_files(folder)[1]
  header = len(path.read_bytes()[8:].split(b"}}")[0]) + 10
  header += -header % 8
  if kind == "truncated":
    os.truncate(path, path.stat().st_size - 1)
  elif kind == "another file in its place":
    other = bytearray(path.read_bytes())
    other[20:40] = b"x" * 20
    path.write_bytes(other)
  else:
    places = {
      "first byte of a state": header,
      "byte in the middle": path.stat().st_size // 2,
      "byte of a checksum": -1,
      "byte of the header": 30,
    }
    flip(path, places[kind])
  message = message_of(folder, contents)
  assert message.startswith(f"{path}: features are damaged (")
  assert reason in message
  assert "delete this file and repeat the command" in message
  path.unlink()
  before = {p: p.stat().st_mtime_ns for p in shard_files(folder)}
  assert feature_cache.missing_bytes(folder, contents) > 0
  feature_cache.write(folder, contents, batch_size=BATCH)
  assert bits(folder) == bits(whole)
  assert all(p.stat().st_mtime_ns == at for p, at in before.items())


def test_a_file_that_shrinks_while_it_is_read_is_an_error_and_no_signal(
  contents, folder
):
  cache = feature_cache.FeatureCache(folder, contents)
  cache.read(np.array([0]))
  os.truncate(shard_files(folder)[0], 700)
  with pytest.raises(ValueError, match="damaged .it is cut off"):
    cache.read(np.array([5]))
  shard_files(folder)[0].unlink()
  with pytest.raises(ValueError, match="damaged .*No such file"):
    cache.read(np.array([5]))


@pytest.mark.parametrize("text", ["torn", "[]", '{"shards": {"a": {}}}'])
def test_a_damaged_index_is_named(contents, folder, text):
  (folder / "index.json").write_text(text)
  with pytest.raises(ValueError, match="index.json: no index of features"):
    feature_cache.write(folder, contents)


def test_incomplete_features_are_not_read(contents, folder):
  shard_files(folder)[2].unlink()
  with pytest.raises(ValueError, match="features are incomplete"):
    feature_cache.FeatureCache(folder, contents)


def test_a_second_process_does_not_write_there(contents, folder):
  with open(folder / "lock", "w") as file:
    fcntl.flock(file, fcntl.LOCK_EX)
    with pytest.raises(ValueError, match="another process is writing these"):
      feature_cache.write(folder, contents)


def test_a_full_disk_keeps_the_complete_files(contents, whole, small_disk):
  folder = small_disk(1) / "features"
  folder.mkdir()
  assert shard_files(whole)[0].stat().st_size // 4096 == 3
  # In pages of 4 KiB: two files of four, the index, its successor, and one.
  ballast = small_disk_lib.fill(folder.parent, leave_kb=4 * 11)
  with pytest.raises(ValueError) as raised:
    feature_cache.write(folder, contents, batch_size=BATCH)
  message = str(raised.value)
  assert "No space left on device" in message
  assert (
    f"2 of {len(shard_files(whole))} files are complete and stay" in message
  )
  assert len(shard_files(folder)) == 2  # And no partial one.
  index = json.loads((folder / "index.json").read_text())
  assert len(index["shards"]) == 2
  ballast.unlink()
  feature_cache.write(folder, contents, batch_size=BATCH)
  assert bits(folder) == bits(whole)


# A kill.

WRITE = """
import pickle, sys, time
from dspine_jax.data import feature_cache, feature_contents, feature_shards
from dspine_jax.decoding import generate
from tests import tiny_models
folder, rows, shard_bytes, batch = pickle.load(sys.stdin.buffer)
cfg = tiny_models.target_config()
target = generate.TargetModel(tiny_models.target_params(cfg), cfg)
contents = feature_contents.Contents(
  target=target, rows=rows, tap_layers=(0, 2), shard_bytes=shard_bytes
)
write = feature_shards.Writer.write
def slowly(*arguments):
  time.sleep(0.02)
  write(*arguments)
feature_shards.Writer.write = slowly
feature_cache.write(folder, contents, batch_size=batch)
"""


def test_a_killed_computation_goes_on_behind_its_last_complete_file(
  contents, whole, tmp_path
):
  folder = tmp_path / "killed"
  process = subprocess.Popen(
    [sys.executable, "-c", WRITE],
    stdin=subprocess.PIPE,
    # Programs are compiled as they are here.
    env=os.environ | {"JAX_DISABLE_MOST_OPTIMIZATIONS": "1"},
  )
  assert process.stdin is not None
  pickle.dump((folder, contents.rows, SHARD_BYTES, BATCH), process.stdin)
  process.stdin.close()
  second = folder / f"{shard_files(whole)[1].name}.partial"
  while not second.exists():
    assert process.poll() is None
    time.sleep(0.002)
  process.kill()
  assert process.wait() == -signal.SIGKILL
  assert second.exists()
  complete = [p for p in shard_files(folder) if p.suffix == ".safetensors"]
  assert complete == [folder / shard_files(whole)[0].name]
  before = complete[0].stat().st_mtime_ns
  with pytest.raises(ValueError, match="incomplete"):
    feature_cache.FeatureCache(folder, contents)
  feature_cache.write(folder, contents, batch_size=BATCH)
  assert bits(folder) == bits(whole)
  assert complete[0].stat().st_mtime_ns == before


def test_an_unknown_dtype_is_refused(contents):
  with pytest.raises(ValueError, match="dtype='float16': not in"):
    feature_shards.Layout(dtype="float16", context_width=1, hidden_width=1)


def test_other_packing_of_the_same_tokens_is_other_contents(contents, rows):
  firsts = np.zeros_like(rows.tokens)
  other = firsts.copy()
  other[:, 3:] = 3
  digests = {
    dataclasses.replace(
      contents, rows=rows._replace(documents=documents)
    ).digest
    for documents in (None, firsts, other)
  }
  assert len(digests) == 3
