"""Sizes and parameters from configurations, and what is refused or noted."""

import csv
import json

import pytest

from energy import architecture

LLAMA = {
  "model_type": "llama",
  "hidden_size": 4096,
  "num_hidden_layers": 32,
  "num_attention_heads": 32,
  "num_key_value_heads": 8,
  "intermediate_size": 14336,
  "vocab_size": 128256,
  "tie_word_embeddings": False,
}

# As their model cards and safetensors indices say.
PARAMETERS = {
  "Llama 3.2 1B": 1_235_814_400,
  "OPT 1.3B": 1_315_758_080,
  "Qwen 2 1.5B": 1_543_714_304,
  "Gemma 2 2B": 2_614_341_888,
  "OPT 2.7B": 2_651_596_800,
  "Llama 3.2 3B": 3_212_749_824,
  "OPT 6.7B": 6_658_473_984,
  "Qwen 2 7B": 7_615_616_512,
  "Llama 3.1 8B": 8_030_261_248,
  "Gemma 2 9B": 9_241_705_984,
  "Qwen3 8B": 8_190_735_360,
  "bigcode/starcoder2-3b": 3_030_371_328,
  "bigcode/starcoder2-15b": 15_957_889_024,
  "microsoft/Phi-3-mini-4k-instruct": 3_821_079_552,
  "mistralai/Mistral-7B-Instruct-v0.3": 7_248_023_552,
  "mistralai/Mistral-Nemo-Instruct-2407": 12_247_782_400,
  "google/codegemma-7b": 8_537_680_896,
}


@pytest.mark.parametrize(("name", "count"), PARAMETERS.items())
def test_parameters_of_released_models(name, count):
  assert architecture.shipped_models()[name].architecture.parameters == count


@pytest.mark.parametrize(
  ("config", "count"),
  [
    (  # Phi-2.
      {
        "model_type": "phi",
        "hidden_size": 2560,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "intermediate_size": 10240,
        "vocab_size": 51200,
        "tie_word_embeddings": False,
      },
      2_779_683_840,
    ),
    (  # Falcon-7B, one key and value head, one norm a layer.
      {
        "model_type": "falcon",
        "hidden_size": 4544,
        "num_hidden_layers": 32,
        "num_attention_heads": 71,
        "vocab_size": 65024,
        "multi_query": True,
        "parallel_attn": True,
        "bias": False,
      },
      6_921_720_704,
    ),
  ],
)
def test_parameters_of_other_families(config, count):
  model = architecture.from_config(config, "config.json")
  assert model.architecture.parameters == count


def test_sizes_are_those_of_the_paper_as_corrected():
  path = architecture.DATASETS / "sweetspot_table2_architectures.csv"
  models = architecture.shipped_models()
  with path.open() as file:
    rows = list(csv.DictReader(file))
  assert len(rows) == 13
  for row in rows:
    sizes = models[row["model"]].architecture
    expected = ("hidden_size_true", "layers", "q_heads", "kv_heads_true")
    assert sizes[:4] == tuple(int(row[key]) for key in expected), row
    assert sizes.head_dim == int(row["head_dim_true"]), row


def test_widths_follow_the_heads_and_not_the_hidden_size():
  gemma = architecture.shipped_models()["Gemma 2 9B"].architecture
  assert gemma.attention_width == 4096 != gemma.hidden_size
  assert gemma.kv_width == 2048
  assert gemma.kv_ratio == 0.5


def test_nested_text_configurations_are_found():
  plain = architecture.from_config(LLAMA, "a")
  nested = architecture.from_config(
    {"model_type": "llava", "text_config": LLAMA}, "a"
  )
  assert nested == plain
  assert plain.family == "Llama"


def test_files_and_folders(tmp_path):
  path = tmp_path / "config.json"
  path.write_text(json.dumps(LLAMA))
  for place in (path, tmp_path):
    model = architecture.from_file(place)
    assert model.architecture.hidden_size == 4096
  path.write_text("[]")
  with pytest.raises(ValueError, match=r"config\.json: a JSON object"):
    architecture.from_file(tmp_path)
  path.write_text("{")
  with pytest.raises(ValueError, match=r"config\.json: not readable"):
    architecture.from_file(tmp_path)
  with pytest.raises(ValueError, match=r"none\.json: no such file"):
    architecture.from_file(tmp_path / "none.json")


@pytest.mark.parametrize(
  ("change", "message"),
  [
    ({"num_local_experts": 8}, "mixture of experts (num_local_experts)"),
    ({"model_type": "qwen3_moe"}, "mixture of experts (qwen3_moe)"),
    ({"kv_lora_rank": 512}, "multi-head latent attention (kv_lora_rank)"),
    ({"layer_types": ["linear_attention"] * 32}, "linear attention"),
    ({"model_type": "mamba2"}, "linear attention or state space"),
    ({"model_type": "bert"}, "model_type 'bert' is not among"),
    ({"layer_types": 5}, "layer_types=5: a list is needed"),
    ({"sliding_window": "x"}, "sliding_window='x' must be"),
    ({"intermediate_size": None}, "key 'intermediate_size' is missing"),
    ({"hidden_size": None}, "key 'hidden_size' is missing"),
    ({"num_hidden_layers": 0}, "num_hidden_layers=0 must be"),
    ({"num_hidden_layers": 2.5}, "num_hidden_layers=2.5 must be"),
    ({"num_key_value_heads": 5}, "num_key_value_heads=5 does not divide"),
    ({"hidden_size": 4097}, "num_attention_heads=32 does not divide"),
  ],
)
def test_what_no_law_covers_is_refused(change, message):
  with pytest.raises(ValueError) as error:
    architecture.from_config(LLAMA | change, "some/config.json")
  assert str(error.value).startswith("some/config.json: ")
  assert message in str(error.value)


def test_windows_are_noted_where_the_request_is_longer():
  gemma = architecture.shipped_models()["Gemma 2 9B"]
  assert gemma.notes(4096) == []
  (note,) = gemma.notes(4097)
  assert "21 of 42 layers see only 4096 positions" in note
  unused = LLAMA | {"sliding_window": 4096, "use_sliding_window": False}
  assert architecture.from_config(unused, "a").notes(1e6) == []
