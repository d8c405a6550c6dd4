"""Released tensor names <-> parameter paths.

Hugging Face stores a linear map as [out, in]; ours are [in, out]. A table of
(released name, parameter path, transposed) describes one model; `load` and
`export` apply it, and report every missing tensor or wrong shape together.
"""

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax.typing import Params


class Entry(NamedTuple):
  """One tensor: its released name, our path, and the shape we expect.

  `shape` is ours, that is [in, out] where `transposed` is True. An optional
  tensor may be missing, in a file and in our tree. `legacy` is a name that
  older files have for it.
  """

  name: str
  path: tuple[str | int, ...]
  shape: tuple[int, ...]
  transposed: bool = False
  optional: bool = False
  legacy: str | None = None


def decoder_layer(
  cfg: Any, index: int, prefix: str, root: tuple[str, ...] = ()
) -> list[Entry]:
  """The tensors of one Qwen3- or Llama-style layer below `root`."""
  width, feed = cfg.hidden_size, cfg.intermediate_size
  queries = cfg.num_heads * cfg.head_dim
  keys = cfg.num_kv_heads * cfg.head_dim
  base = f"{prefix}layers.{index}."
  at = (*root, "layers", index)
  linear = [
    ("self_attn", "q_proj", (width, queries)),
    ("self_attn", "k_proj", (width, keys)),
    ("self_attn", "v_proj", (width, keys)),
    ("self_attn", "o_proj", (queries, width)),
    ("mlp", "gate_proj", (width, feed)),
    ("mlp", "up_proj", (width, feed)),
    ("mlp", "down_proj", (feed, width)),
  ]
  entries = [
    Entry(
      f"{base}{part}.{name}.weight", (*at, part, name, "kernel"), shape, True
    )
    for part, name, shape in linear
  ]
  norms = [
    (("input_layernorm",), width),
    (("post_attention_layernorm",), width),
  ]
  if cfg.qk_norm:
    norms += [
      (("self_attn", "q_norm"), cfg.head_dim),
      (("self_attn", "k_norm"), cfg.head_dim),
    ]
  entries += [
    Entry(f"{base}{'.'.join(path)}.weight", (*at, *path, "scale"), (size,))
    for path, size in norms
  ]
  return entries


def target_entries(cfg: Any) -> list[Entry]:
  """The tensors of a target; tied targets have no `lm_head.weight`."""
  table = (cfg.vocab_size, cfg.hidden_size)
  entries = [
    Entry("model.embed_tokens.weight", ("embed_tokens",), table),
    Entry("model.norm.weight", ("norm", "scale"), (cfg.hidden_size,)),
  ]
  for index in range(cfg.num_layers):
    entries += decoder_layer(cfg, index, "model.")
  if not cfg.tie_embeddings:
    entries.append(Entry("lm_head.weight", ("lm_head",), table))
  return entries


def backbone_entries(cfg: Any) -> list[Entry]:
  """The tensors common to all drafters (58 for five layers)."""
  root = ("params", "backbone")
  width = cfg.hidden_size
  fused = len(cfg.target_layer_ids) * width
  entries = [
    Entry("fc.weight", (*root, "fc", "kernel"), (fused, width), True),
    Entry("hidden_norm.weight", (*root, "hidden_norm", "scale"), (width,)),
    Entry("norm.weight", (*root, "norm", "scale"), (width,)),
  ]
  for index in range(cfg.num_layers):
    entries += decoder_layer(cfg, index, "", root)
  return entries


def load(
  tensors: Mapping[str, np.ndarray],
  entries: Iterable[Entry],
  *,
  source: object,
  optional_prefix: str = "model.",
) -> Params:
  """Parameters from released tensors.

  Args:
    tensors: name -> array.
    entries: the table of the model.
    source: named in errors.
    optional_prefix: some files carry it before every name, some do not.

  Raises:
    ValueError: with all missing tensors and all wrong shapes.
  """
  params: dict = {}
  problems = []
  for entry in entries:
    known = [entry.name] if entry.legacy is None else [entry.name, entry.legacy]
    spellings = [
      spelling
      for name in known
      for spelling in (
        name,
        optional_prefix + name,
        name.removeprefix(optional_prefix),
      )
    ]
    array = next((tensors[x] for x in spellings if x in tensors), None)
    if array is None:
      if not entry.optional:
        problems.append(f"missing {entry.name}")
      continue
    value = array.T if entry.transposed else array
    if value.shape != entry.shape:
      expected = entry.shape[::-1] if entry.transposed else entry.shape
      problems.append(
        f"{entry.name} has shape {list(array.shape)}, expected {list(expected)}"
      )
      continue
    _put(params, entry.path, value)
  if problems:
    shown = "; ".join(problems[:6])
    more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
    raise ValueError(f"{source}: {shown}{more}")
  # jnp.array copies, so that no view of a mapped file or transposed buffer
  # stays behind.
  return jax.tree.map(
    lambda x: jnp.array(np.ascontiguousarray(x)), _freeze(params)
  )


def export(params: Params, entries: Iterable[Entry]) -> dict[str, np.ndarray]:
  """Released tensors from parameters with unrolled layers."""
  tensors = {}
  for entry in entries:
    value: Any = params
    try:
      for key in entry.path:
        value = value[key]
    except KeyError:
      if entry.optional:
        continue
      raise
    array = np.asarray(value)
    tensors[entry.name] = np.ascontiguousarray(
      array.T if entry.transposed else array
    )
  return tensors


def _put(tree: dict, path: tuple[str | int, ...], value: np.ndarray) -> None:
  for key in path[:-1]:
    tree = tree.setdefault(key, {})
  tree[path[-1]] = value


def _freeze(tree: Any) -> Any:
  """Dicts keyed 0..n-1 become tuples."""
  if not isinstance(tree, dict):
    return tree
  if tree and all(isinstance(key, int) for key in tree):
    return tuple(_freeze(tree[index]) for index in range(len(tree)))
  return {key: _freeze(value) for key, value in tree.items()}
