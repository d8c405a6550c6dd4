"""The output length of least joules per output token.

A request's prefill is paid once and spreads over more tokens the longer the
answer is, while every token reads back over all before it: joules per token
fall, then rise. Two ways to the minimum: in closed form where a law is a
parabola in O (all but `capacity` and `baseline3`), and by Newton's method on
gradients for any law. In log O, log(joules / O) is convex as long as the
coefficients are not negative, so that there is one minimum.
"""

from typing import Any

import jax
import numpy as np
from jax import numpy as jnp

from energy import laws
from energy.architecture import Architecture

_NEWTON_STEPS = 100
_LARGEST_STEP = 2.0  # In log O.
_LONGEST = 1e7  # No minimum before: the law falls for ever.


def closed_form(
  law: laws.Law,
  theta: Any,
  architecture: Architecture,
  input_tokens: Any,
  cached_tokens: Any = 0,
) -> jax.Array:
  """sqrt(a / c) for joules a + b O + c O^2, infinite if c is not positive.

  Args:
    law: a parabola in O.
    theta: [coefficients].
    architecture: sizes.
    input_tokens: I.
    cached_tokens: C.
  """
  # Far apart: a second difference of near lengths would lose all digits.
  far = 1e4

  def at(outputs):
    return law(theta, architecture, input_tokens, outputs, cached_tokens)

  a = at(0.0)
  c = (at(2 * far) - 2 * at(far) + a) / (2 * far**2)
  rises = c > 0
  root = jnp.sqrt(jnp.maximum(a, 0.0) / jnp.where(rises, c, 1.0))
  return jnp.where(rises, root, jnp.inf)


def by_gradient(
  law: laws.Law,
  theta: Any,
  architecture: Architecture,
  input_tokens: Any,
  cached_tokens: Any = 0,
  concurrency: Any = None,
) -> jax.Array:
  """The same for any law, by Newton steps on log(joules / O) over log O.

  Arguments as in `closed_form`, and `concurrency` as in a law. Infinite where
  there is no minimum below ten million tokens.
  """

  def objective(x, inputs, cached):
    outputs = jnp.exp(x)
    joules = law(theta, architecture, inputs, outputs, cached, concurrency)
    return jnp.log(joules) - x

  slope = jax.grad(objective)
  curve = jax.grad(slope)

  def minimum(inputs, cached):
    def step(_, x):
      down = slope(x, inputs, cached) / jnp.maximum(
        jnp.abs(curve(x, inputs, cached)), 1e-6
      )
      return x - jnp.clip(down, -_LARGEST_STEP, _LARGEST_STEP)

    start = jnp.log(jnp.asarray(256.0, jnp.result_type(float)))
    found = jnp.exp(jax.lax.fori_loop(0, _NEWTON_STEPS, step, start))
    return jnp.where(found < _LONGEST, found, jnp.inf)

  inputs, cached = jnp.broadcast_arrays(
    *(
      jnp.asarray(np.asarray(x, np.float64), jnp.result_type(float))
      for x in (input_tokens, cached_tokens)
    )
  )
  found = jax.vmap(minimum)(inputs.reshape(-1), cached.reshape(-1))
  return found.reshape(inputs.shape)
