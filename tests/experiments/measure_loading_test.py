import json

import pytest

from tests import script_runner


@pytest.mark.slow
def test_memory_of_loading_is_measured_and_the_folder_is_deleted(tmp_path):
  done = script_runner.run(
    "measure_loading",
    size="tiny",
    num_layers=2,
    shard_gb=0.001,
    devices=2,
    work_dir=tmp_path / "run",
  )
  # Beside shards of a megabyte, what a process needs anyway is above the bound.
  assert "above the bound" in done.stderr or done.status == 0
  result = json.loads((tmp_path / "run" / "loading.json").read_text())
  assert result["num_layers"] == 2 and result["devices"] == 2
  assert result["stored_bytes"] == pytest.approx(2 * result["parameters"], 0.01)
  # The embedding alone makes a shard.
  assert result["largest_shard_bytes"] == pytest.approx(
    result["largest_tensor_bytes"], 0.01
  )
  assert result["beside_arrays_bytes"] >= result["largest_tensor_bytes"] / 2
  assert not (tmp_path / "run" / "model").exists()


def test_a_folder_that_exists_is_not_overwritten(tmp_path):
  (tmp_path / "model").mkdir()
  done = script_runner.run(
    "measure_loading",
    size="tiny",
    folder=tmp_path / "model",
    work_dir=tmp_path / "run",
  )
  assert done.status == 1 and "exists already" in done.error
  assert (tmp_path / "model").is_dir()
