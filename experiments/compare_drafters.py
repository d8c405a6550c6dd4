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
Time on one CPU core, embedded target, 400 steps of block 16: about 3 minutes a
training, a minute a decoding of 64 prompts.
"""

import functools
import itertools
import sys
from typing import Any, NamedTuple

import numpy as np
from absl import flags

from dspine_jax import configs
from dspine_jax.checkpoints import hf_config
from dspine_jax.drafters import methods
from experiments import provenance, run_io, targets
from experiments.stages import (
  answers,
  comparison,
  comparison_tables,
  feature_sources,
  plots,
  published,
  round_parts,
  timing,
  training,
)

_WORK_DIR = flags.DEFINE_string("work_dir", "runs/compare", "Where cells go.")
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
_TRAIN_BATCH = flags.DEFINE_integer(
  "batch_size", 8, "Sequences of a training step.", lower_bound=1
)
_ANCHORS = flags.DEFINE_integer(
  "num_anchors", 16, "Blocks per sequence.", lower_bound=1
)
_LR = flags.DEFINE_float("learning_rate", 0.02, "Peak learning rate of muon.")
_BLOCK = flags.DEFINE_integer("block_size", 16, "Slots of a draft block.")
_RELEASED = flags.DEFINE_list(
  "released_seeds",
  ["0"],
  "Training seeds at each method's released block size; empty: none.",
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
_SPEED_BENCHMARK = flags.DEFINE_string(
  "speed_benchmark", None, "Whose prompts are timed; default: the first."
)
_SPEED_PROMPTS = flags.DEFINE_integer(
  "speed_prompts", 16, "Prompts that are timed.", lower_bound=1
)


class Entry(NamedTuple):
  """A line of a table: a method at a block size."""

  method: str
  block_size: int

  @property
  def name(self) -> str:
    return f"{self.method}_b{self.block_size}"


class Table(NamedTuple):
  """Methods on equal terms.

  Attributes:
    title: what is equal.
    entries: its lines; the last is compared with each of the others.
    seeds: training seeds.
  """

  title: str
  entries: list[Entry]
  seeds: list[int]


def main(unused_argv):
  unknown = sorted(set(_METHODS.value) - set(methods.DRAFTERS))
  if unknown or not _METHODS.value:
    raise ValueError(
      f"--methods={','.join(_METHODS.value)}: not among"
      f" {sorted(methods.DRAFTERS)}"
    )
  seeds = comparison.whole_numbers(_SEEDS, 0)
  released = comparison.whole_numbers(_RELEASED, 0)
  batches = comparison.whole_numbers(_SPEED_BATCHES, 1)
  temperatures = answers.parse_temperatures(_TEMPERATURES.value)
  target = targets.load(_TARGET.value)
  block = _BLOCK.value
  own_blocks = [
    Entry(m, published.BLOCKS.get(m, block)) for m in _METHODS.value
  ]
  tables = [
    Table(f"block {block}", [Entry(m, block) for m in _METHODS.value], seeds),
    Table("released block sizes", own_blocks, released),
  ]
  tables = [table for table in tables if table.seeds]
  if not tables:
    raise ValueError("--seeds and --released_seeds are empty")
  entries = list(dict.fromkeys(e for table in tables for e in table.entries))
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
  train_cfgs = {
    seed: comparison.train_config(
      _STEPS.value,
      seed,
      batch_size=_TRAIN_BATCH.value,
      num_anchors=_ANCHORS.value,
      learning_rate=_LR.value,
    )
    for seed in {*seeds, *released}
  }
  train = training.load_parts(_ANSWERS.value, _PARTS.value, target)
  benchmarks = training.load_benchmarks(
    _ANSWERS.value, _BENCHMARKS.value, target, limit=_EVAL.value
  )
  timed = _SPEED_BENCHMARK.value or next(iter(benchmarks))
  if timed not in benchmarks:
    raise ValueError(
      f"--speed_benchmark={timed}: not among {sorted(benchmarks)}"
    )
  count = min(_SPEED_PROMPTS.value, len(benchmarks[timed].lengths))
  if max(batches, default=1) > count:
    raise ValueError(
      f"--speed_batches={','.join(_SPEED_BATCHES.value)}: only {count}"
      f" prompts of {timed} are timed (--speed_prompts)"
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
  features = feature_sources.on_demand(
    target, train, cfgs[entries[0]].target_layer_ids, work_dir.path / "features"
  )

  @functools.cache
  def drafter(entry, seed):
    return comparison.train_cell(
      target,
      features,
      work_dir.path / "drafters" / f"{entry.name}_s{seed}",
      cfgs[entry],
      train_cfgs[seed],
    )

  def decode(entry, seeds, temperature, **rule):
    """Benchmark -> report of each seed."""
    label = "_".join([f"T{temperature:g}", *rule.values()])
    return {
      name: [
        comparison.decode_cell(
          work_dir.path / "cells" / name / f"{entry.name}_s{seed}_{label}.json",
          target,
          drafter(entry, seed),
          prompts,
          comparison.decode_config(target, prompts, temperature, **rule),
          seed=seed,
        )
        for seed in seeds
      ]
      for name, prompts in benchmarks.items()
    }

  @functools.cache
  def held_out(benchmark, temperature):
    prompts = benchmarks[benchmark]
    path = work_dir.path / "sampled" / f"{benchmark}_t{temperature:g}.npz"
    sampling = configs.SamplingConfig(temperature=temperature)
    drawn = answers.sampled(target, prompts, sampling, path, seed=0)
    taps = cfgs[entries[0]].target_layer_ids
    return feature_sources.in_memory(target, drawn, taps)

  def expect(entry, seeds, temperature):
    """The teacher-forced proxy of each seed, mean of the benchmarks."""
    return [
      float(
        np.mean(
          [
            comparison.proxy_cell(
              work_dir.path
              / "proxy"
              / name
              / f"{entry.name}_s{seed}_T{temperature:g}.json",
              target,
              drafter(entry, seed),
              functools.partial(held_out, name, temperature),
              comparison.decode_config(target, prompts, temperature),
              seed=0,
            )
            for name, prompts in benchmarks.items()
          ]
        )
      )
      for seed in seeds
    ]

  # Trainings come first: they are what takes long.
  for table in tables:
    for seed, entry in itertools.product(table.seeds, table.entries):
      drafter(entry, seed)
  looping = {name: prompts.loops for name, prompts in benchmarks.items()}
  results: dict[str, Any] = {
    "target": _TARGET.value,
    "steps": _STEPS.value,
    "training_answers": len(train.lengths),
    "device": provenance.device_summary(),
    "prompts": {
      name: {"all": len(rows), "looping": int(rows.sum())}
      for name, rows in looping.items()
    },
    "tables": [],
  }
  for table in tables:
    reports = {
      entry: {t: decode(entry, table.seeds, t) for t in temperatures}
      for entry in table.entries
    }
    lines = []
    for entry in table.entries:
      rule = published.RULES.get(entry.method)
      by_rule = {
        t: decode(entry, table.seeds[:1], t, **rule)
        for t in temperatures
        if t > 0 and rule
      }
      lines.append(
        {
          "method": entry.method,
          "block_size": entry.block_size,
          "proposals": cfgs[entry].num_proposals,
          "parameters": comparison.parameter_counts(
            drafter(entry, table.seeds[0])
          ),
          "own_rule": summarize(by_rule, looping),
          "proxy": {
            f"T={t:g}": expect(entry, table.seeds, t) for t in temperatures
          },
          "by_seed": {
            f"T={t:g}": by_seed(reports[entry][t], looping)
            for t in temperatures
          },
        }
        | summarize(reports[entry], looping)
      )
    results["tables"].append(
      {
        "title": table.title,
        "seeds": table.seeds,
        "methods": lines,
        "gains": gains_of_last(table.entries, reports, looping),
        "proxy_correlation": proxy_correlation(lines),
      }
    )
  run_io.write_json(work_dir.path / "results.json", results)
  for table, found in zip(tables, results["tables"], strict=True):
    for entry, line in zip(table.entries, found["methods"], strict=True):
      line["speed"] = {
        str(batch): time_cell(
          work_dir.path
          / "speed"
          / f"{timed}_{count}"
          / f"{entry.name}_batch{batch}.json",
          target,
          drafter(entry, table.seeds[0]),
          benchmarks[timed].select(np.arange(count)),
          batch,
        )
        for batch in batches
      }
  run_io.write_json(work_dir.path / "results.json", results)
  text = comparison_tables.markdown(results, batches, temperatures)
  (work_dir.path / "table.md").write_text(text)
  draw(work_dir, results, temperatures)
  print(text)
  print(f"results.json, table.md and comparison.png are in {work_dir.path}")


def summarize(by_temperature, looping) -> dict[str, Any]:
  """Advancement with intervals: of each benchmark, and of all, by group."""
  summary: dict[str, Any] = {
    "advancement": {},
    "benchmarks": {},
    "acceptance_by_position": {},
  }
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
    flat = list(itertools.chain(*reports.values()))
    summary["acceptance_by_position"][key] = np.mean(
      [
        np.asarray(report["all"]["acceptance_by_position"], float)
        for report in flat
      ],
      axis=0,
    )
    checks = [report["lossless"] for report in flat if "lossless" in report]
    if checks:
      summary["lossless"] = {
        name: sum(check[name] for check in checks)
        for name in ("prompts", "equal")
      }
  return summary


def by_seed(reports, looping) -> list[float]:
  """Mean advancement of each seed."""
  count = len(next(iter(reports.values())))
  return [
    comparison.resample_reports(
      {name: one[seed : seed + 1] for name, one in reports.items()},
      looping,
      "all",
    ).value
    for seed in range(count)
  ]


def proxy_correlation(lines) -> dict[str, float]:
  """Pearson's, of proxy and measured advancement over methods and seeds.

  NaN for one or two points, which always lie on a line, or without variation.
  """
  found = {}
  for key in lines[0]["proxy"]:
    pairs = [
      np.concatenate([line[name][key] for line in lines])
      for name in ("proxy", "by_seed")
    ]
    varies = len(pairs[0]) > 2 and all(np.ptp(values) > 0 for values in pairs)
    found[key] = float(np.corrcoef(pairs)[0, 1]) if varies else float("nan")
  return found


def gains_of_last(entries, reports, looping) -> dict[str, Any]:
  """Advancement of a table's last method over each of the others."""
  last = reports[entries[-1]]
  return {
    entry.method: {
      f"T={temperature:g}": comparison.gains(
        reports[entry][temperature], last[temperature], looping
      )
      for temperature in last
    }
    for entry in entries[:-1]
  }


def time_cell(path, target, drafter, prompts, batch: int) -> dict[str, Any]:
  """Speed at one batch size, and at batch 1 what a round is made of."""
  if not path.exists():
    decode = comparison.decode_config(target, prompts, 0.0)
    found = timing.time_generation(
      target.model, drafter, prompts, decode, batch_size=batch
    )
    if batch == 1:
      prompt = prompts.tokens[0, : prompts.prompt_lengths[0]]
      found["part_seconds"] = round_parts.time_parts(
        target.model, drafter, prompt, decode, repeats=7
      )
    path.parent.mkdir(parents=True, exist_ok=True)
    run_io.write_json(path, found)
  return hf_config.read_json(path)


def draw(work_dir, results, temperatures) -> None:
  """comparison.png: advancement with intervals, acceptance by position."""
  table = results["tables"][0]
  lines = {line["method"]: line for line in table["methods"]}
  bars = {}
  for temperature in temperatures:
    key = f"T={temperature:g}"
    for group in ("non_looping", "looping") if temperature == 0 else ("all",):
      bars[f"{key}, {group.replace('_', '-')}"] = {
        method: line["advancement"][key][group]
        for method, line in lines.items()
      }
  first = f"T={temperatures[0]:g}"
  plots.comparison(
    work_dir.path / "comparison.png",
    bars,
    {
      method: line["acceptance_by_position"][first]
      for method, line in lines.items()
    },
    f"{results['target']}, {table['title']}, {results['steps']} steps",
  )


if __name__ == "__main__":
  run_io.run_app(main)
