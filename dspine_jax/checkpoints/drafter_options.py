"""A method's options in `config.json`, whichever form holds them.

Released files of a method always have certain options; the others, and our
settings of training (decay constant, objective), are written only where they
are not the default. Where they stand in the file is the form's affair
(`drafter_formats.py`). Missing ones take the released defaults.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from dspine_jax import attention_masks, configs

type Json = Mapping[str, Any]

# Options that released files of a method always have.
_RELEASED = {
  "dflash": (),
  "dflash2": (
    "conv_kernel_size",
    "conv_group_size",
    "selector_rank",
    "selector_top_k",
  ),
  "domino": ("pure_draft_prefix_len", "emb_dim", "gru_hidden_dim"),
  "dspark": (
    "markov_rank",
    "markov_head_type",
    "enable_confidence_head",
    "confidence_head_with_markov",
  ),
  "dspine": (
    "transfer_rank",
    "message_size",
    "top_k",
    "ce_weight",
    "alignment_weight",
    "alignment_warmup_steps",
    "replacement_layers",
    "replacement_probability",
    "replacement_hold_ratio",
    "replacement_end_ratio",
    "candidate_mass_threshold",
  ),
}

# Methods whose released files state `is_causal`.
_STATE_CAUSALITY = ("dflash2", "dspine")


def shift_key(method: str) -> str:
  """Key of `dflash_config` that holds the label shift."""
  return "shift_label" if method == "domino" else "sample_from_anchor"


def method_options(config: Json, method: str, num_layers: int) -> dict:
  """{method: its options} as DrafterConfig takes them.

  Args:
    config: a flat `config.json`.
    method: as found by `method_of`.
    num_layers: decides a default.
  """
  own = config.get("dflash_config") or {}
  if method == "dspine":
    options = dict(config.get("dspine_config") or {})
    fields = dataclasses.fields(configs.DSpineOptions)
    unknown = sorted(set(options) - {field.name for field in fields})
    if unknown:
      raise ValueError(f"dspine_config: unknown keys {unknown}")
  else:
    # Beside `dflash_config`: DeepSpec's options, and Domino's emb_dim.
    options = _known(configs.conventions(method).options, own, config)
  return {method: configs.default_options(method, num_layers, **options)}


def _known(kind: type | None, *sources: Json) -> dict[str, Any]:
  """The options that the sources name, earlier sources first."""
  found: dict[str, Any] = {}
  for field in dataclasses.fields(kind) if kind is not None else ():
    for source in sources:
      if source.get(field.name) is not None:
        found.setdefault(field.name, source[field.name])
  return found


def options_json(cfg: configs.DrafterConfig) -> dict[str, Any]:
  """The method's options: the released ones, others if not the default."""
  options = getattr(cfg, cfg.method, None)
  if options is None:
    return {}
  default = configs.default_options(cfg.method, cfg.num_layers)
  released = _RELEASED[cfg.method]
  found = {name: getattr(options, name) for name in released}
  for field in dataclasses.fields(options):
    value = getattr(options, field.name)
    if value != getattr(default, field.name):
      found[field.name] = value
  return found


def common_json(cfg: configs.DrafterConfig) -> dict[str, Any]:
  """What all methods keep beside their options."""
  convention = configs.conventions(cfg.method)
  own: dict[str, Any] = {
    "mask_token_id": cfg.mask_token_id,
    "target_layer_ids": list(cfg.target_layer_ids),
  }
  shift = cfg.sample_from_anchor
  if cfg.method == "domino" or shift != convention.sample_from_anchor:
    own[shift_key(cfg.method)] = shift
  gamma = convention.decay_gamma or configs.default_decay_gamma(cfg.block_size)
  if cfg.decay_gamma != gamma:
    own["loss_decay_gamma"] = cfg.decay_gamma
  return own


def causality_json(cfg: configs.DrafterConfig) -> dict[str, Any]:
  """`is_causal` where it is usual or decides how layers run, else nothing.

  SpecForge and SGLang run sliding layers causally if it is absent, and all
  layers as it says if it is there.
  """
  usual = configs.conventions(cfg.method).is_causal
  states = cfg.sliding_window is not None or cfg.method in _STATE_CAUSALITY
  if cfg.is_causal != usual or (states and not only_sliding_is_causal(cfg)):
    return {"is_causal": cfg.is_causal}
  return {}


def only_sliding_is_causal(cfg: configs.DrafterConfig) -> bool:
  """Whether sliding layers are causal in the block and full ones are not."""
  rule = attention_masks.WINDOW_CONVENTIONS[cfg.sliding_window_convention]
  return rule.is_causal and not cfg.is_causal
