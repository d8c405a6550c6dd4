"""DSpine against DFlash over several training seeds, on the same answers.

  python -m experiments.compare_seeds --answers=runs/answers \\
      --work_dir=runs/seeds --seeds=0,1,2

Both methods start each seed from the same backbone and see the same data, steps
and optimiser. Held-out prompts are decoded at the given temperatures; the gain
at temperature 0 is a paired bootstrap over prompts, each prompt's rounds pooled
over the seeds, for looping and non-looping answers apart. Finished parts are
kept, so a killed run goes on. Time: about 4 minutes a seed on two CPU cores.
"""

import itertools
import sys

import numpy as np
from absl import flags

from dspine_jax.decoding import metrics
from experiments import run_io, targets
from experiments.stages import answers, comparison, training

_WORK_DIR = flags.DEFINE_string("work_dir", "runs/seeds", "Where results go.")
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
_ANSWERS = flags.DEFINE_string(
  "answers", "runs/answers", "Work directory of make_answers."
)
_PARTS = flags.DEFINE_list(
  "parts", ["train_t0"], "Which of its training parts to use."
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Training seeds.")
_TEMPERATURES = flags.DEFINE_list(
  "temperatures", ["0"], "Temperatures to decode at; 0 must be among them."
)
_EVAL = flags.DEFINE_integer(
  "eval_prompts", 96, "How many of the held-out prompts.", lower_bound=1
)
_STEPS = flags.DEFINE_integer(
  "steps", 500, "Optimiser steps of each drafter.", lower_bound=1
)
_BLOCK = flags.DEFINE_integer("block_size", 8, "Slots of a draft block.")
_LAYERS = flags.DEFINE_integer("num_layers", 2, "Draft layers.", lower_bound=1)


def pool(reports: list[dict]) -> list[list[int]]:
  """Each prompt's rounds over all seeds."""
  by_seed = [report["round_lengths"] for report in reports]
  return [
    list(itertools.chain(*rounds)) for rounds in zip(*by_seed, strict=True)
  ]


def main(unused_argv):
  try:
    seeds = [int(seed) for seed in _SEEDS.value]
  except ValueError:
    raise ValueError(
      f"--seeds={','.join(_SEEDS.value)}: whole numbers are needed"
    ) from None
  temperatures = answers.parse_temperatures(_TEMPERATURES.value)
  if 0.0 not in temperatures:
    raise ValueError("--temperatures: 0 is needed for the gain")
  target = targets.load(_TARGET.value)
  cfgs = {
    method: comparison.drafter_config(
      target,
      method,
      num_layers=_LAYERS.value,
      block_size=_BLOCK.value,
      steps=_STEPS.value,
    )
    for method in comparison.METHODS
  }
  train = training.load_parts(_ANSWERS.value, _PARTS.value, target)
  held_out = training.load_parts(_ANSWERS.value, ["held_out"], target)
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "target": _TARGET.value,
      "answers": _ANSWERS.value,
      "parts": _PARTS.value,
      "temperatures": temperatures,
      "eval_prompts": _EVAL.value,
      "drafters": cfgs,
    },
    argv=sys.argv,
    resume=True,
  )
  held_out = held_out.select(np.arange(len(held_out.lengths)) < _EVAL.value)
  new_tokens = held_out.tokens.shape[1] - int(held_out.prompt_lengths.max())
  features = training.features_on_demand(
    target, train, cfgs["dspine"].target_layer_ids
  )
  by_seed = []
  for seed in seeds:
    own = run_io.open_work_dir(
      str(work_dir.path / f"seed{seed}"),
      config={"seed": seed},
      argv=sys.argv,
      resume=True,
    )
    drafters = comparison.train_all(
      target,
      features,
      own,
      cfgs,
      comparison.train_config(_STEPS.value, seed),
    )
    by_seed.append(
      comparison.evaluate_all(
        target,
        drafters,
        held_out,
        own,
        new_tokens=new_tokens,
        seed=seed,
        temperatures=temperatures,
      )
    )
  results = summarize(by_seed, held_out.loops)
  run_io.write_json(work_dir.path / "results.json", results)
  show(results)


def summarize(by_seed: list[dict], looping: np.ndarray) -> dict:
  """Pooled means, the paired gain, and each seed's own gain."""
  pooled = {
    name: {
      method: pool([reports[name][method] for reports in by_seed])
      for method in comparison.METHODS
    }
    for name in by_seed[0]
  }
  groups = comparison.prompt_groups(looping)
  return {
    "gain": comparison.paired_gains(
      pooled["T=0"]["dflash"], pooled["T=0"]["dspine"], looping
    ),
    "gain_by_seed": [
      comparison.paired_gains(
        reports["T=0"]["dflash"]["round_lengths"],
        reports["T=0"]["dspine"]["round_lengths"],
        looping,
      )
      for reports in by_seed
    ],
    "mean_advancement": {
      name: {
        method: {
          group: metrics.mean_advancement([rounds[i] for i in rows])
          for group, rows in groups.items()
        }
        for method, rounds in by_method.items()
      }
      for name, by_method in pooled.items()
    },
    "lossless": [
      {method: report["lossless"] for method, report in reports["T=0"].items()}
      for reports in by_seed
    ],
  }


def show(results: dict) -> None:
  """Table, gains, and the check of the output."""
  rows = [
    [
      f"{method} {name}",
      *(f"{means[g]['pooled']:.2f}" for g in ("all", "non_looping", "looping")),
    ]
    for name, by_method in results["mean_advancement"].items()
    for method, means in by_method.items()
  ]
  headers = ["mean advancement", "all", "non-looping", "looping"]
  print(run_io.table(rows, headers))
  print("\n".join(comparison.gain_lines(results["gain"])))
  ratios = [gain["non_looping"]["ratio"] for gain in results["gain_by_seed"]]
  print("non-looping, seed by seed: " + ", ".join(f"x{r:.2f}" for r in ratios))
  checks = [one for seed in results["lossless"] for one in seed.values()]
  equal = sum(one["equal"] for one in checks)
  total = sum(one["prompts"] for one in checks)
  print(f"{equal} of {total} greedy outputs equal the target's own")


if __name__ == "__main__":
  run_io.run_app(main)
