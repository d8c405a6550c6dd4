"""Compares this code with golden arrays of the reference implementations.

  python -m experiments.check_parity --golden=tests/golden

Every method folder below --golden is loaded with the ordinary loaders and
recomputed; each of its output arrays gets one line for each of our forms of it
(unrolled and scanned layers, direct and factored transition scores). Drafters
are compared after they were exported and read again in every form that has
their method. Exit
status 1 if an error exceeds its bound, if an array is not compared with
anything, or if one that the folder's README lists is missing. Folders of
methods that are not implemented are named, and fail only if --methods asks for
them. Bounds are in `parity/report.py`. Time: about a minute on two CPU cores.
"""

import pathlib
from collections.abc import Callable, Sequence

import jax
from absl import flags

from experiments import run_io
from experiments.parity import (
  dflash,
  dflash2,
  domino,
  dspark,
  dspine,
  exported,
  report,
  target,
)

_GOLDEN = flags.DEFINE_string(
  "golden", None, "Folder with one golden folder a method (required)."
)
_METHODS = flags.DEFINE_list(
  "methods", None, "Folders to compare; default: all that are implemented."
)
_JSON = flags.DEFINE_string("json", None, "File for the results, if given.")

METHODS: dict[str, Callable[[report.Folder], list[report.Record]]] = {
  target.NAME: target.compare,
  "dflash": dflash.compare,
  "dflash2": dflash2.compare,
  "domino": domino.compare,
  "dspark": dspark.compare,
  "dspine": dspine.compare,
}

# What makes a folder one of golden arrays.
_MARKS = ("config.json", "inputs.npz", "outputs.npz")


def golden_folders(golden: str | None) -> list[pathlib.Path]:
  """The golden folders below `golden`, the target's first.

  Raises:
    ValueError: `golden` is not given, is no folder, or holds no such folder.
  """
  if not golden:
    raise ValueError("--golden must name a folder with golden arrays")
  root = pathlib.Path(golden)
  if not root.is_dir():
    raise ValueError(f"--golden={golden}: no such folder")
  found = [
    path
    for path in sorted(root.iterdir())
    if path.is_dir() and any((path / mark).exists() for mark in _MARKS)
  ]
  if not found:
    raise ValueError(
      f"--golden={golden}: holds no method folder (with {', '.join(_MARKS)})"
    )
  return sorted(found, key=lambda path: path.name != target.NAME)


def run(
  golden: str | None,
  methods: Sequence[str] | None = None,
  show: Callable[[str], None] = print,
) -> dict[str, list[report.Record]]:
  """Compares folders and shows a line for each record.

  Args:
    golden: the folder of folders.
    methods: names of folders to compare; None takes all.
    show: takes each line.

  Returns:
    Records by folder. A folder that was asked for by name and is not
    implemented has one record, which is not ok.

  Raises:
    ValueError: nothing there to compare, or a folder that cannot be read.
  """
  folders = {path.name: path for path in golden_folders(golden)}
  absent = sorted(set(methods or ()) - set(folders))
  if absent:
    raise ValueError(
      f"--methods={','.join(absent)}: not in {golden}, which has"
      f" {', '.join(folders)}"
    )
  results = {}
  for name, path in folders.items():
    if methods and name not in methods:
      continue
    if name in METHODS:
      with jax.default_matmul_precision("float32"):
        results[name] = METHODS[name](report.read_folder(path))
        if name != target.NAME:
          results[name] += exported.compare(path)
      for record in results[name]:
        show(_line(name, record))
      continue
    show(f"{name}: not implemented")
    if methods:
      note = "method is not implemented"
      results[name] = [report.absent(name, "not compared", note)]
  if not results:
    raise ValueError(f"--golden={golden}: no folder of an implemented method")
  return results


def _line(folder: str, record: report.Record) -> str:
  state = "ok  " if record.ok else "FAIL"
  numbers = f"error {record.error:.2e}  bound {record.bound:.2e}"
  note = f"  {record.note}" if record.note else ""
  return f"{state} {folder}/{record.name}  {record.kind}  {numbers}{note}"


def summary(results: dict[str, list[report.Record]]) -> str:
  """One line: for each folder, how many records are ok and the worst ratio."""
  parts = []
  for name, records in results.items():
    passed = sum(record.ok for record in records)
    worst = max(records, key=lambda record: record.ratio)
    parts.append(
      f"{name} {passed}/{len(records)} ok, worst error/bound"
      f" {worst.ratio:.3g} ({worst.name})"
    )
  return f"{'PASS' if is_ok(results) else 'FAIL'}: {'; '.join(parts)}"


def is_ok(results: dict[str, list[report.Record]]) -> bool:
  """Whether every record of every folder is ok."""
  return all(record.ok for records in results.values() for record in records)


def main(unused_argv: Sequence[str]) -> int:
  results = run(_GOLDEN.value, _METHODS.value)
  print(summary(results))
  if _JSON.value:
    ok = is_ok(results)
    content = {"golden": _GOLDEN.value, "ok": ok, "folders": results}
    run_io.write_json(_JSON.value, content)
  return 0 if is_ok(results) else 1


if __name__ == "__main__":
  run_io.run_app(main)
