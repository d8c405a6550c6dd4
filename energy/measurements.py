"""Measured requests: their schema, CSV files, and the reconstructed grid.

A row is one operating point: a model, its lengths, and the mean joules of a
request. Files come from many tools, so columns are mapped by name and energies
may be in kJ or mJ; a byte order mark, CRLF, thousands separators and blank rows
are read as what they mean, anything else is an error with file, row and column.
"""

import csv
import io
import math
import pathlib
import re
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from energy import architecture, laws

JOULES_PER_UNIT = {"J": 1.0, "kJ": 1e3, "mJ": 1e-3, "Wh": 3600.0}

RECONSTRUCTED = "reconstructed from published fits"

# Columns of a file unless they are mapped.
COLUMNS = {
  "model": "model",
  "input_tokens": "input_tokens",
  "output_tokens": "output_tokens",
  "cached_tokens": "cached_tokens",
  "energy": "joules",
  "concurrency": "concurrency",
}
_THOUSANDS = re.compile(r"[+-]?\d{1,3}(,\d{3})+(\.\d*)?")
_OPTIONAL = ("cached_tokens", "concurrency")


# One number a row.
Column = Sequence[architecture.Number] | np.ndarray


class Measurements(NamedTuple):
  """n operating points; every array is [n] float64.

  Attributes:
    models: name of each row's model.
    families: family of each row's model.
    architecture: sizes of each row's model.
    input_tokens: I.
    output_tokens: O.
    cached_tokens: C.
    concurrency: requests in a decoding step, or None if the file has none.
    joules: of one request.
  """

  models: tuple[str, ...]
  families: tuple[str, ...]
  architecture: architecture.Architecture
  input_tokens: np.ndarray
  output_tokens: np.ndarray
  cached_tokens: np.ndarray
  concurrency: np.ndarray | None
  joules: np.ndarray

  @property
  def request(self) -> tuple[Any, ...]:
    """Lengths and concurrency, as the arguments of a law."""
    return (
      self.input_tokens,
      self.output_tokens,
      self.cached_tokens,
      self.concurrency,
    )

  def select(self, rows: np.ndarray) -> "Measurements":
    """The rows of a boolean mask or of indices."""
    index = np.arange(len(self.joules))[rows]
    return Measurements(
      models=tuple(self.models[i] for i in index),
      families=tuple(self.families[i] for i in index),
      architecture=architecture.Architecture(
        *(np.asarray(x)[index] for x in self.architecture)
      ),
      input_tokens=self.input_tokens[index],
      output_tokens=self.output_tokens[index],
      cached_tokens=self.cached_tokens[index],
      concurrency=None if self.concurrency is None else self.concurrency[index],
      joules=self.joules[index],
    )


def measurements(
  models: Sequence[architecture.Model],
  input_tokens: Column,
  output_tokens: Column,
  joules: Column,
  *,
  cached_tokens: Column | None = None,
  concurrency: Column | None = None,
) -> Measurements:
  """Rows from columns of the same length.

  Raises:
    ValueError: lengths that no request has, energies that are not positive, or
      no rows.
  """
  if not len(models):
    raise ValueError("no measurements")
  inputs, outputs, energies = (
    np.asarray(column, np.float64)
    for column in (input_tokens, output_tokens, joules)
  )
  cached = (
    np.zeros_like(inputs)
    if cached_tokens is None
    else np.asarray(cached_tokens, np.float64)
  )
  laws.check_lengths(inputs, outputs, cached)
  if not (np.isfinite(energies).all() and (energies > 0).all()):
    raise ValueError("energies must be finite and positive")
  return Measurements(
    models=tuple(model.name for model in models),
    families=tuple(model.family for model in models),
    architecture=architecture.stack([model.architecture for model in models]),
    input_tokens=inputs,
    output_tokens=outputs,
    cached_tokens=cached,
    concurrency=None
    if concurrency is None
    else np.asarray(concurrency, np.float64),
    joules=energies,
  )


def read_csv(
  path: pathlib.Path | str,
  models: Mapping[str, architecture.Model],
  *,
  columns: Mapping[str, str] | None = None,
  unit: str = "J",
  per_token: bool = False,
  where: Mapping[str, str] | None = None,
  input_tokens: architecture.Number | None = None,
  skip_unknown_models: bool = False,
) -> Measurements:
  """Measurements from a CSV file with a header.

  Args:
    path: of the file.
    models: name in the file's model column -> its architecture.
    columns: changes of `COLUMNS`.
    unit: of the energy column, key of `JOULES_PER_UNIT`.
    per_token: the energy column is per output token, not per request.
    where: column -> value; other rows are left out.
    input_tokens: of every row, for a file that does not say.
    skip_unknown_models: leave rows out whose model is not in `models`.

  Raises:
    ValueError: names the file, and the row (line of the file) and column.
  """
  path = pathlib.Path(path)
  if unit not in JOULES_PER_UNIT:
    raise ValueError(f"unit={unit!r}: not in {sorted(JOULES_PER_UNIT)}")
  names = COLUMNS | dict(columns or {})
  unknown = sorted(set(names) - set(COLUMNS))
  if unknown:
    raise ValueError(f"columns {unknown}: not among {sorted(COLUMNS)}")
  rows, header = _read_rows(path)
  wanted = dict(where or {})
  missing = sorted(set(wanted) - set(header))
  if missing:
    raise ValueError(f"{path}: no column {missing[0]!r}; it has {header}")
  if input_tokens is not None:
    if names["input_tokens"] in header:
      raise ValueError(
        f"{path}: has a column {names['input_tokens']!r}; a constant would"
        " override it"
      )
    del names["input_tokens"]
  mapped = set(columns or {})
  for key, name in names.items():
    if name not in header and (key not in _OPTIONAL or key in mapped):
      raise ValueError(f"{path}: no column {name!r} ({key}); it has {header}")
  found: dict[str, list] = {key: [] for key in names}
  for line, row in rows:
    if any(row[column].strip() != value for column, value in wanted.items()):
      continue
    name = row[names["model"]].strip()
    if name not in models and skip_unknown_models:
      continue
    if name not in models:
      raise ValueError(
        f"{path}: line {line}: model {name!r} has no architecture (known:"
        f" {', '.join(sorted(models))})"
      )
    found["model"].append(models[name])
    for key in set(names) - {"model"}:
      if names[key] in header:
        place = f"{path}: line {line}: {names[key]}"
        found[key].append(_number(row[names[key]], place))
    if input_tokens is not None:
      found.setdefault("input_tokens", []).append(input_tokens)
    _check_row(found, f"{path}: line {line}")
    if per_token and not found["output_tokens"][-1]:
      raise ValueError(
        f"{path}: line {line}: joules per output token without output"
      )
  if not found["model"]:
    raise ValueError(f"{path}: no rows of measurements")
  outputs = np.asarray(found["output_tokens"], np.float64)
  joules = np.asarray(found["energy"], np.float64) * JOULES_PER_UNIT[unit]
  return measurements(
    found["model"],
    found["input_tokens"],
    outputs,
    joules * outputs if per_token else joules,
    cached_tokens=found["cached_tokens"] or None,
    concurrency=found["concurrency"] or None,
  )


def reconstructed_grid() -> Measurements:
  """13 models on the 7 x 7 grid, from the published fits; no measurement.

  The 637 measurements of the SweetSpot paper are not public. These are its
  formula with its printed coefficients (Table 5), at full precision.
  """
  models = architecture.shipped_models()
  fitted = sweetspot_coefficients()
  points = _dataset("sweetspot_reconstructed_grid_637.csv")
  inputs, outputs = (
    np.asarray([float(row[key]) for row in points])
    for key in ("input_tokens", "output_tokens")
  )
  theta = np.asarray([fitted[row["model"]] for row in points])
  terms = (outputs, inputs**2, inputs * outputs, inputs, outputs**2, 1.0)
  joules = np.sum([theta[:, i] * x for i, x in enumerate(terms)], axis=0)
  return measurements(
    [models[row["model"]] for row in points], inputs, outputs, joules
  )


def sweetspot_coefficients() -> dict[str, np.ndarray]:
  """Table 5 of the SweetSpot paper: model -> theta of `laws.SWEETSPOT`."""
  return {
    row["model"]: np.asarray(
      [float(value) for key, value in row.items() if key.startswith("theta")]
    )
    for row in _dataset("sweetspot_table5_coefficients.csv")
  }


def sweetspot_optimum_outputs() -> dict[str, float]:
  """The printed output length of least joules per token, at 64 tokens in."""
  return {
    row["model"]: float(row["sweetspot_out_estimated"])
    for row in _dataset("sweetspot_table5_coefficients.csv")
  }


def sweetspot_mape() -> dict[str, dict[str, float]]:
  """Table 3: model -> law -> MAPE in percent, against the measurements."""
  columns = {
    "baseline1": "baseline1",
    "baseline2": "baseline2",
    "baseline3": "baseline3",
    "baseline4": "baseline4_wilkins",
    "flops": "flops_based",
    "sweetspot": "memory_and_flops_based",
  }
  return {
    row["model"]: {law: float(row[name]) for law, name in columns.items()}
    for row in _dataset("sweetspot_table3_mape.csv")
  }


def _dataset(name: str) -> list[dict[str, str]]:
  with (architecture.DATASETS / name).open(encoding="utf-8") as file:
    return list(csv.DictReader(file))


def _read_rows(
  path: pathlib.Path,
) -> tuple[list[tuple[int, dict[str, str]]], list[str]]:
  """(line number, row) of all rows that are not blank, and the header."""
  try:
    text = path.read_text(encoding="utf-8-sig")
  except FileNotFoundError:
    raise ValueError(f"{path}: no such file") from None
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: not readable as CSV ({error})") from None
  reader = csv.DictReader(io.StringIO(text, newline=""))
  header = [name.strip() for name in reader.fieldnames or []]
  if not header:
    raise ValueError(f"{path}: empty file")
  reader.fieldnames = header
  rows = []
  for row in reader:
    cells = [value for value in row.values() if isinstance(value, str)]
    if not any(cell.strip() for cell in cells):
      continue
    if None in row or None in row.values():
      raise ValueError(
        f"{path}: line {reader.line_num}: not {len(header)} cells, as many as"
        " the header has"
      )
    rows.append((reader.line_num, row))
  return rows, header


def _number(text: str, where: str) -> float:
  """A finite number; "1,234.5" has a thousands separator."""
  digits = text.strip()
  if _THOUSANDS.fullmatch(digits):
    digits = digits.replace(",", "")
  try:
    value = float(digits)
  except ValueError:
    raise ValueError(f"{where}={text!r}: not a number") from None
  if not math.isfinite(value):
    raise ValueError(f"{where}={text!r}: must be finite")
  return value


def _check_row(found: Mapping[str, list], where: str) -> None:
  """The last row of `found`, with its place in the file in the error."""
  last = {key: values[-1] for key, values in found.items() if values}
  try:
    laws.check_lengths(
      last["input_tokens"], last["output_tokens"], last.get("cached_tokens", 0)
    )
  except ValueError as error:
    raise ValueError(f"{where}: {error}") from None
  if last["energy"] <= 0:
    raise ValueError(f"{where}: energy {last['energy']:g}: must be positive")
  if last.get("concurrency", 1) <= 0:
    raise ValueError(
      f"{where}: concurrency {last['concurrency']:g}: must be positive"
    )
