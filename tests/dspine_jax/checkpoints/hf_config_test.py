import json

import pytest

from dspine_jax import configs, rope_scaling
from dspine_jax.checkpoints import hf_config
from tests import tiny_models

QWEN3_8B = {
  "architectures": ["Qwen3ForCausalLM"],
  "attention_bias": False,
  "attention_dropout": 0.0,
  "bos_token_id": 151643,
  "eos_token_id": 151645,
  "head_dim": 128,
  "hidden_act": "silu",
  "hidden_size": 4096,
  "intermediate_size": 12288,
  "max_position_embeddings": 40960,
  "max_window_layers": 36,
  "model_type": "qwen3",
  "num_attention_heads": 32,
  "num_hidden_layers": 36,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-06,
  "rope_scaling": None,
  "rope_theta": 1000000,
  "sliding_window": None,
  "tie_word_embeddings": False,
  "torch_dtype": "bfloat16",
  "use_sliding_window": False,
  "vocab_size": 151936,
}
LLAMA31 = {
  "model_type": "llama",
  "bos_token_id": 128000,
  "eos_token_id": [128001, 128008, 128009],
  "hidden_size": 4096,
  "intermediate_size": 14336,
  "max_position_embeddings": 131072,
  "num_attention_heads": 32,
  "num_hidden_layers": 32,
  "num_key_value_heads": 8,
  "rms_norm_eps": 1e-05,
  "rope_scaling": {
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
    "rope_type": "llama3",
  },
  "rope_theta": 500000.0,
  "tie_word_embeddings": False,
  "vocab_size": 128256,
}


def test_a_qwen3_config_parses_to_its_values():
  assert hf_config.target_config(QWEN3_8B) == configs.TargetConfig(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_layers=36,
    num_heads=32,
    num_kv_heads=8,
    head_dim=128,
    rope_theta=1e6,
    tie_embeddings=False,
    eos_token_ids=(151645,),
    bos_token_id=151643,
  )


def test_qwen3_4b_has_tied_embeddings_and_queries_wider_than_the_model():
  config = QWEN3_8B | {
    "hidden_size": 2560,
    "intermediate_size": 9728,
    "tie_word_embeddings": True,
  }
  cfg = hf_config.target_config(config)
  assert cfg.tie_embeddings
  assert cfg.head_dim * cfg.num_heads > cfg.hidden_size


def test_a_llama_config_has_no_qk_norm_a_derived_head_width_and_scaling():
  cfg = hf_config.target_config(LLAMA31)
  assert not cfg.qk_norm
  assert cfg.head_dim == 128
  assert cfg.eos_token_ids == (128001, 128008, 128009)
  assert cfg.rms_norm_eps == 1e-5
  assert cfg.rope_scaling == rope_scaling.Llama3Scaling(
    factor=8.0,
    low_freq_factor=1.0,
    high_freq_factor=4.0,
    original_max_positions=8192,
  )


def test_missing_keys_take_the_defaults_of_hugging_face():
  config = {
    name: LLAMA31[name]
    for name in (
      "model_type",
      "hidden_size",
      "intermediate_size",
      "num_attention_heads",
      "num_hidden_layers",
      "vocab_size",
    )
  }
  cfg = hf_config.target_config(config)
  assert cfg.num_kv_heads == cfg.num_heads
  assert cfg.rope_theta == 1e4 and cfg.rope_scaling is None
  assert not cfg.tie_embeddings
  assert cfg.eos_token_ids == () and cfg.bos_token_id is None


def test_newer_files_nest_the_rope_in_its_parameters():
  nested = {"rope_type": "default", "rope_theta": 5e6}
  plain = {k: v for k, v in QWEN3_8B.items() if k != "rope_theta"}
  cfg = hf_config.target_config(plain | {"rope_parameters": nested})
  assert cfg.rope_theta == 5e6 and cfg.rope_scaling is None
  nested = LLAMA31["rope_scaling"] | {"rope_theta": 5e5}
  plain = {k: v for k, v in LLAMA31.items() if not k.startswith("rope")}
  cfg = hf_config.target_config(plain | {"rope_parameters": nested})
  assert cfg == hf_config.target_config(LLAMA31)


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"model_type": "gpt2"}, "model_type='gpt2' is not supported"),
    ({"model_type": None}, "model_type=None is not supported"),
    ({"vocab_size": None}, "key 'vocab_size' is missing"),
    ({"hidden_size": None}, "key 'hidden_size' is missing"),
    ({"model_type": "qwen3_moe"}, "model_type='qwen3_moe' is not supported"),
    ({"model_type": "mixtral"}, "dense models of qwen3, llama, qwen2, mistral"),
    ({"num_experts": 8}, "num_experts=8 is not implemented"),
    ({"num_local_experts": 8}, "num_local_experts=8 is not implemented"),
    ({"n_routed_experts": 2}, "n_routed_experts=2 is not implemented"),
    ({"mlp_bias": True}, "mlp_bias=True is not implemented"),
    (
      {"quantization_config": {"quant_method": "fp8"}},
      "quantization_config=.*fp8.* is not implemented",
    ),
    (
      {"partial_rotary_factor": 0.5},
      "partial_rotary_factor=0.5 is not implemented",
    ),
    (
      {"rope_parameters": {"partial_rotary_factor": 0.25}},
      "partial_rotary_factor=0.25 is not implemented",
    ),
    ({"hidden_act": "gelu"}, "hidden_act='gelu' is not implemented"),
    ({"use_sliding_window": True}, "use_sliding_window=true is not impl"),
    (
      {"layer_types": ["full_attention", "sliding_attention"]},
      r"layer_types=\['sliding_attention'\] is not implemented",
    ),
    ({"model_type": "mistral", "sliding_window": 4096}, "sliding_window=4096"),
    (
      {"model_type": "mistral", "attention_bias": True, "sliding_window": None},
      "attention_bias=True: is not of the family mistral",
    ),
    (
      {"rope_scaling": {"rope_type": "dynamic", "factor": 4.0}},
      "rope scaling 'dynamic' is not implemented",
    ),
    (
      {"rope_scaling": {"type": "longrope", "short_factor": []}},
      "rope scaling 'longrope' is not implemented",
    ),
    (
      {"rope_parameters": {"full_attention": {"rope_type": "default"}}},
      "rope_parameters of each kind of layer",
    ),
    ({"rope_scaling": {"rope_type": "llama3"}}, "key 'factor' is missing"),
    (
      {"rope_scaling": {"rope_type": "linear", "factor": "2"}},
      "rope_scaling.factor='2' is no float",
    ),
    (
      {"rope_scaling": {"rope_type": "linear", "factor": True}},
      "rope_scaling.factor=True is no float",
    ),
    (
      {"rope_scaling": {"rope_type": "linear", "factor": 0.0}},
      "rope_scaling: factor=0.0: must be at least 1",
    ),
    ({"num_key_value_heads": 5}, "num_kv_heads=5: must divide"),
  ],
)
def test_what_cannot_be_run_is_refused_with_file_key_and_value(changes, match):
  with pytest.raises(ValueError, match=f"some/config.json: .*{match}"):
    hf_config.target_config(QWEN3_8B | changes, "some/config.json")


def test_mistral_may_have_a_window_as_long_as_its_context_or_none():
  config = LLAMA31 | {"model_type": "mistral", "rope_scaling": None}
  for window in (None, 131072):
    cfg = hf_config.target_config(config | {"sliding_window": window})
    assert cfg.model_type == "mistral" and cfg.head_dim == 128
  # Without the key, it is the window of the first Mistral.
  with pytest.raises(ValueError, match="sliding_window=4096 below"):
    hf_config.target_config(config)


def test_qwen2_has_its_biases_whatever_the_unread_key_says():
  config = QWEN3_8B | {"model_type": "qwen2", "sliding_window": 32768}
  for value in (False, True):
    cfg = hf_config.target_config(config | {"attention_bias": value})
    assert cfg.biased_projections == ("q_proj", "k_proj", "v_proj")


def test_attention_bias_gives_all_four_projections_one():
  cfg = hf_config.target_config(QWEN3_8B | {"attention_bias": True})
  assert cfg.biased_projections == ("q_proj", "k_proj", "v_proj", "o_proj")


@pytest.mark.parametrize(
  ("values", "want"),
  [
    (
      {"type": "linear", "factor": 2},
      rope_scaling.LinearScaling(factor=2.0),
    ),
    (
      {"type": "yarn", "factor": 4.0},
      rope_scaling.YarnScaling(factor=4.0, original_max_positions=40960),
    ),
    (
      {
        "rope_type": "yarn",
        "factor": 4.0,
        "original_max_position_embeddings": 32768,
        "beta_fast": 16,
        "attention_factor": None,
        "truncate": False,
      },
      rope_scaling.YarnScaling(
        factor=4.0,
        original_max_positions=32768,
        beta_fast=16.0,
        truncate=False,
      ),
    ),
  ],
)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_scalings_are_read_under_both_keys(values, want, key):
  cfg = hf_config.target_config(QWEN3_8B | {key: values})
  assert cfg.rope_scaling == want


@pytest.mark.parametrize(
  "scaling",
  [
    rope_scaling.LinearScaling(factor=2.5),
    rope_scaling.Llama3Scaling(factor=2.0, original_max_positions=64),
    rope_scaling.YarnScaling(factor=4.0, original_max_positions=64),
    rope_scaling.YarnScaling(
      factor=4.0,
      original_max_positions=64,
      beta_fast=16.0,
      beta_slow=2.0,
      attention_factor=1.25,
      mscale=1.0,
      mscale_all_dim=0.5,
      truncate=False,
    ),
  ],
)
def test_a_written_scaling_is_read_back_unchanged(scaling):
  written = json.loads(json.dumps(hf_config.rope_scaling_json(scaling)))
  for key in ("rope_scaling", "rope_parameters"):
    assert hf_config.rope_scaling({key: written}, "here") == scaling
  assert None not in written.values()


@pytest.mark.parametrize(
  "cfg",
  [
    tiny_models.target_config(eos_token_ids=(3, 5), bos_token_id=2),
    tiny_models.target_config(attention_bias=True),
    tiny_models.target_config(model_type="qwen2"),
    tiny_models.target_config(model_type="mistral", max_positions=8192),
    tiny_models.target_config(
      model_type="llama",
      tie_embeddings=True,
      rope_scaling=rope_scaling.Llama3Scaling(factor=2.0),
    ),
  ],
  ids=["qwen3", "biased", "qwen2", "mistral", "llama"],
)
def test_a_written_config_is_read_back_unchanged(cfg, tmp_path):
  path = tmp_path / "config.json"
  hf_config.write_json(path, hf_config.target_json(cfg))
  assert hf_config.target_config(hf_config.read_json(path), path) == cfg


@pytest.mark.parametrize(
  ("text", "match"),
  [
    ("", "not readable as JSON"),
    ('{"a": 1', "not readable as JSON"),
    ("[1, 2]", "a JSON object is needed"),
    (b"\xff\xfe\x00", "not readable as JSON"),
  ],
  ids=["empty", "truncated", "list", "binary"],
)
def test_a_file_that_is_no_json_object_is_named(text, match, tmp_path):
  path = tmp_path / "config.json"
  path.write_bytes(text if isinstance(text, bytes) else text.encode())
  with pytest.raises(ValueError, match=f"config.json: {match}"):
    hf_config.read_json(path)


def test_a_missing_file_is_named(tmp_path):
  with pytest.raises(ValueError, match="nowhere.json: no such file"):
    hf_config.read_json(tmp_path / "nowhere.json")


def test_an_empty_object_lacks_its_family(tmp_path):
  path = tmp_path / "config.json"
  path.write_text("{}")
  with pytest.raises(ValueError, match="config.json: model_type=None"):
    hf_config.target_config(hf_config.read_json(path), path)


def test_written_json_is_sorted_and_ends_with_a_newline(tmp_path):
  hf_config.write_json(tmp_path / "config.json", {"b": 1, "a": [2]})
  text = (tmp_path / "config.json").read_text()
  assert list(json.loads(text)) == ["a", "b"] and text.endswith("}\n")
