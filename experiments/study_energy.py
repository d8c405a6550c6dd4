"""Every figure that the README gives about the energy laws, in one run.

  python -m experiments.study_energy --work_dir=runs/study_energy \\
      --mlenergy=mlenergy_v2_llm.csv

On the SweetSpot grid (reconstructed from published fits, not measured): the
laws of single models beside their paper's table; SIMPLE under every objective
and the pooled baselines, in sample and with models left out; our law by nested
selection, its ablation, its band's coverage; and how much coefficients and
errors move when the grid is disturbed by the published error. With --mlenergy,
the batch term on measured rows of the ML.ENERGY leaderboard v2, whose input
lengths are unknown. WORK_DIR gets results.json, table.md and fitted_laws.json
(what predict_energy ships). About a minute on two CPU cores.
"""

import dataclasses
import sys
from typing import Any

import numpy as np
from absl import flags

from energy import (
  architecture,
  fit,
  laws,
  measurements,
  prediction,
  selection,
  sweet_spot,
  validation,
)
from experiments import run_io

_WORK_DIR = flags.DEFINE_string("work_dir", "runs/study_energy", "For results.")
_MLENERGY = flags.DEFINE_string(
  "mlenergy", None, "mlenergy_v2_llm.csv; default: that part is left out."
)
_REPLICATES = flags.DEFINE_integer(
  "replicates", 200, "Of bootstrap and disturbance.", lower_bound=10
)
_SEED = flags.DEFINE_integer("seed", 0, "Of bootstrap and disturbance.")

SOURCE = f"SweetSpot grid, {measurements.RECONSTRUCTED}"
HELD_OUT_REPLICATES = 20  # Of the disturbed grids; each takes 13 fits.
ML_GPUS = ("NVIDIA H100 80GB HBM3", "NVIDIA A100-SXM4-40GB")
ML_INPUTS = (0.0, 85.0, 300.0, 600.0)

_NEXT = "next_token"


def _pooled(name, coefficients, terms) -> laws.Law:
  coefficients = tuple(laws.Coefficient(c, "", _NEXT, "") for c in coefficients)
  return laws.Law(name, coefficients, terms, shared=True)


# What pooled models were compared with; N is the parameter count.
POOLED = {
  "a I + b O + c I O": dataclasses.replace(
    laws.LAWS["baseline4"], name="pooled", shared=True
  ),
  "N (a I + b O)": _pooled(
    "lengths by N",
    "ab",
    lambda a, r: (
      a.parameters * r.input_tokens,
      a.parameters * r.output_tokens,
    ),
  ),
  "N (a I + b O + c I O)": _pooled(
    "lengths and product by N",
    "abc",
    lambda a, r: (
      a.parameters * r.input_tokens,
      a.parameters * r.output_tokens,
      a.parameters * r.input_tokens * r.output_tokens,
    ),
  ),
  "SIMPLE without R": dataclasses.replace(
    laws.SIMPLE,
    name="simple without R",
    terms=lambda a, r: laws.SIMPLE.terms(
      a._replace(num_kv_heads=a.num_heads), r
    ),
  ),
}

OBJECTIVES: dict[str, dict[str, Any]] = {
  "absolute, J": {"objective": "absolute"},
  "absolute, J/output token": {"objective": "absolute", "per_token": True},
  "relative": {"objective": "relative"},
  "relative, none below 0": {"objective": "relative", "non_negative": True},
  "soft-L1 of relative": {"objective": "soft_l1"},
  "log": {"objective": "log"},
}


def main(unused_argv):
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "mlenergy": _MLENERGY.value,
      "replicates": _REPLICATES.value,
      "seed": _SEED.value,
    },
    argv=sys.argv,
    resume=True,
  )
  data = measurements.reconstructed_grid()
  results: dict[str, Any] = {"source": SOURCE}
  text = []

  def section(key, title, found, headers, rows):
    results[key] = found
    text.append(f"## {title}\n\n{run_io.markdown_table(rows, headers)}\n")
    print(f"{title}\n\n{run_io.table(rows, headers)}\n", flush=True)

  single = single_models(data)
  section(
    "single_models",
    f"Laws of single models, mean MAPE in % ({SOURCE}; paper: measurements)",
    single,
    ["law", "here", "paper"],
    [[name, one["mape"], one["paper"]] for name, one in single["laws"].items()],
  )
  section(
    "optima",
    "Output length of least joules per token, 64 tokens in",
    single["optima"],
    ["model", "closed form", "by gradient", "paper"],
    [[name, *one.values()] for name, one in single["optima"].items()],
  )
  shared = shared_laws(data)
  section(
    "shared_laws",
    f"One theta for 13 models ({SOURCE})",
    shared,
    [
      "law, objective",
      "MAPE, %",
      "R2, J",
      "R2, J/token",
      "not positive",
      "left out: MAPE, %",
      "R2, J ",
      "R2, J/token ",
      "family left out: MAPE, %",
    ],
    [
      [
        name,
        *one["in_sample"].values(),
        one["not_positive"],
        *one["model_left_out"].values(),
        one["family_left_out"]["mape"],
      ]
      for name, one in shared.items()
    ]
    + [["paper, SIMPLE", 11.974, None, 0.969, None, 13.252, None, 0.944, None]],
  )
  own = our_law(data)
  section(
    "our_law",
    f"Our law: nested selection {own['nested_mape']:.2f} %, leave-one-model-out"
    f" MAPE with terms changed ({SOURCE})",
    own,
    ["terms", "MAPE, %"],
    [list(item) for item in own["ablation"].items()],
  )
  section(
    "band",
    "90 % interval for a model that was not fitted: share of its rows inside",
    own["coverage"],
    ["model", *own["coverage"]],
    [
      [name, *(one[name] for one in own["coverage"].values())]
      for name in [*dict.fromkeys(data.models), "mean"]
    ],
  )
  moved = disturbance(data)
  section(
    "disturbance",
    "How far a disturbance of the published error moves the fits",
    moved,
    ["law, disturbance", "coefficients, sd in %", "MAPE, %", "left out, %"],
    [
      [
        name,
        ", ".join(f"{100 * sd:.1f}" for sd in one["relative_sd"]),
        "{:.2f} to {:.2f}".format(*one["mape"]),
        "{:.2f} to {:.2f}".format(*one["held_out_mape"]),
      ]
      for name, one in moved.items()
    ],
  )
  if _MLENERGY.value is not None:
    batch = batch_term(_MLENERGY.value)
    section(
      "batch_term",
      "Batch term on ML.ENERGY v2, one GPU (measured; input tokens assumed)",
      batch,
      [
        "GPU",
        "input tokens",
        "rows",
        "models",
        "MAPE, %",
        "model left out, %",
        "nJ per parameter read",
        "without it: MAPE, %",
      ],
      [
        [
          one["gpu"].split()[1],
          one["input_tokens"],
          one["rows"],
          len(one["errors"]),
          one["mape"],
          one["held_out_mape"],
          1e9 * one["theta"]["weights"],
          one["mape_without"],
        ]
        for one in batch
      ],
    )
    worst = [
      [one["gpu"].split()[1], name, *errors.values()]
      for one in batch
      if one["input_tokens"] == 300
      for name, errors in one["errors"].items()
    ]
    section(
      "batch_failures",
      "Where it fails: error in % of each model, 300 input tokens assumed",
      worst,
      ["GPU", "model", "mean", "smallest batch", "largest batch"],
      worst,
    )
  run_io.write_json(work_dir.path / "fitted_laws.json", fitted_laws(data))
  run_io.write_json(work_dir.path / "results.json", results)
  (work_dir.path / "table.md").write_text("\n".join(text), encoding="utf-8")
  print(f"results.json, table.md and fitted_laws.json are in {work_dir.path}")


def single_models(data) -> dict[str, Any]:
  """SweetSpot and what it is compared with, refitted to each model."""
  published = measurements.sweetspot_mape()
  theirs = measurements.sweetspot_coefficients()
  found: dict[str, Any] = {}
  recovered = float("nan")
  for name in next(iter(published.values())):
    law = laws.LAWS[name]
    # As in the paper: least squares of joules per output token.
    theta = validation.fit_each_model(
      law, data, objective="absolute", per_token=True
    )
    rows = np.stack([theta[model] for model in data.models])
    found[name] = {
      "mape": validation.mape(data.joules, validation.predict(law, rows, data)),
      "paper": float(np.mean([one[name] for one in published.values()])),
    }
    if law is laws.SWEETSPOT:
      recovered = max(
        float(np.max(np.abs(theta[model] / theirs[model] - 1)))
        for model in theirs
      )
  models = architecture.shipped_models()
  printed = measurements.sweetspot_optimum_outputs()
  optima = {
    name: {
      "closed_form": float(
        sweet_spot.closed_form(
          laws.SWEETSPOT, theta, models[name].architecture, 64
        )
      ),
      "by_gradient": float(
        sweet_spot.by_gradient(
          laws.SWEETSPOT, theta, models[name].architecture, 64
        )
      ),
      "paper": printed[name],
    }
    for name, theta in theirs.items()
  }
  return {
    "laws": found,
    "largest_change_of_table_5": recovered,
    "optima": optima,
  }


def shared_laws(data) -> dict[str, Any]:
  """SIMPLE under every objective, the pooled baselines, and ours."""
  runs = {
    f"SIMPLE, {name}": (laws.SIMPLE, options)
    for name, options in OBJECTIVES.items()
  }
  runs |= {f"{name}, relative": (law, {}) for name, law in POOLED.items()}
  runs["capacity, relative"] = (laws.LAWS["capacity"], {})
  found = {}
  for name, (law, options) in runs.items():
    theta = fit.fit(law, data, **options).theta
    predicted = validation.predict(law, theta, data)
    scores: dict[str, Any] = {
      "theta": theta,
      "in_sample": validation.score(data, predicted)._asdict(),
      "not_positive": int((predicted <= 0).sum()),
    }
    for key, groups in (("model", data.models), ("family", data.families)):
      outer = validation.held_out(law, data, groups, **options)
      scores[f"{key}_left_out"] = validation.score(data, outer)._asdict()
    found[name] = scores
  return found


def our_law(data) -> dict[str, Any]:
  """Nested selection, what it chose, the ablation, the band's coverage."""
  chooser = selection.Selection(data)
  nested, chosen = chooser.nested()
  every = range(len(chooser.folds))
  coverage = {}
  for name in ("capacity", "simple"):
    inside = validation.band_coverage(laws.LAWS[name], data, data.models)
    coverage[name] = inside | {"mean": float(np.mean(list(inside.values())))}
  capacity = laws.LAWS["capacity"]
  draws = validation.bootstrap(
    capacity, data, replicates=_REPLICATES.value, seed=_SEED.value
  )
  return {
    "candidates": sum(1 for _ in selection.candidates()),
    "nested_mape": nested,
    "chosen_without": chosen,
    "chosen": chooser.best(every),
    "ablation": selection.ablation(data),
    "coverage": coverage,
    "bootstrap_90": validation.interval(draws),
    "condition_number": {
      name: validation.identifiability(laws.LAWS[name], data).condition
      for name in ("simple", "capacity")
    },
  }


def disturbance(data) -> dict[str, Any]:
  """Refits to the grid times noise whose mean size is the published MAPE."""
  sizes = {
    model: one["sweetspot"] / 100
    for model, one in measurements.sweetspot_mape().items()
  }
  # Of a normal variable with mean absolute value `size`.
  sd = np.asarray([sizes[m] for m in data.models]) * np.sqrt(np.pi / 2)
  folds = {name: i for i, name in enumerate(dict.fromkeys(data.models))}
  row_fold = np.asarray([folds[name] for name in data.models])
  rng = np.random.default_rng(_SEED.value)
  found = {}
  for kind in ("every point", "a factor a model"):
    noise = rng.normal(size=(_REPLICATES.value, len(sd)))
    if kind == "a factor a model":
      noise = noise[:, :: len(sd) // len(folds)][:, row_fold]
    for name in ("simple", "capacity"):
      law = laws.LAWS[name]
      terms = {
        "simple": selection.SIMPLE_TERMS,
        "capacity": selection.CAPACITY_TERMS,
      }[name]
      moved = [
        data._replace(joules=data.joules * np.exp(sd * one)) for one in noise
      ]
      theta = np.asarray([fit.closed_form(law, one) for one in moved])
      errors = [
        validation.mape(one.joules, validation.predict(law, own, one))
        for one, own in zip(moved, theta, strict=True)
      ]
      outer = [
        selection.Selection(one).held_out_error(terms, range(len(folds)))
        for one in moved[:HELD_OUT_REPLICATES]
      ]
      found[f"{name}, {kind}"] = {
        "theta_mean": theta.mean(axis=0),
        "relative_sd": theta.std(axis=0) / np.abs(theta.mean(axis=0)),
        "mape": validation.interval(np.asarray(errors)),
        "held_out_mape": validation.interval(np.asarray(outer)),
      }
  return found


def batch_term(path: str) -> list[dict[str, Any]]:
  """The capacity law with the measured batch, for assumed input lengths."""
  law = laws.LAWS["capacity"]
  found = []
  for gpu in ML_GPUS:
    for inputs in ML_INPUTS:
      data = measurements.read_csv(
        path,
        architecture.shipped_models(),
        columns={
          "model": "Model",
          "output_tokens": "Avg Output Tokens",
          "energy": "Energy/req (J)",
          "concurrency": "Avg BS (reqs)",
        },
        where={"GPU": gpu, "TP": "1", "PP": "1"},
        input_tokens=inputs,
        skip_unknown_models=True,
      )
      theta = fit.fit(law, data, non_negative=True).theta
      predicted = validation.predict(law, theta, data)
      outer = validation.held_out(law, data, data.models, non_negative=True)
      # All steps alone: the batch shares nothing.
      alone = data._replace(concurrency=np.ones_like(data.joules))
      plain = fit.fit(law, alone, non_negative=True).theta
      found.append(
        {
          "gpu": gpu,
          "input_tokens": inputs,
          "rows": len(data.joules),
          "theta": {
            one.name: x for one, x in zip(law.coefficients, theta, strict=True)
          },
          "mape": validation.mape(data.joules, predicted),
          "held_out_mape": validation.mape(data.joules, outer),
          "mape_without": validation.mape(
            data.joules, validation.predict(law, plain, alone)
          ),
          "errors": errors_by_model(data, outer),
        }
      )
  return found


def errors_by_model(data, predicted) -> dict[str, dict[str, float]]:
  """Signed held-out error in percent: mean, at the least and largest batch."""
  names = np.asarray(data.models)
  errors = 100 * (predicted / data.joules - 1)
  found = {}
  for name in dict.fromkeys(data.models):
    rows = np.flatnonzero(names == name)
    order = rows[np.argsort(data.concurrency[rows])]
    found[name] = {
      "mean": float(errors[rows].mean()),
      "smallest": float(errors[order[0]]),
      "largest": float(errors[order[-1]]),
    }
  return found


def fitted_laws(data) -> dict[str, Any]:
  """What ships: ours, SIMPLE refitted, and SIMPLE of its paper's example."""
  found = {}
  for name, key in (("capacity", "capacity"), ("simple", "simple_refit")):
    law = laws.LAWS[name]
    outer = validation.held_out(law, data, data.models)
    band = validation.ErrorBand.of(data.joules, outer, data.models)
    theta = fit.fit(law, data).theta
    found[key] = prediction.fitted_on(law, theta, data, SOURCE, band)
  found["simple"] = dataclasses.replace(
    found["simple_refit"],
    theta=laws.SIMPLE_OF_THE_PAPER,
    source="solved from the worked example of arXiv 2611.03330 (ranges and"
    " interval: those of simple_refit)",
  )
  return {name: one.to_json() for name, one in found.items()}


if __name__ == "__main__":
  run_io.run_app(main)
