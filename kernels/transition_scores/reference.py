"""Transition scores in plain JAX (dspine, 6): the specification.

A slot's last write is redone with the code of an actual token a in place of
the predicted feature; the final norm of that is q(a), and E_b . q(a) scores
the pair of a and its successor b:

  z_a     = sigmoid(W_q f(u) + W_p p_a + b) * (W_m p_a),  p_a = sqrt(R) c_a
  q(a)    = g * (u + rms(u) O z_a) / sqrt(mean_square + eps)
  s(a, b) = E_b . q(a)

`transition_scores` says it directly and is what XLA runs.
`factored_transition_scores` is the same without any D-wide refined state, as
the kernels compute it. Not here: where candidates come from, and sampling.
"""

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from kernels.adjacent_injection import reference as injection


def transition_scores(
  u: Float[Array, "*b d"],
  predecessors: Int[Array, "*b p"],
  candidates: Int[Array, "*b c"],
  codes: Float[Array, "v r"],
  head: Float[Array, "v d"],
  weights: injection.Weights,
  norm_scale: Float[Array, "d"],
  eps: float,
) -> Float[Array, "*b p c"]:
  """s(a, b) of all pairs, float32, by direct refinement.

  Args:
    u: each slot's state before the last write.
    predecessors: tokens a that may come before the slot.
    candidates: tokens b that may take it.
    codes: frozen token codes; no gradient.
    head: frozen LM head; no gradient.
    weights: of the last layer's injection.
    norm_scale: g, of the final norm.
    eps: of the final norm.
  """
  z = messages(u, predecessors, codes, weights)
  h = injection.write(weights.write, u[..., None, :], z)
  refined = final_norm(h, norm_scale, eps)
  return jnp.einsum(
    "...pd,...cd->...pc",
    refined,
    lax.stop_gradient(head)[candidates].astype(refined.dtype),
    preferred_element_type=jnp.float32,
  )


def messages(
  u: Float[Array, "*b d"],
  predecessors: Int[Array, "*b p"],
  codes: Float[Array, "v r"],
  weights: injection.Weights,
) -> Float[Array, "*b p z"]:
  """z_a of every slot and predecessor."""
  known = injection.token_vector(lax.stop_gradient(codes)[predecessors])
  receiver = injection.feature(weights.readout, u)[..., None, :]
  return injection.message(weights, receiver, known.astype(u.dtype))


def final_norm(
  h: Float[Array, "*rows d"], scale: Float[Array, "d"], eps: float
) -> Float[Array, "*rows d"]:
  """RMS normalisation in float32; returns the dtype of `h`."""
  h32 = h.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(h32), axis=-1, keepdims=True)
  scale = scale.reshape((1,) * (h.ndim - 1) + (-1,)).astype(jnp.float32)
  return (h32 * lax.rsqrt(mean_square + eps) * scale).astype(h.dtype)


def factored_transition_scores(
  u: Float[Array, "*b d"],
  predecessors: Int[Array, "*b p"],
  candidates: Int[Array, "*b c"],
  codes: Float[Array, "v r"],
  head: Float[Array, "v d"],
  weights: injection.Weights,
  norm_scale: Float[Array, "d"],
  eps: float,
) -> Float[Array, "*b p c"]:
  """`transition_scores` from products in the message space.

  With s = rms(u) and G = O^T O:
    numerator    (g E_b) . u + s (O^T (g E_b)) . z_a
    mean square  (|u|^2 + 2 s (O^T u) . z_a + s^2 z_a^T G z_a) / D
  """
  write = weights.write.astype(u.dtype)  # [Z, D]
  z = messages(u, predecessors, codes, weights)
  scale = norm_scale.reshape((1,) * candidates.ndim + (-1,))
  rows = lax.stop_gradient(head)[candidates].astype(jnp.float32) * scale
  through = injection.matmul(rows.astype(u.dtype), write.T)
  base = dot32("...cd,...d->...c", rows, u.astype(jnp.float32))
  change = dot32("...pz,...cz->...pc", z, through)
  along = dot32("...pz,...z->...p", z, injection.matmul(u, write.T))
  length = dot32("...pz,zy,...py->...p", z, gram(write), z)
  s = injection.rms(u)
  square = jnp.sum(jnp.square(u.astype(jnp.float32)), axis=-1, keepdims=True)
  mean_square = (square + 2 * s * along + s**2 * length) / u.shape[-1]
  # Of rounding alone: it is a square norm.
  mean_square = jnp.maximum(mean_square, 0.0)
  numerator = base[..., None, :] + s[..., None] * change
  return numerator * lax.rsqrt(mean_square + eps)[..., None]


def gram(write: Float[Array, "z d"]) -> Float[Array, "z z"]:
  """G = O^T O in the dtype of `write`, summed in float32."""
  return dot32("zd,yd->zy", write, write).astype(write.dtype)


def dot32(equation: str, *operands: jax.Array) -> jax.Array:
  """An einsum with a float32 result."""
  return jnp.einsum(equation, *operands, preferred_element_type=jnp.float32)


def greedy_draft(
  u: Float[Array, "*b m d"],
  anchor: Int[Array, "*b"],
  candidates: Int[Array, "*b m c"],
  codes: Float[Array, "v r"],
  head: Float[Array, "v d"],
  weights: injection.Weights,
  norm_scale: Float[Array, "d"],
  eps: float,
) -> Int[Array, "*b m"]:
  """The path that takes the best successor of each token it has taken."""
  scores = transition_scores(
    u,
    predecessor_ids(anchor, candidates),
    candidates,
    codes,
    head,
    weights,
    norm_scale,
    eps,
  )
  return greedy_walk(scores, candidates)


def predecessor_ids(
  anchor: Int[Array, "*b"], candidates: Int[Array, "*b m c"]
) -> Int[Array, "*b m c"]:
  """The anchor for slot 0, then the candidates of the slot before."""
  first = jnp.broadcast_to(
    anchor[..., None, None], (*candidates.shape[:-2], 1, candidates.shape[-1])
  )
  return jnp.concatenate(
    [first.astype(candidates.dtype), candidates[..., :-1, :]], axis=-2
  )


def greedy_walk(
  scores: Float[Array, "*b m p c"], candidates: Int[Array, "*b m c"]
) -> Int[Array, "*b m"]:
  """i_t = argmax_c scores[t, i_{t-1}, c], from row 0; returns the tokens.

  Of equal scores the first counts. The argmaxes are independent of each other;
  the walk then only follows indices.
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
