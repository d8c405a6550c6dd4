"""Tensors of a Hugging Face folder: one or several safetensors shards.

`read_tensors` gives a dict of NumPy arrays in float32 (from bf16, f16 or f32)
and says clearly what is wrong with a folder; `write_tensors` writes one file.
Names and layouts of a model are in `names.py`, not here.
"""

import pathlib
from collections.abc import Mapping

import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from dspine_jax.checkpoints import hf_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


def shard_paths(folder: pathlib.Path | str) -> list[pathlib.Path]:
  """The shards of a folder, from the index file if there is one.

  Raises:
    ValueError: no safetensors file, or a shard of the index is missing.
  """
  folder = pathlib.Path(folder)
  index = folder / INDEX
  if index.exists():
    table = hf_config.require_key(
      hf_config.read_json(index), "weight_map", index
    )
    paths = [folder / name for name in sorted(set(table.values()))]
    missing = [path.name for path in paths if not path.exists()]
    if missing:
      raise ValueError(f"{index}: missing shards {missing}")
    return paths
  if not (folder / SINGLE).exists():
    raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
  return [folder / SINGLE]


def read_tensors(folder: pathlib.Path | str) -> dict[str, np.ndarray]:
  """All tensors of the folder; floating types as float32.

  Raises:
    ValueError: a truncated or unreadable shard, or NaN/inf in a tensor.
  """
  tensors = {}
  for path in shard_paths(folder):
    try:
      with safetensors.safe_open(path, framework="numpy") as shard:
        for name in shard.keys():
          tensors[name] = plain(shard.get_tensor(name), path, name)
    except (safetensors.SafetensorError, OSError) as error:
      raise ValueError(
        f"{path}: truncated or not a safetensors file ({error})"
      ) from None
  return tensors


def plain(array: np.ndarray, path: pathlib.Path, name: str) -> np.ndarray:
  """Floating types as float32; ValueError naming a tensor with NaN or inf."""
  floating = (np.floating, ml_dtypes.bfloat16)
  if not any(np.issubdtype(array.dtype, kind) for kind in floating):
    return array
  array = array.astype(np.float32)
  if not np.isfinite(array).all():
    raise ValueError(f"{path}: tensor {name!r} holds NaN or infinity")
  return array


def write_tensors(
  folder: pathlib.Path | str,
  tensors: Mapping[str, np.ndarray],
  *,
  dtype: str = "float32",
) -> pathlib.Path:
  """Writes `model.safetensors`, floating tensors in `dtype`, atomically."""
  kinds = {
    "float32": np.float32,
    "bfloat16": ml_dtypes.bfloat16,
    "float16": np.float16,
  }
  if dtype not in kinds:
    raise ValueError(f"dtype={dtype!r}: must be one of {sorted(kinds)}")
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  converted = {
    name: np.ascontiguousarray(
      array.astype(kinds[dtype])
      if np.issubdtype(array.dtype, np.floating)
      else array
    )
    for name, array in tensors.items()
  }
  path = folder / SINGLE
  partial = path.with_suffix(".partial")
  safetensors.numpy.save_file(converted, partial, metadata={"format": "pt"})
  # The library writes for the owner alone; a model is an ordinary file.
  partial.chmod(0o644)
  partial.replace(path)
  return path
