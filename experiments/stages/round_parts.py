"""Times the parts of a speculative round, as differences of programs.

Each program runs a round up to and including one part: draft, candidates,
cache, walk, verify, commit. Methods without pairs of candidates have no part
of that name: what follows the draft is their walk.
"""

import dataclasses
import functools

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax.decoding import generate
from dspine_jax.decoding import round as round_lib
from dspine_jax.drafters import candidates, dspine
from dspine_jax.target import model
from experiments.stages import speed


def round_parts(target, drafter, state, decode) -> dict:
  """Programs that run one round up to and including each part.

  Each is a function of the state that returns (state, a number that depends on
  everything computed), for `loop_time`.
  """
  cfg, tables = drafter.cfg, target.tables

  def draft(state):
    return round_lib.draft(target, drafter, state.anchor, state.draft_cache)

  def draft_only(state):
    output = draft(state)
    used = jnp.sum(output.hidden)
    if output.pre_injection is not None:
      used = used + jnp.sum(output.pre_injection)
    return state, used

  def select(state):
    output = draft(state)
    logits = model.head_logits(
      tables.head, output.hidden[:, 0, cfg.first_slot :]
    )
    return output, candidates.top_candidates(logits, cfg.dspine.top_k)[1]

  def to_candidates(state):
    return state, jnp.sum(select(state)[1])

  def to_cache(state):
    output, ids = select(state)
    assert output.pre_injection is not None
    predecessors = candidates.predecessor_ids(state.anchor, ids)
    scores = dspine.transition_scores(
      dspine.refinement_params(drafter.params),
      output.pre_injection[:, 0, cfg.first_slot :],
      predecessors,
      ids,
      drafter.buffers,
      tables,
      cfg.rms_norm_eps,
    )
    return state, jnp.sum(scores)

  def to_walk(state):
    proposal = round_lib.propose(
      target, drafter, draft(state), state.anchor, state.keys, decode=decode
    )
    return state, jnp.sum(proposal.tokens)

  def to_verify(state):
    proposal = round_lib.propose(
      target, drafter, draft(state), state.anchor, state.keys, decode=decode
    )
    checked = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    out = model.forward(
      target.params,
      checked,
      cfg=target.cfg,
      cache=state.target_cache,
      tap_layers=cfg.target_layer_ids,
    )
    best = jnp.argmax(model.logits(target.params, out.hidden), axis=-1)
    state = dataclasses.replace(state, target_cache=out.cache)
    return state, jnp.sum(best) + jnp.sum(out.features)

  def to_commit(state):
    frozen = state.done, state.num_tokens, state.rounds
    state = round_lib.speculative_round(target, drafter, state, decode=decode)
    # Every repetition is the same round at the same length.
    committed = state.num_tokens - frozen[1]
    back = {"lengths": state.target_cache.lengths - committed}
    state = dataclasses.replace(
      state,
      done=frozen[0],
      num_tokens=frozen[1],
      rounds=frozen[2],
      target_cache=dataclasses.replace(state.target_cache, **back),
      draft_cache=dataclasses.replace(state.draft_cache, **back),
    )
    return state, jnp.sum(committed)

  has_pairs = cfg.dspine is not None and cfg.dspine.refines
  pairs = {"candidates": to_candidates, "cache": to_cache}
  return {
    "draft": draft_only,
    **(pairs if has_pairs else {}),
    "walk": to_walk,
    "verify": to_verify,
    "commit": to_commit,
  }


def loop_time(part, state, *, repeats: int, rounds: int = 16) -> float:
  """Seconds of one call of `part`, from a device loop of `rounds` calls."""

  @functools.partial(jax.jit, donate_argnums=0)
  def loop(state):
    def body(_, state):
      new, used = part(state)
      # Ties each call to the one before it, so that none is hoisted.
      anchor = (new.anchor + (used > 1e30).astype(jnp.int32)) % 64
      return dataclasses.replace(new, anchor=anchor)

    return jax.lax.fori_loop(0, rounds, body, state)

  holder = [loop(jax.tree.map(jnp.copy, state))]

  def call():
    holder[0] = loop(holder[0])
    return holder[0].anchor

  return float(np.median(speed.seconds(call, repeats=repeats))) / rounds


def time_parts(target, drafter, prompt, decode, *, repeats: int) -> dict:
  """Seconds of each part of a round in the middle of a generation."""
  state = generate.start(
    target,
    drafter,
    jnp.asarray(prompt)[None],
    jnp.asarray([len(prompt)]),
    decode=decode,
    keys=jax.random.key(0)[None],
  )
  seconds, before = {}, 0.0
  for name, part in round_parts(target, drafter, state, decode).items():
    until = loop_time(part, state, repeats=repeats)
    seconds[name] = max(0.0, until - before)
    before = until
  seconds["round"] = before
  return seconds
