"""Released tensor names <-> parameter paths.

Hugging Face stores a linear map as [out, in]; ours are [in, out]. A table of
(released name, parameter path, transposed) describes one model; `resolve` and
`export` apply it, and report every missing tensor or wrong shape together.
"""

import functools
from collections.abc import Callable, Container, Iterable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dspine_jax.typing import Params


class Entry(NamedTuple):
  """One tensor: its released name, our path, and the shape we expect.

  `shape` is ours, that is [in, out] where `transposed` is True. An optional
  tensor may be missing, in a file and in our tree. `legacy` is a name that
  older files have for it. `stored` is the released dtype of a tensor that is
  not floating.
  """

  name: str
  path: tuple[str | int, ...]
  shape: tuple[int, ...]
  transposed: bool = False
  optional: bool = False
  legacy: str | None = None
  stored: str | None = None

  @property
  def stored_shape(self) -> tuple[int, ...]:
    """The shape in a file."""
    return self.shape[::-1] if self.transposed else self.shape


def decoder_layer(
  cfg: Any, index: int, prefix: str, root: tuple[str, ...] = ()
) -> list[Entry]:
  """The tensors of one decoder layer below `root`."""
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
  entries += [
    Entry(f"{base}{part}.{name}.bias", (*at, part, name, "bias"), shape[1:])
    for part, name, shape in linear
    if name in cfg.biased_projections
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


def find(
  entry: Entry, stored: Container[str], optional_prefix: str = "model."
) -> str | None:
  """What a file calls the tensor of an entry, None if it does not hold it."""
  known = [entry.name] if entry.legacy is None else [entry.name, entry.legacy]
  for name in known:
    for spelling in (
      name,
      optional_prefix + name,
      name.removeprefix(optional_prefix),
      # The first drafters with a head kept it in a container.
      f"logit_head.{name}",
    ):
      if spelling in stored:
        return spelling
  return None


def table_entries(cfg: Any) -> list[Entry]:
  """A drafter's own embedding and head, in files that have them.

  With a reduced vocabulary (`cfg.draft_vocab_size`) the head has a row for each
  of its tokens, and d2t is what to add to the number of a row to get its token.
  """
  width, reduced = cfg.hidden_size, cfg.draft_vocab_size
  rows = reduced or cfg.vocab_size
  entries = [
    Entry(
      "embed_tokens.weight",
      ("buffers", "embed_tokens"),
      (cfg.vocab_size, width),
      optional=True,
    ),
    Entry(
      "lm_head.weight",
      ("buffers", "lm_head"),
      (rows, width),
      optional=reduced is None,
    ),
  ]
  if reduced is not None:
    entries += [
      Entry("d2t", ("buffers", "d2t"), (reduced,), stored="int64"),
      Entry(
        "t2d",
        ("buffers", "t2d"),
        (cfg.vocab_size,),
        optional=True,
        stored="bool",
      ),
    ]
  return entries


def resolve(
  shapes: Mapping[str, tuple[int, ...]],
  entries: Iterable[Entry],
  *,
  source: object,
  optional_prefix: str = "model.",
) -> list[tuple[Entry, str]]:
  """The entries that a file holds, each with the file's name for it.

  Args:
    shapes: name -> shape of every tensor of the file.
    entries: the table of the model.
    source: named in errors.
    optional_prefix: some files carry it before every name, some do not.

  Raises:
    ValueError: with all missing tensors and all wrong shapes.
  """
  found, problems = [], []
  for entry in entries:
    name = find(entry, shapes, optional_prefix)
    if name is None:
      if not entry.optional:
        problems.append(f"missing {entry.name}")
    elif tuple(shapes[name]) != entry.stored_shape:
      problems.append(
        f"{entry.name} has shape {list(shapes[name])}, expected"
        f" {list(entry.stored_shape)}"
      )
    else:
      found.append((entry, name))
  if problems:
    shown = "; ".join(problems[:6])
    more = f" and {len(problems) - 6} more" if len(problems) > 6 else ""
    raise ValueError(f"{source}: {shown}{more}")
  return found


def assemble(leaves: Mapping[tuple[str | int, ...], Any]) -> Params:
  """A tree from its leaves by path; keys 0..n-1 make a tuple."""
  params: dict = {}
  for path, value in leaves.items():
    _put(params, path, value)
  return _freeze(params)


def export(params: Params, entries: Iterable[Entry]) -> dict[str, np.ndarray]:
  """Released tensors from parameters with unrolled layers."""
  return {name: made() for name, made in lazy_export(params, entries).items()}


def lazy_export(
  params: Params, entries: Iterable[Entry]
) -> dict[str, Callable[[], np.ndarray]]:
  """As `export`, each tensor brought to the host when it is asked for."""
  found = ((entry, leaf(params, entry)) for entry in entries)
  return {
    entry.name: functools.partial(stored_array, value, entry)
    for entry, value in found
    if value is not None
  }


def leaf(params: Params, entry: Entry) -> Any:
  """The array of an entry; None if it is optional and not there."""
  value: Any = params
  try:
    for key in entry.path:
      value = value[key]
  except KeyError:
    if entry.optional:
      return None
    raise
  return value


def stored_array(value: Any, entry: Entry) -> np.ndarray:
  """One of our arrays on the host as a file holds it."""
  array = np.asarray(value)
  if entry.stored is not None:
    array = array.astype(entry.stored)
  return np.ascontiguousarray(array.T if entry.transposed else array)


def _put(tree: dict, path: tuple[str | int, ...], value: Any) -> None:
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
