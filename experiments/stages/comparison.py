"""Drafters on equal terms: trained and decoded cell by cell, kept on disk.

A cell is one training (a folder with the drafter) or one decoding (a JSON
report). Finished cells are read back, so that a killed comparison goes on and a
larger one takes up the cells of a smaller one.
"""

import dataclasses
import math
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import numpy as np
from absl import flags

from dspine_jax import configs
from dspine_jax.checkpoints import hf_config
from dspine_jax.data import answers as answers_lib
from dspine_jax.data import sources
from dspine_jax.decoding import generate, metrics
from dspine_jax.target import tapped_layers
from experiments import run_io, targets
from experiments.stages import evaluation, proxy, training

GROUPS = ("all", "non_looping", "looping")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """Widths of what the methods add to the backbone, for small targets.

  Attributes:
    transfer_rank: DSpine, width of the token codes.
    message_size: DSpine, width of gate and message.
    top_k: DSpine and DFlash2, candidates per slot.
    head_rank: DFlash2, Domino, DSpark: rank of the head.
    gru_hidden_dim: Domino, width of the GRU.
    markov_head_type: DSpark, its head.
    alignment_weight: DSpine. On a small target the cross-entropy stays high,
      and with it the scale of the alignment term; the paper's 0.5 would let it
      dominate.
    alignment_warmup_steps: DSpine; None takes 4 % of the steps.
    objective: DFlash and DFlash2, of the unary logits; None is the default.
  """

  transfer_rank: int = 128
  message_size: int = 64
  top_k: int = 16
  head_rank: int = 64
  gru_hidden_dim: int = 128
  markov_head_type: str = "vanilla"
  alignment_weight: float = 0.1
  alignment_warmup_steps: int | None = None
  objective: str | None = None

  def options(self, method: str, steps: int) -> dict[str, Any]:
    """Keyword arguments of the method's options, for a run of `steps`.

    Raises:
      ValueError: an objective for a method that has its own.
    """
    warmup = self.alignment_warmup_steps or max(1, round(0.04 * steps))
    objective = {} if self.objective is None else {"objective": self.objective}
    if objective and method not in ("dflash", "dflash2"):
      raise ValueError(
        f"--objective={self.objective}: --method={method} has its own"
      )
    by_method = {
      "dflash": objective,
      "dflash2": objective
      | {
        "selector_rank": self.head_rank,
        "selector_top_k": self.top_k,
      },
      "domino": {
        "emb_dim": self.head_rank,
        "gru_hidden_dim": self.gru_hidden_dim,
      },
      "dspark": {
        "markov_rank": self.head_rank,
        "markov_head_type": self.markov_head_type,
      },
      "dspine": {
        "transfer_rank": self.transfer_rank,
        "message_size": self.message_size,
        "top_k": self.top_k,
        "alignment_weight": self.alignment_weight,
        "alignment_warmup_steps": warmup,
      },
    }
    return by_method.get(method, {})


def drafter_config(
  target: targets.NamedTarget,
  method: str,
  *,
  num_layers: int,
  block_size: int,
  steps: int,
  sizes: Sizes | None = None,
  mask_token_id: int | None = None,
  **block: Any,
) -> configs.DrafterConfig:
  """A small drafter of any method, in the widths of its target.

  Without `sizes` the default ones, as far as the target is wide enough; `block`
  goes to `configs.drafter_for`: causality and windows.

  Raises:
    ValueError: the target is not deep enough for so many draft layers, or what
      a configuration refuses.
  """
  depth = target.model.cfg.num_layers
  try:
    tapped_layers.check_tapped_layers(
      tapped_layers.tapped_layers(depth, num_layers), depth
    )
  except ValueError:
    raise ValueError(
      f"--num_layers={num_layers}: each draft layer taps a layer of its own of"
      f" --target={target.name}, which has {depth} layers: too few"
    ) from None
  if sizes is None:
    sizes = Sizes(transfer_rank=min(128, target.model.cfg.hidden_size))
  options = sizes.options(method, steps)
  return configs.drafter_for(
    target.model.cfg,
    method,
    num_layers=num_layers,
    mask_token_id=targets.mask_token_id(target, mask_token_id),
    block_size=block_size,
    **block,
    **{method: configs.default_options(method, num_layers, **options)},
  )


def train_config(
  steps: int,
  seed: int,
  *,
  batch_size: int = 8,
  num_anchors: int = 16,
  learning_rate: float = 0.02,
) -> configs.TrainConfig:
  """One trainer for all methods."""
  return configs.TrainConfig(
    optimizer=configs.OptimizerConfig(
      name="muon", learning_rate=learning_rate, total_steps=steps
    ),
    batch_size=batch_size,
    num_anchors=num_anchors,
    chunk_blocks=16,
    seed=seed,
  )


def train_cell(
  target: targets.NamedTarget,
  features: Callable[[], sources.Source],
  folder: pathlib.Path,
  cfg: configs.DrafterConfig,
  train_cfg: configs.TrainConfig,
) -> generate.DrafterModel:
  """A drafter, trained in `folder` unless it already lies there.

  Args:
    target: whose drafter it is.
    features: gives the training data; called only if it is needed.
    folder: the cell; named in the progress line.
    cfg: the drafter.
    train_cfg: the run.

  Raises:
    ValueError: the folder holds a drafter of another configuration.
  """
  own = run_io.open_work_dir(
    str(folder),
    config={"drafter": cfg, "train": train_cfg},
    argv=sys.argv,
    resume=True,
  )
  trained = own.path / "drafter"
  if not (trained / "config.json").exists():
    training.train_drafter(
      target,
      features(),
      cfg,
      train_cfg,
      own,
      checkpoint_every=100,
      label=f"train {folder.name}",
    )
  return evaluation.load_drafter(trained, target)


def decode_config(
  target: targets.NamedTarget,
  prompts: answers_lib.AnswerSet,
  temperature: float,
  **rule: str,
) -> configs.DecodeConfig:
  """How a set is decoded: greedy, or rejection unless `rule` says otherwise."""
  chosen = {"rule": "greedy" if temperature == 0 else "rejection"} | rule
  return configs.DecodeConfig(
    max_new_tokens=prompts.new_tokens,
    stop_tokens=target.model.cfg.eos_token_ids,
    sampling=configs.SamplingConfig(temperature=temperature),
    **chosen,
  )


def decode_cell(
  path: pathlib.Path,
  target: targets.NamedTarget,
  drafter: generate.DrafterModel,
  prompts: answers_lib.AnswerSet,
  decode: configs.DecodeConfig,
  *,
  seed: int,
) -> dict[str, Any]:
  """The report of one decoding, made unless it already lies at `path`.

  Greedy reports say how many outputs equal the target's own answers, which are
  those of `prompts`.
  """
  if not path.exists():
    decoded = evaluation.decode_prompts(
      target.model,
      drafter,
      prompts,
      decode,
      batch_size=16,
      seed=seed,
      label=f"decode {path.stem}",
    )
    report = evaluation.advancement_report(
      decoded, prompts.loops, drafter.cfg.num_proposals
    )
    if decode.sampling.temperature == 0:
      report["lossless"] = evaluation.losslessness(
        target.model, prompts, decoded
      )
    path.parent.mkdir(parents=True, exist_ok=True)
    run_io.write_json(path, report)
  return hf_config.read_json(path)


def proxy_cell(
  path: pathlib.Path,
  target: targets.NamedTarget,
  drafter: generate.DrafterModel,
  data: Callable[[], sources.Source],
  decode: configs.DecodeConfig,
  *,
  seed: int,
) -> float:
  """The teacher-forced proxy, kept like a report; see `proxy`."""
  if not path.exists():
    found = proxy.expected_advancement(
      target.model,
      drafter,
      data(),
      decode,
      seed=seed,
      label=f"proxy {path.stem}",
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    run_io.write_json(path, {"expected_advancement": found})
  return hf_config.read_json(path)["expected_advancement"]


def means_cell(
  path: pathlib.Path,
  target: targets.NamedTarget,
  drafter: generate.DrafterModel,
  data: Callable[[], sources.Source],
) -> dict[str, float]:
  """Teacher-forced means on greedy answers; see `proxy.greedy_means`."""
  if not path.exists():
    found = proxy.greedy_means(
      target.model, drafter, data(), seed=0, label=f"teacher {path.stem}"
    )
    path.parent.mkdir(parents=True, exist_ok=True)
    run_io.write_json(path, found)
  return hf_config.read_json(path)


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


def interval_text(interval: Mapping[str, float | None], digits: int = 2) -> str:
  """mean [low, high], or a dash where there was nothing to average."""
  mean, low, high = (interval[name] for name in ("mean", "low", "high"))
  if mean is None or math.isnan(mean):
    return "-"
  return f"{mean:.{digits}f} [{low:.{digits}f}, {high:.{digits}f}]"


def parameter_counts(drafter: generate.DrafterModel) -> dict[str, int]:
  """Trainable numbers: of the common backbone, and of the method's own part."""
  return {
    part: sum(leaf.size for leaf in jax.tree.leaves(tree))
    for part, tree in drafter.params.items()
  }


def prompt_groups(looping: np.ndarray) -> dict[str, list[int]]:
  """Row numbers of all, non-looping and looping prompts."""
  return {
    "all": list(range(len(looping))),
    "non_looping": [int(i) for i in np.flatnonzero(~looping)],
    "looping": [int(i) for i in np.flatnonzero(looping)],
  }


def resample_reports(
  reports: Mapping[str, Sequence[Mapping[str, Any]]],
  looping: Mapping[str, np.ndarray],
  group: str,
) -> metrics.Resampled:
  """Bootstrap over seeds and prompts of one method's advancement.

  Args:
    reports: benchmark -> report of each seed.
    looping: benchmark -> [n] bool.
    group: one of `GROUPS`.
  """
  tallies = []
  for benchmark, by_seed in reports.items():
    rows = prompt_groups(looping[benchmark])[group]
    tallies.append(
      metrics.tally(
        [[report["round_lengths"][i] for i in rows] for report in by_seed]
      )
    )
  return metrics.resample(tallies)


def gains(
  first: Mapping[str, Sequence[Mapping[str, Any]]],
  second: Mapping[str, Sequence[Mapping[str, Any]]],
  looping: Mapping[str, np.ndarray],
) -> dict[str, dict[str, float]]:
  """Advancement of `second` over `first`, paired by seed and prompt, by group.

  Arguments as in `resample_reports`.
  """
  return {
    group: resample_reports(second, looping, group).interval(
      resample_reports(first, looping, group)
    )
    | {
      "prompts": sum(
        len(prompt_groups(rows)[group]) for rows in looping.values()
      )
    }
    for group in GROUPS
  }


def gain_lines(gains: Mapping[str, Mapping[str, float]]) -> list[str]:
  """Sentences about `gains` of DSpine over DFlash."""
  return [
    f"DSpine over DFlash at T=0, {name.replace('_', '-')} prompts:"
    f" x{gain['mean']:.2f} (95 % interval {gain['low']:.2f} to"
    f" {gain['high']:.2f}, {gain['prompts']} prompts)"
    for name, gain in gains.items()
    if gain["prompts"]
  ]
