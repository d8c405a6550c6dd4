"""Whole generations: speculative, and plain autoregressive as the baseline.

Both prefill once, take the first token from the target, and loop on the device
with fixed buffers until every row is done. The state is donated from the
prefill to the loop, so caches exist once.
"""

import dataclasses
import functools

import jax
from flax import struct
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Int

from dspine_jax import configs, kv_cache
from dspine_jax.checkpoints import drafter_folder
from dspine_jax.decoding import round as round_lib
from dspine_jax.decoding import sampling
from dspine_jax.target import model
from dspine_jax.typing import Lengths, Tokens

TargetModel = round_lib.TargetModel
DrafterModel = round_lib.DrafterModel


@struct.dataclass
class DecodeResult:
  """What a generation returns.

  Attributes:
    tokens: [B, max_new] int32, generated tokens, zero behind `num_tokens`.
    num_tokens: [B] int32, the stop token included.
    rounds: [] int32, passes of the target after the prefill.
    round_lengths: [B, max_new] int32, tokens committed per round, clipped at
      limit and stop token; 0 where the row was finished. The first token comes
      from the prefill and belongs to no round.
    accepted: [B, max_new] int32, draft tokens that stood, before clipping; -1
      where the row was finished.
  """

  tokens: Tokens
  num_tokens: Lengths
  rounds: Int[Array, ""]
  round_lengths: Int[Array, "b r"]
  accepted: Int[Array, "b r"]


def check_request(
  target: TargetModel,
  drafter: DrafterModel | None,
  prompts: Tokens,
  *,
  decode: configs.DecodeConfig,
) -> None:
  """ValueError for what cannot be decoded: shapes, lengths, vocabularies."""
  if prompts.ndim != 2 or 0 in prompts.shape:
    raise ValueError(f"prompts of shape {prompts.shape}: empty prompt")
  length = prompts.shape[1] + decode.max_new_tokens
  if length > target.cfg.max_positions:
    raise ValueError(
      f"prompt of {prompts.shape[1]} tokens and max_new_tokens="
      f"{decode.max_new_tokens} exceed the target's max_positions="
      f"{target.cfg.max_positions}"
    )
  for token in decode.stop_tokens:
    if not 0 <= token < target.cfg.vocab_size:
      raise ValueError(
        f"stop_tokens: {token} is outside vocab_size={target.cfg.vocab_size}"
      )
  if drafter is not None:
    drafter_folder.check_fits(drafter.cfg, target.cfg)
    round_lib.proposal_kind(drafter.cfg, decode)


def start(
  target: TargetModel,
  drafter: DrafterModel,
  prompts: Tokens,
  prompt_lengths: Lengths,
  *,
  decode: configs.DecodeConfig,
  keys: jax.Array,
  limits: Lengths | None = None,
) -> round_lib.DecodeState:
  """Prefill: caches of the prompt, and the first token from the target.

  Args:
    target: the verifier.
    drafter: the drafter.
    prompts: [B, T], padded on the right.
    prompt_lengths: [B], each at least 1.
    decode: how to decode.
    keys: [B] typed PRNG keys.
    limits: [B], most tokens each row may generate, at least 1; the default is
      `decode.max_new_tokens`, which also bounds them.
  """
  check_request(target, drafter, prompts, decode=decode)
  batch = prompts.shape[0]
  if limits is None:
    limits = jnp.full((batch,), decode.max_new_tokens, jnp.int32)
  return _start(target, drafter, prompts, prompt_lengths, keys, limits, decode)


@functools.partial(jax.jit, static_argnames="decode")
def _start(target, drafter, prompts, prompt_lengths, keys, limits, decode):
  batch, prompt_size = prompts.shape
  room = drafter.cfg.num_proposals + 1
  capacity = prompt_size + decode.max_new_tokens + room
  tokens, passed, next_keys = _prefill(
    target,
    prompts,
    prompt_lengths,
    keys,
    capacity=capacity,
    decode=decode,
    tap_layers=drafter.cfg.target_layer_ids,
  )
  stacked = not isinstance(drafter.params["backbone"]["layers"], tuple)
  context = kv_cache.init(
    drafter.cfg,
    batch,
    capacity,
    num_layers=drafter.cfg.num_layers,
    stacked=stacked,
  )
  context = round_lib.write_context(drafter, context, passed.features)
  buffer = jnp.zeros((batch, decode.max_new_tokens + room), jnp.int32)
  per_round = (batch, decode.max_new_tokens)
  limits = jnp.minimum(limits, decode.max_new_tokens)
  _, stopped = round_lib.clip_at_stop(
    tokens[:, None], jnp.ones((batch,), jnp.int32), decode.stop_tokens
  )
  return round_lib.DecodeState(
    tokens=buffer.at[:, 0].set(tokens),
    num_tokens=jnp.ones((batch,), jnp.int32),
    anchor=tokens,
    limits=limits,
    done=stopped | (limits <= 1),
    target_cache=passed.cache,
    draft_cache=kv_cache.advance(context, prompt_lengths),
    keys=next_keys,
    rounds=jnp.zeros((), jnp.int32),
    round_lengths=jnp.zeros(per_round, jnp.int32),
    accepted=jnp.full(per_round, -1, jnp.int32),
  )


def _prefill(
  target,
  prompts,
  prompt_lengths,
  keys,
  *,
  capacity,
  decode,
  tap_layers=(),
):
  """The prompt's pass, and the first token of each row."""
  passed = model.prefill(
    target.params,
    prompts,
    prompt_lengths,
    cfg=target.cfg,
    capacity=capacity,
    tap_layers=tap_layers,
  )
  last = (prompt_lengths - 1)[:, None, None]
  hidden = jnp.take_along_axis(passed.hidden, last, axis=1)[:, 0]
  split = jax.vmap(jax.random.split)(keys)
  tokens = next_tokens(target, hidden, split[:, 1], decode)
  return tokens, passed, split[:, 0]


def next_tokens(target, hidden, keys, decode) -> Lengths:
  """The target's own next token for states [B, D]: argmax or a draw."""
  logits = model.logits(target.params, hidden)
  if decode.sampling.temperature == 0:
    return sampling.argmax(logits)
  return sampling.draw(keys, sampling.probabilities(logits, decode.sampling))


# One round from Python, for streaming: state = step(target, drafter, state,
# decode=decode). The old state's buffers are given up.
step = jax.jit(
  round_lib.speculative_round,
  static_argnames="decode",
  donate_argnames="state",
)


def generate(
  target: TargetModel,
  drafter: DrafterModel,
  prompts: Tokens,
  prompt_lengths: Lengths,
  *,
  decode: configs.DecodeConfig,
  keys: jax.Array,
  limits: Lengths | None = None,
) -> DecodeResult:
  """Speculative generation; arguments as in `start`.

  Raises:
    ValueError: see `check_request`.
  """
  state = start(
    target,
    drafter,
    prompts,
    prompt_lengths,
    decode=decode,
    keys=keys,
    limits=limits,
  )
  return result(run_rounds(target, drafter, state, decode=decode))


@functools.partial(jax.jit, static_argnames="decode", donate_argnames="state")
def run_rounds(target, drafter, state, *, decode):
  """`speculative_round` until every row is done."""

  def one_round(state):
    return round_lib.speculative_round(target, drafter, state, decode=decode)

  return lax.while_loop(lambda state: ~jnp.all(state.done), one_round, state)


def result(state: round_lib.DecodeState) -> DecodeResult:
  """The output part of a state, tokens behind the end set to zero."""
  size = state.round_lengths.shape[1]
  tokens = state.tokens[:, :size]
  behind = jnp.arange(size)[None] >= state.num_tokens[:, None]
  return DecodeResult(
    tokens=jnp.where(behind, 0, tokens),
    num_tokens=state.num_tokens,
    rounds=state.rounds,
    round_lengths=state.round_lengths,
    accepted=state.accepted,
  )


@struct.dataclass
class PlainState:
  """State of autoregressive decoding; fields as in `DecodeState`."""

  tokens: Tokens
  num_tokens: Lengths
  anchor: Lengths
  limits: Lengths
  done: jax.Array
  cache: kv_cache.KVCache
  keys: jax.Array


def autoregressive(
  target: TargetModel,
  prompts: Tokens,
  prompt_lengths: Lengths,
  *,
  decode: configs.DecodeConfig,
  keys: jax.Array,
  limits: Lengths | None = None,
) -> DecodeResult:
  """Token by token with the same target pass, cache and sampling.

  `decode.rule` and `decode.proposal` are not read. Each round has length 1.

  Raises:
    ValueError: see `check_request`.
  """
  check_request(target, None, prompts, decode=decode)
  if limits is None:
    limits = jnp.full((prompts.shape[0],), decode.max_new_tokens, jnp.int32)
  state = _start_plain(target, prompts, prompt_lengths, keys, limits, decode)
  state = _run_plain(target, state, decode=decode)
  size = decode.max_new_tokens
  behind = jnp.arange(size)[None] >= state.num_tokens[:, None]
  lengths = (~behind).astype(jnp.int32).at[:, 0].set(0)
  lengths = jnp.roll(lengths, -1, axis=1)
  return DecodeResult(
    tokens=jnp.where(behind, 0, state.tokens[:, :size]),
    num_tokens=state.num_tokens,
    rounds=jnp.max(state.num_tokens) - 1,
    round_lengths=lengths,
    accepted=lengths - 1,
  )


@functools.partial(jax.jit, static_argnames="decode")
def _start_plain(target, prompts, prompt_lengths, keys, limits, decode):
  batch, prompt_size = prompts.shape
  tokens, passed, next_keys = _prefill(
    target,
    prompts,
    prompt_lengths,
    keys,
    capacity=prompt_size + decode.max_new_tokens + 1,
    decode=decode,
  )
  ones = jnp.ones((batch,), jnp.int32)
  limits = jnp.minimum(limits, decode.max_new_tokens)
  _, stopped = round_lib.clip_at_stop(tokens[:, None], ones, decode.stop_tokens)
  buffer = jnp.zeros((batch, decode.max_new_tokens + 1), jnp.int32)
  return PlainState(
    tokens=buffer.at[:, 0].set(tokens),
    num_tokens=ones,
    anchor=tokens,
    limits=limits,
    done=stopped | (limits <= 1),
    cache=passed.cache,
    keys=next_keys,
  )


@functools.partial(jax.jit, static_argnames="decode", donate_argnames="state")
def _run_plain(target, state, *, decode):
  def one_token(state):
    split = jax.vmap(jax.random.split)(state.keys)
    passed = model.forward(
      target.params, state.anchor[:, None], cfg=target.cfg, cache=state.cache
    )
    token = next_tokens(target, passed.hidden[:, 0], split[:, 1], decode)
    counts = jnp.where(state.done, 0, 1)
    _, stopped = round_lib.clip_at_stop(
      token[:, None], counts, decode.stop_tokens
    )
    num_tokens = state.num_tokens + counts
    return dataclasses.replace(
      state,
      tokens=round_lib.append_tokens(
        state.tokens, token[:, None], state.num_tokens
      ),
      num_tokens=num_tokens,
      anchor=jnp.where(state.done, state.anchor, token),
      done=state.done | stopped | (num_tokens >= state.limits),
      cache=kv_cache.advance(passed.cache, counts),
      keys=split[:, 0],
    )

  return lax.while_loop(lambda state: ~jnp.all(state.done), one_token, state)
