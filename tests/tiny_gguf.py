"""A tiny GGUF file of the Llama family with known weights and tokens.

Rows of q and k are put into the file's order by a list of indices, apart from
the code that undoes it. Without the `gguf` package, what imports this skips.
"""

import pathlib
import struct

import numpy as np
import pytest
from tokenizers import pre_tokenizers

from dspine_jax import configs
from dspine_jax.checkpoints import names
from tests import tiny_models

gguf = pytest.importorskip("gguf", reason="needs pip install gguf")

SPECIALS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<empty_output>"]
MERGES = ["t h", "th e", "Ġ the", "1 2"]
TOKENS = [
  *SPECIALS,
  *sorted(pre_tokenizers.ByteLevel.alphabet()),
  *(merge.replace(" ", "") for merge in MERGES),
]
TYPES = [3] * len(SPECIALS) + [1] * (len(TOKENS) - len(SPECIALS))
TEMPLATE = (
  "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n"
  "{% endfor %}{% if add_generation_prompt %}<|im_start|>a\n{% endif %}"
)


def target_config(**changes) -> configs.TargetConfig:
  """Head width times heads (40) differs from the model width (32)."""
  fields = {
    "vocab_size": len(TOKENS),
    "hidden_size": 32,
    "num_layers": 2,
    "model_type": "llama",
    "rope_theta": 1e5,
    "rms_norm_eps": 1e-5,
    "eos_token_ids": (2,),
    "bos_token_id": 1,
  }
  return tiny_models.target_config(**(fields | changes))


def metadata(cfg: configs.TargetConfig) -> dict:
  """Key -> value; float, int, string or list as the format has them."""
  return {
    "general.architecture": "llama",
    "llama.block_count": cfg.num_layers,
    "llama.context_length": cfg.max_positions,
    "llama.embedding_length": cfg.hidden_size,
    "llama.feed_forward_length": cfg.intermediate_size,
    "llama.attention.head_count": cfg.num_heads,
    "llama.attention.head_count_kv": cfg.num_kv_heads,
    "llama.attention.key_length": cfg.head_dim,
    "llama.attention.value_length": cfg.head_dim,
    "llama.attention.layer_norm_rms_epsilon": cfg.rms_norm_eps,
    "llama.rope.freq_base": cfg.rope_theta,
    "llama.rope.dimension_count": cfg.head_dim,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": TOKENS,
    "tokenizer.ggml.token_type": TYPES,
    "tokenizer.ggml.merges": MERGES,
    "tokenizer.ggml.bos_token_id": 1,
    "tokenizer.ggml.eos_token_id": 2,
    "tokenizer.chat_template": TEMPLATE,
  }


# The format's names, written out; {} is the layer.
NAMES = {
  "model.embed_tokens.weight": "token_embd.weight",
  "model.norm.weight": "output_norm.weight",
  "lm_head.weight": "output.weight",
  "input_layernorm.weight": "blk.{}.attn_norm.weight",
  "post_attention_layernorm.weight": "blk.{}.ffn_norm.weight",
  "self_attn.q_proj.weight": "blk.{}.attn_q.weight",
  "self_attn.k_proj.weight": "blk.{}.attn_k.weight",
  "self_attn.v_proj.weight": "blk.{}.attn_v.weight",
  "self_attn.o_proj.weight": "blk.{}.attn_output.weight",
  "mlp.gate_proj.weight": "blk.{}.ffn_gate.weight",
  "mlp.up_proj.weight": "blk.{}.ffn_up.weight",
  "mlp.down_proj.weight": "blk.{}.ffn_down.weight",
}


def arrays(cfg: configs.TargetConfig, params) -> dict[str, np.ndarray]:
  """The tensors of a file, by their names in it."""
  found = {}
  for name, array in names.export(params, names.target_entries(cfg)).items():
    if name in NAMES:
      found[NAMES[name]] = array
      continue
    _, _, layer, part = name.split(".", 3)
    if part.startswith(("self_attn.q", "self_attn.k")):
      array = array[neighbours(len(array), cfg.head_dim)]
    found[NAMES[part].format(layer)] = array
  return found


def neighbours(rows: int, head_dim: int) -> list[int]:
  """Where each row of the file comes from: 0, d/2, 1, d/2 + 1, ..."""
  return [
    start + pair + half
    for start in range(0, rows, head_dim)
    for pair in range(head_dim // 2)
    for half in (0, head_dim // 2)
  ]


def write(
  path: pathlib.Path,
  cfg: configs.TargetConfig,
  *,
  tensors: dict[str, np.ndarray] | None = None,
  quantized: dict[str, str] | None = None,
  **changes,
) -> pathlib.Path:
  """Writes a file of `tiny_models.target_params(cfg)`.

  Args:
    path: of the file.
    cfg: of the target.
    tensors: in place of the parameters', by name in the file.
    quantized: name -> quantisation; others are float32.
    **changes: metadata by key; None leaves a key out.
  """
  if tensors is None:
    tensors = arrays(cfg, tiny_models.target_params(cfg))
  fields = metadata(cfg) | changes
  writer = gguf.GGUFWriter(path, fields.pop("general.architecture"))
  add = {
    int: writer.add_uint32,
    float: writer.add_float32,
    str: writer.add_string,
    list: writer.add_array,
  }
  for key, value in fields.items():
    if value is not None:
      add[type(value)](key, value)
  for name, array in tensors.items():
    kind = gguf.GGMLQuantizationType[(quantized or {}).get(name, "F32")]
    writer.add_tensor(name, gguf.quantize(array, kind), raw_dtype=kind)
  writer.write_header_to_file()
  writer.write_kv_data_to_file()
  writer.write_tensors_to_file()
  writer.close()
  return path


def q8_0(data: bytes, count: int) -> np.ndarray:
  """`count` values of blocks [float16 scale, 32 int8], one by one."""
  values = []
  for start in range(0, len(data), 34):
    scale, *steps = struct.unpack_from("<e32b", data, start)
    values += [np.float32(scale) * np.float32(step) for step in steps]
  return np.asarray(values[:count], np.float32)
