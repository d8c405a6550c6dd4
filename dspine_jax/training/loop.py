"""The training loop of a drafter: data order, metrics, checkpoints, resume.

A killed run goes on with bit-equal parameters: everything a step uses is in the
checkpoint or a function of the step. Printing and files other than checkpoints
are the caller's, through `on_metrics`.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import numpy as np

from dspine_jax import configs
from dspine_jax.checkpoints import orbax
from dspine_jax.data import features
from dspine_jax.drafters import contract
from dspine_jax.training import anchors
from dspine_jax.training import step as step_lib
from dspine_jax.typing import Params, PyTree


class Trained(NamedTuple):
  """A trained drafter.

  Attributes:
    params: trainable tree.
    buffers: the method's frozen arrays.
  """

  params: Params
  buffers: PyTree


def train(
  cfg: configs.DrafterConfig,
  train_cfg: configs.TrainConfig,
  tables: contract.TargetTables,
  data: features.FeatureSet,
  *,
  checkpoints: orbax.TrainingCheckpoints | None = None,
  checkpoint_every: int = 100,
  on_start: Callable[[int], None] = lambda step: None,
  on_metrics: Callable[[int, dict[str, np.ndarray]], None] = (
    lambda step, metrics: None
  ),
) -> Trained:
  """Trains to `train_cfg.optimizer.total_steps`, from a checkpoint if any.

  Args:
    cfg: the drafter.
    train_cfg: the run.
    tables: the target's embedding and head.
    data: training rows.
    checkpoints: where states are kept; None keeps none.
    checkpoint_every: steps between checkpoints; the last step always has one.
    on_start: called with the first step to be run (after a restore).
    on_metrics: called with (step, metrics of that step), one step late so that
      the device is never waited for.

  Raises:
    ValueError: NaN or infinity in loss, gradient or parameters. The last
      checkpoint is from before it.
  """
  state, buffers = step_lib.init(cfg, train_cfg, tables)
  if checkpoints is not None and checkpoints.latest_step() is not None:
    state, _ = checkpoints.restore(state)
  # Fresh states are placed like restored ones: one program serves both.
  state = jax.device_put(state, jax.local_devices()[0])
  train_step = step_lib.make_train_step(cfg, train_cfg)
  first, total = int(state.step), train_cfg.optimizer.total_steps
  on_start(first)
  rows_per_step = train_cfg.batch_size * train_cfg.accumulation
  order = features.RowOrder(len(data.loss_mask), rows_per_step, train_cfg.seed)
  pending: tuple[int, dict] | None = None

  def report(pending):
    step, metrics = pending[0], jax.device_get(pending[1])
    for name in ("loss", "grad_norm", "param_norm"):
      if not np.isfinite(metrics[name]):
        kept = checkpoints.latest_step() if checkpoints is not None else None
        raise ValueError(
          f"{name} is {metrics[name]} at step {step}; the last good checkpoint"
          f" is of step {kept} (a lower learning rate may help)"
        )
    on_metrics(step, metrics)

  for step in range(first, total):
    batches = window(data, order.rows(step), train_cfg)
    state, metrics = train_step(state, buffers, tables, batches)
    if pending is not None:
      report(pending)
    pending = (step, metrics)
    done = step + 1
    if checkpoints is not None and (
      done % checkpoint_every == 0 or done == total
    ):
      # Only a state that is finite, as its loss and gradient are, is kept.
      report(pending)
      pending = None
      checkpoints.save(done, state, {})
  if pending is not None:
    report(pending)
  return Trained(params=state.params, buffers=buffers)


def window(
  data: features.FeatureSet,
  rows: np.ndarray,
  train_cfg: configs.TrainConfig,
) -> anchors.TrainBatch:
  """Rows of one optimiser step as [A, B, ...] arrays."""
  batch = data.batch(rows)
  shape = (train_cfg.accumulation, train_cfg.batch_size)
  return jax.tree.map(lambda x: x.reshape(*shape, *x.shape[1:]), batch)
