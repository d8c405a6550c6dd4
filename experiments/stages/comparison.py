"""DFlash and DSpine side by side: one trainer, one evaluation, paired gains."""

import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from dspine_jax import configs
from dspine_jax.checkpoints import hf_config
from dspine_jax.data import answers as answers_lib
from dspine_jax.data import features as features_lib
from dspine_jax.decoding import generate, metrics
from experiments import run_io, targets
from experiments.stages import evaluation, training

METHODS = ("dflash", "dspine")


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
      name="muon", learning_rate=0.02, total_steps=steps
    ),
    batch_size=8,
    num_anchors=16,
    chunk_blocks=16,
    seed=seed,
  )


def train_all(
  target: targets.NamedTarget,
  features: Callable[[], features_lib.FeatureSet],
  work_dir: run_io.WorkDir,
  cfgs: Mapping[str, configs.DrafterConfig],
  train_cfg: configs.TrainConfig,
) -> dict[str, generate.DrafterModel]:
  """All drafters, from finished folders where they exist.

  `features` gives the training data; it is called only if some is needed.
  """
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
      training.train_drafter(
        target,
        features(),
        cfg,
        train_cfg,
        own,
        checkpoint_every=100,
        label=f"train {method}",
      )
    drafters[method] = evaluation.load_drafter(folder, target)
  return drafters


def evaluate_all(
  target: targets.NamedTarget,
  drafters: Mapping[str, generate.DrafterModel],
  held_out: answers_lib.AnswerSet,
  work_dir: run_io.WorkDir,
  *,
  new_tokens: int,
  seed: int,
  temperatures: Sequence[float] = (0.0, 1.0),
) -> dict[str, dict[str, Any]]:
  """Reports of every drafter at each temperature, kept cell by cell.

  Returns:
    "T=0", ... -> method -> report of `evaluation.advancement_report`; above
    temperature 0 with rejection sampling and the method's first proposal.
  """
  decodes = {
    f"T={temperature:g}": configs.DecodeConfig(
      max_new_tokens=new_tokens,
      stop_tokens=target.model.cfg.eos_token_ids,
      sampling=configs.SamplingConfig(temperature=temperature),
      rule="greedy" if temperature == 0 else "rejection",
    )
    for temperature in temperatures
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


def paired_gains(
  first: list[list[int]], second: list[list[int]], looping: np.ndarray
) -> dict[str, dict[str, float]]:
  """Advancement of `second` over `first`, bootstrap over prompts, by group.

  Args:
    first: round lengths of each prompt, one method.
    second: the same for the other.
    looping: [n] bool, whether the prompt's own answer loops.
  """
  return {
    name: metrics.paired_ratio_interval(
      [first[i] for i in rows], [second[i] for i in rows]
    )
    for name, rows in prompt_groups(looping).items()
  }


def prompt_groups(looping: np.ndarray) -> dict[str, list[int]]:
  """Row numbers of all, non-looping and looping prompts."""
  return {
    "all": list(range(len(looping))),
    "non_looping": [int(i) for i in np.flatnonzero(~looping)],
    "looping": [int(i) for i in np.flatnonzero(looping)],
  }


def gain_lines(gains: Mapping[str, Mapping[str, float]]) -> list[str]:
  """Sentences about `paired_gains` of DSpine over DFlash."""
  return [
    f"DSpine over DFlash at T=0, {name.replace('_', '-')} prompts:"
    f" x{gains[name]['ratio']:.2f} (95 % interval {gains[name]['low']:.2f} to"
    f" {gains[name]['high']:.2f}, {gains[name]['requests']} prompts)"
    for name in ("all", "non_looping", "looping")
    if gains[name]["requests"]
  ]
