"""A target as a Hugging Face folder: config.json and safetensors.

Loading goes tensor by tensor from mapped shards into device arrays, each
process reading only what its own devices hold. Not here: the tokenizer
(`experiments/targets.py`), and which device holds what (`sharding.py`).
"""

import dataclasses
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.checkpoints import folders, hf_config, names, tensors
from dspine_jax.typing import Params

# Path and shape of a parameter -> where it lies.
type Shardings = Callable[[Any, Sequence[int]], jax.sharding.Sharding]
# Index of a parameter -> that part of it.
type Part = Callable[[tensors.Index], np.ndarray]

# What some files hold beside the weights; the second where the head is tied.
_IGNORED = ("rotary_emb.inv_freq", "lm_head.weight")


class Target(NamedTuple):
  """A loaded target.

  Attributes:
    params: unrolled layers; see `target.model`.
    cfg: its configuration.
    folder: where it came from.
  """

  params: Params
  cfg: configs.TargetConfig
  folder: pathlib.Path


def load_target(
  folder: pathlib.Path | str,
  *,
  dtype: str = "float32",
  sharding: Shardings | None = None,
) -> Target:
  """Loads a dense target of one of `target_config.FAMILIES`.

  Host memory beyond the arrays stays under the largest tensor and some 50 MB.

  Args:
    folder: config.json and safetensors.
    dtype: of parameters and activations, one of `target_config.DTYPES`.
    sharding: (path, shape) -> sharding of that parameter; None puts all on
      JAX's default device.

  Raises:
    ValueError: with the file at fault: a missing or truncated shard, a missing
      or unknown tensor, a wrong shape, NaN, or an unsupported configuration.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise ValueError(folders.missing(folder))
  path = folder / "config.json"
  cfg = with_dtype(
    hf_config.target_config(hf_config.read_json(path), path), dtype
  )
  reader = tensors.Reader(folder)
  stored = reader.names()
  found = names.resolve(
    {name: reader.shape(name) for name in stored},
    names.target_entries(cfg),
    source=folder,
  )
  known = {name for _, name in found}
  unknown = [
    name for name in stored if name not in known and not name.endswith(_IGNORED)
  ]
  if unknown:
    raise ValueError(
      f"{folder}: tensors {unknown[:6]} are not of a {cfg.model_type} model"
      " with this config.json"
    )
  order = {name: i for i, name in enumerate(reader.in_shard_order(list(known)))}
  found.sort(key=lambda item: order[item[1]])

  def read(entry: names.Entry, name: str) -> Part:
    return lambda index: reader.read(
      name, index, dtype=jnp.dtype(dtype), transposed=entry.transposed
    )

  params = place(found, read, dtype=dtype, sharding=sharding)
  return Target(params=params, cfg=cfg, folder=folder)


def with_dtype(cfg: configs.TargetConfig, dtype: str) -> configs.TargetConfig:
  """The configuration of a target that computes in `dtype`."""
  return dataclasses.replace(cfg, dtype=dtype)


def place(
  found: Iterable[tuple[names.Entry, str]],
  read: Callable[[names.Entry, str], Part],
  *,
  dtype: str,
  sharding: Shardings | None,
) -> Params:
  """A tree of device arrays, made one after the other.

  Args:
    found: of `names.resolve`.
    read: (entry, name in the file) -> parts of that parameter, [in, out].
    dtype: of the arrays.
    sharding: as in `load_target`.
  """
  leaves = {}
  for entry, name in found:
    part = read(entry, name)
    if sharding is None:
      array = jax.device_put(np.asarray(part(()), jnp.dtype(dtype)))
    else:
      array = _sharded(part, entry, dtype, sharding(entry.path, entry.shape))
    # Else copies on their way to the device would pile up on the host.
    leaves[entry.path] = jax.block_until_ready(array)
  return names.assemble(leaves)


def _sharded(
  part: Part, entry: names.Entry, dtype: str, where: jax.sharding.Sharding
) -> jax.Array:
  """One array; what several devices hold is read once."""
  seen: dict[str, np.ndarray] = {}

  def callback(index: tuple[slice, ...] | None) -> np.ndarray:
    key = str(index)
    if key not in seen:
      seen[key] = np.asarray(part(index or ()), jnp.dtype(dtype))
    return seen[key]

  return jax.make_array_from_callback(entry.shape, where, callback)


def save_target(
  folder: pathlib.Path | str,
  params: Params,
  cfg: configs.TargetConfig,
  *,
  dtype: str = "float32",
  max_shard_bytes: int = tensors.MAX_SHARD_BYTES,
) -> None:
  """Writes config.json and safetensors in the released names.

  An existing folder is replaced as a whole, but for files that are neither
  (tokenizer, chat template).

  Args:
    folder: need not exist.
    params: unrolled layers, as loaded.
    cfg: its configuration.
    dtype: of the stored tensors, key of `tensors.FLOATING`.
    max_shard_bytes: as in `tensors.write_tensors`.

  Raises:
    ValueError: the folder cannot be written; it is as it was before.
  """
  config = hf_config.target_json(cfg) | {"torch_dtype": dtype}
  arrays = names.lazy_export(params, names.target_entries(cfg))
  with folders.replacing(folder) as fresh:
    tensors.write_tensors(
      fresh, arrays, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    hf_config.write_json(fresh / "config.json", config)
