"""Candidates, transition cache and walk (dspine, 6; baselines, 4.2).

A method that scores pairs gives a table of scores [M, P, C] a request: slot,
predecessor, candidate. Predecessor row 0..C-1 of slot t is candidate i of slot
t - 1; slot 0 of the table has the anchor in every row. An optional last row
(P = C + 1) is a token outside the candidates, drawn beforehand. The serial part
is only the walk: table look-ups. Every method that selects from pairs uses it,
and its `propose` is theirs but for the scores.
"""

from collections.abc import Callable

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from dspine_jax import configs
from dspine_jax.decoding import sampling
from dspine_jax.drafters import contract
from kernels.transition_scores import reference as transition_scores

# The ways to draw a draft at T > 0, see `propose`.
KINDS = ("full_support", "candidates", "base")


def top_candidates(
  logits: Float[Array, "*bm v"], top_k: int
) -> tuple[Float[Array, "*bm c"], Int[Array, "*bm c"]]:
  """The top-k logits and their token ids, descending.

  The barrier keeps later slices of the ids from being merged with the one that
  is part of top-k: XLA:CPU would then no longer recognise top-k and sort the
  whole vocabulary, at a hundred times the cost. Two barriers, since XLA:CPU
  fails on top-k as the one operand of a barrier, as which it ends up in
  programs for several devices.
  """
  values, ids = jax.lax.top_k(logits, top_k)
  barrier = jax.lax.optimization_barrier
  return barrier(values), barrier(ids)


# Tokens of each predecessor row, and the argmax walk: they are also parts of
# what `transition_scores.greedy_draft` does in kernels.
predecessor_ids = transition_scores.predecessor_ids
greedy_walk = transition_scores.greedy_walk


def sampled_walk(
  log_law: Float[Array, "b m p c"],
  choices: Int[Array, "b m c"],
  noise: Float[Array, "b m c"],
) -> tuple[Int[Array, "b m"], Float[Array, "b m c"]]:
  """Draws a path: i_t ~ law[t, i_{t-1}], by the Gumbel-max rule.

  Args:
    log_law: log-probabilities of each choice given each predecessor row; P is
      the number of choices.
    choices: their token ids.
    noise: Gumbel noise [B, M, C]; slot t uses only its own.

  Returns:
    The tokens [B, M], and the law each was drawn from, log_law[t, i_{t-1}].
  """
  row = jnp.zeros(choices.shape[:1], jnp.int32)
  tokens, laws = [], []
  for slot in range(choices.shape[1]):
    law = jnp.take_along_axis(log_law[:, slot], row[:, None, None], axis=1)[
      :, 0
    ]
    row = jnp.argmax(law + noise[:, slot], axis=-1).astype(jnp.int32)
    picked = jnp.take_along_axis(choices[:, slot], row[:, None], axis=-1)
    tokens.append(picked[:, 0])
    laws.append(law)
  return jnp.stack(tokens, axis=1), jnp.stack(laws, axis=1)


def with_candidates(
  probs: Float[Array, "b m v"],
  candidates: Int[Array, "b m c"],
  values: Float[Array, "b m c"],
) -> Float[Array, "b m v"]:
  """`probs` with the entries of the candidates replaced by `values`."""
  return jnp.put_along_axis(probs, candidates, values, axis=-1, inplace=False)


def propose(
  logits: Float[Array, "b m v"],
  top_k: int,
  scores_of: Callable[
    [Int[Array, "b m p"], Int[Array, "b m c"]], Float[Array, "b m p c"]
  ],
  anchor_tokens: Int[Array, "b"],
  *,
  sampling_cfg: configs.SamplingConfig,
  kind: str,
  keys: jax.Array,
  forced: Int[Array, "b m"] | None = None,
) -> contract.Proposal:
  """Candidates, transition cache, walk.

  Kinds:
    greedy: argmax walk.
    full_support: pair scores share the base mass of the candidates, base
      probabilities outside them. The token that a slot takes if it leaves its
      candidates is drawn beforehand, so it is one more predecessor row of the
      next slot and the serial part stays a look-up.
    candidates: pair scores alone, support of top_k tokens.
    base: independent samples of the base logits, no pair scores.

  Args:
    logits: [B, M, V], of the base distribution.
    top_k: C, candidates per slot.
    scores_of: (predecessor tokens [B, M, P], candidates [B, M, C]) -> scores.
    anchor_tokens: [B], predecessor of the first slot.
    sampling_cfg: temperature, top-k and top-p of the request.
    kind: "greedy" or one of `KINDS`.
    keys: [B].
    forced: as in `contract.Drafter.propose`.
  """
  if kind == "base":
    q = sampling.probabilities(logits, sampling_cfg)
    tokens = sampling.draw(keys, q) if forced is None else forced
    return contract.Proposal(tokens=tokens, probs=q)
  _, ids = top_candidates(logits, top_k)
  if kind == "greedy":
    scores = scores_of(predecessor_ids(anchor_tokens, ids), ids)
    tokens = greedy_walk(scores, ids)
    return contract.Proposal(tokens=tokens.astype(jnp.int32))

  base = sampling.probabilities(logits, sampling_cfg)
  inside = jnp.take_along_axis(base, ids, axis=-1)
  walk_keys, outside_keys = _split_rows(keys)
  choices, outside_mass = ids, None
  if kind == "full_support":
    outside = with_candidates(base, ids, jnp.zeros_like(inside))
    outside_mass = jnp.sum(outside, axis=-1)
    extra = sampling.draw(outside_keys, outside)
    choices = jnp.concatenate([ids, extra[..., None]], axis=-1)
  if forced is None:
    predecessors = predecessor_ids(anchor_tokens, choices)
  else:
    # One row of the table: the token before is known.
    before = jnp.concatenate([anchor_tokens[:, None], forced[:, :-1]], axis=1)
    predecessors = before[..., None]
  scores = scores_of(predecessors, ids) / sampling_cfg.temperature
  # What top-k or top-p removed from the full distribution stays removed.
  scores = jnp.where(inside[:, :, None] > 0, scores, -jnp.inf)
  log_law = jax.nn.log_softmax(scores)
  if outside_mass is not None:
    inside_mass = jnp.sum(inside, axis=-1)
    log_law = log_law + jnp.log(inside_mass)[:, :, None, None]
    leave = jnp.broadcast_to(
      jnp.log(outside_mass)[:, :, None, None], (*log_law.shape[:-1], 1)
    )
    log_law = jnp.concatenate([log_law, leave], axis=-1)
  if forced is None:
    noise = sampling.gumbel(walk_keys, choices.shape[1:])
    tokens, law = sampled_walk(log_law, choices, noise)
  else:
    tokens, law = forced, log_law[:, :, 0]
  others = base if kind == "full_support" else jnp.zeros_like(base)
  on_candidates = jnp.exp(law[..., :top_k])
  probs = with_candidates(others, ids, on_candidates)
  return contract.Proposal(tokens=tokens.astype(jnp.int32), probs=probs)


def _split_rows(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
  split = jax.vmap(jax.random.split)(keys)
  return split[:, 0], split[:, 1]
