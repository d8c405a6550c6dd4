"""Inputs of block attention, and what it gives, in plain Python."""

import math

import numpy as np
from jax import numpy as jnp

# Of the arguments, those that get a gradient.
ARRAYS = (0, 1, 2, 3, 4)


def inputs(
  batch=2,
  blocks=3,
  slots=3,
  heads=4,
  groups=2,
  width=16,
  context=21,
  *,
  window=None,
  is_causal=True,
  seed=0,
  dtype=jnp.float32,
):
  """Arguments of the op; the first block sees nothing, the last all or more.

  A window moves with the slot: slot i sees `window` positions, its own block
  counted.
  """
  rng = np.random.default_rng(seed)

  def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), dtype)

  visible = rng.integers(0, context + 1, (batch, blocks))
  visible[0, 0] = 0
  visible[-1, -1] = context if window else context + 3
  starts = None
  if window is not None:
    starts = visible[..., None] + 1 + np.arange(slots) - window
    starts = jnp.asarray(starts, jnp.int32)
  mask = np.ones((slots, slots), bool)
  return (
    normal(batch, blocks, slots, heads, width),
    normal(batch, blocks, slots, groups, width),
    normal(batch, blocks, slots, groups, width),
    normal(batch, groups, context, width),
    normal(batch, groups, context, width),
    jnp.asarray(visible, jnp.int32),
    starts,
    jnp.asarray(np.tril(mask) if is_causal else mask),
  )


def double(arguments):
  """The same in NumPy, floats in float64."""
  arrays = (None if x is None else np.asarray(x) for x in arguments)
  return tuple(
    x if i not in ARRAYS else x.astype(np.float64) for i, x in enumerate(arrays)
  )


def attention(q, own_k, own_v, context_k, context_v, visible, starts, own_mask):
  """Every query by itself, in float64."""
  batch, blocks, slots, heads, width = q.shape
  repeat = heads // own_k.shape[3]
  out = np.zeros(q.shape)
  for b, n, i, head in np.ndindex(batch, blocks, slots, heads):
    g = head // repeat
    first = 0 if starts is None else max(0, starts[b, n, i])
    keys, values = [], []
    for s in range(first, min(visible[b, n], context_k.shape[2])):
      keys.append(context_k[b, g, s])
      values.append(context_v[b, g, s])
    for j in range(slots):
      if own_mask[i, j]:
        keys.append(own_k[b, n, j, g])
        values.append(own_v[b, n, j, g])
    if keys:
      scores = np.array(keys) @ q[b, n, i, head] / math.sqrt(width)
      weights = np.exp(scores - scores.max())
      out[b, n, i, head] = weights @ np.array(values) / weights.sum()
  return out
