"""Parameters of adjacent causal injection, and its write (dspine, 4).

The op itself, forward and backward, is `kernels.adjacent_injection`; here are
the parameters of all layers as a drafter holds them, and their way into it.
"""

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspine_jax.typing import Key, Params
from kernels.adjacent_injection import api, reference


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


def weights(shared: Params, layer: Params) -> reference.Weights:
  """The weights of one layer's injection, as the ops take them.

  Args:
    shared: weights common to all layers.
    layer: this layer's readout and write.
  """
  return reference.Weights(
    readout=layer["readout"]["kernel"],
    write=layer["write"]["kernel"],
    message=shared["message"]["kernel"],
    receiver_gate=shared["receiver_gate"]["kernel"],
    predecessor_gate=shared["predecessor_gate"]["kernel"],
    bias=shared["bias"],
  )


def adjacent_injection(
  shared: Params,
  layer: Params,
  h: Float[Array, "*b k d"],
  tokens: Int[Array, "*b k"],
  replaced: Bool[Array, "*b"],
  codes: Float[Array, "v r"],
  *,
  with_feature: bool = False,
) -> reference.Injected:
  """One layer's write for all slots of any number of blocks.

  Args:
    shared: weights common to all layers.
    layer: this layer's readout and write.
    h: [*b, K, D], the layer's output before the write.
    tokens: [*b, K], the blocks' true tokens; only slot 0 (the anchor) is read
      unless `replaced`.
    replaced: [*b], whether true predecessors take the place of predicted
      features.
    codes: [V, R], frozen codes of all tokens.
    with_feature: whether to give the written states' features as well.

  Returns:
    States [*b, K, D], slot 0 unchanged; and features [*b, K, R] or None.
  """
  return api.adjacent_injection(
    h,
    tokens,
    replaced,
    codes,
    weights(shared, layer),
    with_feature=with_feature,
  )
