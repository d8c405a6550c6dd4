"""Grouped-query attention over one or several key parts, joined exactly.

A pass attends to [cache or context | own tokens]. Each part gives its
unnormalised output with the running maximum and sum of its softmax; `merge`
joins them by log-sum-exp, so that no concatenated key array or score matrix is
ever made. Masks are boolean, True = may attend; a row that may attend nothing
gives zeros. Not here: which positions may be seen (`attention_masks.py`).
"""

from flax import struct
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float

# Finite, so that no row is NaN. The maximum of a row is kept above _FLOOR, so
# that exp(_MASKED - maximum) is exactly zero even where everything is masked.
_MASKED = -1e30
_FLOOR = -1e29


@struct.dataclass
class PartialAttention:
  """Attention over one part of the keys, not yet normalised.

  Attributes:
    weighted: [*b, Q, T, H] float32, sum of exp(score - maximum) * value.
    maximum: [*b, Q, T, 1] float32, largest score of the row (no gradient).
    total: [*b, Q, T, 1] float32, sum of exp(score - maximum).
  """

  weighted: Float[Array, "*b q t h"]
  maximum: Float[Array, "*b q t 1"]
  total: Float[Array, "*b q t 1"]


def partial_attention(
  q: Float[Array, "*b t q h"],
  k: Float[Array, "*b g s h"],
  v: Float[Array, "*b g s h"],
  mask: Bool[Array, "*#b #t s"],
) -> PartialAttention:
  """Scores of `q` against one part of the keys.

  Args:
    q: queries, heads second to last; Q is a multiple of G.
    k: keys, heads before positions (the layout of the cache).
    v: values, like `k`.
    mask: True where query t may attend key s; the same for all heads.
  """
  *batch, num_queries, num_heads, head_dim = q.shape
  groups, num_keys = k.shape[-3], k.shape[-2]
  repeat = num_heads // groups
  # One product a key head: its `repeat` query heads are rows of one matrix.
  q = jnp.swapaxes(q, -3, -2)
  q = q.reshape(*batch, groups, repeat * num_queries, head_dim)
  scores = jnp.einsum(
    "...gth,...gsh->...gts", q, k, preferred_element_type=jnp.float32
  )
  scores = scores * head_dim**-0.5
  scores = scores.reshape(*batch, groups, repeat, num_queries, num_keys)
  mask = mask[..., None, None, :, :]
  scores = jnp.where(mask, scores, _MASKED)
  maximum = jnp.max(lax.stop_gradient(scores), axis=-1, keepdims=True)
  maximum = jnp.maximum(maximum, _FLOOR)
  weights = jnp.exp(scores - maximum)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights = weights.reshape(*batch, groups, repeat * num_queries, num_keys)
  weighted = jnp.einsum(
    "...gts,...gsh->...gth",
    weights.astype(v.dtype),
    v,
    preferred_element_type=jnp.float32,
  )
  heads = (*batch, num_heads, num_queries)
  return PartialAttention(
    weighted=weighted.reshape(*heads, head_dim),
    maximum=maximum.reshape(*heads, 1),
    total=total.reshape(*heads, 1),
  )


def merge(
  *parts: PartialAttention, dtype: jnp.dtype
) -> Float[Array, "*b t q h"]:
  """Softmax over the union of the parts' keys; rows without keys give zeros."""
  maximum = parts[0].maximum
  for part in parts[1:]:
    maximum = jnp.maximum(maximum, part.maximum)
  weighted, total = 0.0, 0.0
  for part in parts:
    scale = jnp.exp(part.maximum - maximum)
    weighted = weighted + part.weighted * scale
    total = total + part.total * scale
  empty = total == 0.0
  out = weighted / jnp.where(empty, 1.0, total)
  return jnp.swapaxes(out, -3, -2).astype(dtype)
