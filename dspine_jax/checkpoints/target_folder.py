"""A target as a Hugging Face folder: config.json and safetensors."""

import pathlib
from typing import NamedTuple

from dspine_jax import configs
from dspine_jax.checkpoints import hf_config, names, tensors
from dspine_jax.typing import Params


class Target(NamedTuple):
  """A loaded target.

  Attributes:
    params: float32, unrolled layers; see `target.model`.
    cfg: its configuration.
    folder: where it came from.
  """

  params: Params
  cfg: configs.TargetConfig
  folder: pathlib.Path


def load_target(folder: pathlib.Path | str) -> Target:
  """Loads a Qwen3- or Llama-family target.

  Raises:
    ValueError: with the file at fault: a missing or truncated shard, a missing
      tensor, a wrong shape, NaN, or an unsupported configuration.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise ValueError(f"{folder}: no such folder")
  path = folder / "config.json"
  cfg = hf_config.target_config(hf_config.read_json(path), path)
  arrays = tensors.read_tensors(folder)
  params = names.load(arrays, names.target_entries(cfg), source=folder)
  return Target(params=params, cfg=cfg, folder=folder)


def save_target(
  folder: pathlib.Path | str,
  params: Params,
  cfg: configs.TargetConfig,
  *,
  dtype: str = "float32",
) -> None:
  """Writes config.json and model.safetensors in the released names."""
  config = hf_config.target_json(cfg) | {"torch_dtype": dtype}
  tensors.write_tensors(
    folder, names.export(params, names.target_entries(cfg)), dtype=dtype
  )
  hf_config.write_json(pathlib.Path(folder) / "config.json", config)
