"""Terms of the training objectives, and their reduction in chunks of blocks.

Full-vocabulary rows are the memory peak of training. `chunked_sum` evaluates a
loss over a few blocks at a time and, when differentiated, takes each chunk's
gradient in the same visit: what is kept is the gradient of the chunk's inputs,
never its logits. Unlike rematerialisation proper nothing is computed twice.
"""

import functools
from collections.abc import Callable

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspine_jax.typing import PyTree


def position_decay(num_slots: int, gamma: float) -> Float[Array, "p"]:
  """exp(-i / gamma) for the i-th predicting slot of a block."""
  return jnp.exp(-jnp.arange(num_slots, dtype=jnp.float32) / gamma)


def cross_entropy(
  log_q: Float[Array, "*b v"], labels: Int[Array, "*b"]
) -> Float[Array, "*b"]:
  """-log q(label)."""
  return -jnp.take_along_axis(log_q, labels[..., None], axis=-1)[..., 0]


def l1_distance(
  q: Float[Array, "*b v"], p: Float[Array, "*b v"]
) -> Float[Array, "*b"]:
  """sum_v |q - p|, twice the total variation."""
  return jnp.sum(jnp.abs(q - p), axis=-1)


def forward_kl(
  log_p: Float[Array, "*b v"], log_q: Float[Array, "*b v"]
) -> Float[Array, "*b"]:
  """KL(p || q) = sum_v p (log p - log q)."""
  return jnp.sum(jnp.exp(log_p) * (log_p - log_q), axis=-1)


def d_pace_weights(
  ce: Float[Array, "*b p"], valid: Bool[Array, "*b p"], alpha: float
) -> Float[Array, "*b p"]:
  """What each slot contributes to the expected accepted length, detached.

  With q = exp(-CE), s = (1 - alpha) q + alpha and P_j the product of s up to
  slot j, slot j weighs sum_{m >= j} P_m (baselines, section 3.1). Slots without
  supervision weigh nothing: their s is one and their P is left out.
  """
  confidence = (1 - alpha) * jnp.exp(-lax.stop_gradient(ce)) + alpha
  prefix = jnp.cumprod(jnp.where(valid, confidence, 1.0), axis=-1)
  prefix = jnp.where(valid, prefix, 0.0)
  suffix = jnp.flip(jnp.cumsum(jnp.flip(prefix, -1), axis=-1), -1)
  return jnp.where(valid, suffix, 0.0)


def safe_divide(numerator, denominator):
  """numerator / denominator, zero where the denominator is zero."""
  zero = denominator == 0
  return jnp.where(zero, 0.0, numerator / jnp.where(zero, 1.0, denominator))


# (params, rows, shared, row_constants) -> (scalar, tree of further sums)
ChunkLoss = Callable[[PyTree, PyTree, PyTree, PyTree], tuple[jax.Array, PyTree]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def chunked_sum(
  loss: ChunkLoss,
  chunk_size: int,
  params: PyTree,
  rows: PyTree,
  shared: PyTree,
  row_constants: PyTree,
) -> tuple[jax.Array, PyTree]:
  """Sum of `loss` over chunks of rows.

  Args:
    loss: a pure function that closes over no array. Its scalar is
      differentiated; the further sums are not.
    chunk_size: rows (blocks) per chunk; rows that do not fill the last chunk
      are padded with zeros, so `loss` must give zero for zero weights.
    params: trees whose gradient is summed over chunks.
    rows: trees with a leading row axis, differentiated row by row.
    shared: constants of all chunks.
    row_constants: constants with a leading row axis.

  Returns:
    The summed scalar and sums.
  """
  chunks = _split((rows, row_constants), chunk_size)

  def add(total, chunk):
    value = loss(params, chunk[0], shared, chunk[1])
    return jax.tree.map(jnp.add, total, value), None

  first = jax.tree.map(lambda x: x[0], chunks)
  shape = jax.eval_shape(loss, params, first[0], shared, first[1])
  zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shape)
  return lax.scan(add, zero, chunks)[0]


def _chunked_forward(loss, chunk_size, params, rows, shared, row_constants):
  chunks = _split((rows, row_constants), chunk_size)
  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)

  def add(total, chunk):
    value, (from_params, from_rows) = value_and_grad(
      params, chunk[0], shared, chunk[1]
    )
    total = jax.tree.map(jnp.add, total, (value, from_params))
    return total, from_rows

  first = jax.tree.map(lambda x: x[0], chunks)
  shape = jax.eval_shape(value_and_grad, params, first[0], shared, first[1])
  zero = jax.tree.map(
    lambda x: jnp.zeros(x.shape, x.dtype), (shape[0], shape[1][0])
  )
  (value, from_params), from_rows = lax.scan(add, zero, chunks)
  from_rows = jax.tree.map(_join, from_rows, rows)
  return value, (from_params, from_rows)


def _chunked_backward(loss, chunk_size, residuals, cotangent):
  del loss, chunk_size
  scale = cotangent[0]
  from_params, from_rows = jax.tree.map(
    lambda x: (x * scale).astype(x.dtype), residuals
  )
  return from_params, from_rows, None, None


chunked_sum.defvjp(_chunked_forward, _chunked_backward)


def _split(rows: PyTree, chunk_size: int) -> PyTree:
  """[n, ...] -> [chunks, chunk_size, ...], padded with zeros."""

  def split(x):
    count = -(-x.shape[0] // chunk_size)
    padding = count * chunk_size - x.shape[0]
    if padding:
      x = jnp.pad(x, [(0, padding)] + [(0, 0)] * (x.ndim - 1))
    return x.reshape(count, chunk_size, *x.shape[1:])

  return jax.tree.map(split, rows)


def _join(chunks: jax.Array, like: jax.Array) -> jax.Array:
  return chunks.reshape(-1, *chunks.shape[2:])[: like.shape[0]]
