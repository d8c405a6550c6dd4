"""What a drafter is: the functions every method provides, and what they return.

Trainer, verifier and decode loop know only this file. A method is a `Drafter`
record in `methods.DRAFTERS`; label shift, block size and losses are its own
affair, expressed through the configuration and the functions below.
"""

from collections.abc import Callable
from typing import NamedTuple

from flax import struct
from jaxtyping import Array, Bool, Float, Int

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
  """

  anchors: Anchors
  keep: BlockKeep
  tokens: BlockTokens
  context: PyTree
  replaced: Bool[Array, "b n"] | None = None


@struct.dataclass
class DrafterOutput:
  """What a drafter's parallel pass gives.

  Attributes:
    hidden: [B, N, K, D], after the drafter's final norm.
    pre_injection: [B, N, K, D], last layer before its write (DSpine), or None.
    layer_features: [L, B, N, K, R] or tuple of [B, N, K, R], features of the
      post-write states (DSpine), or None.
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
      from the batch itself (no accumulation).
    alignment_weight: beta at this step.
  """

  denominator: Float[Array, ""]
  ce_scale: Float[Array, ""] | None
  alignment_weight: Float[Array, ""]


@struct.dataclass
class LossReport:
  """Weighted sums behind a loss; every mean is a quotient of two of them.

  Attributes:
    sums: name -> numerator (weighted by `Supervision.weights`).
    hits: [P] supervised slots whose proposed token is the label (DSpine: the
      refined choice given the true predecessor, which has the walk's accepted
      length).
    prefix_hits: [P] supervised slots with this and all earlier slots right.
    base_hits: [P] the same as `hits` for the argmax of the plain logits.
    covered: [P] supervised slots whose label is a candidate.
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


@struct.dataclass
class Proposal:
  """Draft tokens of one round and the distribution they were drawn from.

  Attributes:
    tokens: [B, M] int32.
    probs: [B, M, V] float32, q: the law of each token given the earlier ones
      of the same proposal; None for a deterministic (greedy) draft.
  """

  tokens: Int[Array, "b m"]
  probs: Float[Array, "b m v"] | None = None


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
      sampling_cfg, kind, keys [B]) -> Proposal, for one block a row; `kind` is
      "greedy" or one of `proposal_kinds`.
    proposal_kinds: names that `propose` takes as `kind` at T > 0.
    entries: (cfg) -> released tensor names of {"params", "buffers"}, see
      `checkpoints.names`.
  """

  init: Callable
  make_buffers: Callable
  forward: Callable
  supervised: Callable
  loss: Callable
  propose: Callable
  proposal_kinds: tuple[str, ...]
  entries: Callable
