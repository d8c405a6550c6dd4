"""What a folder named on the command line is: a target, a drafter, a run's.

Folders of models are told apart by their config.json; a run's work directory
has one, too, of its settings. Not here: whether a model can be read, which its
loader says, and the reading.
"""

import os
import pathlib

from dspine_jax.checkpoints import drafter_formats, folders, hf_config
from experiments import targets

TARGET, DRAFTER, OTHER = "target", "drafter", "other"
# What a run leaves in its work directory and no folder of a model has.
_OF_A_RUN = ("checkpoints", "provenance.json", "command.txt")


def kind(folder: pathlib.Path) -> str | None:
  """TARGET, DRAFTER, OTHER by its config.json; None where it has none.

  Raises:
    ValueError: a config.json that is no JSON object.
  """
  path = folder / "config.json"
  if not path.exists():
    return None
  config = hf_config.read_json(path)
  known = config.get("architectures") or ()
  if any(name.endswith("ForCausalLM") for name in known):
    return TARGET
  try:
    drafter_formats.method_of(drafter_formats.flat(config, path), path)
  except ValueError:
    return OTHER
  return DRAFTER


def run_file(folder: pathlib.Path) -> str | None:
  """What shows that a folder is a run's work directory; None if nothing."""
  return next((name for name in _OF_A_RUN if (folder / name).exists()), None)


def drafter_inside(folder: pathlib.Path) -> pathlib.Path | None:
  """The drafter of a training's work directory, if it has written one."""
  inner = folder / "drafter"
  return inner if (inner / "config.json").exists() else None


def refuse_work_dir(name: str | pathlib.Path) -> None:
  """ValueError if --drafter names a run's work directory, not its drafter."""
  folder = pathlib.Path(name)
  inner = drafter_inside(folder)
  if inner is not None:
    raise ValueError(
      f"--drafter={name}: a work directory; its drafter is --drafter={inner}"
    )
  if kind(folder) in (None, OTHER) and run_file(folder):
    raise ValueError(
      f"--drafter={name}: the work directory of a run ({run_file(folder)} is"
      " there) that has written no drafter"
    )


def is_gguf(name: str) -> bool:
  """Whether a target comes as one GGUF file."""
  return name == targets.SMOLLM2 or name.endswith(".gguf")


def source(name: str) -> pathlib.Path | str:
  """What --source names: of a training's work directory, its drafter.

  Returns:
    The folder of a model, or a target's name or GGUF file as given.

  Raises:
    ValueError: no folder of a model, or a training that has not ended.
  """
  if is_gguf(name) or name == targets.EMBEDDED:
    return name
  folder = pathlib.Path(name)
  if folder.is_file():
    raise ValueError(
      f"--source={name}: is a file; a folder or a *.gguf file is needed"
    )
  if not folder.is_dir():
    raise ValueError(f"--source={folders.missing(folder)}")
  inner = drafter_inside(folder)
  if inner is not None:
    return inner
  if (folder / "checkpoints").is_dir():
    raise ValueError(
      f"--source={name}: a training that has not written its drafter yet; let"
      " it end, the same command resumes it"
    )
  found = kind(folder)
  if found is None:
    raise ValueError(f"--source={name}: no config.json there")
  if found == OTHER and run_file(folder):
    raise ValueError(
      f"--source={name}: the work directory of a run ({run_file(folder)} is"
      " there), not a model"
    )
  return folder


def check_destination(
  to: pathlib.Path,
  source: pathlib.Path | str,
  source_kind: str,
  *,
  overwrite: bool,
) -> None:
  """Refuses a --destination that holds what must not be replaced.

  Args:
    to: folder to write; it may be the source itself.
    source: as `source` gives it.
    source_kind: TARGET or DRAFTER, what will be written.
    overwrite: whether a model of this kind, or other files, may be there.

  Raises:
    ValueError: `to` is a file, a run's work directory, holds another kind of
      model, lies in the source or around it, or is not empty.
  """
  if to.is_file():
    raise ValueError(f"--destination={to}: is a file, not a folder")
  if run_file(to):
    raise ValueError(
      f"--destination={to}: the work directory of a run ({run_file(to)} is"
      " there), whose config.json would be replaced; name another folder"
    )
  _refuse_nested(to, source)
  held = kind(to)
  if held not in (None, source_kind):
    what = "something else" if held == OTHER else f"a {held}"
    raise ValueError(
      f"--destination={to}: its config.json is that of {what}, which a"
      f" {source_kind} would replace; name another folder"
    )
  if not overwrite and to.is_dir() and any(to.iterdir()):
    raise ValueError(
      f"--destination={to}: is not empty; --overwrite replaces its weights"
    )


def _refuse_nested(to: pathlib.Path, source: pathlib.Path | str) -> None:
  """ValueError if one lies in the other; both may be the same folder."""
  if source in (targets.EMBEDDED, targets.SMOLLM2):
    return
  inner, outer = (pathlib.Path(os.path.realpath(path)) for path in (to, source))
  where = "inside"
  if outer.is_relative_to(inner):
    inner, outer, where = outer, inner, "around"
  if inner != outer and inner.is_relative_to(outer):
    raise ValueError(
      f"--destination={to}: lies {where} --source={source}; name a folder"
      " beside it"
    )
