"""AdamW or muon with cosine decay, warm-up and clipping.

One optimiser for every method that is compared. Parameters and moments are
float32 masters whatever dtype the forward pass uses. Muon acts on the kernels
of linear maps only ([in, out], or [layers, in, out] where layers are stacked);
norms, biases and embeddings get its Adam part.
"""

from typing import Any

import jax
import optax
import optax.contrib

from dspine_jax import configs


def learning_rate(cfg: configs.OptimizerConfig) -> optax.Schedule:
  """Linear warm-up over `warmup_ratio` of the steps, then the named decay.

  A "wsd" run (warm-up, stable, decay) may be shortened or lengthened until its
  decay starts, since nothing before depends on the number of steps but the
  warm-up.
  """
  warmup = max(1, round(cfg.warmup_ratio * cfg.total_steps))
  if cfg.schedule == "wsd":
    decay = max(1, round(cfg.decay_ratio * cfg.total_steps))
    final = cfg.learning_rate * cfg.final_lr_ratio
    return optax.join_schedules(
      [
        optax.linear_schedule(0.0, cfg.learning_rate, warmup),
        optax.constant_schedule(cfg.learning_rate),
        optax.linear_schedule(cfg.learning_rate, final, decay),
      ],
      [warmup, max(warmup, cfg.total_steps - decay)],
    )
  return optax.warmup_cosine_decay_schedule(
    init_value=0.0,
    peak_value=cfg.learning_rate,
    warmup_steps=warmup,
    decay_steps=max(cfg.total_steps, warmup + 1),
    end_value=cfg.learning_rate * cfg.final_lr_ratio,
  )


def make_optimizer(
  cfg: configs.OptimizerConfig,
) -> optax.GradientTransformation:
  """Clipping by global norm, then the named optimiser."""
  schedule = learning_rate(cfg)
  if cfg.name == "muon":
    core = optax.contrib.muon(
      schedule,
      weight_decay=cfg.weight_decay,
      adam_b1=cfg.adam_b1,
      adam_b2=cfg.adam_b2,
      adam_weight_decay=cfg.weight_decay,
      muon_weight_dimension_numbers=_matrix_axes,
    )
  else:
    core = optax.adamw(
      schedule,
      b1=cfg.adam_b1,
      b2=cfg.adam_b2,
      weight_decay=cfg.weight_decay,
    )
  return optax.chain(optax.clip_by_global_norm(cfg.clip_norm), core)


def _matrix_axes(params: Any) -> Any:
  """MuonDimensionNumbers for kernels, None (Adam) for everything else."""

  def axes(path, leaf):
    if getattr(path[-1], "key", None) != "kernel" or leaf.ndim < 2:
      return None
    return optax.contrib.MuonDimensionNumbers(
      reduction_axis=leaf.ndim - 2, output_axis=leaf.ndim - 1
    )

  return jax.tree_util.tree_map_with_path(axes, params)
