"""`config.json` of a drafter <-> DrafterConfig, in every released form.

The keys of the layers, which all forms have, are here; what forms and methods
differ in is in `drafter_formats.py` and `drafter_options.py`.
"""

from collections.abc import Mapping
from typing import Any

from dspine_jax import attention_masks, configs
from dspine_jax.checkpoints import drafter_formats, drafter_options, hf_config
from dspine_jax.target import tapped_layers


def from_json(
  config: Mapping[str, Any], path: object = "config.json"
) -> configs.DrafterConfig:
  """A DrafterConfig from a parsed `config.json` of any released form.

  Raises:
    ValueError: a drafter of another kind, a missing key or an impossible value;
      the message names `path`.
  """
  form = drafter_formats.form_of(config)
  config = drafter_formats.flat(config, path)
  method = drafter_formats.method_of(config, path)
  if form != "speculators":
    hf_config.require_key(config, "num_target_layers", path)
  convention = configs.conventions(method)
  hf_config.refuse_unimplemented(config, path)
  own = config.get("dflash_config") or {}
  num_layers = hf_config.require_key(config, "num_hidden_layers", path)
  vocab_size = hf_config.require_key(config, "vocab_size", path)
  # DeepSpec has at the top level what the others nest.
  taps = own.get("target_layer_ids") or config.get("target_layer_ids")
  num_target_layers = config.get("num_target_layers")
  if not taps:
    depth = hf_config.require_key(config, "num_target_layers", path)
    taps = tapped_layers.tapped_layers(depth, num_layers)
  block_size = config.get("block_size") or own.get("block_size") or 16
  mask_token_id = own.get("mask_token_id", config.get("mask_token_id"))
  if mask_token_id is None:
    raise ValueError(f"{path}: key 'mask_token_id' is missing")
  shift = _either(config, own, drafter_options.shift_key(method))
  is_causal = config.get("is_causal")
  gamma = _either(config, own, "loss_decay_gamma") or convention.decay_gamma
  reduced = config.get("draft_vocab_size")
  try:
    return configs.DrafterConfig(
      method=method,
      vocab_size=vocab_size,
      hidden_size=hf_config.require_key(config, "hidden_size", path),
      intermediate_size=hf_config.require_key(
        config, "intermediate_size", path
      ),
      num_layers=num_layers,
      num_heads=hf_config.require_key(config, "num_attention_heads", path),
      num_kv_heads=hf_config.require_key(config, "num_key_value_heads", path),
      head_dim=hf_config.require_key(config, "head_dim", path),
      rope_theta=hf_config.rope_theta(config),
      rope_scaling=hf_config.rope_scaling(config, path),
      rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
      max_positions=config.get("max_position_embeddings", 40960),
      block_size=block_size,
      mask_token_id=mask_token_id,
      target_layer_ids=tuple(taps),
      num_target_layers=num_target_layers,
      draft_vocab_size=None if reduced == vocab_size else reduced,
      is_causal=bool(convention.is_causal if is_causal is None else is_causal),
      sample_from_anchor=bool(
        convention.sample_from_anchor if shift is None else shift
      ),
      decay_gamma=float(gamma or configs.default_decay_gamma(block_size)),
      bos_token_id=config.get("bos_token_id"),
      eos_token_ids=_token_ids(config.get("eos_token_id")),
      tie_embeddings=bool(config.get("tie_word_embeddings", False)),
      **_windows(config, form, path),
      **drafter_options.method_options(config, method, num_layers),
    )
  except ValueError as error:
    raise hf_config.with_path(error, path) from None


def _either(config: Mapping[str, Any], own: Mapping[str, Any], key: str) -> Any:
  return own.get(key, config.get(key))


def _token_ids(value: Any) -> tuple[int, ...]:
  if value is None:
    return ()
  return tuple(value) if isinstance(value, list) else (int(value),)


def _windows(
  config: Mapping[str, Any], form: str, path: object
) -> dict[str, Any]:
  """The fields of DrafterConfig about sliding layers; none if there are none.

  `layer_types` says which layers slide. The convention is, in this order:

  * what our own key `sliding_window_convention` names;
  * speculators' two, by `sliding_window_non_causal`;
  * SpecForge's (causal inside the block), if the form is known to be its own
    and `is_causal` is absent: a value there holds for all layers;
  * z-lab's, which is automodel's, where `is_causal` alone decides. A DFlash or
    DFlash2 file does not tell z-lab's from SpecForge's; one that SpecForge
    trained without `is_causal` needs our key to be run as it was trained.
  """
  types = tuple(config.get("layer_types") or ())
  uses = config.get("use_sliding_window")
  if uses and not types:
    raise ValueError(f"{path}: use_sliding_window=true needs layer_types")
  if set(types) <= {"full_attention"}:
    return {}
  if uses is False:
    raise ValueError(
      f"{path}: use_sliding_window=false does not fit layer_types={list(types)}"
    )
  convention = config.get("sliding_window_convention")
  if convention is None and "sliding_window_non_causal" in config:
    non_causal = config["sliding_window_non_causal"]
    convention = "speculators_non_causal" if non_causal else "speculators"
  if convention is None and form == "specforge":
    convention = "specforge" if config.get("is_causal") is None else None
  return {
    "layer_types": types,
    "sliding_window": config.get("sliding_window"),
    "sliding_window_convention": convention
    or attention_masks.DEFAULT_CONVENTION,
  }


def _layers_json(cfg: configs.DrafterConfig) -> dict[str, Any]:
  """The keys of the layers, which all forms have."""
  stops = list(cfg.eos_token_ids)
  written = {
    "attention_bias": False,
    "attention_dropout": 0.0,
    "bos_token_id": cfg.bos_token_id,
    "dtype": "float32",
    "eos_token_id": stops if len(stops) > 1 else (stops or [None])[0],
    "head_dim": cfg.head_dim,
    "hidden_act": "silu",
    "hidden_size": cfg.hidden_size,
    "initializer_range": 0.02,
    "intermediate_size": cfg.intermediate_size,
    "layer_types": list(
      cfg.layer_types or ("full_attention",) * cfg.num_layers
    ),
    "max_position_embeddings": cfg.max_positions,
    "max_window_layers": cfg.num_layers,
    "model_type": "qwen3",
    "num_attention_heads": cfg.num_heads,
    "num_hidden_layers": cfg.num_layers,
    "num_key_value_heads": cfg.num_kv_heads,
    "num_target_layers": cfg.num_target_layers,
    "rms_norm_eps": cfg.rms_norm_eps,
    "rope_scaling": hf_config.rope_scaling_json(cfg.rope_scaling),
    "rope_theta": cfg.rope_theta,
    "sliding_window": cfg.sliding_window,
    "tie_word_embeddings": cfg.tie_embeddings,
    "use_cache": True,
    "use_sliding_window": cfg.sliding_window is not None,
    "vocab_size": cfg.vocab_size,
  }
  if cfg.sliding_window_convention != attention_masks.DEFAULT_CONVENTION:
    written["sliding_window_convention"] = cfg.sliding_window_convention
  return written


def to_json(
  cfg: configs.DrafterConfig,
  form: str | None = None,
  *,
  has_tables: bool | None = None,
  target_name: str | None = None,
) -> dict[str, Any]:
  """The `config.json` that `from_json` reads back.

  Args:
    cfg: of the drafter.
    form: key of `drafter_formats.FORMS`; None takes the method's first one.
    has_tables: whether the folder will hold the drafter's own embedding and
      head; None does not ask.
    target_name: where serving finds the target; only speculators' form has it.

  Raises:
    ValueError: the form has no place for this drafter.
  """
  if form is None:
    form = drafter_formats.default_form(cfg, has_tables)
  else:
    drafter_formats.check_expressible(form, cfg, has_tables)
  if cfg.num_target_layers is None and form != "speculators":
    raise ValueError(
      f"form={form!r}: num_target_layers is not known, since the drafter was"
      " read from speculators' form; name its target"
    )
  write = drafter_formats.FORMS[form].write
  return dict(write(cfg, _layers_json(cfg), target_name))
