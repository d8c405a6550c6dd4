import signal
import subprocess
import sys

import jax
import ml_dtypes
import numpy as np
import pytest
import safetensors.numpy
from jax import numpy as jnp

from dspine_jax import rope_scaling, sharding
from dspine_jax.checkpoints import names, target_folder, tensors
from tests import on_devices, stored_tensors, tiny_models
from tests import small_disk as small_disk_lib

QWEN = tiny_models.target_config(num_layers=2, eos_token_ids=(3,))
LLAMA = tiny_models.target_config(
  num_layers=2,
  model_type="llama",
  tie_embeddings=True,
  rope_scaling=rope_scaling.Llama3Scaling(factor=4.0),
)


def save(folder, cfg=QWEN, **options):
  params = tiny_models.target_params(cfg)
  target_folder.save_target(folder, params, cfg, **options)
  return params


def change(folder, edit):
  """Rewrites the folder's tensors by `edit(tensors)`."""
  arrays = stored_tensors.read(folder)
  edit(arrays)
  tensors.write_tensors(folder, arrays)


def rounded(params, dtype):
  kinds = {"bfloat16": ml_dtypes.bfloat16, "float16": np.float16}
  if dtype == "float32":
    return params
  return jax.tree.map(
    lambda x: np.asarray(x).astype(kinds[dtype]).astype(np.float32), params
  )


@pytest.mark.parametrize("cfg", [QWEN, LLAMA], ids=["qwen3", "llama"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_saved_target_is_loaded_unchanged(cfg, dtype, tmp_path):
  params = save(tmp_path, cfg, dtype=dtype)
  target = target_folder.load_target(str(tmp_path))
  assert target.cfg == cfg and target.folder == tmp_path
  assert jax.tree.structure(target.params) == jax.tree.structure(params)
  for got, want in zip(
    jax.tree.leaves(target.params),
    jax.tree.leaves(rounded(params, dtype)),
    strict=True,
  ):
    assert got.dtype == jnp.float32
    np.testing.assert_array_equal(got, want)


@pytest.mark.parametrize(
  ("model_type", "attention_bias"),
  [("qwen3", True), ("llama", True), ("qwen2", False), ("mistral", False)],
)
def test_every_family_is_loaded_unchanged_biases_and_all(
  model_type, attention_bias, tmp_path
):
  cfg = tiny_models.target_config(
    num_layers=2, model_type=model_type, attention_bias=attention_bias
  )
  params = save(tmp_path, cfg, max_shard_bytes=4000)
  assert len(list(tmp_path.glob("model-*.safetensors"))) > 2
  names_of_biases = [x for x in tensors.Reader(tmp_path).names() if "bias" in x]
  assert len(names_of_biases) == 2 * len(cfg.biased_projections)
  target = target_folder.load_target(tmp_path)
  assert target.cfg == cfg
  jax.tree.map(np.testing.assert_array_equal, target.params, params)


def test_parameters_may_be_loaded_in_bfloat16(tmp_path):
  params = save(tmp_path)
  target = target_folder.load_target(tmp_path, dtype="bfloat16")
  assert target.cfg.dtype == "bfloat16"
  for got, want in zip(
    jax.tree.leaves(target.params), jax.tree.leaves(params), strict=True
  ):
    assert got.dtype == jnp.bfloat16
    np.testing.assert_array_equal(got, want.astype(jnp.bfloat16))
  with pytest.raises(ValueError, match="dtype='float16': not in"):
    target_folder.load_target(tmp_path, dtype="float16")


def read_on_devices(folder):
  """What is read, and held, with parameters on four devices, in two halves."""
  elements, read = [], tensors.Reader.read

  def counted(self, name, index=(), **options):
    part = read(self, name, index, **options)
    elements.append(part.size)
    return part

  mesh = jax.make_mesh((2, 1, 2), sharding.AXES)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(tensors.Reader, "read", counted)
    split = target_folder.load_target(
      folder, sharding=sharding.for_target(mesh)
    ).params
  whole = target_folder.load_target(folder).params
  jax.tree.map(np.testing.assert_array_equal, split, whole)
  kernel = split["layers"][1]["mlp"]["up_proj"]["kernel"]
  return {
    "read": sum(elements),
    "held": sum(leaf.size for leaf in jax.tree.leaves(split)),
    "part": list(kernel.addressable_shards[3].data.shape),
  }


def test_each_device_gets_its_own_part_of_the_file(tmp_path):
  save(tmp_path, max_shard_bytes=4000)
  got = on_devices.call(
    __name__, "read_on_devices", devices=4, folder=str(tmp_path)
  )
  assert got["part"] == [24, 18]
  # What several devices hold is read once, and nothing is read twice.
  assert got["read"] == got["held"]


def test_the_tokenizer_stays_when_a_target_is_saved_again(tmp_path):
  save(tmp_path, max_shard_bytes=4000)
  (tmp_path / "tokenizer.json").write_text("{}")
  params = save(tmp_path, LLAMA)
  assert {path.name for path in tmp_path.iterdir()} == {
    "config.json",
    "tokenizer.json",
    tensors.SINGLE,
  }
  got = target_folder.load_target(tmp_path).params
  jax.tree.map(np.testing.assert_array_equal, got, params)


SAVES = """
import itertools, sys
from dspine_jax.checkpoints import target_folder
target = target_folder.load_target(sys.argv[1])
embedding = target.params["embed_tokens"]
for number in itertools.count(1):
  target.params["embed_tokens"] = embedding + number
  target.params["lm_head"] = embedding + number
  target_folder.save_target(
    sys.argv[1], target.params, target.cfg, max_shard_bytes=4000
  )
  print(number, flush=True)
"""


def test_a_killed_export_leaves_a_target_that_loads(tmp_path):
  folder = tmp_path / "target"
  save(folder)
  command = [sys.executable, "-c", SAVES, str(folder)]
  with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
    assert process.stdout is not None
    for _ in range(3):
      assert process.stdout.readline()
    process.send_signal(signal.SIGKILL)
  params = target_folder.load_target(folder).params
  # Embedding and head lie in different shards, but are of the same export.
  np.testing.assert_array_equal(params["embed_tokens"], params["lm_head"])
  save(folder)
  assert [path.name for path in tmp_path.iterdir()] == ["target"]


def test_a_full_disk_leaves_the_old_target_and_says_what_to_do(small_disk):
  folder = small_disk(1) / "target"
  params = save(folder)
  small_disk_lib.fill(folder.parent, leave_kb=20)
  with pytest.raises(ValueError, match=r"cannot be written.*free disk space"):
    save(folder, LLAMA)
  assert {path.name for path in folder.parent.iterdir()} == {
    "ballast",
    "target",
  }
  got = target_folder.load_target(folder).params
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_tensors_of_another_model_are_refused(tmp_path):
  save(tmp_path, LLAMA)
  frequencies = {"model.layers.0.self_attn.rotary_emb.inv_freq": np.ones(5)}
  change(tmp_path, lambda arrays: arrays.update(frequencies))
  target_folder.load_target(tmp_path)
  bias = {"model.layers.0.self_attn.q_proj.bias": np.ones(40, np.float32)}
  change(tmp_path, lambda arrays: arrays.update(bias))
  with pytest.raises(ValueError, match="q_proj.bias'.* are not of a llama"):
    target_folder.load_target(tmp_path)


def test_a_truncated_shard_is_named_before_anything_is_loaded(
  tmp_path, monkeypatch
):
  save(tmp_path, max_shard_bytes=4000)
  last = sorted(tmp_path.glob("model-*.safetensors"))[-1]
  last.write_bytes(last.read_bytes()[:-4])
  monkeypatch.setattr(target_folder, "place", None)
  with pytest.raises(ValueError, match=f"{last.name}: truncated .* again"):
    target_folder.load_target(tmp_path)


def test_linear_maps_are_stored_out_in_under_released_names(tmp_path):
  params = save(tmp_path)
  arrays = stored_tensors.read(tmp_path)
  layer = params["layers"][1]
  np.testing.assert_array_equal(
    arrays["model.layers.1.self_attn.k_proj.weight"],
    np.asarray(layer["self_attn"]["k_proj"]["kernel"]).T,
  )
  np.testing.assert_array_equal(
    arrays["model.layers.1.self_attn.q_norm.weight"],
    layer["self_attn"]["q_norm"]["scale"],
  )
  np.testing.assert_array_equal(
    arrays["model.embed_tokens.weight"], params["embed_tokens"]
  )
  np.testing.assert_array_equal(arrays["lm_head.weight"], params["lm_head"])
  # Eleven a layer; embedding, norm and head.
  assert len(arrays) == 2 * 11 + 3


def test_a_tied_target_without_qk_norm_has_fewer_tensors(tmp_path):
  save(tmp_path, LLAMA)
  arrays = stored_tensors.read(tmp_path)
  assert len(arrays) == 2 * 9 + 2
  assert "lm_head.weight" not in arrays


def test_a_head_stored_beside_a_tied_embedding_is_ignored(tmp_path):
  params = save(tmp_path, LLAMA)
  extra = {"lm_head.weight": np.ones((61, 24), np.float32)}
  change(tmp_path, lambda arrays: arrays.update(extra))
  got = target_folder.load_target(tmp_path).params
  assert "lm_head" not in got
  np.testing.assert_array_equal(got["embed_tokens"], params["embed_tokens"])


def test_names_without_the_model_prefix_are_accepted(tmp_path):
  params = save(tmp_path)

  def strip(arrays):
    for name in list(arrays):
      arrays[name.removeprefix("model.")] = arrays.pop(name)

  change(tmp_path, strip)
  got = target_folder.load_target(tmp_path).params
  jax.tree.map(np.testing.assert_array_equal, got, params)


def test_a_missing_tensor_is_named(tmp_path):
  save(tmp_path)
  change(tmp_path, lambda arrays: arrays.pop("model.norm.weight"))
  with pytest.raises(ValueError, match="missing model.norm.weight"):
    target_folder.load_target(tmp_path)


def test_an_untied_target_needs_its_head(tmp_path):
  save(tmp_path)
  change(tmp_path, lambda arrays: arrays.pop("lm_head.weight"))
  with pytest.raises(ValueError, match="missing lm_head.weight"):
    target_folder.load_target(tmp_path)


def test_a_wrong_shape_is_named_in_the_orientation_of_the_file(tmp_path):
  save(tmp_path)
  name = "model.layers.0.mlp.down_proj.weight"

  def transpose(arrays):
    arrays[name] = np.ascontiguousarray(arrays[name].T)

  change(tmp_path, transpose)
  match = rf"{name} has shape \[36, 24\], expected \[24, 36\]"
  with pytest.raises(ValueError, match=match):
    target_folder.load_target(tmp_path)


def test_all_problems_are_reported_together_and_long_lists_cut():
  entries = names.target_entries(QWEN)
  with pytest.raises(ValueError, match=r"here: missing .* and 19 more") as info:
    names.resolve({}, entries, source="here")
  assert str(info.value).count("missing") == 6


def test_a_vocabulary_other_than_the_configured_one_is_refused(tmp_path):
  save(tmp_path)
  path = tmp_path / "config.json"
  path.write_text(
    path.read_text().replace('"vocab_size": 61', '"vocab_size": 62')
  )
  with pytest.raises(
    ValueError, match=r"embed_tokens.weight has shape \[61, 24\]"
  ):
    target_folder.load_target(tmp_path)


def test_nan_in_a_weight_is_refused(tmp_path):
  save(tmp_path)
  arrays = stored_tensors.read(tmp_path)
  arrays["model.norm.weight"][3] = np.nan
  safetensors.numpy.save_file(arrays, tmp_path / tensors.SINGLE)
  with pytest.raises(ValueError, match="'model.norm.weight' holds NaN"):
    target_folder.load_target(tmp_path)


def test_a_missing_folder_or_config_is_named(tmp_path):
  with pytest.raises(ValueError, match="nowhere: no such folder"):
    target_folder.load_target(tmp_path / "nowhere")
  with pytest.raises(ValueError, match="config.json: no such file"):
    target_folder.load_target(tmp_path)


def test_loaded_parameters_do_not_keep_the_file_alive(tmp_path):
  params = save(tmp_path)
  got = target_folder.load_target(tmp_path).params
  (tmp_path / tensors.SINGLE).write_bytes(b"\0" * 100_000)
  jax.tree.map(np.testing.assert_array_equal, got, params)
