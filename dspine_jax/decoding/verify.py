"""Verification rules: how many draft tokens stand, and which token follows.

The target has run over [anchor, x_1 .. x_M]; its logits at slot j judge x_{j+1}
and those at slot M give the bonus token. Every rule leaves the target's law
unchanged:

  greedy       x stands while it is the target's argmax;
  rejection    x ~ q stands with probability min(1, p(x) / q(x)); the first that
               falls is replaced by a draw from max(p - q, 0), normalised;
  exact_match  the target draws its own token at every slot; x stands while the
               two are equal (draft greedy or sampled).

A proposal may end early (`lengths`). The token behind its end is then drawn
like the bonus, from the target's law: nothing was proposed there that could
fall.

Draft, acceptance and replacement use keys of their own: a replacement drawn
with the noise of its draft would not follow the target's law.
"""

import jax
from flax import struct
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspine_jax import configs
from dspine_jax.decoding import sampling
from dspine_jax.drafters import contract


@struct.dataclass
class Verdict:
  """Result of one verification.

  Attributes:
    accepted: [B] int32, draft tokens that stand, 0..M.
    next_token: [B] int32, the correction, or the bonus after M accepted ones.
  """

  accepted: Int[Array, "b"]
  next_token: Int[Array, "b"]


def _longest_prefix(
  stands: Bool[Array, "b m"], proposal: contract.Proposal
) -> Int[Array, "b"]:
  """[1, 1, 0, 1] -> 2, and no more than were proposed."""
  count = jnp.sum(jnp.cumprod(stands.astype(jnp.int32), axis=-1), axis=-1)
  if proposal.lengths is None:
    return count
  return jnp.minimum(count, proposal.lengths)


def _at(values: jax.Array, index: Int[Array, "b"]) -> jax.Array:
  """values[b, index[b]]."""
  shape = (-1,) + (1,) * (values.ndim - 1)
  return jnp.take_along_axis(values, index.reshape(shape), axis=1)[:, 0]


def greedy(
  logits: Float[Array, "b m1 v"],
  proposal: contract.Proposal,
  *,
  sampling_cfg: configs.SamplingConfig,
  accept_keys: jax.Array,
  replace_keys: jax.Array,
) -> Verdict:
  """Temperature 0: the output is the target's argmax token by token.

  Argmaxes [5, 7, 2] against drafts [5, 9] give accepted 1, next token 7.
  """
  del sampling_cfg, accept_keys, replace_keys
  best = sampling.argmax(logits)
  accepted = _longest_prefix(proposal.tokens == best[:, :-1], proposal)
  return Verdict(accepted=accepted, next_token=_at(best, accepted))


def rejection(
  logits: Float[Array, "b m1 v"],
  proposal: contract.Proposal,
  *,
  sampling_cfg: configs.SamplingConfig,
  accept_keys: jax.Array,
  replace_keys: jax.Array,
) -> Verdict:
  """Rejection sampling with the proposal's true law q.

  p = [.6, .4], q = [.9, .1], x = 0 stands with probability 2/3; if it falls,
  the residual [0, .3] / .3 gives token 1.
  """
  if proposal.probs is None:
    raise ValueError(
      "rule='rejection' needs the proposal's distribution; this draft is greedy"
    )
  p = sampling.probabilities(logits, sampling_cfg)
  q = proposal.probs
  tokens = proposal.tokens[..., None]
  p_of = jnp.take_along_axis(p[:, :-1], tokens, axis=-1)[..., 0]
  q_of = jnp.take_along_axis(q, tokens, axis=-1)[..., 0]
  uniform = jax.vmap(lambda key: jax.random.uniform(key, p_of.shape[1:]))
  stands = uniform(accept_keys) * q_of < p_of
  accepted = _longest_prefix(stands, proposal)
  # Behind the last proposal q is zero, so that the residual is p: the bonus.
  q_padded = jnp.pad(q, ((0, 0), (0, 1), (0, 0)))
  q_at = _at(q_padded, accepted)
  if proposal.lengths is not None:
    q_at = jnp.where((accepted == proposal.lengths)[:, None], 0.0, q_at)
  rest = sampling.residual(_at(p, accepted), q_at)
  return Verdict(
    accepted=accepted, next_token=sampling.draw(replace_keys, rest)
  )


def exact_match(
  logits: Float[Array, "b m1 v"],
  proposal: contract.Proposal,
  *,
  sampling_cfg: configs.SamplingConfig,
  accept_keys: jax.Array,
  replace_keys: jax.Array,
) -> Verdict:
  """The target's own draws decide; drafts stand while they agree."""
  del replace_keys
  p = sampling.probabilities(logits, sampling_cfg)
  posterior = sampling.draw(accept_keys, p)
  accepted = _longest_prefix(proposal.tokens == posterior[:, :-1], proposal)
  return Verdict(accepted=accepted, next_token=_at(posterior, accepted))


RULES = {
  "greedy": greedy,
  "rejection": rejection,
  "exact_match": exact_match,
}
