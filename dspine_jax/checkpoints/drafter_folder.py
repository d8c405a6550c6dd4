"""A drafter as a folder in a released form: config.json + safetensors.

`load_drafter` reads every form of `drafter_formats.py`, `save_drafter` writes
one; config.json is `drafter_config.py`'s affair. Embedding and head
are the target's: a folder may hold copies of them, and a drafter computes with
the copies that its folder holds, so that they are never replaced unseen
(`without_copies` drops those that are equal). Folders are converted without
loading them by `drafter_conversion.py`.
"""

import dataclasses
import pathlib
from typing import NamedTuple

import numpy as np
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.checkpoints import (
  drafter_config,
  folders,
  hf_config,
  names,
  tensors,
)
from dspine_jax.drafters import contract, methods
from dspine_jax.target import tapped_layers
from dspine_jax.typing import Params, PyTree


class DrafterCheckpoint(NamedTuple):
  """A loaded drafter.

  Attributes:
    params: trainable float32 tree.
    buffers: frozen arrays of the method, and the folder's own tables.
    cfg: its configuration.
  """

  params: Params
  buffers: PyTree
  cfg: configs.DrafterConfig


def entries(cfg: configs.DrafterConfig) -> list[names.Entry]:
  """All tensors that a folder of the drafter may hold, but for the flag."""
  own = methods.drafter(cfg).entries(cfg)
  # DSpark's tables are its own entries; no other released form has any.
  tables = cfg.method in ("dflash", "dflash2")
  return [*own, *(names.table_entries(cfg) if tables else ())]


# Tensors that loaders of every form ignore: caches, and what speculators' own
# training keeps of its target.
_IGNORED = ("rotary_emb.", "verifier_lm_head.", "verifier_norm.")
FLAG = "transfer_ready"
# What a tensor's name gives away about a drafter that is not read here.
_FOREIGN = {
  "qkv_proj": "fused projections (Laguna's form) are not implemented",
  ".g_proj": "gated attention (Laguna's form) is not implemented",
  "aux_hidden_norms": "norms of tapped layers (Laguna's form) are not"
  " implemented",
  "_scale": "quantised weights; take the bfloat16 ones",
  "zero_point": "quantised weights; take the bfloat16 ones",
  "qweight": "quantised weights; take the bfloat16 ones",
  "weight_packed": "quantised weights; take the bfloat16 ones",
  "midlayer": "EAGLE-3, another kind of drafter, is not implemented",
  "self_attn.q_proj.bias": "draft layers with biases are not implemented",
  "self_attn.k_proj.bias": "draft layers with biases are not implemented",
  "self_attn.v_proj.bias": "draft layers with biases are not implemented",
  "self_attn.o_proj.bias": "draft layers with biases are not implemented",
}


def stored_names(
  reader: tensors.Reader, cfg: configs.DrafterConfig
) -> list[tuple[names.Entry, str]]:
  """The entries that the folder holds, each with the folder's name for it.

  Raises:
    ValueError: a missing tensor, one of another shape, one that nothing here
      reads, or codes that are not marked ready.
  """
  shapes = {name: reader.shape(name) for name in reader.names()}
  flags = [name for name in (FLAG, f"model.{FLAG}") if name in shapes]
  # What the file is explains what it lacks, and so comes first.
  _refuse_tensors(reader, [n for n in shapes if _why_foreign(n)])
  found = names.resolve(shapes, entries(cfg), source=reader.folder)
  known = {name for _, name in found}.union(flags)
  _refuse_tensors(reader, [n for n in shapes if n not in known])
  if not all(reader.read(name) for name in flags):
    raise ValueError(
      f"{reader.folder}: transfer_ready is false: codes were not built"
    )
  return found


def _why_foreign(name: str) -> str | None:
  return next((why for part, why in _FOREIGN.items() if part in name), None)


def _refuse_tensors(reader: tensors.Reader, rest: list[str]) -> None:
  """ValueError naming the first tensor that is not read but would matter."""
  for name in rest:
    if name.removeprefix("model.").startswith(_IGNORED):
      continue
    why = _why_foreign(name) or "not a tensor of this method"
    raise ValueError(f"{reader.folder}: tensor {name!r}: {why}")


def load_drafter(folder: pathlib.Path | str) -> DrafterCheckpoint:
  """Loads a drafter in any released form, tensor by tensor.

  Raises:
    ValueError: with the file at fault, as in `load_target`; also codes that
      are not marked ready, and drafters of another kind.
  """
  folder = pathlib.Path(folder)
  if not folder.is_dir():
    raise ValueError(folders.missing(folder))
  path = folder / "config.json"
  cfg = drafter_config.from_json(hf_config.read_json(path), path)
  reader = tensors.Reader(folder)
  by_name = {name: entry for entry, name in stored_names(reader, cfg)}
  leaves = {}
  for name in reader.in_shard_order(list(by_name)):
    entry = by_name[name]
    dtype = np.float32 if tensors.is_floating(reader.dtype(name)) else None
    value = reader.read(name, dtype=dtype, transposed=entry.transposed)
    if entry.stored == "int64":
      value = value.astype(np.int32)
    leaves[entry.path] = jnp.asarray(value)
  # In the order of the entries, which is that of a fresh drafter's tree.
  tree = names.assemble({e.path: leaves[e.path] for e in by_name.values()})
  loaded = DrafterCheckpoint(tree["params"], tree.get("buffers", {}), cfg)
  _check_vocabulary(loaded.buffers, cfg, folder)
  return loaded


def _check_vocabulary(
  buffers: PyTree, cfg: configs.DrafterConfig, folder: pathlib.Path
) -> None:
  """ValueError unless d2t names different tokens of the target, as t2d does."""
  if cfg.draft_vocab_size is None:
    return
  ids = np.arange(cfg.draft_vocab_size) + np.asarray(buffers["d2t"])
  inside = (ids >= 0) & (ids < cfg.vocab_size)
  if not inside.all() or len(np.unique(ids)) != len(ids):
    raise ValueError(
      f"{folder}: d2t does not name draft_vocab_size={cfg.draft_vocab_size}"
      f" different tokens below vocab_size={cfg.vocab_size}"
    )
  if "t2d" in buffers:
    named = np.zeros(cfg.vocab_size, bool)
    named[ids] = True
    if not np.array_equal(named, np.asarray(buffers["t2d"])):
      raise ValueError(f"{folder}: d2t and t2d name different tokens")


def save_drafter(
  folder: pathlib.Path | str,
  params: Params,
  buffers: PyTree,
  cfg: configs.DrafterConfig,
  *,
  dtype: str = "float32",
  form: str | None = None,
  target_name: str | None = None,
  max_shard_bytes: int = tensors.MAX_SHARD_BYTES,
) -> None:
  """Writes a drafter in a released form, in one step (`folders.replacing`).

  Args:
    folder: what is there is replaced; its other files (tokenizer) stay.
    params: trainable tree, unrolled layers.
    buffers: as `DrafterCheckpoint.buffers`.
    cfg: of the drafter.
    dtype: of floating tensors; "bfloat16" gives back a bfloat16 file bit by
      bit.
    form: key of `drafter_formats.FORMS`; None takes the method's first one.
    target_name: as in `drafter_config.to_json`.
    max_shard_bytes: as in `tensors.write_tensors`.

  Raises:
    ValueError: the form has no place for this drafter, or a full disk.
  """
  has_tables = bool({"embed_tokens", "lm_head"} & set(buffers))
  config = drafter_config.to_json(
    cfg, form, has_tables=has_tables, target_name=target_name
  )
  tree = {"params": params, "buffers": buffers}
  arrays: dict[str, tensors.Source] = {**names.lazy_export(tree, entries(cfg))}
  if "transfer_codes" in arrays:
    arrays[FLAG] = np.asarray(True)
  with folders.replacing(folder) as fresh:
    tensors.write_tensors(
      fresh, arrays, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    hf_config.write_json(fresh / "config.json", config | {"dtype": dtype})


def without_copies(
  loaded: DrafterCheckpoint, tables: contract.TargetTables
) -> DrafterCheckpoint:
  """The drafter without tables that are the target's, to have them only once.

  Tables that differ stay, and the drafter computes with them.
  """
  targets = {"embed_tokens": tables.embedding, "lm_head": tables.head}
  buffers = {
    name: value
    for name, value in loaded.buffers.items()
    if name not in targets
    or not bool(jnp.array_equal(value, targets[name].astype(value.dtype)))
  }
  return loaded._replace(buffers=buffers)


def for_target(
  cfg: configs.DrafterConfig, target: configs.TargetConfig
) -> configs.DrafterConfig:
  """A drafter's configuration with what only its target can tell.

  Raises:
    ValueError: as `check_fits`.
  """
  check_fits(cfg, target)
  return dataclasses.replace(cfg, num_target_layers=target.num_layers)


def check_fits(
  cfg: configs.DrafterConfig, target: configs.TargetConfig
) -> None:
  """ValueError if the drafter was made for another target."""
  for name, made_for, has in (
    ("vocab_size", cfg.vocab_size, target.vocab_size),
    ("hidden_size", cfg.hidden_size, target.hidden_size),
    ("num_target_layers", cfg.num_target_layers, target.num_layers),
  ):
    if made_for is not None and made_for != has:
      raise ValueError(
        f"drafter was made for a target with {name}={made_for}, this target"
        f" has {has}"
      )
  tapped_layers.check_tapped_layers(cfg.target_layer_ids, target.num_layers)
