import pytest

from tests import tiny_models

QKV = ("q_proj", "k_proj", "v_proj")


@pytest.mark.parametrize(
  ("model_type", "attention_bias", "biased", "qk_norm"),
  [
    ("qwen3", False, (), True),
    ("qwen3", True, (*QKV, "o_proj"), True),
    ("llama", False, (), False),
    ("llama", True, (*QKV, "o_proj"), False),
    ("qwen2", False, QKV, False),
    ("mistral", False, (), False),
  ],
)
def test_the_family_says_which_projections_have_a_bias_or_a_norm(
  model_type, attention_bias, biased, qk_norm
):
  cfg = tiny_models.target_config(
    model_type=model_type, attention_bias=attention_bias
  )
  attention = tiny_models.target_params(cfg)["layers"][0]["self_attn"]
  assert {name for name in attention if "bias" in attention[name]} == set(
    biased
  )
  assert ("q_norm" in attention) == ("k_norm" in attention) == qk_norm


@pytest.mark.parametrize("model_type", ["qwen2", "mistral"])
def test_families_without_such_a_key_refuse_a_bias(model_type):
  with pytest.raises(
    ValueError, match="attention_bias=True: is not of the fam"
  ):
    tiny_models.target_config(model_type=model_type, attention_bias=True)


def test_another_family_is_refused():
  with pytest.raises(ValueError, match="model_type='gpt2': not in .*'mistral'"):
    tiny_models.target_config(model_type="gpt2")
