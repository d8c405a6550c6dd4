"""From logits to the distribution that is sampled; residuals; draws.

Temperature, top-k and top-p act on the full distribution, for target and draft
alike. p is the target's law, q the draft's, everywhere.
"""

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from dspine_jax import configs


def argmax(x: Float[Array, "*b v"]) -> Int[Array, "*b"]:
  """Index of the first largest entry, int32.

  A maximum and then the first place where it stands: both are vectorised by
  XLA:CPU, which runs `jnp.argmax` ten times slower.
  """
  places = jnp.arange(x.shape[-1], dtype=jnp.int32)
  places = places.reshape((1,) * (x.ndim - 1) + (-1,))
  largest = x == jnp.max(x, axis=-1, keepdims=True)
  # The last index where nothing equals the maximum, which is then NaN.
  return jnp.min(jnp.where(largest, places, x.shape[-1] - 1), axis=-1)


def probabilities(
  logits: Float[Array, "*b v"], cfg: configs.SamplingConfig
) -> Float[Array, "*b v"]:
  """The distribution to sample from: temperature, then top-k, then top-p.

  At temperature 0 it is one-hot on the first largest logit. Of tied logits at
  the edge of top-k all are kept; top-p keeps the smallest set of most likely
  tokens whose mass reaches `top_p`, ties included.
  """
  if cfg.temperature == 0:
    best = argmax(logits)
    return jax.nn.one_hot(best, logits.shape[-1], dtype=jnp.float32)
  logits = logits.astype(jnp.float32) / cfg.temperature
  if cfg.top_k and cfg.top_k < logits.shape[-1]:
    least = jax.lax.top_k(logits, cfg.top_k)[0][..., -1:]
    logits = jnp.where(logits >= least, logits, -jnp.inf)
  probs = jax.nn.softmax(logits, axis=-1)
  if cfg.top_p < 1:
    descending = -jnp.sort(-probs, axis=-1)
    before = jnp.cumsum(descending, axis=-1) - descending
    kept = jnp.where(before < cfg.top_p, descending, jnp.inf)
    least = jnp.min(kept, axis=-1, keepdims=True)
    probs = jnp.where(probs >= least, probs, 0.0)
    probs = probs / jnp.sum(probs, axis=-1, keepdims=True)
  return probs


def residual(
  p: Float[Array, "*b v"], q: Float[Array, "*b v"]
) -> Float[Array, "*b v"]:
  """max(p - q, 0), normalised; p itself where nothing is left (p = q)."""
  rest = jnp.maximum(p - q, 0.0)
  mass = jnp.sum(rest, axis=-1, keepdims=True)
  return jnp.where(mass > 0, rest / jnp.where(mass > 0, mass, 1.0), p)


def draw(keys: jax.Array, probs: Float[Array, "b *m v"]) -> Int[Array, "b *m"]:
  """One token per distribution, each row of the batch with its own key."""

  def one_row(key, probs):
    noise = jax.random.gumbel(key, probs.shape)
    return argmax(jnp.log(probs) + noise)

  return jax.vmap(one_row)(keys, probs)


def gumbel(keys: jax.Array, shape: tuple[int, ...]) -> Float[Array, "b *m"]:
  """Gumbel noise [B, *shape], each row with its own key."""
  return jax.vmap(lambda key: jax.random.gumbel(key, shape))(keys)
