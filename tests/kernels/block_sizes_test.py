import json

import pytest
from jax import numpy as jnp

from kernels import block_sizes
from kernels.block_sizes import BlockSizes

SIZES = BlockSizes(rows=64, cols=128, inner=32)
OTHER = BlockSizes(rows=16, cols=16, inner=16, num_warps=8, num_stages=2)
BUCKET = "bfloat16,rows=64,d=96"
TUNED = {
  "defaults": {"op": {"bfloat16": "pallas"}},
  "block_sizes": {"op": {"k": {BUCKET: {"rows": 32, "cols": 32, "inner": 64}}}},
}


@pytest.fixture
def tuned(tmp_path, monkeypatch):
  (tmp_path / "nvidia_h100.json").write_text(json.dumps(TUNED))
  monkeypatch.setattr(block_sizes, "FOLDER", tmp_path)
  monkeypatch.setattr(block_sizes, "device_kind", lambda: "nvidia_h100")
  block_sizes.tuned.cache_clear()
  yield
  block_sizes.tuned.cache_clear()


def choose(bucket=BUCKET, kernel="k", given=()):
  return block_sizes.choose("op", kernel, bucket, given, lambda: SIZES)


def test_an_argument_comes_before_the_tuned_file_before_the_heuristic(tuned):
  assert choose(given=(("k", OTHER),)) == OTHER
  assert choose() == BlockSizes(rows=32, cols=32, inner=64)
  assert choose(bucket="float32,rows=64,d=96") == choose(kernel="j") == SIZES
  assert block_sizes.measured_default("op", jnp.bfloat16) == "pallas"
  assert block_sizes.measured_default("op", jnp.float32) is None
  assert block_sizes.measured_default("another op", jnp.bfloat16) is None


@pytest.mark.parametrize(
  ("text", "match"),
  [
    ('{"defaults":', "nvidia_h100.json: is no JSON"),
    ("[]", "nvidia_h100.json: must be a JSON object"),
    (
      json.dumps({"block_sizes": {"op": {"k": {BUCKET: {"rows": 3}}}}}),
      f"nvidia_h100.json: op, k, {BUCKET}: ",
    ),
  ],
)
def test_a_broken_tuned_file_is_named(tuned, tmp_path, text, match):
  (tmp_path / "nvidia_h100.json").write_text(text)
  with pytest.raises(ValueError, match=match):
    choose()


def test_without_a_gpu_nothing_is_tuned():
  assert block_sizes.device_kind() is None
  assert choose() == SIZES
  assert block_sizes.measured_default("op", jnp.bfloat16) is None


def test_buckets_round_rows_up_and_keep_the_rest():
  half = jnp.bfloat16
  assert block_sizes.bucket_of(half, 65, d=96) == "bfloat16,rows=128,d=96"
  assert block_sizes.bucket_of(half, 64, d=96) == BUCKET
  assert block_sizes.bucket_of("float32", 1) == "float32,rows=1"


@pytest.mark.parametrize("name", ["rows", "cols", "inner", "num_warps"])
@pytest.mark.parametrize("value", [0, 48])
def test_sizes_are_powers_of_two(name, value):
  sizes = {"rows": 16, "cols": 16, "inner": 16, name: value}
  with pytest.raises(ValueError, match=f"{name}={value}"):
    BlockSizes(**sizes)


def test_a_pipeline_has_a_stage():
  with pytest.raises(ValueError, match="num_stages=0"):
    BlockSizes(rows=16, cols=16, inner=16, num_stages=0)


def test_sizes_of_an_unknown_kernel_are_refused():
  assert block_sizes.freeze(None, ("k",)) == ()
  assert block_sizes.freeze({"k": SIZES}, ("k", "j")) == (("k", SIZES),)
  with pytest.raises(ValueError, match=r"\['l'\] are none of the kernels"):
    block_sizes.freeze({"l": SIZES}, ("k",))
