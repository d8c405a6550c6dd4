"""What each part of DSpine is worth: variants trained on equal terms.

  python -m experiments.ablate_dspine --answers=runs/answers \\
      --work_dir=runs/ablation --seeds=0,1,2

First a ladder from a causal DFlash to all of DSpine, one part a rung; then the
whole method with single parts taken away or replaced, and with other widths.
Every variant starts each seed from the same backbone and sees the same data,
anchors, steps and optimiser. Held-out prompts are decoded greedily; advancement
relative to all of DSpine is a paired bootstrap over seeds and prompts, for
looping and non-looping answers apart. Beside it stand teacher-forced means on
the same answers: expected advancement, share of labels among the candidates,
accuracy of the base logits.

--variants takes names of the table, such as --variants="+ L1,top-k 4"; all of
DSpine is always among them. WORK_DIR gets results.json, table.md and
ablation.png. Variants of the same configuration are trained once, and finished
cells are kept: a killed run goes on, and seeds or variants can be added later.
Time on two CPU cores, embedded target, 800 steps of block 16: an estimated 5
minutes for each of 20 configurations and each seed.
"""

import dataclasses
import functools
import hashlib
import json
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
from absl import flags

from dspine_jax import configs
from experiments import provenance, run_io, targets
from experiments.stages import (
  comparison,
  feature_sources,
  plots,
  published,
  training,
)

# Without injection nothing reads a predecessor that could be replaced.
_UNINJECTED = {"injects": False, "replacement_probability": 0.0}
_BARE = _UNINJECTED | {"refines": False}
FULL = "+ replacement curriculum"

# Name -> method, and what is changed: its options, or fields of the
# configuration that they do not have.
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
  "causal DFlash with CE": (
    "dflash",
    # DSpine's weights of the slots, which are no part of what is compared.
    {
      "is_causal": True,
      "decay_gamma": configs.conventions("dspine").decay_gamma,
    },
  ),
  "+ L1": ("dspine", _BARE | {"alignment_weight": 0.0}),
  "+ layer cosine": ("dspine", _BARE),
  "+ final refinement": ("dspine", _UNINJECTED),
  "+ injection": ("dspine", {"replacement_probability": 0.0}),
  FULL: ("dspine", {}),
  "injection without alignment": ("dspine", {"alignment_weight": 0.0}),
  "alignment without injection": ("dspine", _UNINJECTED),
  "full without refinement": ("dspine", {"refines": False}),
  "full without refinement and injection": ("dspine", _BARE),
  "layer supervision by token CE": (
    "dspine",
    {"layer_supervision": "token_ce"},
  ),
  "readouts initialised whitened": ("dspine", {"readout_init": "whitened"}),
  "0.5 CE + 0.5 L1": ("dspine", {"ce_weight": 0.5}),
}

_WORK_DIR = flags.DEFINE_string("work_dir", "runs/ablation", "Where cells go.")
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
_ANSWERS = flags.DEFINE_string(
  "answers", "runs/answers", "Work directory of make_answers."
)
_PARTS = flags.DEFINE_list(
  "parts", ["train_t0"], "Which of its training parts to use."
)
_BENCHMARKS = flags.DEFINE_list(
  "benchmarks", None, "Which of its other parts to decode; default: all."
)
_VARIANTS = flags.DEFINE_list(
  "variants",
  None,
  f"Lines of the table: {', '.join(VARIANTS)}; rank, message or top-k and a"
  " width that has a flag of its own. Default: all.",
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Training seeds.")
_EVAL = flags.DEFINE_integer(
  "eval_prompts", 96, "Prompts of each benchmark.", lower_bound=1
)
_STEPS = flags.DEFINE_integer(
  "steps", 800, "Optimiser steps of each drafter.", lower_bound=1
)
_TRAIN_BATCH = flags.DEFINE_integer(
  "batch_size", 8, "Sequences of a training step.", lower_bound=1
)
_ANCHORS = flags.DEFINE_integer(
  "num_anchors", 16, "Blocks per sequence.", lower_bound=1
)
_LR = flags.DEFINE_float("learning_rate", 0.02, "Peak learning rate of muon.")
_BLOCK = flags.DEFINE_integer("block_size", 16, "Slots of a draft block.")
_LAYERS = flags.DEFINE_integer("num_layers", 2, "Draft layers.", lower_bound=1)
_RANK = flags.DEFINE_integer("transfer_rank", 128, "Code width.")
_MESSAGE = flags.DEFINE_integer("message_size", 64, "Message width.")
_TOP_K = flags.DEFINE_integer("top_k", 16, "Candidates per slot.")
_BETA = flags.DEFINE_float(
  "alignment_weight", 0.1, "Weight of the layer supervision."
)
_RANKS = flags.DEFINE_list(
  "transfer_ranks", ["32", "64", "192"], "Other code widths to train."
)
_MESSAGES = flags.DEFINE_list(
  "message_sizes", ["16", "32", "128"], "Other message widths to train."
)
_TOP_KS = flags.DEFINE_list(
  "top_ks", ["4", "8", "16", "32"], "Numbers of candidates to train."
)

MEANS = ("expected_advancement", "coverage", "base_accuracy")


def table_of_variants() -> dict[str, tuple[str, dict[str, Any]]]:
  """`VARIANTS` and one of each width that the flags name."""
  widths = {
    "rank": (_RANKS, "transfer_rank"),
    "message": (_MESSAGES, "message_size"),
    "top-k": (_TOP_KS, "top_k"),
  }
  return VARIANTS | {
    f"{name} {value}": ("dspine", {option: value})
    for name, (flag, option) in widths.items()
    for value in comparison.whole_numbers(flag, 1)
  }


def chosen_variants() -> dict[str, tuple[str, dict[str, Any]]]:
  """Those of --variants and `FULL`, in the order of the table."""
  table = table_of_variants()
  names = list(table) if _VARIANTS.value is None else _VARIANTS.value
  unknown = sorted(set(names) - set(table))
  if unknown or not names:
    raise ValueError(
      f"--variants={','.join(names)}: {unknown} not among {list(table)}"
    )
  return {
    name: one for name, one in table.items() if name in names or name == FULL
  }


def configuration(
  target: targets.NamedTarget, method: str, changes: Mapping[str, Any]
) -> configs.DrafterConfig:
  """A small drafter of the method with the changes of a variant."""
  cfg = comparison.drafter_config(
    target,
    method,
    num_layers=_LAYERS.value,
    block_size=_BLOCK.value,
    steps=_STEPS.value,
    sizes=comparison.Sizes(
      transfer_rank=_RANK.value,
      message_size=_MESSAGE.value,
      top_k=_TOP_K.value,
      alignment_weight=_BETA.value,
    ),
  )
  options = getattr(cfg, method)
  names = {field.name for field in dataclasses.fields(options)}
  own = {name: value for name, value in changes.items() if name in names}
  rest = {name: value for name, value in changes.items() if name not in names}
  options = dataclasses.replace(options, **own)
  return dataclasses.replace(cfg, **{method: options} | rest)


def cell_name(cfg: configs.DrafterConfig) -> str:
  """The same for the same configuration, whatever its variants are called."""
  text = json.dumps(run_io.to_json(cfg), sort_keys=True)
  return f"{cfg.method}_{hashlib.sha256(text.encode()).hexdigest()[:12]}"


def main(unused_argv):
  seeds = comparison.whole_numbers(_SEEDS, 0)
  if not seeds:
    raise ValueError("--seeds is empty")
  target = targets.load(_TARGET.value)
  cfgs = {
    name: configuration(target, *variant)
    for name, variant in chosen_variants().items()
  }
  train_cfgs = {
    seed: comparison.train_config(
      _STEPS.value,
      seed,
      batch_size=_TRAIN_BATCH.value,
      num_anchors=_ANCHORS.value,
      learning_rate=_LR.value,
    )
    for seed in seeds
  }
  train = training.load_parts(_ANSWERS.value, _PARTS.value, target)
  benchmarks = training.load_benchmarks(
    _ANSWERS.value, _BENCHMARKS.value, target, limit=_EVAL.value
  )
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "target": _TARGET.value,
      "answers": _ANSWERS.value,
      "parts": _PARTS.value,
      "eval_prompts": _EVAL.value,
      "steps": _STEPS.value,
    },
    argv=sys.argv,
    resume=True,
  )
  taps = cfgs[FULL].target_layer_ids
  features = {
    name: feature_sources.on_demand(
      target, part, taps, work_dir.path / "features" / name
    )
    for name, part in {"train": train, **benchmarks}.items()
  }

  @functools.cache
  def measure(cfg, seed):
    """Reports and teacher-forced means of one training, by benchmark."""
    cell = f"{cell_name(cfg)}_s{seed}"
    drafter = comparison.train_cell(
      target,
      features["train"],
      work_dir.path / "drafters" / cell,
      cfg,
      train_cfgs[seed],
    )
    reports, means = {}, {}
    for name, prompts in benchmarks.items():
      reports[name] = comparison.decode_cell(
        work_dir.path / "cells" / name / f"{cell}.json",
        target,
        drafter,
        prompts,
        comparison.decode_config(target, prompts, 0.0),
        seed=seed,
      )
      means[name] = comparison.means_cell(
        work_dir.path / "teacher_forced" / name / f"{cell}.json",
        target,
        drafter,
        features[name],
      )
    return reports, means

  measured = {}
  for number, (name, cfg) in enumerate(cfgs.items(), start=1):
    print(f"{number} of {len(cfgs)}: {name} ({cell_name(cfg)})", flush=True)
    measured[name] = [measure(cfg, seed) for seed in seeds]
  looping = {name: prompts.loops for name, prompts in benchmarks.items()}
  results = {
    "target": _TARGET.value,
    "steps": _STEPS.value,
    "seeds": seeds,
    "training_answers": len(train.lengths),
    "device": provenance.device_summary(),
    "prompts": {
      name: {"all": len(rows), "looping": int(rows.sum())}
      for name, rows in looping.items()
    },
    "relative_to": FULL,
    "variants": summarize(cfgs, measured, looping),
  }
  run_io.write_json(work_dir.path / "results.json", results)
  text = markdown(results)
  (work_dir.path / "table.md").write_text(text)
  draw(work_dir, results)
  print(text)
  print(f"results.json, table.md and ablation.png are in {work_dir.path}")


def summarize(cfgs, measured, looping) -> dict[str, Any]:
  """Advancement, its ratio to `FULL`'s, and means, of every variant."""
  reports = {
    name: {
      benchmark: [one[0][benchmark] for one in by_seed] for benchmark in looping
    }
    for name, by_seed in measured.items()
  }
  lines = {}
  for name, cfg in cfgs.items():
    checks = [r["lossless"] for rs in reports[name].values() for r in rs]
    lines[name] = {
      "drafter": cfg,
      "cell": cell_name(cfg),
      "same_as": [n for n in cfgs if n != name and cfgs[n] == cfg],
      "paper": published.DSPINE_PARTS.get(name),
      "advancement": {
        group: comparison.resample_reports(
          reports[name], looping, group
        ).interval()
        for group in comparison.GROUPS
      },
      "ratio": comparison.gains(reports[FULL], reports[name], looping),
      "teacher_forced": {
        key: float(
          np.mean([m[b][key] for _, m in measured[name] for b in looping])
        )
        for key in MEANS
      },
      "lossless": {
        key: sum(check[key] for check in checks) for key in ("prompts", "equal")
      },
    }
  return lines


def percent(ratio: Mapping[str, float]) -> dict[str, float]:
  """Mean, low and high of a ratio as changes in percent."""
  return {key: 100 * (ratio[key] - 1) for key in ("mean", "low", "high")}


def markdown(results) -> str:
  """The table, what its columns are, and the paper's figures beside."""
  prompts = results["prompts"].values()
  headers = [
    "variant",
    "advancement",
    "non-looping",
    "looping",
    "change, %",
    "non-looping, %",
    "looping, %",
    "expected",
    "coverage",
    "base accuracy",
    "equal outputs",
    "paper",
  ]
  rows = []
  for name, line in results["variants"].items():
    has_candidates = line["drafter"].dspine is not None
    forced, lossless = line["teacher_forced"], line["lossless"]
    rows.append(
      [
        name,
        *(
          comparison.interval_text(line["advancement"][group])
          for group in comparison.GROUPS
        ),
        *(
          comparison.interval_text(percent(line["ratio"][group]), digits=1)
          for group in comparison.GROUPS
        ),
        f"{forced['expected_advancement']:.2f}",
        f"{forced['coverage']:.3f}" if has_candidates else "-",
        f"{forced['base_accuracy']:.3f}",
        f"{lossless['equal']}/{lossless['prompts']}",
        line["paper"] or "-",
      ]
    )
  seeds = ", ".join(map(str, results["seeds"]))
  return (
    f"Target {results['target']}, {results['steps']} steps,"
    f" {results['training_answers']} answers, seeds {seeds},"
    f" {sum(one['all'] for one in prompts)} prompts"
    f" ({sum(one['looping'] for one in prompts)} looping), T=0. Mean"
    f" advancement and its change against '{FULL}', which is all of DSpine,"
    " with 95 % intervals over seeds and prompts, paired. Expected, coverage"
    " (labels among the candidates) and base accuracy are teacher-forced."
    " Paper: Qwen3-8B, change over three benchmarks, or layer supervision on"
    " MATH-500.\n\n" + run_io.markdown_table(rows, headers) + "\n"
  )


def draw(work_dir, results) -> None:
  """ablation.png: change of advancement, looping and non-looping apart."""
  groups = {
    group.replace("_", "-"): {
      name: percent(line["ratio"][group])
      for name, line in results["variants"].items()
      if name != FULL
    }
    for group in ("non_looping", "looping")
  }
  if any(groups.values()):
    plots.intervals(
      work_dir.path / "ablation.png",
      groups,
      "change of mean advancement against all of DSpine, %",
      f"{results['target']}, {results['steps']} steps, T=0",
    )


if __name__ == "__main__":
  run_io.run_app(main)
