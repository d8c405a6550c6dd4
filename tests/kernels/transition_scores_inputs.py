"""Inputs of the transition scores, and their formulas in float64 loops."""

import dataclasses
import math

import jax
import numpy as np
from jax import numpy as jnp

from kernels.adjacent_injection import reference as injection
from kernels.transition_scores import reference

EPS = 1e-6


@dataclasses.dataclass(frozen=True)
class Sizes:
  """None of them equal, so that no axis can be taken for another."""

  slots: int = 3
  predecessors: int = 5
  candidates: int = 4
  width: int = 37
  rank: int = 21
  message: int = 19
  vocab: int = 211


def inputs(sizes=Sizes(), seed=0, lead=(), draft=False):
  """Arguments of `transition_scores`, or of `greedy_draft`, float32.

  u and the ids have the axes [*lead, slots].
  """
  rng = np.random.default_rng(seed)
  width, rank, message = sizes.width, sizes.rank, sizes.message
  shape = (*lead, sizes.slots)

  def normal(*shape, scale=1.0):
    return jnp.asarray(rng.normal(size=shape) * scale, jnp.float32)

  def ids(*shape):
    return jnp.asarray(rng.integers(0, sizes.vocab, shape), jnp.int32)

  codes = normal(sizes.vocab, rank)
  codes = codes / jnp.linalg.norm(codes, axis=-1, keepdims=True)
  weights = injection.Weights(
    readout=normal(width, rank, scale=width**-0.5),
    write=normal(message, width, scale=message**-0.5),
    message=normal(rank, message, scale=rank**-0.5),
    receiver_gate=normal(rank, message, scale=rank**-0.5),
    predecessor_gate=normal(rank, message, scale=rank**-0.5),
    bias=normal(message),
  )
  before = ids(*lead) if draft else ids(*shape, sizes.predecessors)
  return (
    normal(*shape, width, scale=3.0),
    before,
    ids(*shape, sizes.candidates),
    codes,
    normal(sizes.vocab, width),
    weights,
    1 + normal(width, scale=0.3),
  )


def cancelling(slots=16):
  """Huge states that the write takes back to zero, but for rounding."""
  sizes = Sizes(slots=slots, predecessors=1, candidates=2, message=1)
  u, before, ids, codes, head, weights, scale = inputs(sizes)
  # Multiples of one state with the same token: all have the same message.
  u = u[:1] * jnp.linspace(1e3, 4e3, slots)[:, None]
  before = jnp.broadcast_to(before[:1], before.shape)
  z = reference.messages(u, before, codes, weights)[0, 0, 0]
  direction = u[:1] / jnp.sqrt(jnp.mean(jnp.square(u[:1])))
  weights = weights._replace(write=-direction / z)
  return u, before, ids, codes, head, weights, scale


def refined(u, token, codes, weights, norm_scale):
  """q(a) of one slot and one token."""
  width, rank, message = len(u), codes.shape[1], len(weights.bias)
  read = [
    sum(u[d] * weights.readout[d, r] for d in range(width)) for r in range(rank)
  ]
  norm = math.sqrt(sum(x * x for x in read))
  feature = [math.sqrt(rank) * x / norm for x in read]
  before = [math.sqrt(rank) * codes[token, r] for r in range(rank)]
  z = []
  for k in range(message):
    gate, content = weights.bias[k], 0.0
    for r in range(rank):
      gate += feature[r] * weights.receiver_gate[r, k]
      gate += before[r] * weights.predecessor_gate[r, k]
      content += before[r] * weights.message[r, k]
    z.append(content / (1 + math.exp(-gate)))
  rms = math.sqrt(sum(x * x for x in u) / width)
  h = [
    u[d] + rms * sum(z[k] * weights.write[k, d] for k in range(message))
    for d in range(width)
  ]
  mean_square = sum(x * x for x in h) / width
  return np.array(
    [h[d] / math.sqrt(mean_square + EPS) * norm_scale[d] for d in range(width)]
  )


def oracle(u, predecessors, candidates, codes, head, weights, norm_scale):
  """[N, P, C] in float64 for u [N, D]."""
  u, codes, head, weights, norm_scale = jax.tree.map(
    lambda x: np.asarray(x, np.float64), (u, codes, head, weights, norm_scale)
  )
  scores = [
    [
      [head[b] @ q for b in np.asarray(candidates)[n]]
      for q in (
        refined(u[n], a, codes, weights, norm_scale)
        for a in np.asarray(predecessors)[n]
      )
    ]
    for n in range(len(u))
  ]
  return np.array(scores)


def sequential_draft(u, anchor, candidates, codes, head, weights, norm_scale):
  """The draft [M] of one request, refining each slot with the token taken."""
  u, codes, head, weights, norm_scale = jax.tree.map(
    lambda x: np.asarray(x, np.float64), (u, codes, head, weights, norm_scale)
  )
  token, tokens = int(anchor), []
  for m in range(len(u)):
    q = refined(u[m], token, codes, weights, norm_scale)
    best = None
    for b in np.asarray(candidates)[m].tolist():
      if best is None or head[b] @ q > head[best] @ q:
        best = b
    token = best
    tokens.append(token)
  return np.array(tokens)
