"""Schedules of the objectives as functions of the step.

DSpine's alignment and replacement (dspine, 7); Domino's curriculum (baselines,
5.2).

Steps may be traced; totals are static. The learning rate is in `optimizer.py`.
"""

from jax import numpy as jnp

from dspine_jax import configs


def alignment_weight(step, options: configs.DSpineOptions):
  """beta: rises linearly from 0 over the first `alignment_warmup_steps`."""
  warmup = max(1, options.alignment_warmup_steps)
  return options.alignment_weight * jnp.clip(step / warmup, 0.0, 1.0)


def replacement_probability(
  step, total_steps: int | None, options: configs.DSpineOptions
):
  """rho: held for the first part of training, then linear to zero.

  Without a known total there is no replacement.
  """
  if not total_steps or total_steps < 0:
    return jnp.zeros_like(jnp.asarray(step, jnp.float32))
  done = jnp.asarray(step, jnp.float32) / total_steps
  hold, end = options.replacement_hold_ratio, options.replacement_end_ratio
  if end == hold:
    falling = jnp.where(done < hold, 1.0, 0.0)
  else:
    falling = jnp.clip((end - done) / (end - hold), 0.0, 1.0)
  return options.replacement_probability * falling


def base_share(step, total_steps: int, options: configs.DominoOptions):
  """lambda: from its start linearly to zero; the rest is the final loss."""
  decay_steps = max(1, int(total_steps * options.lambda_decay_ratio))
  done = jnp.asarray(step, jnp.float32) / decay_steps
  return options.lambda_start * jnp.clip(1.0 - done, 0.0, 1.0)
