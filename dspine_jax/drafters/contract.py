"""What a drafter is: the functions every method provides, and what they return.

Trainer, verifier and decode loop know only this file. A method is a `Drafter`
record in `methods.DRAFTERS`; label shift, block size and losses are its own
affair, expressed through the configuration and the functions below.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from flax import struct
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspine_jax import sharding
from dspine_jax.typing import (
  Anchors,
  BlockHidden,
  BlockKeep,
  BlockTokens,
  BlockWeights,
  PyTree,
)


@struct.dataclass
class TargetTables:
  """Frozen tables borrowed from the target; no gradient ever reaches them.

  Attributes:
    embedding: [V, D], input embeddings.
    head: [V, D], rows of the LM head (the same array where they are tied).
  """

  embedding: Float[Array, "v d"]
  head: Float[Array, "v d"]


@struct.dataclass
class BlockInputs:
  """Draft blocks of a pass, in training (many a row) and decoding (one a row).

  Attributes:
    anchors: [B, N] int32, position of slot 0; context is seen strictly before.
    keep: [B, N] bool, False for padding blocks.
    tokens: [B, N, K] int32, true token of each slot. Only slot 0 is read,
      unless predecessors are replaced.
    context: per layer (k, v), each [B, G, S, H]; see `backbone.context_kv`.
    replaced: [B, N] bool, blocks that read true predecessors, or None.
    origins: [B, N] int32, position of the first token of the anchor's document
      in a packed row: context is seen from there on, and positions count from
      there. None where a row is one document.
    for_loss: whether the pass is to be supervised, so that what only a loss
      reads has to be computed (static).
  """

  anchors: Anchors
  keep: BlockKeep
  tokens: BlockTokens
  context: PyTree
  replaced: Bool[Array, "b n"] | None = None
  origins: Anchors | None = None
  for_loss: bool = struct.field(pytree_node=False, default=False)


@struct.dataclass
class DrafterOutput:
  """What a drafter's parallel pass gives.

  Attributes:
    hidden: [B, N, K, D], after the drafter's final norm.
    pre_injection: [B, N, K, D], last layer before its write (DSpine), or None.
    layer_features: [L, B, N, K, R] or tuple of [B, N, K, R], features of the
      post-write states (DSpine), or what else of them `layer_supervision`
      reads, or None.
  """

  hidden: BlockHidden
  pre_injection: BlockHidden | None = None
  layer_features: PyTree = None


@struct.dataclass
class Supervision:
  """Labels of the predicting slots (P = number of proposals).

  Attributes:
    labels: [B, N, P] int32, clipped at the end of the row where invalid.
    predecessors: [B, N, P] int32, true token before each label.
    valid: [B, N, P] bool, the method's rule for supervised slots.
    weights: [B, N, P] float32, valid x position decay.
    teacher: [B, N, P, D], target's final-normed state that predicts the label.
  """

  labels: Int[Array, "b n p"]
  predecessors: Int[Array, "b n p"]
  valid: Bool[Array, "b n p"]
  weights: BlockWeights
  teacher: Float[Array, "b n p d"]


@struct.dataclass
class LossWindow:
  """Scalars that a loss shares over a whole accumulation window.

  Attributes:
    denominator: sum of weights over the window.
    ce_scale: mean backbone cross-entropy over the window, or None to take it
      from the batch itself (no accumulation). Only for methods with
      `Drafter.needs_ce_scale`.
    scheduled_weight: `Schedule.weight` at this step; 0 in evaluation.
    axes: of `jax.shard_map` that the rows of the batch are spread over; the
      scalars above are of all rows. Empty where one device has them all.
  """

  denominator: Float[Array, ""]
  ce_scale: Float[Array, ""] | None
  scheduled_weight: Float[Array, ""]
  axes: tuple[str, ...] = struct.field(pytree_node=False, default=())

  def total(self, x: Float[Array, ""]) -> Float[Array, ""]:
    """A sum over the rows of this device -> over the rows of all, constant."""
    return sharding.all_sum(jax.lax.stop_gradient(x), self.axes)


@struct.dataclass
class Schedule:
  """What a method varies over training, at one step.

  Attributes:
    weight: weight of the one term that rises or falls (DSpine: beta of the
      alignment; Domino: lambda of the base cross-entropy).
    replacement: probability that a block reads its true predecessors; None for
      methods without replacement, which then draw nothing.
  """

  weight: Float[Array, ""]
  replacement: Float[Array, ""] | None = None


def no_schedule(step: Any, total_steps: int, cfg: Any) -> Schedule:
  """The schedule of methods whose objective is the same at every step."""
  del step, total_steps, cfg
  return Schedule(weight=jnp.zeros(()))


@struct.dataclass
class LossReport:
  """Weighted sums behind a loss; every mean is a quotient of two of them.

  Attributes:
    sums: name -> numerator (weighted by `Supervision.weights`).
    hits: [P] supervised slots whose proposed token is the label (methods with
      a walk: the choice given the true predecessors, which has the walk's
      accepted length).
    prefix_hits: [P] supervised slots with this and all earlier slots right.
    base_hits: [P] the same as `hits` for the argmax of the plain logits.
    covered: [P] supervised slots whose label is a candidate (methods without
      candidates: the same as `hits`).
    supervised: [P] supervised slots.
    weight: sum of weights.
  """

  sums: dict[str, Float[Array, ""]]
  hits: Float[Array, "p"]
  prefix_hits: Float[Array, "p"]
  base_hits: Float[Array, "p"]
  covered: Float[Array, "p"]
  supervised: Float[Array, "p"]
  weight: Float[Array, ""]


def counts(
  terms: dict[str, jax.Array], valid: Bool[Array, "n p"]
) -> dict[str, jax.Array]:
  """Per-slot counts [P] of a chunk of blocks, for `loss_report`.

  Args:
    terms: `hit` [blocks, P], and `base_hit` and `covered` where they differ.
    valid: supervised slots.
  """
  hit = terms["hit"] & valid
  prefix = jnp.cumprod(hit.astype(jnp.float32), axis=-1)

  def count(name):
    right = terms.get(name, hit) & valid
    return jnp.sum(right, axis=0).astype(jnp.float32)

  return {
    "hits": count("hit"),
    "prefix_hits": jnp.sum(prefix, axis=0),
    "base_hits": count("base_hit"),
    "covered": count("covered"),
  }


_COUNTS = ("hits", "prefix_hits", "base_hits", "covered")


def loss_report(
  sums: dict[str, jax.Array], supervision: Supervision
) -> LossReport:
  """A report from weighted sums and the `counts` among them."""
  terms = {name: x for name, x in sums.items() if name not in _COUNTS}
  return LossReport(
    sums=terms,
    **{name: sums[name] for name in _COUNTS},
    supervised=jnp.sum(supervision.valid, axis=(0, 1)).astype(jnp.float32),
    weight=jnp.sum(supervision.weights),
  )


@struct.dataclass
class Proposal:
  """Draft tokens of one round and the distribution they were drawn from.

  Attributes:
    tokens: [B, M] int32.
    probs: [B, M, V] float32, q: the law of each token given the earlier ones
      of the same proposal; None for a deterministic (greedy) draft.
    lengths: [B] int32, how many of the tokens are proposed, 0..M; None for all.
      Whether a token is may depend on the tokens before it, not on itself.
  """

  tokens: Int[Array, "b m"]
  probs: Float[Array, "b m v"] | None = None
  lengths: Int[Array, "b"] | None = None


class Drafter(NamedTuple):
  """The functions of one method.

  Attributes:
    init: (key, cfg, tables) -> params, trainable float32 tree.
    make_buffers: (cfg, tables) -> frozen arrays stored in the checkpoint.
    forward: (params, buffers, tables, inputs, *, cfg) -> DrafterOutput.
    supervised: (mask [B, N, P]) -> [B, N, P], which labels count after a hole.
    loss: (params, buffers, tables, output, supervision, *, cfg, window,
      chunk_size) -> (scalar, LossReport).
    propose: (params, buffers, tables, output, anchor_tokens [B], *, cfg,
      sampling_cfg, kind, keys [B], forced) -> Proposal, for one block a row;
      `kind` is "greedy" or one of `proposal_kinds`. `forced` [B, M], with one
      of the latter, are tokens to take instead of drawing: `probs` is then the
      law of each given those before it.
    proposal_kinds: names that `propose` takes as `kind` at T > 0.
    entries: (cfg) -> released tensor names of {"params", "buffers"}, see
      `checkpoints.names`.
    schedule: (step, total_steps, cfg) -> Schedule; the step may be traced.
    needs_ce_scale: whether the loss reads `LossWindow.ce_scale`, which costs a
      pass without gradients when gradients are accumulated.
  """

  init: Callable
  make_buffers: Callable
  forward: Callable
  supervised: Callable
  loss: Callable
  propose: Callable
  proposal_kinds: tuple[str, ...]
  entries: Callable
  schedule: Callable[[Any, int, Any], Schedule] = no_schedule
  needs_ce_scale: bool = False
