"""A fitted law as a file, and what to say beside its predictions.

A prediction is worth its joules, their band, and a warning wherever the request
or the model lies outside of what the coefficients were fitted on.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import numpy as np

from energy import laws
from energy.architecture import DATASETS, Model, Number, read_json
from energy.measurements import Measurements
from energy.validation import ErrorBand

_RANGES = ("input_tokens", "output_tokens", "cached_tokens", "parameters")


@dataclasses.dataclass(frozen=True)
class FittedLaw:
  """Coefficients with where they come from and how far they were tested.

  Attributes:
    law: name, key of `laws.LAWS`.
    theta: coefficients.
    source: what they were fitted to, in words.
    ranges: what the rows covered: lengths and parameters, [least, greatest].
    families: of the fitted models.
    band: of a model that was not fitted; None if that was not tested.
    memory_bytes: of the GPU, read by `capacity`.
    max_requests: of the engine, read by `capacity`.
  """

  law: str
  theta: tuple[float, ...]
  source: str
  ranges: Mapping[str, tuple[float, float]]
  families: tuple[str, ...]
  band: ErrorBand | None = None
  memory_bytes: float = laws.H100_BYTES
  max_requests: float = laws.MEASURED_REQUESTS

  def __post_init__(self):
    """Checks what a file could have wrong; ValueError."""
    if self.law not in laws.LAWS:
      raise ValueError(f"law {self.law!r} is not among {sorted(laws.LAWS)}")
    expected = len(self.function.coefficients)
    if len(self.theta) != expected:
      raise ValueError(
        f"law {self.law!r} has {expected} coefficients, not {len(self.theta)}"
      )
    if not np.isfinite(self.theta).all():
      raise ValueError(f"law {self.law!r}: coefficients {self.theta}")

  @property
  def function(self) -> laws.Law:
    """The law with its settings."""
    if self.law == "capacity":
      return laws.capacity_law(self.memory_bytes, self.max_requests)
    return laws.LAWS[self.law]

  def to_json(self) -> dict[str, Any]:
    """What `from_json` reads."""
    return dataclasses.asdict(self) | {
      "band": None if self.band is None else self.band._asdict(),
      "coefficients": [
        {"name": one.name, "unit": one.unit, "value": value}
        for one, value in zip(
          self.function.coefficients, self.theta, strict=True
        )
      ],
    }

  @classmethod
  def from_json(cls, entry: Mapping[str, Any], path: object) -> "FittedLaw":
    """The inverse of `to_json`; ValueError begins with `path`."""
    try:
      fields = {one.name for one in dataclasses.fields(cls)}
      known = {key: value for key, value in entry.items() if key in fields}
      band = entry.get("band")
      return cls(
        **known
        | {
          "theta": tuple(map(float, entry["theta"])),
          "ranges": {
            name: (float(low), float(high))
            for name, (low, high) in entry["ranges"].items()
          },
          "families": tuple(entry["families"]),
          "band": None if band is None else ErrorBand(**band),
        }
        | {
          name: float(entry[name])
          for name in ("memory_bytes", "max_requests")
          if name in entry
        }
      )
    except (KeyError, TypeError, ValueError) as error:
      raise ValueError(f"{path}: no fitted law: {error}") from None


class Prediction(NamedTuple):
  """Joules of a request.

  Attributes:
    joules: in all.
    parts: by part of the work, see `laws.PARTS`.
    low: lower end of the band, None if the law has none.
    high: upper end.
    notes: what has to be said beside the figure.
  """

  joules: float
  parts: dict[str, float]
  low: float | None
  high: float | None
  notes: list[str]


def fitted_on(
  law: laws.Law,
  theta: np.ndarray,
  data: Measurements,
  source: str,
  band: ErrorBand | None = None,
  **settings: float,
) -> FittedLaw:
  """A fitted law with the ranges and families of its rows."""
  columns = {
    "input_tokens": data.input_tokens,
    "output_tokens": data.output_tokens,
    "cached_tokens": data.cached_tokens,
    "parameters": np.asarray(data.architecture.parameters),
  }
  return FittedLaw(
    law=law.name,
    theta=tuple(map(float, theta)),
    source=source,
    ranges={
      name: (float(np.min(values)), float(np.max(values)))
      for name, values in columns.items()
    },
    families=tuple(sorted(set(data.families))),
    band=band,
    **settings,
  )


def predict(
  fitted: FittedLaw,
  model: Model,
  input_tokens: Number,
  output_tokens: Number,
  cached_tokens: Number = 0,
  concurrency: Number | None = None,
) -> Prediction:
  """Joules, parts, band and notes of one request.

  Args:
    fitted: the law.
    model: a dense decoder.
    input_tokens: I, the cached ones included.
    output_tokens: O.
    cached_tokens: C.
    concurrency: requests in a decoding step, for `capacity`.

  Raises:
    ValueError: lengths that no request has, or a model that the law's GPU
      cannot hold.
  """
  laws.check_lengths(input_tokens, output_tokens, cached_tokens)
  _check_coefficients(fitted, model, concurrency)
  if concurrency is not None and not concurrency > 0:
    raise ValueError(f"concurrency={concurrency}: must be positive")
  with jax.enable_x64(True):
    found = fitted.function.parts(
      fitted.theta,
      model.architecture,
      input_tokens,
      output_tokens,
      cached_tokens,
      concurrency,
    )
    parts = {name: float(value) for name, value in found.items()}
  joules = sum(parts.values())
  if not np.isfinite(joules):
    raise ValueError(
      f"{model.name}: its weights do not fit into"
      f" {fitted.memory_bytes / 1e9:g} GB, for which the law was fitted"
    )
  band = fitted.band
  return Prediction(
    joules=joules,
    parts=parts,
    low=None if band is None else band.low * joules,
    high=None if band is None else band.high * joules,
    notes=_notes(
      fitted, model, input_tokens, output_tokens, cached_tokens, joules
    )
    + memory_notes(
      fitted, model, input_tokens + output_tokens, concurrency or 1
    ),
  )


def memory_notes(
  fitted: FittedLaw, model: Model, tokens: Number, concurrency: Number
) -> list[str]:
  """A note if weights and caches do not fit into the law's GPU.

  Only `capacity` knows of a memory.

  Args:
    fitted: the law.
    model: whose weights and caches.
    tokens: of each request, in and out.
    concurrency: requests whose caches are held at once.
  """
  if fitted.law != "capacity":
    return []
  sizes = model.architecture
  needed = laws.weight_bytes(sizes) + concurrency * laws.cache_bytes(
    sizes, tokens
  )
  if needed <= fitted.memory_bytes:
    return []
  return [
    f"outside the law: {needed / 1e9:,.0f} GB of weights and caches of"
    f" {concurrency:g} requests do not fit into"
    f" {fitted.memory_bytes / 1e9:g} GB"
  ]


def _check_coefficients(
  fitted: FittedLaw, model: Model, concurrency: Number | None
) -> None:
  """ValueError where the law cannot speak of this model or concurrency."""
  if concurrency is not None and fitted.law != "capacity":
    raise ValueError(
      f"concurrency={concurrency:g}: law {fitted.law} does not know of it"
      " ('capacity' does)"
    )
  if not fitted.function.shared and "parameters" in fitted.ranges:
    low, high = fitted.ranges["parameters"]
    if not low <= model.architecture.parameters <= high:
      raise ValueError(
        f"law {fitted.law}: coefficients of one model of {low:,.0f} parameters,"
        f" not of {model.name}"
      )


def _notes(
  fitted: FittedLaw,
  model: Model,
  input_tokens: Number,
  output_tokens: Number,
  cached_tokens: Number,
  joules: float,
) -> list[str]:
  values = {
    "input_tokens": input_tokens,
    "output_tokens": output_tokens,
    "cached_tokens": cached_tokens,
    "parameters": model.architecture.parameters,
  }
  notes = []
  for name in _RANGES:
    if name not in fitted.ranges:
      continue
    (low, high), value = fitted.ranges[name], values[name]
    if low <= value <= high:
      continue
    if name == "cached_tokens" and high == 0:
      notes.append("deduced: no request with a cached prefix was fitted")
      continue
    # How many times, where that is a number.
    near, far = (high, value) if value > high else (value, low)
    how_far = f", {far / near:.3g} times beyond" if near else ""
    notes.append(
      f"extrapolation: {name}={value:,.0f} outside of {low:,.0f} to"
      f" {high:,.0f}{how_far}"
    )
  if fitted.families and model.family not in fitted.families:
    notes.append(
      f"no model of the family {model.family!r} was fitted"
      f" ({', '.join(fitted.families)})"
    )
  if joules <= 0:
    notes.append("the law is not positive here: its coefficients do not apply")
  return notes + model.notes(input_tokens + output_tokens)


def shipped() -> dict[str, FittedLaw]:
  """The fitted laws that come with the package, by name."""
  return read(DATASETS / "fitted_laws.json")


def read(path: pathlib.Path | str) -> dict[str, FittedLaw]:
  """Fitted laws of a file: a mapping, or the `fitted` of a fit's results.

  Raises:
    ValueError: the file does not hold any; names it.
  """
  found = read_json(path)
  if isinstance(found.get("fitted"), dict):
    found = {found["fitted"].get("law"): found["fitted"]}
  if not found:
    raise ValueError(f"{path}: no fitted laws")
  laws_of = {}
  for name, entry in found.items():
    if not isinstance(entry, dict):
      raise ValueError(f"{path}: no fitted laws")
    laws_of[str(name)] = FittedLaw.from_json(entry, path)
  return laws_of
