import dataclasses
import json
import re

import jax
import ml_dtypes
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs, rope_scaling
from dspine_jax.checkpoints import (
  drafter_config,
  drafter_folder,
  hf_config,
  names,
  tensors,
)
from dspine_jax.drafters import methods
from tests import stored_tensors, tiny_models

# The keys of z-lab/Qwen3-8B-DFlash-b16 that bear on the computation.
DFLASH_8B = {
  "architectures": ["DFlashDraftModel"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "auto_map": {"AutoModel": "dflash.DFlashDraftModel"},
  "block_size": 16,
  "bos_token_id": 151643,
  "dflash_config": {
    "mask_token_id": 151669,
    "target_layer_ids": [1, 9, 17, 25, 33],
  },
  "dtype": "bfloat16",
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 12288,
  "layer_types": ["full_attention"] * 5,
  "max_position_embeddings": 40960,
  "max_window_layers": 5,
  "model_type": "qwen3",
  "num_attention_heads": 32,
  "num_hidden_layers": 5,
  "num_key_value_heads": 8,
  "num_target_layers": 36,
  "rms_norm_eps": 1e-06,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": False,
  "use_sliding_window": False,
  "vocab_size": 151936,
}
DSPINE_8B = DFLASH_8B | {"architectures": ["DSpineDraftModel"]}
PARSED_8B = configs.DrafterConfig(
  method="dflash",
  vocab_size=151936,
  hidden_size=4096,
  intermediate_size=12288,
  num_layers=5,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  rope_theta=1e6,
  mask_token_id=151669,
  target_layer_ids=(1, 9, 17, 25, 33),
  num_target_layers=36,
  bos_token_id=151643,
  eos_token_ids=(151645,),
  dflash=configs.DFlashOptions(),
)


SLIDING = {
  "layer_types": ["sliding_attention"] * 5,
  "sliding_window": 2048,
  "use_sliding_window": True,
}


@pytest.mark.parametrize(
  ("more", "convention"),
  [
    # As z-lab releases them.
    ({}, "automodel"),
    ({"sliding_window_non_causal": False}, "speculators"),
    ({"sliding_window_non_causal": True}, "speculators_non_causal"),
    ({"sliding_window_convention": "specforge"}, "specforge"),
    ({"layer_types": ["full_attention"] * 5}, None),
  ],
)
def test_sliding_layers_are_read_with_their_convention(more, convention):
  want = PARSED_8B
  if convention is not None:
    want = dataclasses.replace(
      PARSED_8B,
      layer_types=("sliding_attention",) * 5,
      sliding_window=2048,
      sliding_window_convention=convention,
    )
  assert drafter_config.from_json(DFLASH_8B | SLIDING | more) == want


def test_layer_types_are_enough_for_a_window():
  config = DFLASH_8B | SLIDING
  del config["use_sliding_window"]
  got = drafter_config.from_json(config)
  assert got == drafter_config.from_json(DFLASH_8B | SLIDING)


def test_a_released_dflash_config_parses_to_its_values():
  assert drafter_config.from_json(DFLASH_8B) == PARSED_8B


@pytest.mark.parametrize("tied", [True, False])
def test_a_dspine_config_without_options_takes_the_released_ones(tied):
  config = DSPINE_8B | {"tie_word_embeddings": tied}
  want = dataclasses.replace(
    PARSED_8B,
    method="dspine",
    is_causal=True,
    tie_embeddings=tied,
    dflash=None,
    dspine=configs.DSpineOptions(
      transfer_rank=1024,
      message_size=512,
      top_k=16,
      ce_weight=0.1,
      alignment_weight=0.5,
      alignment_warmup_steps=146,
      replacement_layers=3,
      replacement_probability=0.5,
      replacement_hold_ratio=1 / 6,
      replacement_end_ratio=1 / 3,
      candidate_mass_threshold=1e-4,
      injects=True,
      refines=True,
      layer_supervision="code_cosine",
      readout_init="principal",
    ),
  )
  assert drafter_config.from_json(config) == want
  empty = config | {"dspine_config": {}}
  assert drafter_config.from_json(empty) == want
  one = config | {"dspine_config": {"top_k": 8}}
  got = drafter_config.from_json(one).dspine
  assert got == dataclasses.replace(want.dspine, top_k=8)


def test_missing_taps_and_block_size_take_the_rule_and_sixteen():
  config = DFLASH_8B | {"dflash_config": {"mask_token_id": 151669}}
  del config["block_size"]
  got = drafter_config.from_json(config)
  assert got == PARSED_8B


def test_newer_files_keep_the_block_size_in_the_nested_config():
  config = {k: v for k, v in DFLASH_8B.items() if k != "block_size"}
  config["dflash_config"] = DFLASH_8B["dflash_config"] | {"block_size": 8}
  got = drafter_config.from_json(config)
  assert got.block_size == 8 and got.decay_gamma == 4


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"architectures": ["GptModel"]}, r"architectures=\['GptModel'\]"),
    ({"architectures": None}, "architectures=None is not one of"),
    ({"architectures": []}, r"architectures=\[\] is not one of"),
    ({"num_target_layers": None}, "key 'num_target_layers' is missing"),
    ({"head_dim": None}, "key 'head_dim' is missing"),
    ({"dflash_config": None}, "key 'mask_token_id' is missing"),
    ({"attention_bias": True}, "attention_bias=true: draft layers"),
    (
      {"use_sliding_window": True, "layer_types": None},
      "use_sliding_window=true needs layer_types",
    ),
    (
      {"layer_types": ["sliding_attention"] * 5, "sliding_window": 2048},
      "use_sliding_window=false does not fit layer_types=",
    ),
    (SLIDING | {"sliding_window": None}, "sliding_window=None: does not fit"),
    (SLIDING | {"sliding_window": 8}, "sliding_window=8: .* block_size=16"),
    (
      SLIDING | {"layer_types": ["sliding_attention"] * 4},
      "layer_types=.*one for each of num_layers=5",
    ),
    (
      SLIDING | {"layer_types": ["chunked_attention"] * 5},
      "layer_types=.*not all in",
    ),
    (
      SLIDING | {"sliding_window_convention": "vllm"},
      "sliding_window_convention='vllm': not in",
    ),
    (
      {"rope_scaling": {"rope_type": "dynamic", "factor": 2.0}},
      "rope.* 'dynamic' is not",
    ),
    (
      {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 35]}},
      "layer 35 cannot be tapped in a target of 36 layers",
    ),
    (
      {"dflash_config": {"mask_token_id": 1, "target_layer_ids": [1, 40]}},
      "layer 40 cannot be tapped",
    ),
    (
      {"dflash_config": {"mask_token_id": 151936}},
      "mask_token_id=151936: must be a row",
    ),
    ({"block_size": 1}, "block_size=1: must be at least 2"),
  ],
)
def test_an_impossible_config_is_refused_with_its_file(changes, match):
  with pytest.raises(ValueError, match=f"^some/config.json: .*{match}"):
    drafter_config.from_json(DFLASH_8B | changes, "some/config.json")


def test_a_refused_config_names_its_file_once():
  config = {k: v for k, v in DFLASH_8B.items() if k != "vocab_size"}
  with pytest.raises(ValueError, match="vocab_size") as info:
    drafter_config.from_json(config, "some/config.json")
  assert str(info.value).count("some/config.json") == 1


@pytest.mark.parametrize(
  ("options", "match"),
  [
    ({"top_k": 0}, "top_k=0: must be positive"),
    ({"confidence": 1}, r"dspine_config: unknown keys \['confidence'\]"),
    ({"transfer_rank": 5000}, "transfer_rank=5000: cannot exceed hidden_size"),
  ],
)
def test_impossible_dspine_options_are_refused_with_their_file(options, match):
  config = DSPINE_8B | {"dspine_config": options}
  with pytest.raises(ValueError, match=f"^some/config.json: .*{match}"):
    drafter_config.from_json(config, "some/config.json")


@pytest.mark.parametrize(
  "changes",
  [
    {},
    {"is_causal": True, "block_size": 8, "decay_gamma": 4.0},
    {
      "rope_scaling": rope_scaling.Llama3Scaling(factor=4.0),
      "rms_norm_eps": 1e-5,
    },
    {"decay_gamma": 3.5},
    {"sample_from_anchor": True},
    {"dflash": {"objective": "d_pace", "d_pace_alpha": 0.25}},
    {"dflash": {"objective": "ce_l1", "ce_weight": 0.5}},
  ],
  ids=lambda changes: ",".join(changes) or "plain",
)
def test_a_written_config_is_read_back_unchanged(changes):
  cfg = tiny_models.drafter_config("dflash", **({"block_size": 16} | changes))
  if "decay_gamma" not in changes:
    cfg = dataclasses.replace(cfg, decay_gamma=7.0)
  text = json.dumps(drafter_config.to_json(cfg))
  assert drafter_config.from_json(json.loads(text)) == cfg


def released_names(num_layers):
  """The common names of the released checkpoints, written out."""
  parts = [
    "input_layernorm",
    "post_attention_layernorm",
    *(f"self_attn.{x}" for x in ("q_proj", "k_proj", "v_proj", "o_proj")),
    *(f"self_attn.{x}" for x in ("q_norm", "k_norm")),
    *(f"mlp.{x}" for x in ("gate_proj", "up_proj", "down_proj")),
  ]
  found = {"fc.weight", "hidden_norm.weight", "norm.weight"}
  for index in range(num_layers):
    found |= {f"layers.{index}.{part}.weight" for part in parts}
  return found


def dspine_names(num_layers):
  shared = ("message", "receiver_gate", "predecessor_gate")
  found = {f"injection.{name}.weight" for name in shared}
  found |= {"injection.bias", "transfer_codes"}
  for index in range(num_layers):
    found |= {f"injection.{x}.{index}.weight" for x in ("readouts", "writes")}
  return found


def test_five_layers_have_the_58_released_tensors():
  entries = names.backbone_entries(PARSED_8B)
  assert len(entries) == 58
  assert {entry.name for entry in entries} == released_names(5)
  shapes = {e.name: e.shape[::-1] if e.transposed else e.shape for e in entries}
  assert shapes["fc.weight"] == (4096, 5 * 4096)
  assert shapes["layers.4.self_attn.k_proj.weight"] == (1024, 4096)
  assert shapes["layers.0.self_attn.q_norm.weight"] == (128,)
  assert shapes["layers.0.mlp.down_proj.weight"] == (4096, 12288)


def test_dspine_adds_its_injection_and_codes_to_the_58():
  cfg = drafter_config.from_json(DSPINE_8B)
  entries = methods.drafter(cfg).entries(cfg)
  assert {e.name for e in entries} == released_names(5) | dspine_names(5)
  assert len(entries) == 58 + 3 + 1 + 2 * 5 + 1
  shapes = {e.name: e.shape[::-1] if e.transposed else e.shape for e in entries}
  assert shapes["injection.message.weight"] == (512, 1024)
  assert shapes["injection.bias"] == (512,)
  assert shapes["injection.readouts.4.weight"] == (1024, 4096)
  assert shapes["injection.writes.4.weight"] == (4096, 512)
  assert shapes["transfer_codes"] == (151936, 1024)


def save(folder, method="dspine", **options):
  setup = tiny_models.drafter(
    tiny_models.drafter_config(method, decay_gamma=7.0, block_size=16)
  )
  drafter_folder.save_drafter(
    folder, setup.params, setup.buffers, setup.cfg, **options
  )
  return setup


def change(folder, edit):
  arrays = stored_tensors.read(folder)
  edit(arrays)
  tensors.write_tensors(folder, arrays)


@pytest.mark.parametrize("method", ["dflash", "dspine"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_saved_drafter_is_loaded_unchanged(method, dtype, tmp_path):
  setup = save(tmp_path, method, dtype=dtype)
  loaded = drafter_folder.load_drafter(str(tmp_path))
  assert loaded.cfg == setup.cfg
  kind = {"bfloat16": ml_dtypes.bfloat16}.get(dtype, dtype)
  got, want = (
    jax.tree_util.tree_flatten(tree)
    for tree in ((loaded.params, loaded.buffers), (setup.params, setup.buffers))
  )
  assert got[1] == want[1]
  for a, b in zip(got[0], want[0], strict=True):
    assert a.dtype == jnp.float32
    rounded = np.asarray(b).astype(kind).astype(np.float32)
    np.testing.assert_array_equal(a, rounded)


@pytest.mark.parametrize("method", ["dflash", "dspine"])
def test_a_saved_drafter_holds_the_released_names(method, tmp_path):
  save(tmp_path, method)
  want = released_names(2)
  if method == "dspine":
    want |= dspine_names(2) | {"transfer_ready"}
  assert set(stored_tensors.read(tmp_path)) == want


@pytest.mark.parametrize("method", ["dflash", "dspine"])
def test_names_with_the_model_prefix_are_accepted(method, tmp_path):
  setup = save(tmp_path, method)

  def add_prefix(arrays):
    for name in list(arrays):
      arrays[f"model.{name}"] = arrays.pop(name)

  change(tmp_path, add_prefix)
  loaded = drafter_folder.load_drafter(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, setup.params)
  jax.tree.map(np.testing.assert_array_equal, loaded.buffers, setup.buffers)


@pytest.mark.parametrize("prefix", ["", "model."])
def test_codes_that_were_not_built_are_refused(prefix, tmp_path):
  save(tmp_path)

  def not_ready(arrays):
    del arrays["transfer_ready"]
    arrays[f"{prefix}transfer_ready"] = np.asarray(False)

  change(tmp_path, not_ready)
  with pytest.raises(ValueError, match="transfer_ready is false"):
    drafter_folder.load_drafter(tmp_path)


@pytest.mark.parametrize(
  "name", ["fc.weight", "injection.bias", "transfer_codes"]
)
def test_a_missing_or_misshapen_tensor_is_named(name, tmp_path):
  save(tmp_path)

  def cut(arrays):
    arrays[name] = arrays[name][:-1]

  change(tmp_path, cut)
  with pytest.raises(ValueError, match=rf"{re.escape(name)} has shape \["):
    drafter_folder.load_drafter(tmp_path)
  change(tmp_path, lambda arrays: arrays.pop(name))
  with pytest.raises(ValueError, match=f"missing {re.escape(name)}"):
    drafter_folder.load_drafter(tmp_path)


def test_nan_and_missing_folders_are_refused(tmp_path):
  with pytest.raises(ValueError, match="nowhere: no such folder"):
    drafter_folder.load_drafter(tmp_path / "nowhere")
  setup = save(tmp_path)
  params = setup.params | {"backbone": dict(setup.params["backbone"])}
  scale = params["backbone"]["norm"]["scale"]
  params["backbone"]["norm"] = {"scale": scale.at[0].set(jnp.nan)}
  drafter_folder.save_drafter(tmp_path, params, setup.buffers, setup.cfg)
  with pytest.raises(ValueError, match="'norm.weight' holds NaN"):
    drafter_folder.load_drafter(tmp_path)


def test_an_empty_config_file_is_named(tmp_path):
  save(tmp_path)
  (tmp_path / "config.json").write_text("")
  with pytest.raises(ValueError, match="config.json: not readable as JSON"):
    drafter_folder.load_drafter(tmp_path)


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"vocab_size": 62}, "vocab_size=61, this target has 62"),
    ({"hidden_size": 32}, "hidden_size=24, this target has 32"),
    ({"num_layers": 6}, "num_target_layers=4, this target has 6"),
  ],
)
def test_a_drafter_of_another_target_is_refused(changes, match):
  cfg = tiny_models.drafter_config("dspine")
  drafter_folder.check_fits(cfg, tiny_models.target_config())
  with pytest.raises(ValueError, match=match):
    drafter_folder.check_fits(cfg, tiny_models.target_config(**changes))


def test_the_written_config_is_one_that_hugging_face_reads(tmp_path):
  setup = save(tmp_path, dtype="bfloat16")
  config = hf_config.read_json(tmp_path / "config.json")
  assert config["architectures"] == ["DSpineDraftModel"]
  assert config["model_type"] == "qwen3" and config["dtype"] == "bfloat16"
  assert config["dflash_config"]["target_layer_ids"] == [0, 2]
  assert config["layer_types"] == ["full_attention"] * 2
  assert config["use_sliding_window"] is False
  assert config["sliding_window"] is None
  assert "sliding_window_convention" not in config
  assert config["is_causal"] is True
  assert config["dspine_config"]["top_k"] == setup.cfg.dspine.top_k
