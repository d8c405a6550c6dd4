"""Expected advancement without decoding: the teacher-forced proxy.

On answers that the target itself drew, rejection sampling keeps the proposal
of a slot with probability sum_v min(p, q), p and q given the true tokens before
it. The proxy is 1 + the mean over blocks of the sum of the products of these
overlaps up to each slot (baselines, 6.2). Decoding differs in two ways: its
rounds begin where the last one ended, not at places drawn evenly, and DSpark's
confidence, which shortens proposals, is not heeded here.
"""

import dataclasses

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float

from dspine_jax import configs
from dspine_jax.decoding import round as round_lib
from dspine_jax.decoding import sampling
from dspine_jax.drafters import methods
from dspine_jax.target import model
from dspine_jax.training import anchors
from dspine_jax.training import step as step_lib
from dspine_jax.typing import Key


def overlaps(
  target: round_lib.TargetModel,
  drafter: round_lib.DrafterModel,
  batch: anchors.TrainBatch,
  key: Key,
  *,
  num_anchors: int,
  sampling_cfg: configs.SamplingConfig,
  kind: str,
) -> tuple[Float[Array, "n p"], Bool[Array, "n p"]]:
  """sum_v min(p, q) of every slot of randomly placed blocks.

  Args:
    target: whose law p is.
    drafter: whose law q is.
    batch: answers drawn by the target at this temperature, with features.
    key: of the places.
    num_anchors: blocks a row.
    sampling_cfg: of both laws; temperature above 0.
    kind: how the draft is drawn, one of the method's `proposal_kinds`.

  Returns:
    The overlaps [B * N, P], and which slots lie in the answer.
  """
  cfg, tables = drafter.cfg, target.tables
  draws = step_lib.draw(
    key, batch.loss_mask, num_anchors, None, batch.documents
  )
  supervision = anchors.supervise(
    batch, draws.anchors, draws.keep, _up_to_the_first_hole, cfg=cfg
  )
  output = step_lib.run_blocks(
    drafter.params, drafter.buffers, tables, batch, draws, cfg=cfg
  )
  output = dataclasses.replace(output, layer_features=None)

  def one_block_a_row(x):
    return x.reshape(-1, 1, *x.shape[2:])

  labels, valid, before, states = (
    x.reshape(-1, *x.shape[2:])
    for x in (
      supervision.labels,
      supervision.valid,
      supervision.predecessors,
      supervision.teacher,
    )
  )
  proposal = methods.drafter(cfg).propose(
    drafter.params,
    drafter.buffers,
    tables,
    jax.tree.map(one_block_a_row, output),
    before[:, 0],
    cfg=cfg,
    sampling_cfg=sampling_cfg,
    kind=kind,
    keys=jax.random.split(key, len(labels)),
    forced=labels,
  )
  logits = model.head_logits(tables.head, states)
  p = sampling.probabilities(logits, sampling_cfg)
  return jnp.sum(jnp.minimum(p, proposal.probs), axis=-1), valid


def _up_to_the_first_hole(mask: jax.Array) -> jax.Array:
  return jnp.cumprod(mask.astype(jnp.int32), axis=-1).astype(bool)


def kept(
  overlap: Float[Array, "n p"], valid: Bool[Array, "n p"]
) -> tuple[Float[Array, "p"], Float[Array, "p"]]:
  """Sum over blocks of prod_{j <= k} overlap_j, and blocks that reach slot k.

  The proxy is 1 + the sum of their quotients; blocks end with the answer. Sums
  of several batches may be added.
  """
  products = jnp.where(valid, jnp.cumprod(overlap, axis=-1), 0.0)
  return jnp.sum(products, axis=0), jnp.sum(valid, axis=0).astype(jnp.float32)
