"""Small inputs of the adjacent injection, and its formulas in plain NumPy."""

import numpy as np
from jax import numpy as jnp

from kernels.adjacent_injection import reference


def inputs(lead=(3,), slots=5, width=40, rank=24, message=20, vocab=13, seed=0):
  """h, tokens, replaced, codes, weights; about every second is replaced."""
  rng = np.random.default_rng(seed)

  def normal(*shape, scale=1.0):
    return jnp.asarray(rng.normal(scale=scale, size=shape), jnp.float32)

  codes = rng.normal(size=(vocab, rank))
  codes /= np.linalg.norm(codes, axis=-1, keepdims=True)
  weights = reference.Weights(
    readout=normal(width, rank),
    write=normal(message, width, scale=0.5),
    message=normal(rank, message, scale=rank**-0.5),
    receiver_gate=normal(rank, message, scale=rank**-0.5),
    predecessor_gate=normal(rank, message, scale=rank**-0.5),
    bias=normal(message),
  )
  replaced = np.arange(np.prod(lead, dtype=int)) % 2 == 1
  return (
    normal(*lead, slots, width),
    jnp.asarray(rng.integers(vocab, size=(*lead, slots)), jnp.int32),
    jnp.asarray(replaced.reshape(lead)),
    jnp.asarray(codes, jnp.float32),
    weights,
  )


def oracle(h, tokens, replaced, codes, weights):
  """Written states and their features, slot by slot in float64."""
  *lead, slots, width = h.shape
  h, codes = np.asarray(h, np.float64), np.asarray(codes, np.float64)
  weights = type(weights)(*(np.asarray(x, np.float64) for x in weights))
  rank = codes.shape[1]

  def feature(state):
    read = state @ weights.readout
    return rank**0.5 * read / max(np.linalg.norm(read), 1e-12)

  out = h.copy()
  for block in np.ndindex(*lead):
    for t in range(1, slots):
      if t == 1 or replaced[block]:
        p = rank**0.5 * codes[tokens[(*block, t - 1)]]
      else:
        p = feature(h[(*block, t - 1)])
      gate = feature(h[(*block, t)]) @ weights.receiver_gate
      gate = gate + p @ weights.predecessor_gate + weights.bias
      z = (p @ weights.message) / (1.0 + np.exp(-gate))
      rms = np.linalg.norm(h[(*block, t)]) / width**0.5
      out[(*block, t)] += rms * (z @ weights.write)
  features = np.zeros((*h.shape[:-1], rank))
  for at in np.ndindex(*h.shape[:-1]):
    features[at] = feature(out[at])
  return out, features
