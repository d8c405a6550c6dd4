"""All drafters on equal terms: one target, trainer, verifier and metric.

  python -m experiments.compare_drafters --answers=runs/answers \\
      --work_dir=runs/compare --seeds=0,1,2

Every method starts each seed from the same backbone and sees the same data,
steps and optimiser, with its own labels, losses and schedules: first at
--block_size, then at the block size of its release. Held-out prompts are
decoded at every temperature, greedy at 0 and with rejection sampling above it;
a method whose released rule is another one has that as a footnote. Intervals
are a bootstrap over seeds and prompts. Speed is measured against autoregressive
decoding of the same prompts in the same run.

WORK_DIR gets results.json, table.md and comparison.png. Finished cells are
kept: a killed run goes on, and seeds, methods or benchmarks can be added later.
Time on two CPU cores, embedded target, 800 steps of block 16: about 4 minutes a
training, half a minute a decoding, half a minute a speed.
"""

import itertools
import sys
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from dspine_jax.checkpoints import hf_config
from dspine_jax.drafters import methods
from experiments import run_io, targets
from experiments.stages import (
  answers,
  comparison,
  plots,
  round_parts,
  timing,
  training,
)

_WORK_DIR = flags.DEFINE_string("work_dir", "runs/compare", "Where cells go.")
_TARGET = flags.DEFINE_string(
  "target", targets.EMBEDDED, "`embedded`, or a Hugging Face folder."
)
_ANSWERS = flags.DEFINE_string(
  "answers", "runs/answers", "Work directory of make_answers."
)
_PARTS = flags.DEFINE_list(
  "parts", ["train_t0"], "Which of its training parts to use."
)
_BENCHMARKS = flags.DEFINE_list(
  "benchmarks", None, "Which of its other parts to decode; default: all."
)
_METHODS = flags.DEFINE_list(
  "methods",
  ["dflash", "domino", "dspark", "dflash2", "dspine"],
  "Methods, in the order of the table.",
)
_SEEDS = flags.DEFINE_list("seeds", ["0", "1", "2"], "Training seeds.")
_TEMPERATURES = flags.DEFINE_list(
  "temperatures", ["0", "1"], "Temperatures to decode at."
)
_EVAL = flags.DEFINE_integer(
  "eval_prompts", 96, "Prompts of each benchmark.", lower_bound=1
)
_STEPS = flags.DEFINE_integer(
  "steps", 800, "Optimiser steps of each drafter.", lower_bound=1
)
_BLOCK = flags.DEFINE_integer("block_size", 16, "Slots of a draft block.")
_RELEASED = flags.DEFINE_bool(
  "released_blocks", True, "Also compare at each method's released block size."
)
_LAYERS = flags.DEFINE_integer("num_layers", 2, "Draft layers.", lower_bound=1)
_RANK = flags.DEFINE_integer("transfer_rank", 128, "DSpine: code width.")
_MESSAGE = flags.DEFINE_integer("message_size", 64, "DSpine: message width.")
_HEAD_RANK = flags.DEFINE_integer(
  "head_rank", 64, "DFlash2, Domino, DSpark: rank of the head."
)
_GRU = flags.DEFINE_integer("gru_hidden_dim", 128, "Domino: width of the GRU.")
_SPEED_BATCHES = flags.DEFINE_list(
  "speed_batches", ["1", "4", "16"], "Batch sizes to time; empty: none."
)
_SPEED_PROMPTS = flags.DEFINE_integer(
  "speed_prompts", 16, "Prompts that are timed.", lower_bound=1
)

# What the releases use: slots of a block, the anchor's included, and how they
# draft and accept above temperature 0 (baselines, sections 1 and 7).
RELEASED_BLOCKS = {
  "dflash": 16,
  "domino": 16,
  "dspark": 7,
  "dflash2": 8,
  "dspine": 16,
}
OWN_RULES = {
  "dflash": {"rule": "exact_match", "proposal": "greedy"},
  "domino": {"rule": "exact_match", "proposal": "sampled"},
  "dflash2": {"rule": "rejection", "proposal": "candidates"},
}
# Advancement of DSpine over the other, mean of seven benchmarks (dspine, 8).
PAPER_GAINS = {"dflash": 1.278, "dflash2": 1.098}


class Entry(NamedTuple):
  """A line of a table: a method at a block size."""

  method: str
  block_size: int

  @property
  def name(self) -> str:
    return f"{self.method}_b{self.block_size}"


def whole_numbers(flag: flags.FlagHolder, least: int) -> list[int]:
  """The numbers of a list flag; ValueError naming it if one is not possible."""
  try:
    numbers = [int(value) for value in flag.value]
  except ValueError:
    numbers = [least - 1]
  if any(number < least for number in numbers):
    raise ValueError(
      f"--{flag.name}={','.join(flag.value)}: whole numbers >= {least} are"
      " needed"
    )
  return numbers


def main(unused_argv):
  unknown = sorted(set(_METHODS.value) - set(methods.DRAFTERS))
  if unknown or not _METHODS.value:
    raise ValueError(
      f"--methods={','.join(_METHODS.value)}: not among"
      f" {sorted(methods.DRAFTERS)}"
    )
  seeds = whole_numbers(_SEEDS, 0)
  batches = whole_numbers(_SPEED_BATCHES, 1)
  temperatures = answers.parse_temperatures(_TEMPERATURES.value)
  target = targets.load(_TARGET.value)
  tables = {
    f"block {_BLOCK.value}": [Entry(m, _BLOCK.value) for m in _METHODS.value]
  }
  if _RELEASED.value:
    tables["released block sizes"] = [
      Entry(m, RELEASED_BLOCKS.get(m, _BLOCK.value)) for m in _METHODS.value
    ]
  entries = list(dict.fromkeys(itertools.chain(*tables.values())))
  sizes = comparison.Sizes(
    transfer_rank=_RANK.value,
    message_size=_MESSAGE.value,
    head_rank=_HEAD_RANK.value,
    gru_hidden_dim=_GRU.value,
  )
  cfgs = {
    entry: comparison.drafter_config(
      target,
      entry.method,
      num_layers=_LAYERS.value,
      block_size=entry.block_size,
      steps=_STEPS.value,
      sizes=sizes,
    )
    for entry in entries
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
      "num_layers": _LAYERS.value,
      "sizes": sizes,
    },
    argv=sys.argv,
    resume=True,
  )
  features = training.features_on_demand(
    target, train, cfgs[entries[0]].target_layer_ids, work_dir.path / "features"
  )
  drafters = {
    (entry, seed): comparison.train_cell(
      target,
      features,
      work_dir.path / "drafters" / f"{entry.name}_s{seed}",
      cfgs[entry],
      comparison.train_config(_STEPS.value, seed),
    )
    for seed in seeds
    for entry in entries
  }

  def decode(entry, seed, benchmark, temperature, **rule):
    label = "_".join([f"T{temperature:g}", *rule.values()])
    name = f"{entry.name}_s{seed}_{label}.json"
    prompts = benchmarks[benchmark]
    return comparison.decode_cell(
      work_dir.path / "cells" / benchmark / name,
      target,
      drafters[entry, seed],
      prompts,
      comparison.decode_config(target, prompts, temperature, **rule),
      seed=seed,
    )

  reports = {
    entry: {
      temperature: {
        benchmark: [
          decode(entry, seed, benchmark, temperature) for seed in seeds
        ]
        for benchmark in benchmarks
      }
      for temperature in temperatures
    }
    for entry in entries
  }
  own_rules = {
    entry: {
      temperature: {
        benchmark: [
          decode(entry, seed, benchmark, temperature, **OWN_RULES[entry.method])
          for seed in seeds
        ]
        for benchmark in benchmarks
      }
      for temperature in temperatures
      if temperature > 0
    }
    for entry in entries
    if entry.method in OWN_RULES
  }
  looping = {name: prompts.loops for name, prompts in benchmarks.items()}
  results: dict[str, Any] = {
    "target": _TARGET.value,
    "steps": _STEPS.value,
    "seeds": seeds,
    "training_answers": len(train.lengths),
    "device": run_io.device_summary(),
    "prompts": {
      name: {"all": len(rows), "looping": int(rows.sum())}
      for name, rows in looping.items()
    },
    "tables": {
      title: [entry.name for entry in lines] for title, lines in tables.items()
    },
    "drafters": {
      entry.name: summarize(reports[entry], looping)
      | {
        "method": entry.method,
        "proposals": cfgs[entry].num_proposals,
        "parameters": comparison.parameter_counts(drafters[entry, seeds[0]]),
        "own_rule": summarize(own_rules.get(entry, {}), looping),
      }
      for entry in entries
    },
    "gains": {
      title: gains_of_last(lines, reports, looping)
      for title, lines in tables.items()
    },
  }
  run_io.write_json(work_dir.path / "results.json", results)
  first = next(iter(benchmarks.values()))
  for entry in entries:
    results["drafters"][entry.name]["speed"] = {
      batch: time_cell(
        work_dir.path / "speed" / f"{entry.name}_batch{batch}.json",
        target,
        drafters[entry, seeds[0]],
        first,
        batch,
      )
      for batch in batches
    }
  run_io.write_json(work_dir.path / "results.json", results)
  text = markdown(results, batches, temperatures)
  (work_dir.path / "table.md").write_text(text)
  draw(work_dir, results, reports, temperatures)
  print(text)
  print(f"results.json, table.md and comparison.png are in {work_dir.path}")


def summarize(by_temperature, looping) -> dict[str, Any]:
  """Advancement with intervals: of each benchmark, and of all, by group."""
  summary: dict[str, Any] = {"advancement": {}, "benchmarks": {}}
  for temperature, reports in by_temperature.items():
    key = f"T={temperature:g}"
    summary["advancement"][key] = {
      group: comparison.resample_reports(reports, looping, group).interval()
      for group in comparison.GROUPS
    }
    summary["benchmarks"][key] = {
      name: comparison.resample_reports(
        {name: by_seed}, looping, "all"
      ).interval()
      for name, by_seed in reports.items()
    }
    checks = [
      report["lossless"]
      for by_seed in reports.values()
      for report in by_seed
      if "lossless" in report
    ]
    if checks:
      summary["lossless"] = {
        name: sum(check[name] for check in checks)
        for name in ("prompts", "equal")
      }
  return summary


def gains_of_last(lines, reports, looping) -> dict[str, Any]:
  """Advancement of a table's last method over each of the others."""
  last = reports[lines[-1]]
  return {
    entry.name: {
      f"T={temperature:g}": comparison.gains(
        reports[entry][temperature], last[temperature], looping
      )
      for temperature in last
    }
    for entry in lines[:-1]
  }


def time_cell(path, target, drafter, prompts, batch: int) -> dict[str, Any]:
  """Speed at one batch size, and at batch 1 what a round is made of."""
  if not path.exists():
    decode = comparison.decode_config(target, prompts, 0.0)
    rows = np.arange(min(_SPEED_PROMPTS.value, len(prompts.lengths)))
    chosen = prompts.select(rows)
    found = timing.time_generation(
      target.model, drafter, chosen, decode, batch_size=batch
    )
    if batch == 1:
      prompt = chosen.tokens[0, : chosen.prompt_lengths[0]]
      found["part_seconds"] = round_parts.time_parts(
        target.model, drafter, prompt, decode, repeats=7
      )
    path.parent.mkdir(parents=True, exist_ok=True)
    run_io.write_json(path, found)
  return hf_config.read_json(path)


def _mean(interval: dict[str, float | None], digits: int = 2) -> str:
  if interval["mean"] is None or np.isnan(interval["mean"]):
    return "-"
  mean, low, high = (interval[name] for name in ("mean", "low", "high"))
  return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def markdown(results, batches, temperatures) -> str:
  """All tables as text."""
  prompts = results["prompts"].values()
  parts = [
    f"Target {results['target']}, {results['steps']} steps,"
    f" {results['training_answers']} answers, seeds {results['seeds']},"
    f" {sum(one['all'] for one in prompts)} prompts"
    f" ({sum(one['looping'] for one in prompts)} looping);"
    " mean advancement with 95 % intervals over seeds and prompts."
  ]
  for title, names in results["tables"].items():
    lines = [results["drafters"][name] for name in names]
    parts.append(f"## {title}")
    parts.append(advancement_table(lines, temperatures))
    if batches:
      parts.append(speed_table(lines, batches))
    parts.append(gain_table(results["gains"][title], lines, temperatures))
    if len(results["prompts"]) > 1:
      parts.append(benchmark_table(lines, results["prompts"], temperatures))
  return "\n\n".join(parts) + "\n"


def advancement_table(lines, temperatures) -> str:
  """Advancement of each method, its groups, and its own rule's."""
  headers = ["method", "proposals"]
  for temperature in temperatures:
    headers.append(f"T={temperature:g}")
    if temperature == 0:
      headers += ["non-looping", "looping", "equal outputs"]
    else:
      headers.append(f"own rule at T={temperature:g} (*)")
  rows = []
  for line in lines:
    row = [line["method"], line["proposals"]]
    for temperature in temperatures:
      key = f"T={temperature:g}"
      groups = line["advancement"][key]
      row.append(_mean(groups["all"]))
      if temperature == 0:
        row += [_mean(groups["non_looping"]), _mean(groups["looping"])]
        row.append(f"{line['lossless']['equal']}/{line['lossless']['prompts']}")
      else:
        own = line["own_rule"]["advancement"].get(key)
        row.append("as left" if own is None else _mean(own["all"]))
    rows.append(row)
  rules = "; ".join(
    f"{method}: {rule['rule'].replace('_', ' ')}, {rule['proposal']} draft"
    for method, rule in OWN_RULES.items()
  )
  return (
    run_io.markdown_table(rows, headers)
    + f"\n\n(*) {rules}. Columns T > 0: rejection sampling with the default"
    " proposal."
  )


def speed_table(lines, batches) -> str:
  """Parameters, milliseconds of a round, tokens/s over autoregressive."""
  headers = ["method", "backbone, M", "own part, M", "draft, ms", "round, ms"]
  headers += [f"tokens/s over autoregressive, batch {b}" for b in batches]
  rows = []
  for line in lines:
    counts = line["parameters"]
    own = sum(n for part, n in counts.items() if part != "backbone")
    timed = line["speed"].get(1, line["speed"].get("1", {}))
    parts = timed.get("part_seconds", {})
    draft = sum(
      parts[name] for name in parts if name not in ("verify", "commit", "round")
    )
    rows.append(
      [
        line["method"],
        f"{counts['backbone'] / 1e6:.2f}",
        f"{own / 1e6:.2f}",
        f"{1e3 * draft:.2f}" if parts else "-",
        f"{1e3 * parts['round']:.2f}" if parts else "-",
        *(f"{line['speed'][batch]['ratio']:.2f}" for batch in batches),
      ]
    )
  return run_io.markdown_table(rows, headers)


def gain_table(gains, lines, temperatures) -> str:
  """The last method over the others, the paper's figure beside."""
  headers = [f"{lines[-1]['method']} over"]
  headers += [f"T={temperature:g}" for temperature in temperatures]
  if 0 in temperatures:
    headers.append("T=0, non-looping")
  headers.append("paper, T=0")
  rows = []
  for line, by_temperature in zip(lines[:-1], gains.values(), strict=True):
    row = [line["method"]]
    row += [
      _mean(by_temperature[f"T={temperature:g}"]["all"])
      for temperature in temperatures
    ]
    if 0 in temperatures:
      row.append(_mean(by_temperature["T=0"]["non_looping"]))
    paper = PAPER_GAINS.get(line["method"])
    is_published = lines[-1]["method"] == "dspine" and paper is not None
    rows.append([*row, f"{paper:.3f}" if is_published else "-"])
  return run_io.markdown_table(rows, headers)


def benchmark_table(lines, prompts, temperatures) -> str:
  """One column a benchmark, one row a method and temperature."""
  headers = ["mean advancement", *prompts, "mean"]
  rows = []
  for temperature, line in itertools.product(temperatures, lines):
    key = f"T={temperature:g}"
    cells = [line["benchmarks"][key][name]["mean"] for name in prompts]
    cells.append(line["advancement"][key]["all"]["mean"])
    rows.append([f"{line['method']} {key}", *(f"{cell:.2f}" for cell in cells)])
  return run_io.markdown_table(rows, headers)


def draw(work_dir, results, reports, temperatures) -> None:
  """comparison.png: advancement with intervals, acceptance by position."""
  title, names = next(iter(results["tables"].items()))
  by_name = {entry.name: entry for entry in reports}
  bars = {}
  for temperature in temperatures:
    for group in ("non_looping", "looping") if temperature == 0 else ("all",):
      label = f"T={temperature:g}, {group.replace('_', '-')}"
      bars[label] = {
        results["drafters"][name]["method"]: results["drafters"][name][
          "advancement"
        ][f"T={temperature:g}"][group]
        for name in names
      }
  curves = {}
  for name in names:
    by_seed = itertools.chain(*reports[by_name[name]][temperatures[0]].values())
    curves[results["drafters"][name]["method"]] = np.mean(
      [
        np.asarray(report["all"]["acceptance_by_position"], float)
        for report in by_seed
      ],
      axis=0,
    ).tolist()
  plots.comparison(
    work_dir.path / "comparison.png",
    bars,
    curves,
    f"{results['target']}, {title}, {results['steps']} steps",
  )


if __name__ == "__main__":
  run_io.run_app(main)
