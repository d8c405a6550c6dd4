"""The teacher-forced proxy of a drafter beside what decoding measured.

At temperature 0 a slot is kept if it is right, above it with the overlap of
both laws (`training.overlap`); both are averaged over blocks that begin at
random places of the target's own held-out answers.
"""

import dataclasses

import jax
import numpy as np

from dspine_jax import configs
from dspine_jax.data import answers as answers_lib
from dspine_jax.data import sources
from dspine_jax.decoding import generate
from dspine_jax.decoding import round as round_lib
from dspine_jax.training import overlap
from dspine_jax.training import step as step_lib
from experiments import run_io

_ANCHORS = 8
_ROWS = 8


def expected_advancement(
  target: generate.TargetModel,
  drafter: generate.DrafterModel,
  data: sources.Source,
  decode: configs.DecodeConfig,
  *,
  seed: int,
  label: str,
) -> float:
  """The proxy, with progress.

  Args:
    target: whose answers they are.
    drafter: what is measured.
    data: answers drawn as `decode` says, with features.
    decode: temperature, and how the draft is drawn above 0.
    seed: of the places of the blocks.
    label: of the progress line.
  """
  if decode.sampling.temperature == 0:
    means = greedy_means(target, drafter, data, seed=seed, label=label)
    return means["expected_advancement"]
  run = _overlaps(target, drafter, decode)
  kept, slots = _over_batches(run, data, seed=seed, label=label)
  return float(1 + np.sum(kept / np.maximum(slots, 1)))


def greedy_means(
  target: generate.TargetModel,
  drafter: generate.DrafterModel,
  data: sources.Source,
  *,
  seed: int,
  label: str,
) -> dict[str, float]:
  """The scalars of `training.step.summarize` on answers, with progress.

  Arguments as in `expected_advancement`.
  """
  train_cfg = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=1), num_anchors=_ANCHORS
  )
  step = step_lib.make_eval_step(drafter.cfg, train_cfg)

  def run(batch, key):
    return step(drafter.params, drafter.buffers, target.tables, batch, key)

  report = _over_batches(run, data, seed=seed, label=label)
  means = step_lib.summarize(report)
  return {name: float(x) for name, x in means.items() if np.ndim(x) == 0}


def _over_batches(run, data, *, seed: int, label: str):
  """Sum of `run(batch, key)` over all answers, each counted once."""
  count, found = len(data), []
  with run_io.Progress(count, label, "answers") as progress:
    for rows, fresh in answers_lib.batches(count, _ROWS):
      key = jax.random.fold_in(jax.random.key(seed), int(rows[0]))
      batch = sources.batch(data, rows)
      # What fills up the last batch was counted before.
      is_fresh = np.arange(len(rows)) >= len(rows) - fresh
      batch = dataclasses.replace(
        batch, loss_mask=batch.loss_mask & is_fresh[:, None]
      )
      found.append(run(batch, key))
      progress.update(fresh)
  return jax.tree.map(lambda *parts: sum(parts), *found)


def _overlaps(target, drafter, decode):
  """The same with the shared mass of both laws in place of right and wrong."""
  kind = round_lib.proposal_kind(drafter.cfg, decode)

  @jax.jit
  def measure(target, drafter, batch, key):
    found = overlap.overlaps(
      target,
      drafter,
      batch,
      key,
      num_anchors=_ANCHORS,
      sampling_cfg=decode.sampling,
      kind=kind,
    )
    return overlap.kept(*found)

  return lambda batch, key: measure(target, drafter, batch, key)
