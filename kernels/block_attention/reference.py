"""Block attention in plain JAX with the whole mask: the specification.

One softmax of each slot over [all context positions | slots of its block]. It
holds every score at once, so it serves tests; what runs is `xla.py` or the
Triton kernels.
"""

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int


def block_attention(
  q: Float[Array, "b n k q h"],
  own_k: Float[Array, "b n k g h"],
  own_v: Float[Array, "b n k g h"],
  context_k: Float[Array, "b g s h"],
  context_v: Float[Array, "b g s h"],
  visible: Int[Array, "b n"],
  starts: Int[Array, "b n k"] | None,
  own_mask: Bool[Array, "k k"],
) -> Float[Array, "b n k q h"]:
  """As `api.block_attention`."""
  batch, blocks, slots, heads, width = q.shape
  groups, context = context_k.shape[1:3]
  dtype = q.dtype
  position = jnp.arange(context)[None, None, None]
  seen = position < visible[..., None, None]
  if starts is not None:
    seen = seen & (position >= starts[..., None])
  seen = jnp.broadcast_to(seen, (batch, blocks, slots, context))
  own = jnp.broadcast_to(own_mask[None, None], (batch, blocks, slots, slots))
  mask = jnp.concatenate([seen, own], axis=-1)[:, :, :, None, None]

  q = q.reshape(batch, blocks, slots, groups, heads // groups, width)
  q, own_k, own_v, context_k, context_v = (
    x.astype(jnp.float32) for x in (q, own_k, own_v, context_k, context_v)
  )
  scores = jnp.concatenate(
    [
      jnp.einsum("bnkgrh,bgsh->bnkgrs", q, context_k),
      jnp.einsum("bnkgrh,bnjgh->bnkgrj", q, own_k),
    ],
    axis=-1,
  )
  scores = jnp.where(mask, scores * width**-0.5, -jnp.inf)
  # A row that sees nothing has no largest score and no weights.
  largest = jnp.max(scores, axis=-1, keepdims=True, initial=-1e30)
  weights = jnp.exp(scores - jax.lax.stop_gradient(largest))
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights = weights / jnp.where(total == 0.0, 1.0, total)
  out = jnp.einsum(
    "bnkgrs,bgsh->bnkgrh", weights[..., :context], context_v
  ) + jnp.einsum("bnkgrj,bnjgh->bnkgrh", weights[..., context:], own_v)
  return out.reshape(batch, blocks, slots, heads, width).astype(dtype)
