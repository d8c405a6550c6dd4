"""Whether a work directory holds the run of another config.

A run goes on only in a directory of its own settings. Where they differ, the
user is told in which, and what to do. A directory in which nothing was made yet
is anyone's: a first try that failed does not claim it.

Not here: writing the directory (`run_io`) and its lock (`work_lock`).
"""

import json
import pathlib
from collections.abc import Iterable, Mapping
from typing import Any

_MOST_SHOWN = 4


def is_same(
  config: pathlib.Path,
  now: Mapping[str, Any],
  *,
  command: pathlib.Path,
  records: Iterable[str],
) -> bool:
  """Whether a directory's config is `now`; False if it may be taken by `now`.

  Args:
    config: the file in the work directory.
    now: this run's settings, as JSON has them.
    command: the file with the command lines of the run that is there.
    records: names of the files that say which run it is, not what it made.

  Raises:
    ValueError: the file cannot be read, or the directory holds something made
      with another config.
  """
  folder = config.parent
  try:
    old = _flatten(json.loads(config.read_text(encoding="utf-8")))
  except (OSError, ValueError) as error:
    raise ValueError(
      f"--work_dir={folder}: cannot read its config.json ({error})"
    ) from error
  new = _flatten(dict(now))
  told = [
    _difference(key, old, new)
    for key in old | new
    if old.get(key) != new.get(key)
  ]
  if not told:
    return True
  if {path.name for path in folder.iterdir()} <= set(records):
    return False
  more = len(told) - _MOST_SHOWN
  if more > 0:
    told[_MOST_SHOWN:] = [f"and {more} more"]
  raise ValueError(
    f"--work_dir={folder} holds a run with another config: {'; '.join(told)}."
    f" Name another --work_dir, or repeat the command in {command}"
  )


def _difference(key: str, old: dict[str, str], new: dict[str, str]) -> str:
  if key.endswith("digest") and key in old and key in new:
    # Its value says nothing to anyone: what it stands for does.
    named = key.removesuffix("digest").rstrip("._")
    return f"the content of {named} has changed"
  there, now = old.get(key, "absent"), new.get(key, "absent")
  return f"{key} is {there} there and {now} now"


def _flatten(tree: Any, prefix: str = "") -> dict[str, str]:
  """Returns the leaves as JSON text by dotted name, to compare and to show."""
  if not isinstance(tree, dict) or not tree:
    return {prefix: json.dumps(tree, ensure_ascii=False)}
  flat: dict[str, str] = {}
  for key, value in tree.items():
    flat |= _flatten(value, f"{prefix}.{key}" if prefix else key)
  return flat
