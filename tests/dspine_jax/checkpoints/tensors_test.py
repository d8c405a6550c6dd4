import json

import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy

from dspine_jax.checkpoints import tensors

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
  got = tensors.read_tensors(tmp_path / "new")
  assert set(got) == set(arrays())
  for name, array in arrays().items():
    if array.dtype == np.float32:
      array = array.astype(KINDS[dtype]).astype(np.float32)
    assert got[name].dtype == array.dtype
    np.testing.assert_array_equal(got[name], array)


def test_the_stored_dtype_is_the_one_asked_for(tmp_path):
  sizes = []
  for dtype in ("float32", "bfloat16"):
    path = tensors.write_tensors(tmp_path, arrays(), dtype=dtype)
    sizes.append(path.stat().st_size)
  assert sizes[0] - sizes[1] == 2 * (3 * 4 + 5)


def test_an_unknown_dtype_is_refused_before_anything_is_written(tmp_path):
  with pytest.raises(ValueError, match="dtype='float8': must be one of"):
    tensors.write_tensors(tmp_path / "new", arrays(), dtype="float8")
  assert not (tmp_path / "new").exists()


def test_several_shards_are_read_like_one_file(tmp_path):
  write_shards(tmp_path)
  got = tensors.read_tensors(tmp_path)
  assert set(got) == set(arrays())
  for name, array in arrays().items():
    np.testing.assert_array_equal(got[name], array)


def test_a_missing_shard_is_named(tmp_path):
  _, second = write_shards(tmp_path)
  (tmp_path / second).unlink()
  with pytest.raises(
    ValueError, match=f"index.json: missing shards .*{second}"
  ):
    tensors.read_tensors(tmp_path)


@pytest.mark.parametrize("keep", [0, 4, 60, -3])
def test_a_truncated_shard_is_named(keep, tmp_path):
  first, _ = write_shards(tmp_path)
  data = (tmp_path / first).read_bytes()
  (tmp_path / first).write_bytes(data[:keep])
  with pytest.raises(ValueError, match=f"{first}: truncated or not"):
    tensors.read_tensors(tmp_path)


def test_an_index_without_its_map_is_named(tmp_path):
  (tmp_path / tensors.INDEX).write_text("{}")
  with pytest.raises(ValueError, match="index.json: key 'weight_map'"):
    tensors.read_tensors(tmp_path)


def test_a_folder_without_weights_is_named(tmp_path):
  with pytest.raises(ValueError, match="neither model.safetensors nor"):
    tensors.read_tensors(tmp_path)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_tensor_that_is_not_finite_is_named(bad, dtype, tmp_path):
  broken = arrays()
  broken["b.weight"][2] = bad
  tensors.write_tensors(tmp_path, broken, dtype=dtype)
  with pytest.raises(ValueError, match="tensor 'b.weight' holds NaN or inf"):
    tensors.read_tensors(tmp_path)


def test_a_transposed_view_is_stored_as_it_is_seen(tmp_path):
  array = np.arange(12, dtype=np.float32).reshape(3, 4).T
  tensors.write_tensors(tmp_path, {"x": array})
  np.testing.assert_array_equal(tensors.read_tensors(tmp_path)["x"], array)


def test_no_partial_file_stays_behind(tmp_path):
  tensors.write_tensors(tmp_path, arrays())
  assert [path.name for path in tmp_path.iterdir()] == [tensors.SINGLE]
