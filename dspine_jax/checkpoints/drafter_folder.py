"""A drafter as a folder in the released layout: config.json + safetensors.

What all methods share is here; where each keeps its own options in config.json
is in `drafter_formats.py`, its tensor names in its own file. Missing keys take
the released defaults. The target's embedding and head are borrowed; only DSpark
stores frozen copies of them.
"""

import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from dspine_jax import attention_masks, configs
from dspine_jax.checkpoints import (
  drafter_formats,
  hf_config,
  names,
  tensors,
)
from dspine_jax.drafters import methods
from dspine_jax.target import tapped_layers
from dspine_jax.typing import Params, PyTree


class DrafterCheckpoint(NamedTuple):
  """A loaded drafter.

  Attributes:
    params: trainable float32 tree.
    buffers: frozen arrays of the method.
    cfg: its configuration.
  """

  params: Params
  buffers: PyTree
  cfg: configs.DrafterConfig


def drafter_config(
  config: Mapping[str, Any], path: object = "config.json"
) -> configs.DrafterConfig:
  """A DrafterConfig from a parsed `config.json` of a released drafter.

  Raises:
    ValueError: an unknown architecture, a missing key or an impossible value;
      the message names `path`.
  """
  method = drafter_formats.method_of(config, path)
  convention = configs.conventions(method)
  hf_config.refuse_unimplemented(config, path)
  own = config.get("dflash_config") or {}
  num_layers = hf_config.require_key(config, "num_hidden_layers", path)
  num_target_layers = hf_config.require_key(config, "num_target_layers", path)
  # DeepSpec has at the top level what the others nest.
  taps = own.get("target_layer_ids") or config.get("target_layer_ids")
  if taps is None:
    taps = tapped_layers.tapped_layers(num_target_layers, num_layers)
  block_size = config.get("block_size") or own.get("block_size") or 16
  mask_token_id = own.get("mask_token_id", config.get("mask_token_id"))
  if mask_token_id is None:
    raise ValueError(f"{path}: key 'mask_token_id' is missing")
  shift_key = drafter_formats.FORMATS[method].shift_key
  shift = own.get(shift_key, config.get(shift_key))
  if shift is None:
    shift = convention.sample_from_anchor
  gamma = own.get("loss_decay_gamma") or config.get("loss_decay_gamma")
  gamma = gamma or convention.decay_gamma
  is_causal = config.get("is_causal")
  if is_causal is None:
    is_causal = convention.is_causal
  try:
    return configs.DrafterConfig(
      method=method,
      vocab_size=hf_config.require_key(config, "vocab_size", path),
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
      is_causal=bool(is_causal),
      sample_from_anchor=bool(shift),
      decay_gamma=float(gamma or configs.default_decay_gamma(block_size)),
      **_windows(config, path),
      **drafter_formats.method_options(config, own, method, num_layers),
    )
  except ValueError as error:
    raise hf_config.with_path(error, path) from None


def _windows(config: Mapping[str, Any], path: object) -> dict[str, Any]:
  """The fields of DrafterConfig about sliding layers; none if there are none.

  `layer_types` says which layers slide. A file that names no convention is
  z-lab's, unless it has speculators' `sliding_window_non_causal`.
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
  return {
    "layer_types": types,
    "sliding_window": config.get("sliding_window"),
    "sliding_window_convention": convention
    or attention_masks.DEFAULT_CONVENTION,
  }


def _windows_json(cfg: configs.DrafterConfig) -> dict[str, Any]:
  """The inverse of `_windows`."""
  written: dict[str, Any] = {
    "layer_types": list(
      cfg.layer_types or ("full_attention",) * cfg.num_layers
    ),
    "sliding_window": cfg.sliding_window,
    "use_sliding_window": cfg.sliding_window is not None,
  }
  if cfg.sliding_window is not None:
    written["sliding_window_convention"] = cfg.sliding_window_convention
  return written


def drafter_json(cfg: configs.DrafterConfig) -> dict[str, Any]:
  """The `config.json` that `drafter_config` reads back."""
  form = drafter_formats.FORMATS[cfg.method]
  common = {
    "loss_decay_gamma": cfg.decay_gamma,
    "mask_token_id": cfg.mask_token_id,
    form.shift_key: cfg.sample_from_anchor,
    "target_layer_ids": list(cfg.target_layer_ids),
  }
  return {
    "architectures": [form.architectures[0]],
    "attention_bias": False,
    "block_size": cfg.block_size,
    "dtype": "float32",
    "head_dim": cfg.head_dim,
    "hidden_act": "silu",
    "hidden_size": cfg.hidden_size,
    "intermediate_size": cfg.intermediate_size,
    "is_causal": cfg.is_causal,
    "max_position_embeddings": cfg.max_positions,
    "model_type": "qwen3",
    "num_attention_heads": cfg.num_heads,
    "num_hidden_layers": cfg.num_layers,
    "num_key_value_heads": cfg.num_kv_heads,
    "num_target_layers": cfg.num_target_layers,
    "rms_norm_eps": cfg.rms_norm_eps,
    "rope_scaling": hf_config.rope_scaling_json(cfg.rope_scaling),
    "rope_theta": cfg.rope_theta,
    "vocab_size": cfg.vocab_size,
    **_windows_json(cfg),
    **form.write(cfg, common),
  }


def load_drafter(folder: pathlib.Path | str) -> DrafterCheckpoint:
  """Loads a drafter in the released layout.

  Raises:
    ValueError: with the file at fault, as in `load_target`; also codes that
      are not marked ready.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise ValueError(f"{folder}: no such folder")
  path = folder / "config.json"
  cfg = drafter_config(hf_config.read_json(path), path)
  arrays = tensors.read_tensors(folder)
  ready = arrays.get("transfer_ready", arrays.get("model.transfer_ready", True))
  if not bool(ready):
    raise ValueError(f"{folder}: transfer_ready is false: codes were not built")
  method = methods.drafter(cfg)
  tree = names.load(arrays, method.entries(cfg), source=folder)
  return DrafterCheckpoint(tree["params"], tree.get("buffers", {}), cfg)


def save_drafter(
  folder: pathlib.Path | str,
  params: Params,
  buffers: PyTree,
  cfg: configs.DrafterConfig,
  *,
  dtype: str = "float32",
) -> None:
  """Writes config.json and model.safetensors in the released names."""
  method = methods.drafter(cfg)
  tree = {"params": params, "buffers": buffers}
  arrays = names.export(jax.device_get(tree), method.entries(cfg))
  if "transfer_codes" in arrays:
    arrays["transfer_ready"] = np.asarray(True)
  tensors.write_tensors(folder, arrays, dtype=dtype)
  config = drafter_json(cfg) | {"dtype": dtype}
  hf_config.write_json(pathlib.Path(folder) / "config.json", config)


def check_fits(
  cfg: configs.DrafterConfig, target: configs.TargetConfig
) -> None:
  """ValueError if the drafter was made for another target."""
  for name, made_for, has in (
    ("vocab_size", cfg.vocab_size, target.vocab_size),
    ("hidden_size", cfg.hidden_size, target.hidden_size),
    ("num_target_layers", cfg.num_target_layers, target.num_layers),
  ):
    if made_for != has:
      raise ValueError(
        f"drafter was made for a target with {name}={made_for}, this target"
        f" has {has}"
      )
