"""`config.json` <-> TargetConfig, in the key names of Hugging Face.

Families are those of `target_config.FAMILIES`. What would change the
computation and is not implemented is refused with the key and its value.
"""

import json
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

from dspine_jax import configs
from dspine_jax import rope_scaling as rope_scaling_lib
from dspine_jax import target_config as target_config_lib


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


class _Key(NamedTuple):
  """Of a key of `rope_scaling`: our field, its type, if it may be absent."""

  field: str
  kind: type
  optional: bool = False


_ORIGINAL = "original_max_position_embeddings"
# By `rope_type`: the class, and the keys of its fields.
_SCALINGS = {
  "linear": (rope_scaling_lib.LinearScaling, {"factor": _Key("factor", float)}),
  "llama3": (
    rope_scaling_lib.Llama3Scaling,
    {
      "factor": _Key("factor", float),
      "low_freq_factor": _Key("low_freq_factor", float),
      "high_freq_factor": _Key("high_freq_factor", float),
      _ORIGINAL: _Key("original_max_positions", int),
    },
  ),
  "yarn": (
    rope_scaling_lib.YarnScaling,
    {
      "factor": _Key("factor", float),
      _ORIGINAL: _Key("original_max_positions", int),
      "beta_fast": _Key("beta_fast", float, True),
      "beta_slow": _Key("beta_slow", float, True),
      "attention_factor": _Key("attention_factor", float, True),
      "mscale": _Key("mscale", float, True),
      "mscale_all_dim": _Key("mscale_all_dim", float, True),
      "truncate": _Key("truncate", bool, True),
    },
  ),
}


def rope_scaling(
  config: Mapping[str, Any], path: object
) -> rope_scaling_lib.RopeScaling | None:
  """The scaling that a config names, None if it names none.

  Both spellings are read: `rope_scaling`, and `rope_parameters` of
  transformers 5. Where the original length is missing, it is
  `max_position_embeddings`, as there.

  Raises:
    ValueError: a kind that is not implemented, or a missing or impossible
      value; the message names `path`.
  """
  where = "rope_scaling" if config.get("rope_scaling") else "rope_parameters"
  values = config.get(where) or {}
  kind = values.get("rope_type", values.get("type", "default"))
  if any(isinstance(value, Mapping) for value in values.values()):
    raise ValueError(
      f"{path}: {where} of each kind of layer is not implemented"
    )
  if kind == "default":
    return None
  if kind not in _SCALINGS:
    known = ", ".join(("default", *_SCALINGS))
    raise ValueError(
      f"{path}: rope scaling {kind!r} is not implemented ({known})"
    )
  made, keys = _SCALINGS[kind]
  fallback = {_ORIGINAL: config.get("max_position_embeddings")}
  fields = {}
  for key, (field, convert, optional) in keys.items():
    value = values.get(key)
    if value is None:
      value = fallback.get(key)
    if value is None and not optional:
      raise ValueError(f"{path}: {where}: key {key!r} is missing")
    if value is not None:
      fields[field] = _number(value, convert, f"{path}: {where}.{key}")
  try:
    return made(**fields)
  except ValueError as error:
    raise ValueError(f"{path}: {where}: {error}") from None


def _number(value: Any, convert: type, where: str) -> Any:
  """The value as `convert`; ValueError if it is of another kind."""
  wanted = bool if convert is bool else (int, float)
  if not isinstance(value, wanted) or isinstance(value, bool) != (
    convert is bool
  ):
    raise ValueError(f"{where}={value!r} is no {convert.__name__}")
  return convert(value)


def rope_scaling_json(
  scaling: rope_scaling_lib.RopeScaling | None,
) -> dict[str, Any] | None:
  """The inverse of `rope_scaling`; optional keys that are None are left out."""
  if scaling is None:
    return None
  kind, keys = next(
    (kind, keys)
    for kind, (made, keys) in _SCALINGS.items()
    if isinstance(scaling, made)
  )
  values = {key: getattr(scaling, keys[key].field) for key in keys}
  written = {key: value for key, value in values.items() if value is not None}
  return {"rope_type": kind, **written}


# Keys that change the result -> the values with which they do not.
_NEUTRAL = {
  "mlp_bias": (None, False),
  "hidden_act": (None, "silu"),
  "partial_rotary_factor": (None, 1, 1.0),
  "quantization_config": (None,),
  "num_experts": (None, 0),
  "num_local_experts": (None, 0),
  "n_routed_experts": (None, 0),
}


def refuse_unimplemented(
  config: Mapping[str, Any], path: object, *, attention_bias: bool = False
) -> None:
  """ValueError for keys that would change the result.

  Args:
    config: of a target or a drafter.
    path: named in the message.
    attention_bias: whether the caller knows biases of the attention.
  """
  neutral = dict(_NEUTRAL)
  if not attention_bias:
    neutral["attention_bias"] = (None, False)
  nested = config.get("rope_parameters") or config.get("rope_scaling") or {}
  factor = "partial_rotary_factor"
  given = {factor: nested.get(factor), **config}
  for key, values in neutral.items():
    if given.get(key) not in values:
      raise ValueError(
        f"{path}: {key}={given[key]!r} is not implemented"
        f" ({' or '.join(map(repr, values[1:])) or 'no such key'})"
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
  if family not in target_config_lib.FAMILIES:
    raise ValueError(
      f"{path}: model_type={family!r} is not supported (dense models of"
      f" {', '.join(target_config_lib.FAMILIES)})"
    )
  refuse_unimplemented(config, path, attention_bias=True)
  _refuse_windows(config, family, path)
  # Qwen2's code reads no such key.
  biased = bool(config.get("attention_bias")) and family != "qwen2"
  hidden_size = require_key(config, "hidden_size", path)
  num_heads = require_key(config, "num_attention_heads", path)
  try:
    return configs.TargetConfig(
      model_type=family,
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
      attention_bias=biased,
      tie_embeddings=bool(config.get("tie_word_embeddings", False)),
      max_positions=config.get("max_position_embeddings", 40960),
      eos_token_ids=_token_ids(config.get("eos_token_id")),
      bos_token_id=config.get("bos_token_id"),
    )
  except ValueError as error:
    raise with_path(error, path) from None


def _refuse_windows(
  config: Mapping[str, Any], family: str, path: object
) -> None:
  """ValueError for a target that does not see all of its context."""
  if config.get("use_sliding_window"):
    raise ValueError(f"{path}: use_sliding_window=true is not implemented")
  types = set(config.get("layer_types") or ()) - {"full_attention"}
  if types:
    raise ValueError(f"{path}: layer_types={sorted(types)} is not implemented")
  if family != "mistral":
    return
  # Absent, it is what the first Mistral had.
  window = config.get("sliding_window", 4096)
  longest = config.get("max_position_embeddings")
  if window is not None and (longest is None or window < longest):
    raise ValueError(
      f"{path}: sliding_window={window} below max_position_embeddings={longest}"
      " is not implemented (null, or as long as the context)"
    )


def target_json(cfg: configs.TargetConfig) -> dict[str, Any]:
  """The `config.json` that `target_config` and transformers read back."""
  return {
    "architectures": [f"{cfg.model_type.capitalize()}ForCausalLM"],
    "attention_bias": cfg.attention_bias,
    "bos_token_id": cfg.bos_token_id,
    "eos_token_id": list(cfg.eos_token_ids) or None,
    "head_dim": cfg.head_dim,
    "hidden_act": "silu",
    "hidden_size": cfg.hidden_size,
    "intermediate_size": cfg.intermediate_size,
    "max_position_embeddings": cfg.max_positions,
    "model_type": cfg.model_type,
    "num_attention_heads": cfg.num_heads,
    "num_hidden_layers": cfg.num_layers,
    "num_key_value_heads": cfg.num_kv_heads,
    "rms_norm_eps": cfg.rms_norm_eps,
    "rope_scaling": rope_scaling_json(cfg.rope_scaling),
    "rope_theta": cfg.rope_theta,
    "sliding_window": None,
    "tie_word_embeddings": cfg.tie_embeddings,
    "use_sliding_window": False,
    "vocab_size": cfg.vocab_size,
  }


def write_json(path: pathlib.Path | str, config: Mapping[str, Any]) -> None:
  """Writes a `config.json`, keys sorted as Hugging Face sorts them."""
  text = json.dumps(config, indent=2, sort_keys=True)
  pathlib.Path(path).write_text(text + "\n", encoding="utf-8")
