"""Trains DFlash and DSpine for the embedded target and shows what they gain.

  make quickstart        or        python -m experiments.quickstart

The embedded target answers prompts cut from the standard library's source; both
drafters are trained from the same initial backbone on the same data, steps and
seed; held-out prompts are decoded at temperature 0 (where the output must be
the target's own, token by token) and 1; and decoding is timed against plain
autoregressive decoding in the same run. A table, two PNG pictures and
results.json are left in WORK_DIR. Finished parts are kept, so a killed run goes
on. Time: within 10 minutes on two CPU cores.
"""

import sys
import time
from typing import Any

import numpy as np
from absl import flags

from experiments import provenance, run_io, targets
from experiments.stages import answers as answers_stage
from experiments.stages import (
  comparison,
  evaluation,
  feature_sources,
  plots,
  timing,
)

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/quickstart", "Where everything goes."
)
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
_CORPUS = flags.DEFINE_string(
  "corpus", None, "Folder of *.py files; default: the standard library."
)
_TRAIN = flags.DEFINE_integer(
  "train_prompts", 1536, "Training prompts.", lower_bound=1
)
_EVAL = flags.DEFINE_integer(
  "eval_prompts", 128, "Held-out prompts.", lower_bound=1
)
_SPEED = flags.DEFINE_integer(
  "speed_prompts", 12, "Held-out prompts timed at batch 1.", lower_bound=1
)
_NEW = flags.DEFINE_integer(
  "new_tokens", 144, "Tokens of an answer.", lower_bound=2
)
_STEPS = flags.DEFINE_integer(
  "steps", 500, "Optimiser steps of each drafter.", lower_bound=1
)
_BLOCK = flags.DEFINE_integer("block_size", 8, "Slots of a draft block.")
_LAYERS = flags.DEFINE_integer("num_layers", 2, "Draft layers.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of everything.", lower_bound=0)

_PROMPT_TOKENS = 64


def show(results: dict[str, Any], seconds: float) -> None:
  """The table and the sentences under it."""
  rows = []
  for name, by_method in results["reports"].items():
    for method, report in by_method.items():
      label = f"{method} {name}"
      row = evaluation.row_for_table(label, report)
      speed = results["speed"].get(method) if name == "T=0" else None
      row += (
        [
          f"{speed['speculative_tokens_per_second']:.0f}",
          f"{speed['ratio']:.2f}x",
        ]
        if speed
        else ["", ""]
      )
      rows.append(row)
  headers = [
    "mean advancement",
    "all",
    "non-looping",
    "looping",
    "tokens/s",
    "vs autoregressive",
  ]
  print(run_io.table(rows, headers))
  print("\n".join(comparison.gain_lines(results["gain"])))
  for method, report in results["reports"]["T=0"].items():
    lossless = report["lossless"]
    print(
      f"{method}: {lossless['equal']} of {lossless['prompts']} greedy outputs"
      " equal the target's own, token by token"
    )
    for one in lossless["differing"]:
      print(
        f"  prompt {one['prompt']} differs at token {one['place']}, where the"
        f" target's two logits are {one['margin']} apart"
      )
  print(f"pictures and results.json are in {results['work_dir']}")
  print(f"took {seconds / 60:.1f} minutes")


def main(unused_argv):
  began = time.monotonic()
  options = {
    "target": _TARGET.value,
    "train_prompts": _TRAIN.value,
    "eval_prompts": _EVAL.value,
    "speed_prompts": _SPEED.value,
    "new_tokens": _NEW.value,
    "steps": _STEPS.value,
    "block_size": _BLOCK.value,
    "num_layers": _LAYERS.value,
    "seed": _SEED.value,
  }
  # Everything that may be wrong with the flags comes before any work.
  target = targets.load(_TARGET.value)
  answers_stage.check_lengths(target, _PROMPT_TOKENS, _NEW.value)
  cfgs = {
    method: comparison.drafter_config(
      target,
      method,
      num_layers=_LAYERS.value,
      block_size=_BLOCK.value,
      steps=_STEPS.value,
    )
    for method in ("dflash", "dspine")
  }
  text = answers_stage.read_text(_CORPUS.value)
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config=options | {"corpus_digest": text.digest},
    argv=sys.argv,
    resume=True,
  )
  folder = work_dir.path / "answers"
  folder.mkdir(exist_ok=True)
  sets = answers_stage.answer_parts(
    target,
    text,
    folder,
    train_prompts=_TRAIN.value,
    eval_prompts=_EVAL.value,
    prompt_tokens=_PROMPT_TOKENS,
    new_tokens=_NEW.value,
    temperatures=[0.0],
    batch_size=64,
    seed=_SEED.value,
  )
  features = feature_sources.on_demand(
    target,
    sets["train_t0"],
    cfgs["dspine"].target_layer_ids,
    work_dir.path / "features",
  )
  drafters = {
    method: comparison.train_cell(
      target,
      features,
      work_dir.path / method,
      cfg,
      comparison.train_config(_STEPS.value, _SEED.value),
    )
    for method, cfg in cfgs.items()
  }
  held_out = sets["held_out"]
  reports = {
    f"T={temperature:g}": {
      method: comparison.decode_cell(
        work_dir.path / "cells" / f"{method}_T{temperature:g}.json",
        target,
        drafter,
        held_out,
        comparison.decode_config(target, held_out, temperature),
        seed=_SEED.value,
      )
      for method, drafter in drafters.items()
    }
    for temperature in (0.0, 1.0)
  }
  timed = held_out.select(np.arange(min(_SPEED.value, len(held_out.lengths))))
  speed = {
    method: timing.time_generation(
      target.model,
      drafter,
      timed,
      comparison.decode_config(target, timed, 0.0),
    )
    for method, drafter in drafters.items()
  }
  results = {
    "work_dir": str(work_dir.path),
    "answers": {
      name: answers_stage.describe(part) for name, part in sets.items()
    },
    "parameters": {
      method: comparison.parameter_counts(drafter)
      for method, drafter in drafters.items()
    },
    "reports": reports,
    "gain": comparison.gains(
      {"held_out": [reports["T=0"]["dflash"]]},
      {"held_out": [reports["T=0"]["dspine"]]},
      {"held_out": held_out.loops},
    ),
    "speed": speed,
    "device": provenance.device_summary(),
    "seconds": time.monotonic() - began,
  }
  run_io.write_json(work_dir.path / "results.json", results)
  draw(work_dir, results)
  show(results, results["seconds"])


def draw(work_dir: run_io.WorkDir, results: dict[str, Any]) -> None:
  """acceptance.png and advancement.png."""
  at_zero = results["reports"]["T=0"]
  plots.acceptance_by_position(
    work_dir.path / "acceptance.png",
    {
      method: report["all"]["acceptance_by_position"]
      for method, report in at_zero.items()
    },
    "Accepted proposals, held-out prompts, T = 0",
  )
  speed = results["speed"]
  plain = [one["autoregressive_tokens_per_second"] for one in speed.values()]
  plots.advancement_and_speed(
    work_dir.path / "advancement.png",
    {
      method: report["all"]["mean_advancement"]["pooled"]
      for method, report in at_zero.items()
    },
    {"autoregressive": float(np.mean(plain))}
    | {
      method: one["speculative_tokens_per_second"]
      for method, one in speed.items()
    },
    "Held-out prompts, T = 0",
  )


if __name__ == "__main__":
  run_io.run_app(main)
