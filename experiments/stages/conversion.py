"""What `convert_checkpoint` does: look into a folder, write it in another form.

Tensors are streamed: one at a time is in memory, up to a shard when written.
Only a GGUF target is loaded as a whole, since its tensors have to be
dequantised.
"""

import functools
import pathlib
import re
import shutil
from typing import Any, NamedTuple

import numpy as np

from dspine_jax import configs
from dspine_jax.checkpoints import (
  drafter_config,
  drafter_conversion,
  drafter_formats,
  folders,
  hf_config,
  names,
  target_folder,
  tensors,
)
from experiments import run_io, targets

HEADERS = ("", "kind", "form", "tensors", "parameters", "dtype", "GB")
_WEIGHTS = (".safetensors", ".safetensors.index.json", ".bin", ".pth", ".gguf")


class HfTarget(NamedTuple):
  """A target folder that was looked into, not loaded.

  Attributes:
    folder: where it lies.
    config: its config.json.
    reader: of its tensors.
    stored: names of all of them, shard by shard.
  """

  folder: pathlib.Path
  config: dict[str, Any]
  reader: tensors.Reader
  stored: list[str]

  @property
  def num_bytes(self) -> int:
    """Of all its tensors, as stored."""
    return sum(
      _size(self.reader, name) * self.reader.dtype(name).itemsize
      for name in self.stored
    )


def _size(reader: tensors.Reader, name: str) -> int:
  return int(np.prod(reader.shape(name), dtype=np.int64))


def inspect_target(folder: pathlib.Path) -> HfTarget:
  """What a target folder holds; its headers are read, not its tensors.

  Raises:
    ValueError: as `target_folder.load_target`.
  """
  path = folder / "config.json"
  config = hf_config.read_json(path)
  cfg = hf_config.target_config(config, path)
  reader = tensors.Reader(folder)
  shapes = {name: reader.shape(name) for name in reader.names()}
  names.resolve(shapes, names.target_entries(cfg), source=folder)
  return HfTarget(folder, config, reader, reader.in_shard_order(list(shapes)))


def in_flags(
  error: ValueError, form: str, cfg: configs.DrafterConfig
) -> ValueError:
  """An error about a drafter's form by the flags that mend it.

  Args:
    error: of `drafter_conversion.convert`; one about something else is kept.
    form: that it was to write.
    cfg: of the drafter.
  """
  about = f"form={form!r}: "
  if not str(error).startswith(about):
    return error
  reason = str(error).removeprefix(about)
  asking = re.compile("name (its|the) target")
  if asking.search(reason):
    reason = asking.sub(r"name with --target=FOLDER \1 target", reason)
    return ValueError(f"--to={form}: {reason}")
  able = [name for name in drafter_formats.FORMS if _can_hold(name, cfg)]
  way_out = f"--to={' or '.join(able)} can hold it" if able else "no form can"
  return ValueError(f"--to={form}: {reason}; {way_out}")


def _can_hold(form: str, cfg: configs.DrafterConfig) -> bool:
  try:
    drafter_formats.check_expressible(form, cfg)
  except ValueError:
    return False
  return True


def _forms(source: drafter_conversion.Source) -> str:
  """The source's form, and those that would be written just like it."""
  own = _written(source.cfg, source.form)
  alike = [
    form
    for form in drafter_formats.FORMS
    if form == source.form
    or (own is not None and _written(source.cfg, form) == own)
  ]
  return ", ".join(alike)


def _written(cfg: configs.DrafterConfig, form: str) -> dict[str, Any] | None:
  """The config.json in a form, None if it has no place for the drafter."""
  try:
    return drafter_config.to_json(cfg, form)
  except ValueError:
    return None


def drafter_row(label: str, source: drafter_conversion.Source) -> list[str]:
  """One line of the table of what was found."""
  return [
    label,
    source.cfg.method,
    _forms(source),
    str(len(source.found)),
    f"{source.num_parameters:,}",
    source.dtype,
    f"{source.num_bytes / 1e9:.3f}",
  ]


def target_row(label: str, target: HfTarget) -> list[str]:
  """The same of a target."""
  count = sum(_size(target.reader, name) for name in target.stored)
  return [
    label,
    "target",
    str(target.config.get("model_type")),
    str(len(target.stored)),
    f"{count:,}",
    target.reader.dtype(target.stored[0]).name,
    f"{target.num_bytes / 1e9:.3f}",
  ]


def convert_target(
  target: HfTarget,
  destination: pathlib.Path,
  *,
  dtype: str | None,
  max_shard_bytes: int,
) -> None:
  """Writes the folder's tensors anew, its other files beside them.

  Args:
    target: of `inspect_target`.
    destination: folder that is made or replaced, in one step.
    dtype: of floating tensors; None keeps each as it is stored.
    max_shard_bytes: as in `tensors.write_tensors`.
  """
  label = f"converting {target.folder.name}"
  with (
    run_io.Progress(target.num_bytes, label, "bytes") as progress,
    folders.replacing(destination) as fresh,
  ):

    def read(name: str) -> np.ndarray:
      array = target.reader.read(name)
      progress.update(array.nbytes)
      return array

    arrays = {name: functools.partial(read, name) for name in target.stored}
    tensors.write_tensors(
      fresh, arrays, dtype=dtype, max_shard_bytes=max_shard_bytes
    )
    config = dict(target.config)
    if dtype is not None:
      key = "dtype" if "dtype" in config else "torch_dtype"
      config[key] = dtype
    hf_config.write_json(fresh / "config.json", config)
    for path in sorted(target.folder.iterdir()):
      is_other = path.is_file() and not path.name.endswith(_WEIGHTS)
      if is_other and path.name != "config.json":
        shutil.copy2(path, fresh / path.name)


def convert_named_target(
  name: str,
  destination: pathlib.Path,
  *,
  dtype: str | None,
  max_shard_bytes: int,
) -> None:
  """A GGUF file (or the embedded target) as a folder with its tokenizer.

  Args:
    name: as in `targets.HELP`.
    destination: folder that is made or replaced.
    dtype: of floating tensors; None: float32, what a GGUF file dequantises to.
    max_shard_bytes: as in `tensors.write_tensors`.
  """
  target = targets.load(name)
  # First: files that are no weights are carried over when these are replaced.
  destination.mkdir(parents=True, exist_ok=True)
  target.tokenizer.save(str(destination / "tokenizer.json"))
  if target.chat_template is not None:
    template = destination / "chat_template.jinja"
    template.write_text(target.chat_template, encoding="utf-8")
  target_folder.save_target(
    destination,
    target.model.params,
    target.model.cfg,
    dtype=dtype or "float32",
    max_shard_bytes=max_shard_bytes,
  )
