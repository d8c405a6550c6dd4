"""Adjacent causal injection in plain JAX (dspine, 4): the specification.

Reads are pre-write, so a layer is one parallel step: there is no loop over
slots. Slot 0 (the anchor) is never written.

  feature      f_t = sqrt(R) R_l h_t / ||R_l h_t||
  predecessor  p_1 = sqrt(R) c_anchor;  p_t = f_{t-1}
  gate         g_t = sigmoid(W_q f_t + W_p p_t + b)
  message      z_t = g_t * (W_m p_t)
  write        h_t <- h_t + rms(h_t) O_l z_t

It is also what XLA runs. Its parts serve the refinement of the last write,
where the predecessor is an actual token (`transition_scores`).
"""

from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

# Far below any real state's square norm; keeps gradients finite at zero.
TINY = 1e-24


class Weights(NamedTuple):
  """Parameters of one layer's injection; kernels are [in, out].

  Attributes:
    readout: [D, R], of this layer.
    write: [Z, D], of this layer.
    message: [R, Z], common to all layers, like the rest.
    receiver_gate: [R, Z].
    predecessor_gate: [R, Z].
    bias: [Z].
  """

  readout: Float[Array, "d r"]
  write: Float[Array, "z d"]
  message: Float[Array, "r z"]
  receiver_gate: Float[Array, "r z"]
  predecessor_gate: Float[Array, "r z"]
  bias: Float[Array, "z"]


class Injected(NamedTuple):
  """States after the write.

  Attributes:
    h: [*b, K, D].
    feature: [*b, K, R], of those states, or None if it was not asked for.
  """

  h: Float[Array, "*b k d"]
  feature: Float[Array, "*b k r"] | None


def matmul(
  x: Float[Array, "*rows i"], kernel: Float[Array, "i o"]
) -> Float[Array, "*rows o"]:
  """`x @ kernel` as one 2-D product, in the dtype of `x`.

  XLA:CPU would fuse the elementwise part of the cotangent into the transposed
  operand of the kernel's gradient and gather it column by column, but for the
  barrier.
  """
  flat = x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)
  flat = lax.optimization_barrier(flat)
  return flat.reshape(*x.shape[:-1], kernel.shape[-1])


def normalised(read: Float[Array, "*rows r"]) -> Float[Array, "*rows r"]:
  """`read` scaled to coordinates of RMS 1, in float32."""
  read32 = read.astype(jnp.float32)
  square = jnp.sum(jnp.square(read32), axis=-1, keepdims=True)
  return read32 * (read.shape[-1] ** 0.5 * lax.rsqrt(jnp.maximum(square, TINY)))


def feature(
  readout: Float[Array, "d r"], h: Float[Array, "*rows d"]
) -> Float[Array, "*rows r"]:
  """Predicted-token feature with coordinates of RMS 1, normed in float32."""
  return normalised(matmul(h, readout)).astype(h.dtype)


def token_vector(codes: Float[Array, "*rows r"]) -> Float[Array, "*rows r"]:
  """sqrt(R) c: a code scaled like a feature."""
  return codes * codes.shape[-1] ** 0.5


def rms(h: Float[Array, "*rows d"]) -> Float[Array, "*rows 1"]:
  """||h|| / sqrt(D) in float32."""
  square = jnp.mean(jnp.square(h.astype(jnp.float32)), axis=-1, keepdims=True)
  return jnp.sqrt(jnp.maximum(square, TINY))


def message(
  weights: Weights,
  receiver: Float[Array, "*#rows r"],
  predecessor: Float[Array, "*#rows r"],
) -> Float[Array, "*#rows z"]:
  """The gated message from `predecessor` to `receiver`."""
  gate = matmul(receiver, weights.receiver_gate)
  gate = gate + matmul(predecessor, weights.predecessor_gate)
  bias = weights.bias.reshape((1,) * (gate.ndim - 1) + (-1,))
  content = matmul(predecessor, weights.message)
  return jax.nn.sigmoid(gate + bias.astype(gate.dtype)) * content


def write(
  kernel: Float[Array, "z d"],
  h: Float[Array, "*#rows d"],
  z: Float[Array, "*#rows z"],
) -> Float[Array, "*#rows d"]:
  """h + rms(h) O z."""
  return h + (rms(h) * matmul(z, kernel)).astype(h.dtype)


def adjacent_injection(
  h: Float[Array, "*b k d"],
  tokens: Int[Array, "*b k"],
  replaced: Bool[Array, "*b"],
  codes: Float[Array, "v r"],
  weights: Weights,
  with_feature: bool,
) -> Injected:
  """One layer's write for all slots of all blocks.

  Args:
    h: the layer's output before the write.
    tokens: the true token of each slot; only that of slot 0 (the anchor) is
      read where a block is not `replaced`.
    replaced: blocks that read true predecessors instead of predicted features.
    codes: frozen token codes; they get no gradient.
    weights: of this layer's injection.
    with_feature: whether to give the feature of the written states, too.
  """
  features = feature(weights.readout, h)
  known = lax.stop_gradient(codes)[tokens]
  known = token_vector(known).astype(h.dtype)
  # Slot 0 goes through with an empty message: cheaper than cutting it off h.
  first = known[..., :1, :]
  predicted = jnp.concatenate([first, first, features[..., 1:-1, :]], axis=-2)
  predicted = predicted[..., : h.shape[-2], :]  # A block of one slot.
  true = jnp.concatenate([first, known[..., :-1, :]], axis=-2)
  is_true = replaced[..., None, None]
  z = message(weights, features, jnp.where(is_true, true, predicted))
  slots = jnp.arange(h.shape[-2]).reshape((1,) * (h.ndim - 2) + (-1, 1))
  out = write(weights.write, h, jnp.where(slots > 0, z, 0.0).astype(h.dtype))
  after = feature(weights.readout, out) if with_feature else None
  return Injected(out, after)
