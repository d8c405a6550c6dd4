"""Fits an energy law to measured requests, and says how wrong it is.

  python -m experiments.fit_energy --data=measured.csv --work_dir=runs/fit \\
      --holdout=model
  python -m experiments.fit_energy --data=mlenergy_v2_llm.csv \\
      --columns="model=Model,output_tokens=Avg Output Tokens" \\
      --columns="energy=Energy/req (J),concurrency=Avg BS (reqs)" \\
      --where="GPU=NVIDIA H100 80GB HBM3,TP=1,PP=1" \\
      --constant_input_tokens=300 --skip_unknown_models --non_negative \\
      --work_dir=runs/mlenergy

Without --data: the SweetSpot grid of 13 models, reconstructed from published
fits. Coefficients by gradient descent (L-BFGS on scaled coordinates), with
intervals by a bootstrap over models, errors on models or families that were
left out, and what the rows cannot tell apart. WORK_DIR gets results.json, which
predict_energy takes as --coefficients, and fit.png. A few seconds, most of them
compilation.
"""

import pathlib
import sys
from typing import Any

import numpy as np
from absl import flags

from energy import fit, laws, measurements, prediction, validation
from experiments import run_io
from experiments.stages import energy_inputs, energy_plots

_DATA = flags.DEFINE_string(
  "data", None, "CSV with a header; default: the reconstructed grid."
)
_WORK_DIR = flags.DEFINE_string("work_dir", "runs/fit_energy", "For results.")
_LAW = flags.DEFINE_enum(
  "law", "capacity", sorted(laws.LAWS), "The law to fit."
)
_OBJECTIVE = flags.DEFINE_enum(
  "objective", "relative", fit.OBJECTIVES, "What is made small."
)
_PER_TOKEN = flags.DEFINE_bool(
  "per_token", False, "Errors of J per output token (objective absolute)."
)
_METHOD = flags.DEFINE_enum("method", "lbfgs", fit.METHODS, "The optimiser.")
_NON_NEGATIVE = flags.DEFINE_bool(
  "non_negative", False, "No coefficient below zero."
)
_HOLDOUT = flags.DEFINE_enum(
  "holdout", "model", ["model", "family", "none"], "What is left out in turn."
)
_COLUMNS = flags.DEFINE_multi_string(
  "columns",
  [],
  "KEY=NAME,...: columns of the file for"
  f" {', '.join(measurements.COLUMNS)}, where they are called otherwise.",
)
_UNIT = flags.DEFINE_enum(
  "unit", "J", sorted(measurements.JOULES_PER_UNIT), "Of the energy column."
)
_ENERGY_PER_TOKEN = flags.DEFINE_bool(
  "energy_per_token", False, "The energy column is per output token."
)
_WHERE = flags.DEFINE_list(
  "where", [], "COLUMN=VALUE,...: rows that are used; default: all."
)
_INPUT = flags.DEFINE_float(
  "constant_input_tokens",
  None,
  "Input tokens of every row, for a file without them: an assumption.",
  lower_bound=0.0,
)
_SKIP = flags.DEFINE_bool(
  "skip_unknown_models", False, "Leave rows of unknown models out."
)
_CONFIGS = flags.DEFINE_list(
  "configs", [], "NAME=FILE,...: config.json of models that are not shipped."
)
_MEMORY = flags.DEFINE_float(
  "memory_gb", 80.0, "Of the GPU (law capacity).", lower_bound=0.0
)
_MAX_REQUESTS = flags.DEFINE_float(
  "max_requests",
  float(laws.MEASURED_REQUESTS),
  "Of the engine (law capacity).",
  lower_bound=1.0,
)
_REPLICATES = flags.DEFINE_integer(
  "replicates", 500, "Of the bootstrap over models; 0: none.", lower_bound=0
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the bootstrap.")

LEVEL = 0.9


def main(unused_argv):
  columns = energy_inputs.mapping(_COLUMNS)
  data, source = read_data(columns)
  settings = {
    "memory_bytes": 1e9 * _MEMORY.value,
    "max_requests": _MAX_REQUESTS.value,
  }
  law = laws.LAWS[_LAW.value]
  if law.name == "capacity":
    law = laws.capacity_law(**settings)
  if not law.shared and _HOLDOUT.value != "none":
    raise ValueError(
      f"--holdout={_HOLDOUT.value}: law {law.name} has coefficients of its own"
      " for every model; --holdout=none"
    )
  if _HOLDOUT.value != "none" and len(set(held_out_groups(data))) < 2:
    raise ValueError(
      f"--holdout={_HOLDOUT.value}: the rows are all of"
      f" {held_out_groups(data)[0]}; --holdout=none"
    )
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "data": _DATA.value,
      "law": law.name,
      "columns": columns,
      "where": _WHERE.value,
      "configs": _CONFIGS.value,
      "unit": _UNIT.value,
      "energy_per_token": _ENERGY_PER_TOKEN.value,
      "constant_input_tokens": _INPUT.value,
      "skip_unknown_models": _SKIP.value,
      "holdout": _HOLDOUT.value,
      "method": _METHOD.value,
      "replicates": _REPLICATES.value,
      "seed": _SEED.value,
      "settings": settings,
    }
    | objective(),
    argv=sys.argv,
    resume=True,
  )
  results: dict[str, Any] = {
    "source": source,
    "rows": len(data.joules),
    "models": sorted(set(data.models)),
    "law": law.name,
    "objective": _OBJECTIVE.value,
  }
  results |= (fit_shared if law.shared else fit_models)(
    law, data, source, settings, work_dir
  )
  run_io.write_json(work_dir.path / "results.json", results)
  print(f"results.json and fit.png are in {work_dir.path}")


def read_data(columns) -> tuple[measurements.Measurements, str]:
  """The rows, and what they are in words."""
  if _DATA.value is None:
    source = f"SweetSpot grid, {measurements.RECONSTRUCTED}"
    return measurements.reconstructed_grid(), source
  data = measurements.read_csv(
    _DATA.value,
    energy_inputs.models_with(_CONFIGS.value),
    columns=columns,
    unit=_UNIT.value,
    per_token=_ENERGY_PER_TOKEN.value,
    where=energy_inputs.mapping(_WHERE),
    input_tokens=_INPUT.value,
    skip_unknown_models=_SKIP.value,
  )
  source = pathlib.Path(_DATA.value).name
  if _INPUT.value is not None:
    source += f", {_INPUT.value:g} input tokens assumed"
  return data, source


def held_out_groups(data: measurements.Measurements) -> tuple[str, ...]:
  """What is left out together: of each row, its family or its model."""
  return data.families if _HOLDOUT.value == "family" else data.models


def objective() -> dict[str, Any]:
  """Keyword arguments of every fit of this run."""
  return {
    "objective": _OBJECTIVE.value,
    "per_token": _PER_TOKEN.value,
    "non_negative": _NON_NEGATIVE.value,
  }


def fit_shared(law, data, source, settings, work_dir) -> dict[str, Any]:
  """One theta for all models: scores, held-out scores, intervals."""
  found = fit.fit(law, data, method=_METHOD.value, **objective())
  predicted = validation.predict(law, found.theta, data)
  known = validation.identifiability(law, data)
  groups = held_out_groups(data)
  result: dict[str, Any] = {
    "fit": found,
    "in_sample": validation.score(data, predicted)._asdict(),
    "condition_number": known.condition,
    "weakest_direction": known.weakest,
    "correlations": known.correlations,
  }
  notes = []
  if found.rank < len(law.coefficients):
    notes.append(
      f"the rows determine {found.rank} of {len(law.coefficients)}"
      " coefficients; only predictions like the rows are meant to be used"
    )
  if (predicted <= 0).any():
    notes.append(f"{int((predicted <= 0).sum())} predictions are not positive")
  band = None
  if _HOLDOUT.value != "none":
    outer = validation.held_out(law, data, groups, **objective())
    result["held_out"] = validation.score(data, outer)._asdict()
    if (outer > 0).all():
      band = validation.ErrorBand.of(data.joules, outer, groups, LEVEL)
      result["band"] = band._asdict()
  rows = energy_plots.law_summary(law, found.theta)
  headers = ["coefficient", "value", "unit", "pays for"]
  if _REPLICATES.value and len(set(data.models)) > 1:
    draws = validation.bootstrap(
      law, data, replicates=_REPLICATES.value, seed=_SEED.value, **objective()
    )
    low, high = validation.interval(draws, LEVEL)
    result["bootstrap"] = {"low": low, "high": high, "level": LEVEL}
    headers.insert(2, f"{100 * LEVEL:.0f} % interval over models")
    for row, a, b in zip(rows, low, high, strict=True):
      row.insert(2, f"{a:.3g} to {b:.3g}")
  fitted = prediction.fitted_on(
    law, found.theta, data, source, band, **settings
  )
  result |= {"fitted": fitted.to_json(), "notes": notes}
  print(f"{source}: {len(data.joules)} rows, {len(set(data.models))} models\n")
  print(run_io.table(rows, headers))
  print()
  show_scores(result)
  print(f"condition number of the scaled terms: {known.condition:.1f}")
  for note in notes:
    print("note:", note)
  energy_plots.fit_quality(
    work_dir.path / "fit.png",
    data.joules,
    predicted,
    data.models,
    f"{law.name}, {_OBJECTIVE.value}, in sample; {source}",
  )
  return result


def fit_models(law, data, source, settings, work_dir) -> dict[str, Any]:
  """A theta of each model."""
  theta = validation.fit_each_model(law, data, **objective())
  names = np.asarray(data.models)
  predicted = validation.predict(
    law, np.stack([theta[name] for name in data.models]), data
  )
  errors = {
    name: validation.mape(data.joules[names == name], predicted[names == name])
    for name in theta
  }
  result: dict[str, Any] = {
    "theta": theta,
    "mape": errors,
    "mean_mape": float(np.mean(list(errors.values()))),
    "in_sample": validation.score(data, predicted)._asdict(),
  }
  if len(theta) == 1:
    fitted = prediction.fitted_on(
      law, next(iter(theta.values())), data, source, **settings
    )
    result["fitted"] = fitted.to_json()
  print(
    run_io.table(
      [[name, *theta[name], errors[name]] for name in theta],
      ["model", *(f"{c.name}, {c.unit}" for c in law.coefficients), "MAPE, %"],
    )
  )
  print()
  show_scores(result)
  print(f"mean MAPE of a model: {result['mean_mape']:.2f} %")
  energy_plots.fit_quality(
    work_dir.path / "fit.png",
    data.joules,
    predicted,
    data.models,
    f"{law.name} of each model, {_OBJECTIVE.value}, in sample; {source}",
  )
  return result


def show_scores(result) -> None:
  """R2 and MAPE, in sample and held out."""
  rows = [
    [title, *(result[key][name] for name in ("mape", "r2", "r2_per_token"))]
    for key, title in (
      ("in_sample", "in sample"),
      ("held_out", f"left out: {_HOLDOUT.value}"),
    )
    if key in result
  ]
  print(run_io.table(rows, ["", "MAPE, %", "R2, J", "R2, J/output token"]))
  if "band" in result:
    band = result["band"]
    print(
      f"a new {_HOLDOUT.value}: {100 * band['level']:.0f} % between"
      f" {band['low']:.2f} and {band['high']:.2f} times the prediction"
    )


if __name__ == "__main__":
  run_io.run_app(main)
