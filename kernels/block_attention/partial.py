"""Grouped-query attention over one or several key parts, joined exactly.

A pass attends to [cache or context | own tokens]. Each part gives its
unnormalised output with the running maximum and sum of its softmax; `merge`
joins them by log-sum-exp, so that no concatenated key array or score matrix is
ever made. Masks are boolean, True = may attend; a row that may attend nothing
gives zeros. Not here: which positions may be seen (`masks.py`).
"""

from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float

# Finite, so that no row is NaN. The maximum of a row is kept above FLOOR, so
# that exp(MASKED - maximum) is exactly zero even where everything is masked.
MASKED = -1e30
FLOOR = -1e29


class PartialAttention(NamedTuple):
  """Attention over one part of the keys, not yet normalised.

  Attributes:
    weighted: [*b, Q, T, H] float32, sum of exp(score - maximum) * value.
    maximum: [*b, Q, T, 1] float32, largest score of the row (no gradient).
    total: [*b, Q, T, 1] float32, sum of exp(score - maximum).
  """

  weighted: Float[Array, "*b q t h"]
  maximum: Float[Array, "*b q t 1"]
  total: Float[Array, "*b q t 1"]


@jax.custom_vjp
def partial_attention(
  q: Float[Array, "*b t q h"],
  k: Float[Array, "*b g s h"],
  v: Float[Array, "*b g s h"],
  mask: Bool[Array, "*#b #t s"],
) -> PartialAttention:
  """Scores of `q` against one part of the keys.

  The gradient is written out, since the one that autodiff derives contracts
  over the rows of a transposed matrix, which XLA:CPU does at a fifth of its
  peak.

  Args:
    q: queries, heads second to last; Q is a multiple of G.
    k: keys, heads before positions (the layout of the cache).
    v: values, like `k`.
    mask: True where query t may attend key s; the same for all heads.
  """
  return _forward(q, k, v, mask)[0]


def _forward(q, k, v, mask):
  """The result, and what the gradient needs: q by key head, k, v, weights."""
  *batch, num_queries, num_heads, head_dim = q.shape
  groups, num_keys = k.shape[-3], k.shape[-2]
  repeat = num_heads // groups
  # One product a key head: its `repeat` query heads are rows of one matrix.
  rows = jnp.swapaxes(q, -3, -2)
  rows = rows.reshape(*batch, groups, repeat * num_queries, head_dim)
  scores = product("...gth,...gsh->...gts", rows, k) * head_dim**-0.5
  scores = scores.reshape(*batch, groups, repeat, num_queries, num_keys)
  scores = jnp.where(mask[..., None, None, :, :], scores, MASKED)
  part, weights = weigh(scores.reshape(*rows.shape[:-1], num_keys), v)
  heads = (*batch, num_heads, num_queries)
  out = jax.tree.map(lambda x: x.reshape(*heads, x.shape[-1]), part)
  return out, (rows, k, v, weights)


def weigh(scores, v) -> tuple[PartialAttention, jax.Array]:
  """Masked scores [..., G, T, S] and values as a part, and the weights."""
  maximum = jnp.max(scores, axis=-1, keepdims=True)
  maximum = jnp.maximum(maximum, FLOOR)
  weights = jnp.exp(scores - maximum)
  total = jnp.sum(weights, axis=-1, keepdims=True)
  weights = weights.astype(v.dtype)
  weighted = product("...gts,...gsh->...gth", weights, v)
  return PartialAttention(weighted, maximum, total), weights


def _backward(residuals, cotangent: PartialAttention):
  # The maximum has none: `merge` gives the same result for any of them.
  rows, k, v, weights = residuals
  *heads, num_queries, _ = cotangent.weighted.shape
  d_rows, d_k, d_v = scores_backward(
    rows,
    k,
    v,
    weights,
    cotangent.weighted.reshape(rows.shape),
    cotangent.total.reshape(*rows.shape[:-1], 1),
  )
  d_q = jnp.swapaxes(d_rows.reshape(*heads, num_queries, -1), -3, -2)
  # Behind the barrier the transpose is no longer folded into the product.
  d_k, d_v = (
    jnp.swapaxes(part, -2, -1) for part in lax.optimization_barrier((d_k, d_v))
  )
  return d_q.astype(rows.dtype), d_k.astype(k.dtype), d_v.astype(v.dtype), None


partial_attention.defvjp(_forward, _backward)


def scores_backward(rows, k, v, weights, weighted, total):
  """Cotangents of rows [..., G, T, H] and, transposed, of k and v.

  Args:
    rows: queries by key head.
    k: keys [..., G, S, H].
    v: values, like `k`.
    weights: exp(score - maximum), [..., G, T, S].
    weighted: cotangent of the weighted values, like `rows`.
    total: cotangent of the sum of weights, [..., G, T, 1].

  Returns:
    d_rows like `rows`, d_k and d_v as [..., G, H, S], all float32.
  """
  weighted = weighted.astype(v.dtype)
  d_scores = product("...gth,...gsh->...gts", weighted, v) + total
  d_scores = (weights * d_scores * rows.shape[-1] ** -0.5).astype(k.dtype)
  return (
    product("...gts,...gsh->...gth", d_scores, k),
    product("...gth,...gts->...ghs", rows, d_scores),
    product("...gth,...gts->...ghs", weighted, weights.astype(v.dtype)),
  )


def product(subscripts: str, a: jax.Array, b: jax.Array) -> jax.Array:
  """An einsum of two arrays, accumulated and returned in float32."""
  return jnp.einsum(subscripts, a, b, preferred_element_type=jnp.float32)


def merge(
  *parts: PartialAttention, dtype: jax.typing.DTypeLike
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
