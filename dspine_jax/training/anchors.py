"""Anchors, labels and supervision weights of draft blocks (baselines, 2.3).

An anchor is a position t with loss_mask[t] = loss_mask[t + 1] = 1, drawn
uniformly without replacement. Fewer positions than blocks leave padding blocks
(anchor 0, keep False). Partial blocks at the end of a row are allowed.
"""

import jax
from flax import struct
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from dspine_jax import configs
from dspine_jax.drafters import contract
from dspine_jax.training import losses
from dspine_jax.typing import (
  Anchors,
  BlockKeep,
  BlockTokens,
  Hidden,
  Key,
  Tokens,
)


@struct.dataclass
class TrainBatch:
  """Sequences with what the target computed for them.

  A window of micro-batches has one more axis in front of all arrays.

  Attributes:
    tokens: [B, S] int32, right-padded.
    loss_mask: [B, S] bool, True on answer tokens only.
    context_features: [B, S, taps * D], outputs of the tapped layers.
    last_hidden: [B, S, D], the target's final-normed states.
    documents: [B, S] int32, position of the first token of the document that a
      position belongs to; None where every row is one document.
  """

  tokens: Int[Array, "*a b t"]
  loss_mask: jax.Array
  context_features: Float[Array, "*a b t taps_d"]
  last_hidden: Float[Array, "*a b t d"]
  documents: Int[Array, "*a b t"] | None = None


def sample_anchors(
  key: Key,
  loss_mask: jax.Array,
  num_anchors: int,
  documents: Int[Array, "b t"] | None = None,
) -> tuple[Anchors, BlockKeep]:
  """Anchors [B, N], ascending, and which of them are real.

  Args:
    key: of the draw.
    loss_mask: [B, S].
    num_anchors: N, of a row, however many documents are packed into it.
    documents: as in `TrainBatch`; the token behind an anchor is of its own.
  """
  next_mask = jnp.pad(loss_mask[:, 1:], ((0, 0), (0, 1)))
  candidate = loss_mask.astype(bool) & next_mask.astype(bool)
  if documents is not None:
    following = jnp.pad(documents[:, 1:], ((0, 0), (0, 1)))
    candidate = candidate & (documents == following)
  # The N candidates with the largest random scores are a uniform subset.
  scores = jax.random.uniform(key, loss_mask.shape)
  scores = jnp.where(candidate, scores, -1.0)
  count = min(num_anchors, loss_mask.shape[1])
  top, positions = jax.lax.top_k(scores, count)
  positions = jnp.where(top >= 0, positions, loss_mask.shape[1])
  positions = jnp.sort(positions, axis=-1)
  padding = ((0, 0), (0, num_anchors - count))
  positions = jnp.pad(
    positions, padding, constant_values=loss_mask.shape[1]
  ).astype(jnp.int32)
  keep = positions < loss_mask.shape[1]
  return jnp.where(keep, positions, 0), keep


def block_tokens(
  tokens: Tokens,
  anchors: Anchors,
  block_size: int,
  documents: Int[Array, "b t"] | None = None,
) -> BlockTokens:
  """True token of each slot, [B, N, K]; clipped at the row's last token.

  Behind the end of a document of a packed row the token is 0, as it is behind
  the end of a row that is padded.
  """
  positions = anchors[..., None] + jnp.arange(block_size)[None, None]
  found = _gather(tokens, positions)
  if documents is None:
    return found
  return jnp.where(_of_one_document(documents, anchors, positions), found, 0)


def origins(
  anchors: Anchors, documents: Int[Array, "b t"] | None
) -> Anchors | None:
  """Where the documents of the anchors begin; None for rows of one each."""
  if documents is None:
    return None
  return _gather(documents, anchors[..., None])[..., 0]


def token_positions(batch: TrainBatch) -> Tokens:
  """Position of every token in its own document, [B, S]."""
  length = batch.tokens.shape[1]
  places = jnp.broadcast_to(jnp.arange(length)[None], batch.tokens.shape)
  return places if batch.documents is None else places - batch.documents


def supervise(
  batch: TrainBatch,
  anchors: Anchors,
  keep: BlockKeep,
  supervised_rule,
  *,
  cfg: configs.DrafterConfig,
) -> contract.Supervision:
  """Labels, predecessors, weights and teacher states of predicting slots.

  Args:
    batch: tokens, mask and teacher states.
    anchors: [B, N].
    keep: [B, N].
    supervised_rule: the method's `supervised`, mask [B, N, P] -> [B, N, P].
    cfg: gives block size, label shift and decay.
  """
  offsets = 1 + jnp.arange(cfg.num_proposals)[None, None]
  positions = anchors[..., None] + offsets
  length = batch.tokens.shape[1]
  mask = _gather(batch.loss_mask.astype(bool), positions)
  mask = mask & (positions < length) & keep[..., None]
  if batch.documents is not None:
    mask = mask & _of_one_document(batch.documents, anchors, positions)
  valid = supervised_rule(mask)
  decay = losses.position_decay(cfg.num_proposals, cfg.decay_gamma)
  before = positions - 1
  return contract.Supervision(
    labels=_gather(batch.tokens, positions),
    predecessors=_gather(batch.tokens, before),
    valid=valid,
    weights=valid * decay[None, None],
    teacher=_gather_states(
      batch.last_hidden, jnp.minimum(positions, length - 1) - 1
    ),
  )


def _of_one_document(documents, anchors, positions) -> jax.Array:
  """Whether positions [B, N, P] before the end of the row are the anchor's."""
  own = _gather(documents, anchors[..., None])
  same = _gather(documents, positions) == own
  return same & (positions < documents.shape[1])


def _gather(values: jax.Array, positions: Int[Array, "b n p"]) -> jax.Array:
  clipped = jnp.minimum(positions, values.shape[1] - 1)
  flat = clipped.reshape(clipped.shape[0], -1)
  return jnp.take_along_axis(values, flat, axis=1).reshape(clipped.shape)


def _gather_states(states: Hidden, positions: Int[Array, "b n p"]) -> jax.Array:
  clipped = jnp.minimum(positions, states.shape[1] - 1)
  return jax.vmap(lambda rows, index: rows[index])(states, clipped)
