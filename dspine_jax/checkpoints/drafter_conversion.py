"""Drafter folders from one released form to another, tensor by tensor.

No parameter is built: each tensor is read as it is stored, gets its released
name and is written, so that a conversion without a new dtype is exact to the
bit whatever the file holds. What is read, and what a form can hold, is
`drafter_folder.py`'s and `drafter_formats.py`'s affair.
"""

import functools
import pathlib
import shutil
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np

from dspine_jax import configs
from dspine_jax.checkpoints import (
  drafter_config,
  drafter_folder,
  drafter_formats,
  folders,
  hf_config,
  names,
  tensors,
)

_TABLES = ("embed_tokens.weight", "lm_head.weight")
# Keys that nothing computes with, kept as they are found.
_INERT = (
  "attention_dropout",
  "initializer_range",
  "max_window_layers",
  "pad_token_id",
  "transformers_version",
  "use_cache",
)
# Names of the dtype, the newer one first.
_DTYPE_KEYS = ("dtype", "torch_dtype")
_ROWS = 4096


class Source(NamedTuple):
  """A drafter folder that was looked into, not loaded.

  Attributes:
    config: its config.json.
    cfg: what that means.
    form: key of `drafter_formats.FORMS`.
    reader: of its tensors.
    found: released name -> the folder's own, in the order of entries.
    dtype: name of the stored dtype of most of its weights.
  """

  config: Mapping[str, Any]
  cfg: configs.DrafterConfig
  form: str
  reader: tensors.Reader
  found: dict[str, str]
  dtype: str

  @property
  def num_parameters(self) -> int:
    """Entries of all its tensors."""
    return sum(self._size(name) for name in self.found.values())

  @property
  def num_bytes(self) -> int:
    """Of all its tensors, as stored."""
    return sum(
      self._size(name) * self.reader.dtype(name).itemsize
      for name in self.found.values()
    )

  def _size(self, name: str) -> int:
    return int(np.prod(self.reader.shape(name), dtype=np.int64))


def inspect(folder: pathlib.Path | str) -> Source:
  """What a drafter folder holds; its headers are read, not its tensors.

  Raises:
    ValueError: as `drafter_folder.load_drafter`.
  """
  folder = pathlib.Path(folder)
  path = folder / "config.json"
  config = hf_config.read_json(path)
  cfg = drafter_config.from_json(config, path)
  reader = tensors.Reader(folder)
  found = drafter_folder.stored_names(reader, cfg)
  by_name = {entry.name: name for entry, name in found}
  return Source(
    config=config,
    cfg=cfg,
    form=drafter_formats.form_of(config),
    reader=reader,
    found=by_name,
    dtype=reader.dtype(by_name["fc.weight"]).name,
  )


def convert(
  source: Source,
  destination: pathlib.Path | str,
  form: str,
  *,
  dtype: str | None = None,
  target: pathlib.Path | str | None = None,
  target_name: str | None = None,
  max_shard_bytes: int = tensors.MAX_SHARD_BYTES,
  on_bytes: Callable[[int], None] = lambda size: None,
) -> list[str]:
  """Writes a drafter in another form (or in the same one), in one step.

  Args:
    source: of `inspect`.
    destination: folder that is made or replaced.
    form: key of `drafter_formats.FORMS`.
    dtype: of floating tensors; None keeps each as it is stored.
    target: folder of the target: gives the tables that DeepSpec's form holds,
      shows whether tables that other forms do not hold are the target's, and
      tells its depth. Not needed where none of this is asked.
    target_name: as in `drafter_config.to_json`.
    max_shard_bytes: as in `tensors.write_tensors`.
    on_bytes: called with the size of each of the source's tensors when it is
      read.

  Returns:
    The names of the tensors written.

  Raises:
    ValueError: the form has no place for the drafter, a table that would be
      lost or is not there, or a full disk; `destination` is then unchanged.
  """
  cfg, given = source.cfg, None
  if target is not None:
    given = _Target(pathlib.Path(target), cfg)
    cfg = given.fill(cfg)
  arrays: dict[str, tensors.Source] = {
    name: functools.partial(_read, source.reader, stored, on_bytes)
    for name, stored in source.found.items()
  }
  arrays = _settle_tables(arrays, source, form, given)
  tables = [name for name in _TABLES if name in arrays]
  # DeepSpec's folders need both, those without any would lose a single one.
  needed = len(_TABLES) if drafter_formats.tables_of(form) == "always" else 1
  config = drafter_config.to_json(
    cfg, form, has_tables=len(tables) >= needed, target_name=target_name
  )
  order = [entry.name for entry in drafter_folder.entries(cfg)]
  ordered = {name: arrays[name] for name in order if name in arrays}
  if "transfer_codes" in ordered:
    ordered[drafter_folder.FLAG] = lambda: np.asarray(True)
  with folders.replacing(destination) as fresh:
    tensors.write_tensors(
      fresh, ordered, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    _write_config(fresh / "config.json", config, source, form, dtype)
  return list(ordered)


def _settle_tables(
  arrays: dict[str, tensors.Source],
  source: Source,
  form: str,
  given: "_Target | None",
) -> dict[str, tensors.Source]:
  """The tensors with the tables that the form holds, as far as `given` helps.

  Raises:
    ValueError: a table that would be dropped is not the target's.
  """
  settled, tables = dict(arrays), drafter_formats.tables_of(form)
  if given is None:
    return settled
  for name in _TABLES:
    if tables == "never" and name in settled:
      given.check_equal(name, source.reader, source.found[name])
      del settled[name]
    if tables == "always" and name not in settled:
      settled[name] = functools.partial(given.read, name)
  return settled


def _write_config(
  path: pathlib.Path,
  config: dict[str, Any],
  source: Source,
  form: str,
  dtype: str | None,
) -> None:
  """The new config.json with what it keeps of the old one.

  In the same form that is all, byte by byte; only a new dtype takes the old
  one's place.
  """
  if form == source.form and dtype is None:
    shutil.copyfile(source.reader.folder / path.name, path)
    return
  if form == source.form:
    kept = source.config
    found = [key for key in _DTYPE_KEYS if key in kept] or _DTYPE_KEYS[:1]
    hf_config.write_json(path, {**kept, **dict.fromkeys(found, dtype)})
    return
  config["dtype"] = dtype or source.dtype
  nested = "transformer_layer_config"
  found = {**source.config, **source.config.get(nested, {})}
  inert = {key: found[key] for key in _INERT if key in found}
  config.get(nested, config).update(inert)
  hf_config.write_json(path, config)


def _read(
  reader: tensors.Reader, name: str, on_bytes: Callable[[int], None]
) -> np.ndarray:
  array = reader.read(name)
  on_bytes(array.nbytes)
  return array


class _Target:
  """The tables of a target folder, by the names that drafters give them."""

  def __init__(self, folder: pathlib.Path, cfg: configs.DrafterConfig):
    path = folder / "config.json"
    self._cfg = hf_config.target_config(hf_config.read_json(path), path)
    try:
      drafter_folder.check_fits(cfg, self._cfg)
    except ValueError as error:
      raise hf_config.with_path(error, path) from None
    self._reader = tensors.Reader(folder)
    shapes = {name: self._reader.shape(name) for name in self._reader.names()}
    entries = names.target_entries(self._cfg)
    found = names.resolve(shapes, entries, source=folder)
    stored = {entry.path: name for entry, name in found}
    embedding = stored[("embed_tokens",)]
    head = stored.get(("lm_head",), embedding)
    self._names = dict(zip(_TABLES, (embedding, head), strict=True))

  def fill(self, cfg: configs.DrafterConfig) -> configs.DrafterConfig:
    """The drafter's configuration with the depth of its target."""
    return drafter_folder.for_target(cfg, self._cfg)

  def read(self, name: str) -> np.ndarray:
    """A table as stored."""
    return self._reader.read(self._names[name])

  def check_equal(self, name: str, reader: tensors.Reader, stored: str) -> None:
    """ValueError unless the drafter's table is the target's."""
    for start in range(0, reader.shape(stored)[0], _ROWS):
      rows = (slice(start, start + _ROWS),)
      own = reader.read(stored, rows, dtype=np.float32)
      theirs = self._reader.read(self._names[name], rows, dtype=np.float32)
      if not np.array_equal(own, theirs):
        raise ValueError(
          f"{reader.folder}: {name} is not the target's"
          f" ({self._reader.folder}): a form without it would change the"
          " drafter"
        )
