"""A target as one GGUF file of the Llama family, in float32.

`read` opens a file, `load_target` gives the same parameters and configuration
as `target_folder.load_target` does for the Hugging Face folder that the file
was made from, but for the rounding of its quantisation. The `gguf` package
reads and dequantises; it is optional and imported where it is used. Not here:
the tokenizer of the file (`gguf_tokenizer.py`).

RoPE: GGUF stores the rows of `attn_q` and `attn_k` so that the two features of
a rotated pair are neighbours, (0, 1), (2, 3), ...; ours and Hugging Face's pair
feature j with j + head_dim / 2 (rotate half). `rotate_half_rows` undoes it.
"""

import pathlib
import re
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from dspine_jax import configs
from dspine_jax.checkpoints import hf_config, names, target_folder, tensors

_PARTS = {
  "self_attn.q_proj": "attn_q",
  "self_attn.k_proj": "attn_k",
  "self_attn.v_proj": "attn_v",
  "self_attn.o_proj": "attn_output",
  "mlp.gate_proj": "ffn_gate",
  "mlp.up_proj": "ffn_up",
  "mlp.down_proj": "ffn_down",
  "input_layernorm": "attn_norm",
  "post_attention_layernorm": "ffn_norm",
  "model.embed_tokens": "token_embd",
  "model.norm": "output_norm",
  "lm_head": "output",
}


class File(NamedTuple):
  """An open GGUF file.

  Attributes:
    path: where it lies; named in errors.
    metadata: key -> number, string or list.
    tensors: name -> the reader's record, mapped from disk and still quantised.
  """

  path: pathlib.Path
  metadata: Mapping[str, Any]
  tensors: Mapping[str, Any]


def read(path: pathlib.Path | str) -> File:
  """Opens a GGUF file.

  Raises:
    ValueError: no such file, truncated, not GGUF, or no `gguf` package.
  """
  path = pathlib.Path(path)
  package = _package(path)
  if not path.is_file():
    raise ValueError(f"{path}: no such file")
  try:
    reader = package.GGUFReader(path)
    metadata = {key: field.contents() for key, field in reader.fields.items()}
  except (ValueError, KeyError, IndexError, OverflowError, OSError) as error:
    # The reader slices the mapped file and trips over what is not there.
    raise ValueError(
      f"{path}: truncated or not a GGUF file ({error})"
    ) from None
  return File(
    path=path,
    metadata=metadata,
    tensors={tensor.name: tensor for tensor in reader.tensors},
  )


def _package(path: pathlib.Path) -> Any:
  try:
    import gguf
  except ImportError:
    raise ValueError(
      f"{path}: reading GGUF needs a package; pip install gguf"
    ) from None
  return gguf


def field(file: File, key: str, kind: type, default: Any = None) -> Any:
  """metadata[key], which must be a `kind`, or the default where it is absent.

  Raises:
    ValueError: naming the file and the key: absent without default, or no
      `kind`.
  """
  value = file.metadata.get(key, default)
  if value is None:
    raise ValueError(f"{file.path}: key {key!r} is missing")
  if not isinstance(value, kind) or (kind is int and isinstance(value, bool)):
    raise ValueError(f"{file.path}: {key}={value!r} is no {kind.__name__}")
  return value


def target_config(file: File) -> configs.TargetConfig:
  """The configuration in a file's metadata.

  Raises:
    ValueError: another architecture, a missing key, or an option that would
      change the computation and is not implemented.
  """
  family = file.metadata.get("general.architecture")
  if family != "llama":
    raise ValueError(
      f"{file.path}: general.architecture={family!r} is not supported (llama)"
    )
  hidden_size = field(file, "llama.embedding_length", int)
  num_heads = field(file, "llama.attention.head_count", int)
  head_dim = field(
    file, "llama.attention.key_length", int, hidden_size // max(num_heads, 1)
  )
  _refuse_unimplemented(file, head_dim)
  try:
    return configs.TargetConfig(
      model_type="llama",
      vocab_size=len(field(file, "tokenizer.ggml.tokens", list)),
      hidden_size=hidden_size,
      intermediate_size=field(file, "llama.feed_forward_length", int),
      num_layers=field(file, "llama.block_count", int),
      num_heads=num_heads,
      num_kv_heads=field(file, "llama.attention.head_count_kv", int, num_heads),
      head_dim=head_dim,
      rope_theta=_decimal(field(file, "llama.rope.freq_base", float, 1e4)),
      rms_norm_eps=_decimal(
        field(file, "llama.attention.layer_norm_rms_epsilon", float)
      ),
      tie_embeddings="output.weight" not in file.tensors,
      max_positions=field(file, "llama.context_length", int),
      eos_token_ids=_stop_tokens(file),
      bos_token_id=file.metadata.get("tokenizer.ggml.bos_token_id"),
    )
  except ValueError as error:
    raise hf_config.with_path(error, file.path) from None


def _decimal(value: float) -> float:
  """The short decimal that a float32 of the file stands for: 1e-05."""
  return float(str(np.float32(value)))


def _stop_tokens(file: File) -> tuple[int, ...]:
  """The end of the text and, where it is another token, of a turn."""
  keys = ("tokenizer.ggml.eos_token_id", "tokenizer.ggml.eot_token_id")
  known = [field(file, key, int) for key in keys if key in file.metadata]
  return tuple(dict.fromkeys(known))


def _refuse_unimplemented(file: File, head_dim: int) -> None:
  """ValueError for options that would change the result."""
  neutral = {
    "llama.rope.scaling.type": "none",
    "llama.rope.dimension_count": head_dim,
    "llama.attention.value_length": head_dim,
    "llama.expert_count": 0,
  }
  for key, value in neutral.items():
    if file.metadata.get(key, value) != value:
      raise ValueError(
        f"{file.path}: {key}={file.metadata[key]!r} is not implemented"
        f" ({value!r})"
      )


def load_target(
  file: File,
  *,
  dtype: str = "float32",
  sharding: target_folder.Shardings | None = None,
) -> target_folder.Target:
  """Loads a Llama-family target from an open file.

  Args:
    file: from `read`.
    dtype: as in `target_folder.load_target`.
    sharding: as there.

  Returns:
    Parameters with unrolled layers and rotate-half RoPE; `folder` is the path
    of the file.

  Raises:
    ValueError: with the file and what is wrong: a missing or unknown tensor, a
      wrong shape, NaN, an unknown quantisation, an unsupported configuration.
  """
  cfg = target_folder.with_dtype(target_config(file), dtype)
  entries = [
    entry._replace(name=gguf_name(entry.name))
    for entry in names.target_entries(cfg)
  ]
  # Biases and frequency factors of RoPE are tensors, not options.
  unknown = sorted(set(file.tensors) - {entry.name for entry in entries})
  if unknown:
    raise ValueError(f"{file.path}: tensors {unknown[:6]} are not implemented")
  # GGUF counts axes from the last one.
  shapes = {
    name: tuple(int(size) for size in reversed(tensor.shape))
    for name, tensor in file.tensors.items()
  }
  found = names.resolve(shapes, entries, source=file.path)

  def read(entry: names.Entry, name: str) -> target_folder.Part:
    array = _dequantize(file, name)
    if name.endswith(("attn_q.weight", "attn_k.weight")):
      array = rotate_half_rows(array, cfg.head_dim)
    array = array.T if entry.transposed else array
    return lambda index: array[index]

  params = target_folder.place(found, read, dtype=dtype, sharding=sharding)
  return target_folder.Target(params=params, cfg=cfg, folder=file.path)


def gguf_name(name: str) -> str:
  """`model.layers.3.mlp.up_proj.weight` -> `blk.3.ffn_up.weight`."""
  part = name.removesuffix(".weight")
  layer = re.match(r"model\.layers\.(\d+)\.", part)
  prefix = f"blk.{layer[1]}." if layer else ""
  return f"{prefix}{_PARTS[part[layer.end() if layer else 0 :]]}.weight"


def rotate_half_rows(array: np.ndarray, head_dim: int) -> np.ndarray:
  """Rows of q or k from neighbouring pairs to halves, head by head.

  Args:
    array: [heads * head_dim, in].
    head_dim: rows of a head.
  """
  pairs = array.reshape(-1, head_dim // 2, 2, *array.shape[1:])
  return pairs.swapaxes(1, 2).reshape(array.shape)


def _dequantize(file: File, name: str) -> np.ndarray:
  tensor = file.tensors[name]
  package = _package(file.path)
  try:
    with np.errstate(over="ignore", invalid="ignore"):  # Checked below.
      array = package.dequantize(tensor.data, tensor.tensor_type)
  except NotImplementedError as error:
    raise ValueError(f"{file.path}: tensor {name!r}: {error}") from None
  tensors.check_finite(array, file.path, name)
  return array.astype(np.float32)
