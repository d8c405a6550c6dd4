"""One speculative round as a pure function over a typed `DecodeState`.

Top to bottom: draft, candidates, transition cache, walk (all the method's own
`forward` and `propose`), verify, commit. Rows advance independently; a finished
row runs along and commits nothing. `generate.py` drives the same function from
a `lax.while_loop`, a streaming caller from Python.
"""

import dataclasses

import jax
from flax import struct
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Int

from dspine_jax import configs, kv_cache
from dspine_jax.decoding import verify
from dspine_jax.drafters import backbone, contract, methods
from dspine_jax.target import model
from dspine_jax.typing import Params, PyTree


@struct.dataclass
class TargetModel:
  """A target's parameters with their configuration (static)."""

  params: Params
  cfg: configs.TargetConfig = struct.field(pytree_node=False)

  @property
  def tables(self) -> contract.TargetTables:
    """Embedding and head, as the drafter borrows them."""
    return contract.TargetTables(
      embedding=model.embedding(self.params), head=model.head(self.params)
    )


@struct.dataclass
class DrafterModel:
  """A drafter's parameters and frozen buffers with their configuration."""

  params: Params
  buffers: PyTree
  cfg: configs.DrafterConfig = struct.field(pytree_node=False)


@struct.dataclass
class DecodeState:
  """Everything a request batch carries from round to round.

  Attributes:
    tokens: [B, max_new + M + 1] int32, generated tokens; what lies behind
      `num_tokens` is undefined.
    num_tokens: [B] int32, generated tokens so far.
    anchor: [B] int32, the last of them; its target state is not cached yet.
    limits: [B] int32, most tokens a row may generate.
    done: [B] bool, stopped or at its limit.
    target_cache: the target's keys and values of everything before the anchor.
    draft_cache: the drafter's context keys and values of the same positions.
    keys: [B] typed PRNG keys, one stream a row.
    rounds: [] int32, rounds run so far.
    round_lengths: [B, max_new] int32, tokens committed in each round, clipped
      at the limit and the stop token; 0 where the row was finished.
    accepted: [B, max_new] int32, draft tokens that stood, before clipping; -1
      where the row was finished.
  """

  tokens: Int[Array, "b t"]
  num_tokens: Int[Array, "b"]
  anchor: Int[Array, "b"]
  limits: Int[Array, "b"]
  done: Bool[Array, "b"]
  target_cache: kv_cache.KVCache
  draft_cache: kv_cache.KVCache
  keys: jax.Array
  rounds: Int[Array, ""]
  round_lengths: Int[Array, "b r"]
  accepted: Int[Array, "b r"]


def draft(
  target: TargetModel,
  drafter: DrafterModel,
  anchor: Int[Array, "b"],
  context: kv_cache.KVCache,
) -> contract.DrafterOutput:
  """The drafter's parallel pass over one block a row, [anchor, MASK, ...]."""
  cfg = drafter.cfg
  batch = anchor.shape[0]
  tokens = jnp.broadcast_to(anchor[:, None, None], (batch, 1, cfg.block_size))
  inputs = contract.BlockInputs(
    anchors=context.lengths[:, None],
    keep=jnp.ones((batch, 1), bool),
    tokens=tokens,
    context=context.layers,
  )
  return methods.drafter(cfg).forward(
    drafter.params, drafter.buffers, target.tables, inputs, cfg=cfg
  )


def propose(
  target: TargetModel,
  drafter: DrafterModel,
  output: contract.DrafterOutput,
  anchor: Int[Array, "b"],
  keys: jax.Array,
  *,
  decode: configs.DecodeConfig,
) -> contract.Proposal:
  """Candidates, transition cache and walk, as far as the method has them."""
  method = methods.drafter(drafter.cfg)
  kind = proposal_kind(drafter.cfg, decode)
  return method.propose(
    drafter.params,
    drafter.buffers,
    target.tables,
    output,
    anchor,
    cfg=drafter.cfg,
    sampling_cfg=decode.sampling,
    kind=kind,
    keys=keys,
  )


def proposal_kind(
  cfg: configs.DrafterConfig, decode: configs.DecodeConfig
) -> str:
  """The way to draw the draft; ValueError if the method does not have it."""
  if decode.sampling.temperature == 0:
    return "greedy"
  kinds = methods.drafter(cfg).proposal_kinds
  kind = decode.proposal or kinds[0]
  if kind not in ("greedy", *kinds):
    raise ValueError(
      f"proposal={kind!r}: {cfg.method} has {('greedy', *kinds)}"
    )
  return kind


def speculative_round(
  target: TargetModel,
  drafter: DrafterModel,
  state: DecodeState,
  *,
  decode: configs.DecodeConfig,
) -> DecodeState:
  """Drafts a block, verifies it in one target pass, commits what stands."""
  keys = jax.vmap(lambda key: jax.random.split(key, 4))(state.keys)
  next_keys, draft_keys, accept_keys, replace_keys = (
    keys[:, i] for i in range(4)
  )
  with jax.named_scope("draft"):
    output = draft(target, drafter, state.anchor, state.draft_cache)
  with jax.named_scope("propose"):
    proposal = propose(
      target, drafter, output, state.anchor, draft_keys, decode=decode
    )
  with jax.named_scope("verify"):
    checked = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    passed = model.forward(
      target.params,
      checked,
      cfg=target.cfg,
      cache=state.target_cache,
      tap_layers=drafter.cfg.target_layer_ids,
    )
    verdict = verify.RULES[decode.rule](
      model.logits(target.params, passed.hidden),
      proposal,
      sampling_cfg=decode.sampling,
      accept_keys=accept_keys,
      replace_keys=replace_keys,
    )
  with jax.named_scope("commit"):
    return commit(
      drafter,
      dataclasses.replace(state, keys=next_keys, target_cache=passed.cache),
      proposal.tokens,
      verdict,
      passed.features,
      decode=decode,
    )


def commit(
  drafter: DrafterModel,
  state: DecodeState,
  drafts: Int[Array, "b m"],
  verdict: verify.Verdict,
  features: jax.Array,
  *,
  decode: configs.DecodeConfig,
) -> DecodeState:
  """Appends accepted tokens and the next one; crops both caches to them.

  A row takes at most what its limit leaves, and nothing behind a stop token.
  """
  slots = jnp.arange(drafts.shape[1] + 1)[None, :]
  padded = jnp.pad(drafts, ((0, 0), (0, 1)))
  accepted = verdict.accepted[:, None]
  emitted = jnp.where(slots == accepted, verdict.next_token[:, None], padded)
  counts, stopped = clip_at_stop(
    emitted,
    jnp.minimum(verdict.accepted + 1, state.limits - state.num_tokens),
    decode.stop_tokens,
  )
  counts = jnp.where(state.done, 0, counts)
  context = write_context(drafter, state.draft_cache, features)
  last = jnp.take_along_axis(
    emitted, jnp.maximum(counts - 1, 0)[:, None], axis=1
  )[:, 0]
  num_tokens = state.num_tokens + counts
  column = (0, state.rounds)
  return dataclasses.replace(
    state,
    tokens=append_tokens(state.tokens, emitted, state.num_tokens),
    num_tokens=num_tokens,
    anchor=jnp.where(state.done, state.anchor, last),
    done=state.done | stopped | (num_tokens >= state.limits),
    target_cache=kv_cache.advance(state.target_cache, counts),
    draft_cache=kv_cache.advance(context, counts),
    rounds=state.rounds + 1,
    round_lengths=lax.dynamic_update_slice(
      state.round_lengths, counts[:, None], column
    ),
    accepted=lax.dynamic_update_slice(
      state.accepted,
      jnp.where(state.done, -1, verdict.accepted)[:, None],
      column,
    ),
  )


def clip_at_stop(
  emitted: Int[Array, "b t"],
  counts: Int[Array, "b"],
  stop_tokens: tuple[int, ...],
) -> tuple[Int[Array, "b"], Bool[Array, "b"]]:
  """Counts cut behind the first stop token, and whether there was one.

  emitted [[4, 9, 7]], counts [3], stop (9,) -> counts [2], stopped [True].
  """
  is_stop = jnp.zeros(emitted.shape, bool)
  for token in stop_tokens:
    is_stop = is_stop | (emitted == token)
  is_stop = is_stop & (jnp.arange(emitted.shape[1])[None] < counts[:, None])
  stopped = jnp.any(is_stop, axis=1)
  first = jnp.argmax(is_stop, axis=1).astype(counts.dtype)
  return jnp.where(stopped, first + 1, counts), stopped


def write_context(
  drafter: DrafterModel, cache: kv_cache.KVCache, features: jax.Array
) -> kv_cache.KVCache:
  """Writes the drafter's keys and values of new context positions."""
  positions = cache.lengths[:, None] + jnp.arange(features.shape[1])[None]
  new = backbone.context_kv(
    drafter.params["backbone"], features, positions, cfg=drafter.cfg
  )
  return kv_cache.write(cache, new)


def append_tokens(
  buffer: Int[Array, "b t"],
  new: Int[Array, "b n"],
  starts: Int[Array, "b"],
) -> Int[Array, "b t"]:
  """Writes each row's new tokens at its own place; the buffer has room."""
  return jax.vmap(
    lambda row, values, start: lax.dynamic_update_slice(row, values, (start,))
  )(buffer, new, starts)
