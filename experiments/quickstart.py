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

import jax
import numpy as np
from absl import flags

from dspine_jax import configs
from dspine_jax.checkpoints import hf_config
from dspine_jax.decoding import metrics
from experiments import run_io, targets
from experiments.stages import answers as answers_stage
from experiments.stages import evaluation, plots, timing, training

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/quickstart", "Where everything goes."
)
_TARGET = flags.DEFINE_string(
  "target", targets.EMBEDDED, "`embedded`, or a Hugging Face folder."
)
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
  "steps", 400, "Optimiser steps of each drafter.", lower_bound=1
)
_BLOCK = flags.DEFINE_integer("block_size", 8, "Slots of a draft block.")
_LAYERS = flags.DEFINE_integer("num_layers", 2, "Draft layers.", lower_bound=1)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of everything.")

_METHODS = ("dflash", "dspine")
_PROMPT_TOKENS = 64


def drafter_config(
  target: targets.NamedTarget,
  method: str,
  *,
  num_layers: int,
  block_size: int,
  steps: int,
) -> configs.DrafterConfig:
  """The small drafters of the quickstart, for any target."""
  options = configs.DSpineOptions(
    transfer_rank=min(128, target.model.cfg.hidden_size),
    message_size=64,
    top_k=16,
    # On a target this small the cross-entropy stays high, and with it the
    # scale of the alignment term; the paper's 0.5 would let it dominate.
    alignment_weight=0.1,
    alignment_warmup_steps=max(1, round(0.04 * steps)),
    replacement_layers=configs.default_replacement_layers(num_layers),
  )
  return configs.drafter_for(
    target.model.cfg,
    method,
    num_layers=num_layers,
    mask_token_id=targets.mask_token_id(target, None),
    block_size=block_size,
    dspine=options if method == "dspine" else None,
  )


def train_config(steps: int, seed: int) -> configs.TrainConfig:
  """One trainer for both methods."""
  return configs.TrainConfig(
    optimizer=configs.OptimizerConfig(
      name="muon", learning_rate=0.01, total_steps=steps
    ),
    batch_size=8,
    num_anchors=16,
    chunk_blocks=16,
    seed=seed,
  )


def train_all(target, sets, work_dir, *, num_layers, block_size, steps, seed):
  """Both drafters, from finished folders where they exist."""
  cfgs = {
    method: drafter_config(
      target,
      method,
      num_layers=num_layers,
      block_size=block_size,
      steps=steps,
    )
    for method in _METHODS
  }
  train_cfg = train_config(steps, seed)
  data = None
  drafters = {}
  for method, cfg in cfgs.items():
    own = run_io.open_work_dir(
      str(work_dir.path / method),
      config={"drafter": cfg, "train": train_cfg},
      argv=sys.argv,
      resume=True,
    )
    folder = own.path / "drafter"
    if not (folder / "config.json").exists():
      if data is None:
        data = training.compute_features(
          target, sets["train_t0"], cfg.target_layer_ids, None
        )
      training.train_drafter(
        target,
        data,
        cfg,
        train_cfg,
        own,
        checkpoint_every=100,
        label=f"train {method}",
      )
    drafters[method] = evaluation.load_drafter(folder, target)
  return drafters


def evaluate_all(target, drafters, held_out, work_dir, *, new_tokens, seed):
  """Reports of every drafter at temperature 0 and 1, kept cell by cell."""
  stop = target.model.cfg.eos_token_ids
  decodes = {
    "T=0": configs.DecodeConfig(max_new_tokens=new_tokens, stop_tokens=stop),
    "T=1": configs.DecodeConfig(
      max_new_tokens=new_tokens,
      stop_tokens=stop,
      sampling=configs.SamplingConfig(temperature=1.0),
      rule="rejection",
    ),
  }
  cells = work_dir.path / "cells"
  cells.mkdir(exist_ok=True)
  reports: dict[str, dict[str, Any]] = {name: {} for name in decodes}
  for name, decode in decodes.items():
    for method, drafter in drafters.items():
      path = cells / f"{method}_{name.replace('=', '')}.json"
      if not path.exists():
        decoded = evaluation.decode_prompts(
          target.model,
          drafter,
          held_out,
          decode,
          batch_size=16,
          seed=seed,
          label=f"decode {method} {name}",
        )
        report = evaluation.advancement_report(
          decoded, held_out.loops, drafter.cfg.num_proposals
        )
        if name == "T=0":
          report["lossless"] = evaluation.losslessness(
            target.model, held_out, decoded
          )
        run_io.write_json(path, report)
      reports[name][method] = hf_config.read_json(path)
  return reports


def paired_gains(reports, looping: np.ndarray) -> dict[str, Any]:
  """DSpine over DFlash at T=0, bootstrap over prompts, by group."""
  first, second = (
    reports["T=0"][method]["round_lengths"] for method in _METHODS
  )
  groups = {
    "all": np.ones(len(looping), bool),
    "non_looping": ~looping,
    "looping": looping,
  }
  return {
    name: metrics.paired_ratio_interval(
      [first[i] for i in np.flatnonzero(rows)],
      [second[i] for i in np.flatnonzero(rows)],
    )
    for name, rows in groups.items()
  }


def show(results: dict[str, Any], seconds: float) -> None:
  """The table and the sentences under it."""
  rows = []
  for name, by_method in results["reports"].items():
    for method, report in by_method.items():
      label = f"{method} {name}"
      row = list(evaluation.rows_for_table(label, report))
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
  gain = results["gain"]
  for name in ("all", "non_looping"):
    one = gain[name]
    if one["requests"]:
      print(
        f"DSpine over DFlash at T=0, {name.replace('_', '-')} prompts:"
        f" x{one['ratio']:.2f}"
        f" (95 % interval {one['low']:.2f} to {one['high']:.2f},"
        f" {one['requests']} prompts)"
      )
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
  text = answers_stage.read_text(_CORPUS.value)
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config=options | {"corpus_digest": text.digest},
    argv=sys.argv,
    resume=True,
  )
  target = targets.load(_TARGET.value)
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
  drafters = train_all(
    target,
    sets,
    work_dir,
    num_layers=_LAYERS.value,
    block_size=_BLOCK.value,
    steps=_STEPS.value,
    seed=_SEED.value,
  )
  held_out = sets["held_out"]
  reports = evaluate_all(
    target,
    drafters,
    held_out,
    work_dir,
    new_tokens=_NEW.value,
    seed=_SEED.value,
  )
  prompts = held_out.tokens[: _SPEED.value, :_PROMPT_TOKENS]
  decode = configs.DecodeConfig(
    max_new_tokens=_NEW.value, stop_tokens=target.model.cfg.eos_token_ids
  )
  speed = {
    method: timing.time_generation(target.model, drafter, prompts, decode)
    for method, drafter in drafters.items()
  }
  results = {
    "work_dir": str(work_dir.path),
    "answers": {
      name: answers_stage.describe(part) for name, part in sets.items()
    },
    "parameters": {
      method: parameter_counts(drafter) for method, drafter in drafters.items()
    },
    "reports": reports,
    "gain": paired_gains(reports, held_out.loops),
    "speed": speed,
    "device": run_io.device_summary(),
    "seconds": time.monotonic() - began,
  }
  run_io.write_json(work_dir.path / "results.json", results)
  draw(work_dir, results)
  show(results, results["seconds"])


def parameter_counts(drafter) -> dict[str, int]:
  """Trainable numbers: of the common backbone, and of the method's own part."""
  return {
    part: sum(leaf.size for leaf in jax.tree.leaves(tree))
    for part, tree in drafter.params.items()
  }


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
