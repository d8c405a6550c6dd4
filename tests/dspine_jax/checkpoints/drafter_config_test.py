"""config.json of every released form, read and written."""

import dataclasses
import pathlib

import pytest

from dspine_jax.checkpoints import (
  drafter_config,
)
from tests import drafter_files

GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


@pytest.mark.parametrize(
  ("method", "form"),
  [
    ("dflash", "zlab"),
    ("dflash2", "specforge"),
    ("domino", "specforge"),
    ("dspark", "deepspec"),
    ("dspine", "specforge"),
  ],
)
def test_a_written_config_has_the_released_keys_and_values(method, form):
  released = drafter_files.read_config(GOLDEN / method)
  cfg = drafter_config.from_json(released)
  written = drafter_config.to_json(cfg, form)
  # The golden folders were written without the code that this key names.
  written.pop("auto_map", None)
  assert written == released


LAYERS_27B = {
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": None,
  "dtype": "bfloat16",
  "eos_token_id": 248044,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 5120,
  "initializer_range": 0.02,
  "intermediate_size": 17408,
  "layer_types": ["sliding_attention"] * 5,
  "max_position_embeddings": 262144,
  "max_window_layers": 5,
  "model_type": "qwen3",
  "num_attention_heads": 32,
  "num_hidden_layers": 5,
  "num_key_value_heads": 8,
  "num_target_layers": 64,
  "rms_norm_eps": 1e-06,
  "rope_parameters": {"rope_theta": 10000000, "rope_type": "default"},
  "sliding_window": 2048,
  "tie_word_embeddings": False,
  "use_cache": True,
  "use_sliding_window": True,
  "vocab_size": 248320,
}
# Keys of z-lab's DFlash2 for Qwen3.8-27B.
DFLASH2_27B = LAYERS_27B | {
  "architectures": ["DFlash2DraftModel"],
  "is_causal": False,
  "dflash_config": {
    "block_size": 8,
    "conv_group_size": 16,
    "conv_kernel_size": 2,
    "mask_token_id": 248070,
    "selector_rank": 256,
    "selector_top_k": 16,
    "target_layer_ids": [5, 19, 33, 47, 61],
  },
}
# Keys of a speculators folder, whose targets count the embedding as 0.
SPECULATORS_8B = {
  "architectures": ["DFlashDraftModel"],
  "aux_hidden_state_layer_ids": [2, 10, 18, 26, 34],
  "block_size": 8,
  "draft_vocab_size": 32000,
  "dtype": "bfloat16",
  "mask_token_id": 151669,
  "sample_from_anchor": False,
  "sliding_window_non_causal": False,
  "speculators_config": {
    "algorithm": "dflash",
    "default_proposal_method": "greedy",
    "proposal_methods": [
      {
        "accept_tolerance": 0.0,
        "proposal_type": "greedy",
        "speculative_tokens": 7,
        "verifier_accept_k": 1,
      }
    ],
    "verifier": {"architectures": [], "name_or_path": "Qwen/Qwen3-8B"},
  },
  "speculators_model_type": "dflash",
  "speculators_version": "0.5.0",
  "target_hidden_size": None,
  "transformer_layer_config": {
    "architectures": ["Qwen3ForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": 151643,
    "eos_token_id": 151645,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "layer_types": ["full_attention"] * 5,
    "max_position_embeddings": 40960,
    "max_window_layers": 5,
    "model_type": "qwen3",
    "num_attention_heads": 32,
    "num_hidden_layers": 5,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_parameters": {"rope_theta": 1000000.0, "rope_type": "default"},
    "sliding_window": None,
    "tie_word_embeddings": False,
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": 151936,
  },
}


def test_z_lab_s_newer_files_are_written_as_they_are():
  cfg = drafter_config.from_json(DFLASH2_27B)
  assert cfg.block_size == 8 and cfg.rope_theta == 1e7
  written = drafter_config.to_json(cfg, "zlab") | {"dtype": "bfloat16"}
  assert written == DFLASH2_27B


def test_speculators_files_are_read_and_written_as_they_are():
  cfg = drafter_config.from_json(SPECULATORS_8B)
  # Their index of a tapped layer is one more than the layer's.
  assert cfg.target_layer_ids == (1, 9, 17, 25, 33)
  assert cfg.draft_vocab_size == 32000 and cfg.num_target_layers is None
  assert cfg.num_proposals == 7
  written = drafter_config.to_json(
    cfg, "speculators", target_name="Qwen/Qwen3-8B"
  )
  assert written | {"dtype": "bfloat16"} == SPECULATORS_8B
  whole = drafter_config.from_json(
    SPECULATORS_8B | {"draft_vocab_size": 151936}
  )
  assert whole == dataclasses.replace(cfg, draft_vocab_size=None)


def test_speculators_methods_have_the_released_conventions():
  common = SPECULATORS_8B
  full = common | {"draft_vocab_size": 151936}
  spark = full | {"speculators_model_type": "dspark", "markov_rank": 64}
  cfg = drafter_config.from_json(spark | {"sample_from_anchor": True})
  assert (cfg.method, cfg.dspark.markov_rank) == ("dspark", 64)
  assert cfg.num_proposals == 8
  assert drafter_config.from_json(spark).num_proposals == 7
  layers = common["transformer_layer_config"] | {
    "layer_types": ["sliding_attention"] * 5,
    "sliding_window": 2048,
  }
  flash2 = full | {
    "speculators_model_type": "dflash2",
    "selector_rank": 8,
    "sliding_window_non_causal": True,
    "transformer_layer_config": layers,
  }
  cfg = drafter_config.from_json(flash2)
  assert (cfg.method, cfg.dflash2.selector_rank) == ("dflash2", 8)
  assert cfg.sliding_window_convention == "speculators_non_causal"
  again = drafter_config.to_json(cfg, "speculators")
  assert again["sliding_window_non_causal"] is True
  assert drafter_config.from_json(again) == cfg


SLIDING_8B = SPECULATORS_8B["transformer_layer_config"] | {
  "layer_types": ["sliding_attention", *["full_attention"] * 4],
  "sliding_window": 2048,
}


@pytest.mark.parametrize("absent", ["no key", "null"])
@pytest.mark.parametrize(
  ("method", "convention"),
  [
    ("dflash", "speculators"),
    ("dspark", "speculators"),
    ("dflash2", "speculators_non_causal"),
  ],
)
def test_keys_that_speculators_files_lack_are_its_own_defaults(
  method, convention, absent
):
  config = SPECULATORS_8B | {
    "draft_vocab_size": 151936,
    "speculators_model_type": method,
    "transformer_layer_config": SLIDING_8B,
  }
  for key in ("block_size", "sliding_window_non_causal"):
    config[key] = None
    if absent == "no key":
      del config[key]
  cfg = drafter_config.from_json(config)
  assert (cfg.block_size, cfg.sliding_window) == (8, 2048)
  assert cfg.sliding_window_convention == convention


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"speculators_model_type": "eagle3"}, "another kind of drafter"),
    ({"speculators_model_type": "peagle"}, "another kind of drafter"),
    ({"speculators_model_type": "xpress"}, "'xpress' is not one of"),
    ({"projector_type": "domino"}, "projector_type='domino'"),
    ({"target_hidden_size": 5120}, "target_hidden_size=5120 is not"),
    ({"aux_hidden_state_layer_ids": [0, 2]}, "layer -1 cannot be tapped"),
    ({"aux_hidden_state_layer_ids": None}, "'aux_hidden_state_layer_ids'"),
    ({"transformer_layer_config": None}, "'transformer_layer_config' is miss"),
    ({"speculators_model_type": "dspark"}, "method 'dspark' scores the whole"),
    ({"draft_vocab_size": 200000}, "cannot exceed vocab_size=151936"),
    ({"mask_token_id": None}, "'mask_token_id' is missing"),
    (
      {"speculators_model_type": "dspark", "sample_from_anchor": None},
      "'sample_from_anchor' is missing.*: set it",
    ),
  ],
)
def test_speculators_folders_of_another_kind_are_refused(changes, match):
  config = SPECULATORS_8B | changes
  with pytest.raises(ValueError, match=f"^some/config.json: .*{match}"):
    drafter_config.from_json(config, "some/config.json")


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"architectures": ["LlamaForCausalLMEagle3"]}, "another kind of drafter"),
    ({"quantization_config": {"bits": 4}}, "quantised drafters"),
    ({"attention_bias": True}, "no biases"),
    ({"dflash_config": {"attention_mode": "mla"}}, "attention_mode=.*'mla'"),
    ({"dflash_config": {"attention_modes": ["gqa", "kda"]}}, "attention_mode"),
    ({"dflash_config": {"attention_sink_bias": True}}, "attention_sink_bias"),
    ({"dflash_config": {"projector_type": "mlp"}}, "projector_type='mlp'"),
  ],
)
def test_drafters_of_another_kind_are_refused(changes, match):
  config = drafter_files.read_config(GOLDEN / "dflash")
  if "dflash_config" in changes:
    nested = config["dflash_config"] | changes["dflash_config"]
    changes = {"dflash_config": nested}
  with pytest.raises(ValueError, match=f"^some/config.json: .*{match}"):
    drafter_config.from_json(config | changes, "some/config.json")
