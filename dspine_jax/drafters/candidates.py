"""Candidates, transition cache and walk (dspine, 6).

A method that scores pairs gives a table of scores [M, P, C] a request: slot,
predecessor, candidate. Predecessor row 0..C-1 of slot t is candidate i of slot
t - 1; slot 0 of the table has the anchor in every row. An optional last row
(P = C + 1) is a token outside the candidates, drawn beforehand. The serial part
is only the walk: table look-ups. Every method that selects from pairs uses it.
"""

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int


def top_candidates(
  logits: Float[Array, "*bm v"], top_k: int
) -> tuple[Float[Array, "*bm c"], Int[Array, "*bm c"]]:
  """The top-k logits and their token ids, descending.

  The barrier keeps later slices of the ids from being merged with the one that
  is part of top-k: XLA:CPU would then no longer recognise top-k and sort the
  whole vocabulary, at a hundred times the cost.
  """
  values, ids = jax.lax.optimization_barrier(jax.lax.top_k(logits, top_k))
  return values, ids


def predecessor_ids(
  anchor: Int[Array, "*b"],
  candidates: Int[Array, "*b m c"],
) -> Int[Array, "*b m c"]:
  """Tokens of each predecessor row: the anchor for the first slot, then the
  candidates of the slot before."""
  first = jnp.broadcast_to(
    anchor[..., None, None], (*candidates.shape[:-2], 1, candidates.shape[-1])
  )
  return jnp.concatenate([first, candidates[..., :-1, :]], axis=-2)


def greedy_walk(
  scores: Float[Array, "*b m p c"], candidates: Int[Array, "*b m c"]
) -> Int[Array, "*b m"]:
  """i_t = argmax_c scores[t, i_{t-1}, c]; returns the tokens.

  All argmaxes are taken in parallel; the walk then only follows indices. It is
  unrolled: a step is one look-up, less than a loop iteration costs.
  """
  best = jnp.argmax(scores, axis=-1)
  index = jnp.zeros(best.shape[:-2], best.dtype)
  path = []
  for slot in range(best.shape[-2]):
    index = jnp.take_along_axis(best[..., slot, :], index[..., None], axis=-1)
    index = index[..., 0]
    path.append(index)
  path = jnp.stack(path, axis=-1)[..., None]
  return jnp.take_along_axis(candidates, path, axis=-1)[..., 0]


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
