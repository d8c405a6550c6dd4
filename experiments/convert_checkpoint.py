"""Converts drafters between released forms, and targets to other shards.

  python -m experiments.convert_checkpoint --source=runs/dspine \\
      --destination=export/dspine --to=specforge --dtype=bfloat16
  python -m experiments.convert_checkpoint --source=FOLDER

--source is a drafter in any released form, a training's work directory (its
drafter is meant), or a target: a Hugging Face folder or a GGUF file. What was
found is printed; without --destination that is all. Forms (--to): `zlab`
(dflash, dflash2), `specforge` (all methods), `deepspec` (dspark), `speculators`
(vllm: dflash, dflash2, dspark), `target`; the default is the source's own.
Without --dtype every tensor is kept bit by bit. A conversion that would change
what the drafter computes is refused: a method that the form does not have, a
head of its own that would be lost, sliding layers that its tools run otherwise.
The destination is replaced in one step. Time: that of reading and writing.
"""

import pathlib

from absl import flags

from dspine_jax.checkpoints import drafter_conversion, drafter_formats, tensors
from experiments import run_io
from experiments.stages import conversion, model_folders

_SOURCE = flags.DEFINE_string("source", None, "What to convert (required).")
_DESTINATION = flags.DEFINE_string(
  "destination", None, "Folder to write; none: only look into the source."
)
_TO = flags.DEFINE_enum(
  "to",
  None,
  [*drafter_formats.FORMS, model_folders.TARGET],
  "Form of the result; default: that of the source.",
)
_DTYPE = flags.DEFINE_enum(
  "dtype", None, sorted(tensors.FLOATING), "Of floating tensors; none: as is."
)
_TARGET = flags.DEFINE_string(
  "target",
  None,
  "Folder of a drafter's target, where embedding, head or depth are needed.",
)
_TARGET_NAME = flags.DEFINE_string(
  "target_name", None, "Name of the target that speculators' form records."
)
_SHARD_GB = flags.DEFINE_float(
  "max_shard_gb", 5.0, "Largest file of weights in GB.", lower_bound=0.001
)
_OVERWRITE = flags.DEFINE_bool(
  "overwrite",
  False,
  "Replace the weights of a destination that is not empty; it may be the source"
  " itself, but no model of another kind and no run's work directory.",
)


def convert_target(source: pathlib.Path | str, to: pathlib.Path | None) -> None:
  """Shows a target, and writes it if there is a destination."""
  if _TO.value not in (None, model_folders.TARGET):
    raise ValueError(f"--to={_TO.value}: --source={_SOURCE.value} is a target")
  options = {"dtype": _DTYPE.value, "max_shard_bytes": _shard_bytes()}
  rows = []
  if isinstance(source, pathlib.Path):
    found = conversion.inspect_target(source)
    rows.append(conversion.target_row("source", found))
    if to is not None:
      conversion.convert_target(found, to, **options)
  elif to is not None:
    conversion.convert_named_target(source, to, **options)
  else:
    raise ValueError(f"--source={source}: name a --destination for it")
  if to is not None:
    written = conversion.inspect_target(to)
    rows.append(conversion.target_row("written", written))
  print(run_io.table(rows, conversion.HEADERS))


def convert_drafter(source: pathlib.Path, to: pathlib.Path | None) -> None:
  """Shows a drafter, and writes it if there is a destination."""
  if _TO.value == model_folders.TARGET:
    raise ValueError(f"--to=target: --source={source} is a drafter")
  found = drafter_conversion.inspect(source)
  rows = [conversion.drafter_row("source", found)]
  if to is not None:
    label, form = f"converting {source.name}", _TO.value or found.form
    with run_io.Progress(found.num_bytes, label, "bytes") as progress:
      try:
        drafter_conversion.convert(
          found,
          to,
          form,
          dtype=_DTYPE.value,
          target=_TARGET.value,
          target_name=_TARGET_NAME.value,
          max_shard_bytes=_shard_bytes(),
          on_bytes=progress.update,
        )
      except ValueError as error:
        raise conversion.in_flags(error, form, found.cfg) from None
    written = drafter_conversion.inspect(to)
    rows.append(conversion.drafter_row("written", written))
  print(run_io.table(rows, conversion.HEADERS))


def _shard_bytes() -> int:
  return int(_SHARD_GB.value * 1e9)


def main(unused_argv):
  if _SOURCE.value is None:
    raise ValueError("--source must name what to convert")
  source = model_folders.source(_SOURCE.value)
  is_target = isinstance(source, str) or (
    model_folders.kind(source) == model_folders.TARGET
  )
  to = None if _DESTINATION.value is None else pathlib.Path(_DESTINATION.value)
  if to is not None:
    written = model_folders.TARGET if is_target else model_folders.DRAFTER
    model_folders.check_destination(
      to, source, written, overwrite=_OVERWRITE.value
    )
  if is_target:
    convert_target(source, to)
  else:
    convert_drafter(source, to)


if __name__ == "__main__":
  run_io.run_app(main)
