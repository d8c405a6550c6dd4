"""One optimiser step of a drafter, and one evaluation step.

The window of a step is [A, B, ...]: A micro-batches whose gradients are summed.
Denominators and the scale that some methods take from their own cross-entropy
are those of the whole window, so that a window of A micro-batches gives the
gradient of one large batch. Such methods get a gradient-free pre-pass, replayed
with the same random draws; with one micro-batch it is not needed.

On a mesh (`sharding.py`) every device takes its rows of each micro-batch, and
denominators, scales and reports are sums over all devices. The gradient is
written as one device's program with explicit sums (`jax.shard_map`), since
kernels cannot be partitioned by XLA; the optimiser's update is partitioned by
it. Random draws are made for the whole batch, so the mesh does not change them.
"""

import dataclasses
import functools

import jax
import optax
from flax import struct
from jax import lax
from jax import numpy as jnp

from dspine_jax import configs, sharding
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
  *,
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[TrainState, PyTree]:
  """A fresh state, and the method's frozen buffers.

  Args:
    cfg: the drafter.
    train: the run.
    tables: the target's; on a mesh, a copy on every device.
    mesh: where the state is to lie; None is the default device.
  """
  method = methods.drafter(cfg)
  init_key, run_key = jax.random.split(jax.random.key(train.seed))
  # Copies, since steps donate the state and leaves may start as one array.
  params = jax.tree.map(jnp.copy, method.init(init_key, cfg, tables))
  buffers = method.make_buffers(cfg, tables)
  make_moments = optimizer.make_optimizer(train.optimizer).init
  step = jnp.zeros((), jnp.int32)
  if mesh is not None:
    params, buffers = sharding.from_first_process((params, buffers))
    params = sharding.place(
      params, sharding.shardings(sharding.DRAFTER_RULES, params, mesh)
    )
    whole = sharding.whole(mesh)
    buffers, step, run_key = sharding.place((buffers, step, run_key), whole)
    moments = jax.eval_shape(make_moments, params)
    where = sharding.shardings(sharding.DRAFTER_RULES, moments, mesh)
    make_moments = jax.jit(make_moments, out_shardings=where)
  state = TrainState(
    params=params, opt_state=make_moments(params), step=step, key=run_key
  )
  return state, buffers


@struct.dataclass
class Draws:
  """The random draws of one micro-batch, made before any pass over it.

  Attributes:
    anchors: [B, N] int32, ascending.
    keep: [B, N] bool, False for padding blocks.
    replace: [B, N] bool, blocks that read their true predecessors, or None.
  """

  anchors: jax.Array
  keep: jax.Array
  replace: jax.Array | None


def draw(
  key: Key,
  loss_mask: jax.Array,
  num_anchors: int,
  replacement_probability: jax.Array | None,
  documents: jax.Array | None = None,
) -> Draws:
  """Anchors, and which blocks read their true predecessors."""
  anchor_key, replace_key = jax.random.split(key)
  positions, keep = anchors.sample_anchors(
    anchor_key, loss_mask, num_anchors, documents
  )
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
  positions = anchors.token_positions(batch)
  with jax.named_scope("context"):
    context = backbone.context_kv(
      params["backbone"], batch.context_features, positions, cfg=cfg
    )
  inputs = contract.BlockInputs(
    anchors=draws.anchors,
    keep=draws.keep,
    tokens=anchors.block_tokens(
      batch.tokens, draws.anchors, cfg.block_size, batch.documents
    ),
    context=context,
    replaced=draws.replace,
    origins=anchors.origins(draws.anchors, batch.documents),
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
  mesh: jax.sharding.Mesh | None = None,
) -> tuple[jax.Array, contract.LossReport, Params]:
  """Loss, report and gradient of a window [A, B, ...].

  Args:
    params: trainable tree; on a mesh split by `sharding.DRAFTER_RULES`.
    buffers: the method's.
    tables: the target's.
    batches: rows; on a mesh split by `sharding.batch_sharding`.
    key: of the window's draws.
    step: of the schedules.
    cfg: the drafter.
    train: the run.
    mesh: over which the rows are spread; its size divides B.

  Returns:
    Sums over all rows; the gradient is split like the parameters.
  """
  schedule = methods.drafter(cfg).schedule(
    step, train.optimizer.total_steps, cfg
  )
  keys = jax.random.split(key, batches.tokens.shape[0])
  draws = [
    draw(
      micro_key,
      batches.loss_mask[index],
      train.num_anchors,
      schedule.replacement,
      None if batches.documents is None else batches.documents[index],
    )
    for index, micro_key in enumerate(keys)
  ]
  gradient_of_rows = functools.partial(_gradient, cfg=cfg, train=train)
  arguments = (params, buffers, tables, batches, draws, schedule.weight)
  if mesh is None:
    return gradient_of_rows(*arguments)
  split = sharding.specs(sharding.DRAFTER_RULES, params, mesh)

  def gradient_of_own_rows(params, *others):
    value, report, gradient = gradient_of_rows(
      sharding.gather(params, split), *others, axes=sharding.AXES
    )
    value, report = sharding.all_sum((value, report), sharding.AXES)
    return value, report, sharding.sum_to_parts(gradient, split)

  whole, rows = sharding.WHOLE, sharding.Spec(sharding.AXES)
  windows = sharding.Spec(None, sharding.AXES)
  # Nothing is differentiated through a collective: the sums above are explicit.
  return jax.shard_map(
    gradient_of_own_rows,
    mesh=mesh,
    in_specs=(split, whole, whole, windows, rows, whole),
    out_specs=(whole, whole, split),
    check_vma=False,
  )(*arguments)


def _gradient(
  params,
  buffers,
  tables,
  batches,
  draws,
  scheduled_weight,
  *,
  cfg,
  train,
  axes=(),
):
  """Loss, report and gradient of the rows at hand.

  Denominators and scales are sums over `axes`, the results are not.
  """
  method = methods.drafter(cfg)
  micros = (batches, jax.tree.map(lambda *x: jnp.stack(x), *draws))

  def supervise(micro):
    batch, draws = micro
    with jax.named_scope("supervise"):
      return anchors.supervise(
        batch, draws.anchors, draws.keep, method.supervised, cfg=cfg
      )

  weight = _sum_over(lambda micro: jnp.sum(supervise(micro).weights), micros)
  denominator = sharding.all_sum(weight, axes)
  window = contract.LossWindow(
    denominator=denominator,
    ce_scale=None,
    scheduled_weight=scheduled_weight,
    axes=axes,
  )

  def objective(params, window, micro):
    batch, draws = micro
    return micro_loss(
      params,
      buffers,
      tables,
      batch,
      draws,
      supervise(micro),
      window,
      cfg=cfg,
      chunk_size=train.chunk_blocks,
    )

  if method.needs_ce_scale and len(draws) > 1:
    # The pre-pass is not differentiated; it only sums cross-entropies.
    ce = _sum_over(
      lambda micro: objective(params, window, micro)[1].sums["ce"], micros
    )
    ce_scale = losses.safe_divide(window.total(ce), denominator)
    window = dataclasses.replace(window, ce_scale=ce_scale)
  differentiate = jax.value_and_grad(objective, has_aux=True)
  (total, report), gradient = _sum_over(
    lambda micro: differentiate(params, window, micro), micros
  )
  return total, report, gradient


def _sum_over(function, micros):
  """Sum of `function`'s results over the leading axis of `micros`.

  A loop, since XLA runs unrolled micro-batches side by side, with the
  activations of all of them in memory.
  """
  first = jax.tree.map(lambda x: x[0], micros)
  if len(jax.tree.leaves(micros)[0]) == 1:
    return function(first)
  structure = None

  def leaves(micro):
    nonlocal structure
    found, structure = jax.tree.flatten(function(micro))
    return found

  # A record of arrays refuses shapes, so only its leaves are asked for theirs.
  zeros = [jnp.zeros(x.shape, x.dtype) for x in jax.eval_shape(leaves, first)]

  def add(total, micro):
    return jax.tree.map(jnp.add, total, leaves(micro)), None

  total, _ = lax.scan(add, zeros, micros)
  return jax.tree.unflatten(structure, total)


def make_train_step(
  cfg: configs.DrafterConfig,
  train: configs.TrainConfig,
  *,
  mesh: jax.sharding.Mesh | None = None,
):
  """A jitted (state, buffers, tables, batches) -> (state, metrics).

  The state is donated. Metrics are device scalars and per-slot arrays; loss and
  grad_norm are of the old parameters, param_norm is of the new ones. On a mesh
  the state stays where `init` put it, and every device has the metrics.
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
      mesh=mesh,
    )
    with jax.named_scope("update"):
      updates, opt_state = tx.update(gradient, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
    metrics = summarize(report)
    metrics["loss"] = value
    metrics["grad_norm"] = optax.tree.norm(gradient)
    metrics["param_norm"] = optax.tree.norm(params)
    state = dataclasses.replace(
      state,
      params=params,
      opt_state=opt_state,
      step=state.step + 1,
    )
    if mesh is not None:
      where = sharding.shardings(sharding.DRAFTER_RULES, state, mesh)
      state = lax.with_sharding_constraint(state, where)
    return state, metrics

  return jax.jit(train_step, donate_argnames="state")


def make_eval_step(cfg: configs.DrafterConfig, train: configs.TrainConfig):
  """A jitted (params, buffers, tables, batch, key) -> LossReport.

  No replacement and no gradient; reports of several batches may be added.
  """
  method = methods.drafter(cfg)

  def eval_step(params, buffers, tables, batch, key):
    draws = draw(key, batch.loss_mask, train.num_anchors, None, batch.documents)
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
