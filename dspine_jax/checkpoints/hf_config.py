"""`config.json` <-> TargetConfig, in the key names of Hugging Face.

Families: Qwen3 and Llama (model_type `qwen3`, `llama`). What would change the
computation and is not implemented is refused with the key and its value.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any

from dspine_jax import configs

_FAMILIES = ("qwen3", "llama")


def read_json(path: pathlib.Path | str) -> dict[str, Any]:
  """A JSON object from a file; ValueError with the path if it is not one."""
  path = pathlib.Path(path)
  try:
    value = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise ValueError(f"{path}: no such file") from None
  except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f"{path}: not readable as JSON ({error})") from None
  if not isinstance(value, dict):
    raise ValueError(f"{path}: a JSON object is needed")
  return value


def require_key(config: Mapping[str, Any], key: str, path: object) -> Any:
  """config[key], or ValueError naming the file and the key."""
  if config.get(key) is None:
    raise ValueError(f"{path}: key {key!r} is missing")
  return config[key]


def rope_theta(config: Mapping[str, Any]) -> float:
  """`rope_theta`, also where newer files nest it in `rope_parameters`."""
  nested = config.get("rope_parameters") or {}
  return float(config.get("rope_theta") or nested.get("rope_theta") or 1e4)


def rope_scaling(
  config: Mapping[str, Any], path: object
) -> configs.RopeScaling | None:
  """Llama-3 scaling if the config names it, None if it names no scaling."""
  scaling = config.get("rope_scaling") or config.get("rope_parameters") or {}
  kind = scaling.get("rope_type", scaling.get("type", "default"))
  if kind == "default":
    return None
  if kind != "llama3":
    raise ValueError(
      f"{path}: rope scaling {kind!r} is not implemented (default, llama3)"
    )
  values = {
    name: require_key(scaling, name, f"{path}: rope scaling")
    for name in (
      "factor",
      "low_freq_factor",
      "high_freq_factor",
      "original_max_position_embeddings",
    )
  }
  return configs.RopeScaling(
    factor=float(values["factor"]),
    low_freq_factor=float(values["low_freq_factor"]),
    high_freq_factor=float(values["high_freq_factor"]),
    original_max_positions=int(values["original_max_position_embeddings"]),
  )


def rope_scaling_json(
  scaling: configs.RopeScaling | None,
) -> dict[str, Any] | None:
  """The inverse of `rope_scaling`."""
  if scaling is None:
    return None
  return {
    "rope_type": "llama3",
    "factor": scaling.factor,
    "low_freq_factor": scaling.low_freq_factor,
    "high_freq_factor": scaling.high_freq_factor,
    "original_max_position_embeddings": scaling.original_max_positions,
  }


def refuse_unimplemented(config: Mapping[str, Any], path: object) -> None:
  """ValueError for keys that would change the result."""
  for key in ("attention_bias", "mlp_bias"):
    if config.get(key):
      raise ValueError(f"{path}: {key}={config[key]!r} is not implemented")
  if config.get("hidden_act", "silu") != "silu":
    raise ValueError(
      f"{path}: hidden_act={config['hidden_act']!r} is not implemented (silu)"
    )


def with_path(error: ValueError, path: object) -> ValueError:
  """The error with the file named in front, once."""
  text = str(error)
  return error if text.startswith(str(path)) else ValueError(f"{path}: {text}")


def _token_ids(value: Any) -> tuple[int, ...]:
  if value is None:
    return ()
  return tuple(value) if isinstance(value, list) else (int(value),)


def target_config(
  config: Mapping[str, Any], path: object = "config.json"
) -> configs.TargetConfig:
  """A TargetConfig from a parsed `config.json`.

  Raises:
    ValueError: a missing key, another family, or an unimplemented option; the
      message names `path`.
  """
  family = config.get("model_type")
  if family not in _FAMILIES:
    raise ValueError(
      f"{path}: model_type={family!r} is not supported {_FAMILIES}"
    )
  refuse_unimplemented(config, path)
  if config.get("use_sliding_window"):
    raise ValueError(f"{path}: use_sliding_window=true is not implemented")
  hidden_size = require_key(config, "hidden_size", path)
  num_heads = require_key(config, "num_attention_heads", path)
  try:
    return configs.TargetConfig(
      vocab_size=require_key(config, "vocab_size", path),
      hidden_size=hidden_size,
      intermediate_size=require_key(config, "intermediate_size", path),
      num_layers=require_key(config, "num_hidden_layers", path),
      num_heads=num_heads,
      num_kv_heads=config.get("num_key_value_heads") or num_heads,
      head_dim=config.get("head_dim") or hidden_size // num_heads,
      rope_theta=rope_theta(config),
      rope_scaling=rope_scaling(config, path),
      rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
      qk_norm=family == "qwen3",
      tie_embeddings=bool(config.get("tie_word_embeddings", False)),
      max_positions=config.get("max_position_embeddings", 40960),
      eos_token_ids=_token_ids(config.get("eos_token_id")),
      bos_token_id=config.get("bos_token_id"),
    )
  except ValueError as error:
    raise with_path(error, path) from None


def target_json(cfg: configs.TargetConfig) -> dict[str, Any]:
  """The `config.json` that `target_config` and transformers read back."""
  family = "qwen3" if cfg.qk_norm else "llama"
  return {
    "architectures": [f"{family.capitalize()}ForCausalLM"],
    "attention_bias": False,
    "bos_token_id": cfg.bos_token_id,
    "eos_token_id": list(cfg.eos_token_ids) or None,
    "head_dim": cfg.head_dim,
    "hidden_act": "silu",
    "hidden_size": cfg.hidden_size,
    "intermediate_size": cfg.intermediate_size,
    "max_position_embeddings": cfg.max_positions,
    "model_type": family,
    "num_attention_heads": cfg.num_heads,
    "num_hidden_layers": cfg.num_layers,
    "num_key_value_heads": cfg.num_kv_heads,
    "rms_norm_eps": cfg.rms_norm_eps,
    "rope_scaling": rope_scaling_json(cfg.rope_scaling),
    "rope_theta": cfg.rope_theta,
    "tie_word_embeddings": cfg.tie_embeddings,
    "use_sliding_window": False,
    "vocab_size": cfg.vocab_size,
  }


def write_json(path: pathlib.Path | str, config: Mapping[str, Any]) -> None:
  """Writes a `config.json`, keys sorted as Hugging Face sorts them."""
  text = json.dumps(config, indent=2, sort_keys=True)
  pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
