"""One optimiser step of a drafter, and one evaluation step.

The window of a step is [A, B, ...]: A micro-batches whose gradients are summed.
Denominators and the scale that some methods take from their own cross-entropy
are those of the whole window, so that a window of A micro-batches gives the
gradient of one large batch. Such methods get a gradient-free pre-pass, replayed
with the same random draws; with one micro-batch it is not needed.
"""

import dataclasses

import jax
import optax
from flax import struct
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import backbone, contract, methods
from dspine_jax.training import anchors, losses, optimizer
from dspine_jax.typing import Key, Params, PyTree


@struct.dataclass
class TrainState:
  """Everything that a killed run needs to go on.

  Attributes:
    params: trainable tree of the drafter, float32.
    opt_state: of the optimiser.
    step: [] int32, optimiser steps done; also the data position.
    key: typed PRNG key of the run; step s uses fold_in(key, s).
  """

  # A restore fills the tree with shapes and file names on its way.
  params: PyTree
  opt_state: PyTree
  step: PyTree
  key: PyTree


def init(
  cfg: configs.DrafterConfig,
  train: configs.TrainConfig,
  tables: contract.TargetTables,
) -> tuple[TrainState, PyTree]:
  """A fresh state, and the method's frozen buffers."""
  method = methods.drafter(cfg)
  init_key, run_key = jax.random.split(jax.random.key(train.seed))
  # Copies, since steps donate the state and leaves may start as one array.
  params = jax.tree.map(jnp.copy, method.init(init_key, cfg, tables))
  tx = optimizer.make_optimizer(train.optimizer)
  state = TrainState(
    params=params,
    opt_state=tx.init(params),
    step=jnp.zeros((), jnp.int32),
    key=run_key,
  )
  return state, method.make_buffers(cfg, tables)


@dataclasses.dataclass(frozen=True)
class Draws:
  """The random draws of one micro-batch, made before any pass over it."""

  anchors: jax.Array
  keep: jax.Array
  replace: jax.Array | None


def draw(
  key: Key,
  loss_mask: jax.Array,
  num_anchors: int,
  replacement_probability: jax.Array | None,
) -> Draws:
  """Anchors, and which blocks read their true predecessors."""
  anchor_key, replace_key = jax.random.split(key)
  positions, keep = anchors.sample_anchors(anchor_key, loss_mask, num_anchors)
  replace = None
  if replacement_probability is not None:
    uniform = jax.random.uniform(replace_key, positions.shape)
    replace = uniform < replacement_probability
  return Draws(positions, keep, replace)


def run_blocks(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  batch: anchors.TrainBatch,
  draws: Draws,
  *,
  cfg: configs.DrafterConfig,
) -> contract.DrafterOutput:
  """The drafter's pass over all drawn blocks of a batch."""
  length = batch.tokens.shape[1]
  positions = jnp.broadcast_to(jnp.arange(length)[None], batch.tokens.shape)
  with jax.named_scope("context"):
    context = backbone.context_kv(
      params["backbone"], batch.context_features, positions, cfg=cfg
    )
  inputs = contract.BlockInputs(
    anchors=draws.anchors,
    keep=draws.keep,
    tokens=anchors.block_tokens(batch.tokens, draws.anchors, cfg.block_size),
    context=context,
    replaced=draws.replace,
    for_loss=True,
  )
  forward = methods.drafter(cfg).forward
  with jax.named_scope("draft"):
    return forward(params, buffers, tables, inputs, cfg=cfg)


def micro_loss(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  batch: anchors.TrainBatch,
  draws: Draws,
  supervision: contract.Supervision,
  window: contract.LossWindow,
  *,
  cfg: configs.DrafterConfig,
  chunk_size: int,
) -> tuple[jax.Array, contract.LossReport]:
  """Forward pass and objective of one micro-batch."""
  output = run_blocks(params, buffers, tables, batch, draws, cfg=cfg)
  with jax.named_scope("loss"):
    return methods.drafter(cfg).loss(
      params,
      buffers,
      tables,
      output,
      supervision,
      cfg=cfg,
      window=window,
      chunk_size=chunk_size,
    )


def window_gradient(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  batches: anchors.TrainBatch,
  key: Key,
  step: jax.Array,
  *,
  cfg: configs.DrafterConfig,
  train: configs.TrainConfig,
) -> tuple[jax.Array, contract.LossReport, Params]:
  """Loss, report and gradient of a window [A, B, ...]."""
  method = methods.drafter(cfg)
  schedule = method.schedule(step, train.optimizer.total_steps, cfg)
  count = batches.tokens.shape[0]
  micros = []
  for index, micro_key in enumerate(jax.random.split(key, count)):
    batch = jax.tree.map(lambda x, i=index: x[i], batches)
    draws = draw(
      micro_key, batch.loss_mask, train.num_anchors, schedule.replacement
    )
    with jax.named_scope("supervise"):
      supervision = anchors.supervise(
        batch, draws.anchors, draws.keep, method.supervised, cfg=cfg
      )
    micros.append((batch, draws, supervision))
  weights = [jnp.sum(supervision.weights) for _, _, supervision in micros]
  denominator = jnp.sum(jnp.stack(weights))
  window = contract.LossWindow(
    denominator=denominator,
    ce_scale=None,
    scheduled_weight=schedule.weight,
  )

  def objective(params, window, micro):
    batch, draws, supervision = micro
    return micro_loss(
      params,
      buffers,
      tables,
      batch,
      draws,
      supervision,
      window,
      cfg=cfg,
      chunk_size=train.chunk_blocks,
    )

  if method.needs_ce_scale and count > 1:
    # The pre-pass is not differentiated; it only sums cross-entropies.
    reports = [objective(params, window, micro)[1] for micro in micros]
    ce = jnp.sum(jnp.stack([report.sums["ce"] for report in reports]))
    ce_scale = losses.safe_divide(ce, denominator)
    window = dataclasses.replace(window, ce_scale=ce_scale)
  differentiate = jax.value_and_grad(objective, has_aux=True)
  (total, report), gradient = differentiate(params, window, micros[0])
  for micro in micros[1:]:
    more = differentiate(params, window, micro)
    (total, report), gradient = jax.tree.map(
      jnp.add, ((total, report), gradient), more
    )
  return total, report, gradient


def make_train_step(cfg: configs.DrafterConfig, train: configs.TrainConfig):
  """A jitted (state, buffers, tables, batches) -> (state, metrics).

  The state is donated. Metrics are device scalars and per-slot arrays; loss and
  grad_norm are of the old parameters, param_norm is of the new ones.
  """
  tx = optimizer.make_optimizer(train.optimizer)

  def train_step(state, buffers, tables, batches):
    key = jax.random.fold_in(state.key, state.step)
    value, report, gradient = window_gradient(
      state.params,
      buffers,
      tables,
      batches,
      key,
      state.step,
      cfg=cfg,
      train=train,
    )
    with jax.named_scope("update"):
      updates, opt_state = tx.update(gradient, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
    metrics = summarize(report)
    metrics["loss"] = value
    metrics["grad_norm"] = optax.tree.norm(gradient)
    metrics["param_norm"] = optax.tree.norm(params)
    return (
      dataclasses.replace(
        state,
        params=params,
        opt_state=opt_state,
        step=state.step + 1,
      ),
      metrics,
    )

  return jax.jit(train_step, donate_argnames="state")


def make_eval_step(cfg: configs.DrafterConfig, train: configs.TrainConfig):
  """A jitted (params, buffers, tables, batch, key) -> LossReport.

  No replacement and no gradient; reports of several batches may be added.
  """
  method = methods.drafter(cfg)

  def eval_step(params, buffers, tables, batch, key):
    draws = draw(key, batch.loss_mask, train.num_anchors, None)
    supervision = anchors.supervise(
      batch, draws.anchors, draws.keep, method.supervised, cfg=cfg
    )
    window = contract.LossWindow(
      denominator=jnp.sum(supervision.weights),
      ce_scale=None,
      scheduled_weight=jnp.zeros(()),
    )
    return micro_loss(
      params,
      buffers,
      tables,
      batch,
      draws,
      supervision,
      window,
      cfg=cfg,
      chunk_size=train.chunk_blocks,
    )[1]

  return jax.jit(eval_step)


def summarize(report: contract.LossReport) -> dict[str, jax.Array]:
  """Means from a report.

  Returns:
    Each term divided by the weight; `accuracy`, `base_accuracy`, `coverage`
    over supervised slots; `slot_accuracy` [P]; and `expected_advancement`, 1 +
    the sum over slots of the share of blocks right up to that slot.
  """
  slots = report.supervised
  total = jnp.sum(slots)
  divide = losses.safe_divide
  return {
    **{
      name: divide(value, report.weight) for name, value in report.sums.items()
    },
    "accuracy": divide(jnp.sum(report.hits), total),
    "base_accuracy": divide(jnp.sum(report.base_hits), total),
    "coverage": divide(jnp.sum(report.covered), total),
    "slot_accuracy": divide(report.hits, slots),
    "expected_advancement": 1 + jnp.sum(divide(report.prefix_hits, slots)),
  }
