"""Golden folders, bounds, and the record of one comparison.

A golden folder holds what a reference implementation computed: `config.json`
and `model.safetensors` (read by the ordinary loaders, not here), `inputs.npz`,
`outputs.npz`, and a README that lists every array. `Comparison` collects one
record an array and, at the end, one for each array that nothing was compared
with. Bounds are those of the set's README and depend on nothing but the kind of
an array. Not here: what an array means (`target`, `dflash`, `dspine`).
"""

import dataclasses
import math
import pathlib
import re
import zipfile
from collections.abc import Mapping
from typing import Any

import numpy as np

# |difference| <= VALUE_BOUND * (1 + max|array|): float32 through a few layers;
# the same code in float64 moves by up to 4e-6 on this scale.
VALUE_BOUND = 2e-5
# |difference| <= GRADIENT_BOUND * max|array|: gradients have no natural scale
# but their own, and sum more terms than values do.
GRADIENT_BOUND = 5e-5
# |difference| of unit vectors from a fresh eigendecomposition, whose small gaps
# between eigenvalues magnify rounding; after matching each column's sign.
CODE_BOUND = 2e-3
# Integers and masks are equal. That is fair for argmax and top-k because a set
# keeps its choices far from ties (its README gives the margins, all well above
# VALUE_BOUND); a tie within rounding would be a defect of the set.
EXACT_BOUND = 0.0

_FLOAT32_EPS = float(np.finfo(np.float32).eps)
_LISTED = re.compile(r"^- `([^`]+)`(.*)$")
_WILDCARD = "<name>"
_OPTIONAL = "(public set only)"


@dataclasses.dataclass(frozen=True)
class Record:
  """One comparison.

  Attributes:
    name: of the output array, with the layout in parentheses if there are
      several; `inputs/...` for inputs that were computed again.
    kind: "value", "gradient", "code", "exact"; "given" for what a reference
      drew or chose and was used as an input; "optional", "missing" or
      "not compared" where there was nothing to compare.
    error: largest absolute difference; number of differing entries if exact.
    bound: what the error may not exceed.
    ok: whether it does not.
    note: why, where the numbers do not say it.
  """

  name: str
  kind: str
  error: float
  bound: float
  ok: bool
  note: str = ""

  @property
  def ratio(self) -> float:
    """error / bound: at most 1 if ok, 0 where both are 0."""
    if self.error == 0:
      return 0.0
    return self.error / self.bound if self.bound else math.inf


class Arrays(Mapping[str, np.ndarray]):
  """The arrays of a .npz file; asking for a missing one is a ValueError."""

  def __init__(self, path: pathlib.Path):
    self._path = path
    try:
      with np.load(path, allow_pickle=False) as file:
        self._arrays = {name: file[name] for name in file.files}
    except FileNotFoundError:
      raise ValueError(f"{path}: no such file") from None
    except (OSError, ValueError, EOFError, zipfile.BadZipFile) as error:
      raise ValueError(f"{path}: not readable as .npz ({error})") from None

  def __getitem__(self, name: str) -> np.ndarray:
    if name not in self._arrays:
      raise ValueError(f"{self._path}: array {name!r} is missing")
    return self._arrays[name]

  def __contains__(self, name: object) -> bool:
    return name in self._arrays

  def __iter__(self):
    return iter(self._arrays)

  def __len__(self) -> int:
    return len(self._arrays)


@dataclasses.dataclass(frozen=True)
class Folder:
  """A golden folder.

  Attributes:
    path: where it is.
    inputs: arrays of `inputs.npz`.
    outputs: arrays of `outputs.npz`.
    listed: names that the README lists as outputs -> whether it may be absent.
  """

  path: pathlib.Path
  inputs: Arrays
  outputs: Arrays
  listed: Mapping[str, bool]


def read_folder(path: pathlib.Path) -> Folder:
  """Reads arrays and README; without a README nothing counts as listed."""
  readme = path / "README.md"
  text = readme.read_text(encoding="utf-8") if readme.exists() else ""
  return Folder(
    path=path,
    inputs=Arrays(path / "inputs.npz"),
    outputs=Arrays(path / "outputs.npz"),
    listed=listed_outputs(text),
  )


def listed_outputs(readme: str) -> dict[str, bool]:
  """Output arrays of a README -> whether they are marked as optional.

  An entry is "- `name` [shape] dtype: text"; "- `grad/<name>`: text: `a` [2],
  `b` [3]" stands for grad/a and grad/b.
  """
  listed = {}
  inside = False
  for line in readme.splitlines():
    if line.startswith("#"):
      inside = line.strip("# ") == "outputs.npz"
    match = _LISTED.match(line)
    if not inside or not match:
      continue
    name, rest = match.groups()
    names = [name]
    if _WILDCARD in name:
      values = re.findall(r"`([^`]+)` \[", rest)
      names = [name.replace(_WILDCARD, value) for value in values]
    listed |= dict.fromkeys(names, _OPTIONAL in rest)
  return listed


class Comparison:
  """Collects the records of one folder.

  Every method compares one output array if the set has it, and else does
  nothing: whether it should have been there is decided by `finish`.

  Attributes:
    outputs: the reference's arrays.
    records: in the order of comparison.
  """

  def __init__(self, folder: Folder):
    self.outputs = folder.outputs
    self.records: list[Record] = []
    self._listed = folder.listed
    self._seen: set[str] = set()

  def value(self, name: str, ours: Any, **options) -> None:
    """Floats of any origin but a gradient; see `_compare` for options."""
    self._compare(
      name,
      ours,
      "value",
      lambda theirs: VALUE_BOUND * (1 + _largest(theirs)),
      **options,
    )

  def gradient(self, name: str, ours: Any, **options) -> None:
    """A gradient."""
    self._compare(
      name,
      ours,
      "gradient",
      lambda theirs: GRADIENT_BOUND * _largest(theirs),
      **options,
    )

  def norms(self, name: str, ours: Any, **options) -> None:
    """Norms of different gradients: each has the bound of its own size.

    Below the rounding of the largest one there is nothing to compare.
    """
    self._compare(
      name,
      ours,
      "gradient",
      lambda theirs: (
        GRADIENT_BOUND * np.abs(theirs) + _FLOAT32_EPS * _largest(theirs)
      ),
      **options,
    )

  def code(self, name: str, ours: Any, **options) -> None:
    """Unit vectors of a fresh eigendecomposition, signs already matched."""
    self._compare(name, ours, "code", lambda _: CODE_BOUND, **options)

  def exact(self, name: str, ours: Any, **options) -> None:
    """Integers, masks and names."""
    self._compare(name, ours, "exact", None, **options)

  def given(self, name: str, is_valid: bool, note: str) -> None:
    """What the reference drew or chose, which our run took as an input."""
    if name in self.outputs:
      self._seen.add(name)
      error = 0.0 if is_valid else math.inf
      self.records.append(Record(name, "given", error, 0.0, is_valid, note))

  def recomputed(self, name: str, ours: Any, theirs: np.ndarray) -> None:
    """An input that our own code can make again, bounded like a value."""
    bound = VALUE_BOUND * (1 + _largest(theirs))
    self.records.append(_record(f"inputs/{name}", "value", ours, theirs, bound))

  def _compare(
    self, name, ours, kind, bound, *, rows: Any = ..., layout: str = ""
  ):
    """Records one comparison.

    Args:
      name: of the output array.
      ours: what our code computed, in the same shape.
      kind: of the record.
      bound: the reference's compared entries -> bound; None compares exactly.
      rows: index of the entries that are compared, such as the kept blocks.
      layout: which of several of our forms this is.
    """
    if name not in self.outputs:
      return
    self._seen.add(name)
    theirs, ours = self.outputs[name], np.asarray(ours)
    label = f"{name} ({layout})" if layout else name
    if ours.shape == theirs.shape:
      ours, theirs = ours[rows], theirs[rows]
    limit = EXACT_BOUND if bound is None else bound(theirs)
    self.records.append(_record(label, kind, ours, theirs, limit))

  def finish(self) -> list[Record]:
    """All records, with one for each array that was not compared."""
    for name in self.outputs:
      if name not in self._seen:
        self.records.append(absent(name, "not compared", "unknown array"))
    for name, is_optional in self._listed.items():
      if name in self.outputs:
        continue
      if is_optional:
        note = "not in this set"
        self.records.append(Record(name, "optional", 0.0, 0.0, True, note))
      else:
        note = "in README.md but not in outputs.npz"
        self.records.append(absent(name, "missing", note))
    return self.records


def absent(name: str, kind: str, note: str) -> Record:
  return Record(name, kind, math.inf, 0.0, False, note)


def _record(label, kind, ours, theirs, bound) -> Record:
  ours = np.asarray(ours)
  if ours.shape != theirs.shape:
    note = f"shape {list(ours.shape)} instead of {list(theirs.shape)}"
    return Record(label, kind, math.inf, 0.0, False, note)
  if kind == "exact":
    wrong = int(np.sum(ours != theirs))
    return Record(label, kind, float(wrong), EXACT_BOUND, wrong == 0)
  if not theirs.size:
    return Record(label, kind, 0.0, float(np.max(bound)), True, "no entries")
  error = np.abs(ours.astype(np.float64) - theirs)
  bound = np.broadcast_to(bound, error.shape)
  # The entry closest to its bound, or furthest beyond; NaN counts as beyond.
  error = np.where(np.isfinite(error), error, np.inf)
  excess = error / np.maximum(bound, np.finfo(np.float64).tiny)
  worst = np.unravel_index(np.argmax(excess), error.shape)
  found, limit = float(error[worst]), float(bound[worst])
  return Record(label, kind, found, limit, found <= limit)


def _largest(array: np.ndarray) -> float:
  return float(np.max(np.abs(array), initial=0.0))
