import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dspine_jax.checkpoints import tensors
from tests import stored_tensors

KINDS = {
  "float32": np.float32,
  "bfloat16": ml_dtypes.bfloat16,
  "float16": np.float16,
}


def arrays():
  rng = np.random.default_rng(0)
  return {
    "a.weight": rng.standard_normal((3, 4)).astype(np.float32),
    "b.weight": rng.standard_normal(5).astype(np.float32),
    "count": np.asarray(7, np.int64),
    "ready": np.asarray(True),
  }


def write_shards(folder):
  """Two shards and their index."""
  halves = [dict(list(arrays().items())[i::2]) for i in range(2)]
  weight_map = {}
  for number, half in enumerate(halves, start=1):
    name = f"model-{number:05}-of-00002.safetensors"
    safetensors.numpy.save_file(half, folder / name)
    weight_map |= dict.fromkeys(half, name)
  (folder / tensors.INDEX).write_text(json.dumps({"weight_map": weight_map}))
  return sorted(set(weight_map.values()))


@pytest.mark.parametrize("dtype", list(KINDS))
def test_tensors_come_back_as_float32_of_the_stored_precision(dtype, tmp_path):
  tensors.write_tensors(tmp_path / "new", arrays(), dtype=dtype)
  got = stored_tensors.read(tmp_path / "new")
  assert set(got) == set(arrays())
  for name, array in arrays().items():
    if array.dtype == np.float32:
      array = array.astype(KINDS[dtype]).astype(np.float32)
    assert got[name].dtype == array.dtype
    np.testing.assert_array_equal(got[name], array)


def test_the_stored_dtype_is_the_one_asked_for(tmp_path):
  for dtype in ("float32", "bfloat16", None):
    tensors.write_tensors(tmp_path, arrays(), dtype=dtype)
    reader = tensors.Reader(tmp_path)
    assert reader.dtype("a.weight") == KINDS[dtype or "float32"]
    assert reader.dtype("count") == np.int64
    assert reader.dtype("ready") == np.bool_ and reader.shape("ready") == ()


def test_an_unknown_dtype_is_refused_before_anything_is_written(tmp_path):
  with pytest.raises(ValueError, match="dtype='float8': must be one of"):
    tensors.write_tensors(tmp_path / "new", arrays(), dtype="float8")
  assert not (tmp_path / "new").exists()


def test_several_shards_are_read_like_one_file(tmp_path):
  write_shards(tmp_path)
  got = stored_tensors.read(tmp_path)
  assert set(got) == set(arrays())
  for name, array in arrays().items():
    np.testing.assert_array_equal(got[name], array)


def test_a_missing_shard_is_named(tmp_path):
  _, second = write_shards(tmp_path)
  (tmp_path / second).unlink()
  with pytest.raises(
    ValueError, match=f"index.json: missing shards .*{second}"
  ):
    stored_tensors.read(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -3])
def test_a_truncated_shard_is_named(keep, tmp_path):
  first, _ = write_shards(tmp_path)
  data = (tmp_path / first).read_bytes()
  (tmp_path / first).write_bytes(data[:keep])
  with pytest.raises(ValueError, match=f"{first}: truncated or not"):
    stored_tensors.read(tmp_path)


def test_an_index_without_its_map_is_named(tmp_path):
  (tmp_path / tensors.INDEX).write_text("{}")
  with pytest.raises(ValueError, match="index.json: key 'weight_map'"):
    stored_tensors.read(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path):
  with pytest.raises(ValueError, match="neither model.safetensors nor"):
    stored_tensors.read(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_that_is_not_finite_is_named(bad, dtype, tmp_path):
  broken = arrays()
  broken["b.weight"][2] = bad
  tensors.write_tensors(tmp_path, broken, dtype=dtype)
  with pytest.raises(ValueError, match="tensor 'b.weight' holds NaN or inf"):
    stored_tensors.read(tmp_path)


def test_a_transposed_view_is_stored_as_it_is_seen(tmp_path):
  array = np.arange(12, dtype=np.float32).reshape(3, 4).T
  tensors.write_tensors(tmp_path, {"x": array})
  np.testing.assert_array_equal(stored_tensors.read(tmp_path)["x"], array)


def test_no_partial_file_stays_behind(tmp_path):
  tensors.write_tensors(tmp_path, arrays())
  assert [path.name for path in tmp_path.iterdir()] == [tensors.SINGLE]


@pytest.mark.parametrize("piece_bytes", [1, 64, 2**20])
@pytest.mark.parametrize("transposed", [False, True])
@pytest.mark.parametrize("dtype", [None, "float32", "bfloat16"])
def test_a_part_equals_the_part_of_the_whole(
  piece_bytes, transposed, dtype, tmp_path, monkeypatch
):
  # Pieces of one row, of some rows, and of all; the map is renewed on the way.
  monkeypatch.setattr(tensors, "_PIECE_BYTES", piece_bytes)
  monkeypatch.setattr(tensors, "_MAPPED_BYTES", 2 * piece_bytes)
  rng = np.random.default_rng(0)
  whole = rng.standard_normal((11, 6)).astype(ml_dtypes.bfloat16)
  tensors.write_tensors(tmp_path, {"x": whole}, dtype=None)
  reader = tensors.Reader(tmp_path)
  seen = whole.T if transposed else whole
  for index in (
    (),
    (slice(2, 5),),
    (slice(None), slice(1, 4)),
    (slice(3, None), slice(-2, None)),
    (slice(4, 4),),
  ):
    got = reader.read("x", index, dtype=KINDS.get(dtype), transposed=transposed)
    assert got.dtype == KINDS[dtype or "bfloat16"] and got.flags.c_contiguous
    np.testing.assert_array_equal(got, seen[index].astype(got.dtype))


def test_only_the_part_that_is_read_has_to_be_finite(tmp_path):
  whole = np.ones((4, 3), np.float32)
  whole[3, 1] = np.nan
  tensors.write_tensors(tmp_path, {"x": whole})
  reader = tensors.Reader(tmp_path)
  np.testing.assert_array_equal(reader.read("x", (slice(3),)), whole[:3])
  with pytest.raises(ValueError, match="tensor 'x' holds NaN"):
    reader.read("x")


def test_slices_with_steps_are_refused(tmp_path):
  tensors.write_tensors(tmp_path, arrays())
  with pytest.raises(ValueError, match="steps must be 1"):
    tensors.Reader(tmp_path).read("a.weight", (slice(None, None, 2),))


def test_a_tensor_that_its_shard_lacks_is_named_with_the_shard(tmp_path):
  first, _ = write_shards(tmp_path)
  path = tmp_path / tensors.INDEX
  table = json.loads(path.read_text())
  table["weight_map"]["c.weight"] = first
  path.write_text(json.dumps(table))
  with pytest.raises(ValueError, match=rf"{first}: lacks .*'c.weight'.*again"):
    tensors.Reader(tmp_path)


def test_fp8_is_refused_when_it_is_asked_for(tmp_path):
  tensors.write_tensors(
    tmp_path,
    {"x": np.ones((2, 2), ml_dtypes.float8_e4m3fn), "y": np.ones(3)},
    dtype=None,
  )
  reader = tensors.Reader(tmp_path)
  assert reader.read("y").dtype == np.float64
  with pytest.raises(ValueError, match="'x' is stored as F8_E4M3.*BF16"):
    reader.read("x")


def test_tensors_are_read_in_the_order_of_the_disk(tmp_path):
  tensors.write_tensors(tmp_path, arrays(), max_shard_bytes=50)
  reader = tensors.Reader(tmp_path)
  order = reader.in_shard_order(reader.names())
  # The library writes wide kinds first.
  assert order == ["a.weight", "count", "b.weight", "ready"]


def test_large_folders_are_cut_into_shards_with_an_index(tmp_path):
  paths = tensors.write_tensors(tmp_path, arrays(), max_shard_bytes=50)
  assert [path.name for path in paths] == [
    f"model-{number:05}-of-00002.safetensors" for number in (1, 2)
  ]
  index = json.loads((tmp_path / tensors.INDEX).read_text())
  assert index["metadata"]["total_size"] == 4 * 12 + 4 * 5 + 8 + 1
  assert index["weight_map"] == {
    "a.weight": paths[0].name,
    "b.weight": paths[1].name,
    "count": paths[1].name,
    "ready": paths[1].name,
  }
  assert sorted(x.name for x in tmp_path.iterdir()) == sorted(
    [tensors.INDEX, *(path.name for path in paths)]
  )
  got = stored_tensors.read(tmp_path)
  for name, array in arrays().items():
    np.testing.assert_array_equal(got[name], array)


def test_functions_are_called_when_it_is_their_turn(tmp_path):
  calls = []

  def source(name, array):
    def make():
      written = len(list(tmp_path.glob("*")))
      calls.append((name, written))
      return array

    return make

  sources = {name: source(name, x) for name, x in arrays().items()}
  tensors.write_tensors(tmp_path, sources, max_shard_bytes=1)
  # The tensor that did not fit any more is in memory beside the full shard.
  assert calls == [("a.weight", 0), ("b.weight", 0), ("count", 1), ("ready", 2)]


def test_older_weights_with_other_names_do_not_stay(tmp_path):
  tensors.write_tensors(tmp_path, arrays(), max_shard_bytes=50)
  tensors.write_tensors(tmp_path, {"x": np.ones(3, np.float32)})
  assert [path.name for path in tmp_path.iterdir()] == [tensors.SINGLE]
  tensors.write_tensors(tmp_path, arrays(), max_shard_bytes=1)
  tensors.write_tensors(tmp_path, arrays(), max_shard_bytes=50)
  assert len(list(tmp_path.iterdir())) == 3
  assert set(stored_tensors.read(tmp_path)) == set(arrays())


def test_bfloat16_is_written_as_the_dtype_that_is_asked_for(tmp_path):
  array = np.arange(3, dtype=ml_dtypes.bfloat16)
  tensors.write_tensors(tmp_path, {"x": array}, dtype="float32")
  assert tensors.Reader(tmp_path).dtype("x") == np.float32
