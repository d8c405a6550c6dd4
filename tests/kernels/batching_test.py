import jax
import numpy as np
from jax import numpy as jnp

from kernels import batching


def product(seen=None):
  """x * y summed with w; `seen` collects the shapes that really ran."""

  def run(x, y, w):
    if seen is not None:
      seen.append(x.shape)
    return x * y + w.reshape((1,) * (x.ndim - 1) + (-1,)), x - y

  return batching.rows_first(run, 2)


X = jnp.arange(24.0).reshape(2, 3, 4)
Y = 1 + X
W = jnp.arange(4.0)


def test_a_mapped_axis_of_rows_becomes_a_leading_axis():
  seen = []
  function = product(seen)
  got = jax.vmap(function, in_axes=(0, 0, None))(X, Y, W)
  np.testing.assert_array_equal(got[0], X * Y + W[None, None])
  np.testing.assert_array_equal(got[1], X - Y)
  assert seen[-1] == X.shape  # One call with all rows, not one a row.


def test_rows_that_are_not_mapped_are_repeated():
  got = jax.vmap(product(), in_axes=(None, 1, None))(X[:, 0], Y, W)
  want = jax.vmap(lambda y: X[:, 0] * y + W[None], in_axes=1)(Y)
  np.testing.assert_array_equal(got[0], want)


def test_two_mapped_axes():
  inner = jax.vmap(product(), in_axes=(0, 0, None))
  got = jax.jit(jax.vmap(inner, in_axes=(0, 0, None)))(X, Y, W)
  np.testing.assert_array_equal(got[0], X * Y + W[None, None])


def test_mapped_weights_run_one_after_another():
  weights = jnp.stack([W, 2 * W])
  got = jax.vmap(product(), in_axes=(0, None, 0))(X, Y[0], weights)
  want = X * Y[:1] + weights[:, None]
  np.testing.assert_array_equal(got[0], want)
  np.testing.assert_array_equal(got[1], X - Y[:1])
