"""Adjacent causal injection: a slot writes to its successor (dspine, 4).

All functions here are for one block, [K, D], and are vmapped over blocks and
requests by `dspine.py`. Reads are pre-write, so a layer is one parallel step:
there is no loop over slots. Slot 0 (the anchor) is never written.

  feature      f_t = sqrt(R) R_l h_t / ||R_l h_t||
  predecessor  p_1 = sqrt(R) c_anchor;  p_t = f_{t-1}
  gate         g_t = sigmoid(W_q f_t + W_p p_t + b)
  message      z_t = g_t * (W_m p_t)
  write        h_t <- h_t + rms(h_t) O_l z_t
"""

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float

from dspine_jax import layers
from dspine_jax.typing import Key, Params

# Far below any real state's square norm; keeps gradients finite at zero.
_TINY = 1e-24


def init(
  key: Key, num_layers: int, directions: jax.Array, message_size: int
) -> Params:
  """Parameters of all injections: zero writes, readouts at the directions.

  Args:
    key: for message and receiver gate.
    num_layers: L, one readout and one write each.
    directions: [D, R], of the transfer space (`transfer_space.READOUTS`).
    message_size: Z.

  Returns:
    `shared` (message, receiver_gate, predecessor_gate, bias) and `layers`, a
    tuple of (readout, write) dicts; kernels are [in, out].
  """
  width, rank = directions.shape
  message_key, gate_key = jax.random.split(key)
  # PyTorch's default of nn.Linear, the reference's framework.
  bound = rank**-0.5

  def uniform(key):
    shape = (rank, message_size)
    return {
      "kernel": jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    }

  shared = {
    "message": uniform(message_key),
    "receiver_gate": uniform(gate_key),
    "predecessor_gate": {"kernel": jnp.zeros((rank, message_size))},
    "bias": jnp.zeros((message_size,)),
  }
  per_layer = tuple(
    {
      "readout": {"kernel": jnp.asarray(directions, jnp.float32)},
      "write": {"kernel": jnp.zeros((message_size, width))},
    }
    for _ in range(num_layers)
  )
  return {"shared": shared, "layers": per_layer}


def feature(
  layer: Params, h: Float[Array, "*rows d"]
) -> Float[Array, "*rows r"]:
  """Predicted-token feature with coordinates of RMS 1, normed in float32."""
  read = _apart(layers.matmul(h, layer["readout"]["kernel"]))
  read32 = read.astype(jnp.float32)
  square = jnp.sum(jnp.square(read32), axis=-1, keepdims=True)
  scale = read.shape[-1] ** 0.5 * lax.rsqrt(jnp.maximum(square, _TINY))
  return (read32 * scale).astype(h.dtype)


def token_vector(codes: Float[Array, "*rows r"]) -> Float[Array, "*rows r"]:
  """sqrt(R) c: a code scaled like a feature."""
  return codes * codes.shape[-1] ** 0.5


def rms(h: Float[Array, "*rows d"]) -> Float[Array, "*rows 1"]:
  """||h|| / sqrt(D) in float32."""
  square = jnp.mean(jnp.square(h.astype(jnp.float32)), axis=-1, keepdims=True)
  return jnp.sqrt(jnp.maximum(square, _TINY))


def message(
  shared: Params,
  receiver: Float[Array, "*#rows r"],
  predecessor: Float[Array, "*#rows r"],
) -> Float[Array, "*#rows z"]:
  """The gated message from `predecessor` to `receiver`."""
  gate = layers.matmul(receiver, shared["receiver_gate"]["kernel"])
  gate = gate + layers.matmul(predecessor, shared["predecessor_gate"]["kernel"])
  bias = shared["bias"].reshape((1,) * (gate.ndim - 1) + (-1,))
  content = layers.matmul(predecessor, shared["message"]["kernel"])
  return jax.nn.sigmoid(gate + bias.astype(gate.dtype)) * content


def write(
  layer: Params, h: Float[Array, "*#rows d"], z: Float[Array, "*#rows z"]
) -> Float[Array, "*#rows d"]:
  """h + rms(h) O z."""
  written = _apart(layers.matmul(z, layer["write"]["kernel"]))
  return h + (rms(h) * written).astype(h.dtype)


def adjacent_injection(
  shared: Params,
  layer: Params,
  h: Float[Array, "k d"],
  block_codes: Float[Array, "k r"],
  replaced: Bool[Array, ""],
) -> Float[Array, "k d"]:
  """One layer's write for one block.

  Args:
    shared: weights common to all layers.
    layer: this layer's readout and write.
    h: [K, D], the layer's output before the write.
    block_codes: [K, R], codes of the block's true tokens; only slot 0 (the
      anchor) is read unless `replaced`.
    replaced: whether true predecessors take the place of predicted features.

  Returns:
    [K, D]; slot 0 is `h[0]` unchanged.
  """
  features = feature(layer, h)
  known = token_vector(block_codes).astype(h.dtype)
  # Slot 0 goes through with an empty message: cheaper than cutting it off h.
  predicted = jnp.concatenate([known[:1], known[:1], features[1:-1]])
  true = jnp.concatenate([known[:1], known[:-1]])
  z = message(shared, features, jnp.where(replaced, true, predicted))
  is_written = jnp.arange(h.shape[0])[:, None] > 0
  return write(layer, h, jnp.where(is_written, z, 0.0).astype(h.dtype))


def _apart(product: jax.Array) -> jax.Array:
  """Keeps what follows a product out of its gradient's operand.

  XLA:CPU fuses the elementwise part of the cotangent into the transposed
  operand of the kernel's gradient, and then gathers it column by column.
  """
  return lax.optimization_barrier(product)
