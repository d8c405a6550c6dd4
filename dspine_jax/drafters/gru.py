"""A one-layer GRU without biases, gates in PyTorch's order (baselines, 5.1).

  r = sigmoid(W_ir e + W_hr s)      z = sigmoid(W_iz e + W_hz s)
  n = tanh(W_in e + r * (W_hn s))   s' = (1 - z) * n + z * s

The three input maps are one kernel [E, 3 H] and do not depend on the state, so
they are applied to many tokens at once (`project`).
"""

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

from dspine_jax import layers
from dspine_jax.typing import Key, Params


def init(key: Key, input_size: int, hidden_size: int) -> Params:
  """PyTorch's default: uniform within 1 / sqrt(H)."""
  bound = hidden_size**-0.5
  input_key, state_key = jax.random.split(key)

  def kernel(key, rows):
    shape = (rows, 3 * hidden_size)
    values = jax.random.uniform(key, shape, minval=-bound, maxval=bound)
    return {"kernel": values}

  return {
    "input": kernel(input_key, input_size),
    "state": kernel(state_key, hidden_size),
  }


def project(
  params: Params, inputs: Float[Array, "*b e"]
) -> Float[Array, "*b gates"]:
  """W_i e for all three gates, [..., 3 H]."""
  return layers.matmul(inputs, params["input"]["kernel"])


def step(
  params: Params,
  state: Float[Array, "*b h"],
  projected: Float[Array, "*b gates"],
) -> Float[Array, "*b h"]:
  """The state after one more token, given its `project`."""
  recurrent = layers.matmul(state, params["state"]["kernel"])
  input_r, input_z, input_n = jnp.split(projected, 3, axis=-1)
  state_r, state_z, state_n = jnp.split(recurrent, 3, axis=-1)
  reset = jax.nn.sigmoid(input_r + state_r)
  update = jax.nn.sigmoid(input_z + state_z)
  new = jnp.tanh(input_n + reset * state_n)
  return (1 - update) * new + update * state


def run(
  params: Params, inputs: Float[Array, "*b t e"]
) -> Float[Array, "*b t h"]:
  """States after each of T tokens, from a zero state."""
  projected = jnp.moveaxis(project(params, inputs), -2, 0)
  hidden_size = params["state"]["kernel"].shape[0]
  start = jnp.zeros((*projected.shape[1:-1], hidden_size), projected.dtype)

  def one(state, token):
    state = step(params, state, token)
    return state, state

  return jnp.moveaxis(lax.scan(one, start, projected)[1], 0, -2)
