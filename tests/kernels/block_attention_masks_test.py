import numpy as np
from jax import numpy as jnp

from kernels.block_attention import masks


def test_prefix_shows_exactly_the_first_positions_of_each_row():
  lengths = np.array([[0, 1], [3, 4]], np.int32)
  got = np.asarray(masks.prefix(jnp.asarray(lengths), 4))
  for row in range(2):
    for column in range(2):
      want = [s < lengths[row, column] for s in range(4)]
      np.testing.assert_array_equal(got[row, column], want)
  starts = jnp.array([[0, 1], [1, -2]])
  got = np.asarray(masks.prefix(jnp.asarray(lengths), 4, starts))
  for row in range(2):
    for column in range(2):
      begin, end = int(starts[row, column]), lengths[row, column]
      want = [begin <= s < end for s in range(4)]
      np.testing.assert_array_equal(got[row, column], want)
