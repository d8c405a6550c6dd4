import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import kv_cache, layers
from tests import tiny_models

CFG = tiny_models.target_config()
HALF = tiny_models.target_config(dtype="bfloat16")
CAPACITY, NEW, LAYERS = 9, 3, 2


def filled(rows, seed=0):
  """A cache of random content with another length in each row."""
  rng = np.random.default_rng(seed)
  empty = kv_cache.init(CFG, rows, CAPACITY, num_layers=LAYERS)
  content = jax.tree.map(
    lambda x: jnp.asarray(rng.standard_normal(x.shape), jnp.float32),
    empty.layers,
  )
  lengths = jnp.arange(rows, dtype=jnp.int32) % (CAPACITY - NEW + 1)
  return kv_cache.KVCache(layers=content, lengths=lengths)


def new_tokens(rows, seed=1):
  rng = np.random.default_rng(seed)
  shape = (rows, CFG.num_kv_heads, NEW, CFG.head_dim)
  return tuple(
    tuple(
      jnp.asarray(rng.standard_normal(shape), jnp.float32) for _ in range(2)
    )
    for _ in range(LAYERS)
  )


@pytest.mark.parametrize("rows", [1, 4, 33], ids="rows={}".format)
def test_write_puts_new_tokens_behind_each_rows_length(rows):
  # Above 32 rows the write takes another path (one scatter).
  cache, new = filled(rows), new_tokens(rows)
  written = jax.jit(kv_cache.write)(cache, new)
  np.testing.assert_array_equal(written.lengths, cache.lengths)
  for layer in range(LAYERS):
    for part in range(2):
      want = np.array(cache.layers[layer][part])
      for row in range(rows):
        for offset in range(NEW):
          at = int(cache.lengths[row]) + offset
          want[row, :, at] = new[layer][part][row, :, offset]
      np.testing.assert_array_equal(written.layers[layer][part], want)


def test_a_stacked_cache_is_written_like_an_unrolled_one():
  cache, new = filled(4), new_tokens(4)
  unrolled = kv_cache.write(cache, new)
  stacked = kv_cache.write(
    cache.replace(layers=layers.stack_layers(cache.layers)),
    layers.stack_layers(new),
  )
  jax.tree.map(
    np.testing.assert_array_equal,
    layers.unstack_layers(stacked.layers),
    unrolled.layers,
  )


def test_the_next_write_overwrites_what_was_not_committed():
  cache = filled(2)
  rejected = kv_cache.advance(
    kv_cache.write(cache, new_tokens(2, seed=2)), jnp.array([1, 0])
  )
  np.testing.assert_array_equal(
    rejected.lengths, cache.lengths + jnp.array([1, 0])
  )
  final = kv_cache.write(rejected, new_tokens(2, seed=3))
  for got, new, kept in zip(
    jax.tree.leaves(final.layers),
    jax.tree.leaves(new_tokens(2, seed=3)),
    jax.tree.leaves(cache.layers),
    strict=True,
  ):
    for row in range(2):
      before, now = int(cache.lengths[row]), int(rejected.lengths[row])
      np.testing.assert_array_equal(got[row, :, :before], kept[row, :, :before])
      np.testing.assert_array_equal(got[row, :, now : now + NEW], new[row])


def test_crop_only_ever_shortens():
  cache = filled(4)
  cropped = kv_cache.crop(cache, jnp.array([5, 0, 1, 2], jnp.int32))
  np.testing.assert_array_equal(cache.lengths, [0, 1, 2, 3])
  np.testing.assert_array_equal(cropped.lengths, [0, 0, 1, 2])


@pytest.mark.parametrize("stacked", [True, False])
def test_a_new_cache_is_empty_and_knows_its_capacity(stacked):
  cache = kv_cache.init(
    HALF,
    3,
    CAPACITY,
    num_layers=LAYERS,
    stacked=stacked,
  )
  assert cache.capacity == CAPACITY
  assert cache.lengths.dtype == jnp.int32 and not cache.lengths.any()
  shape = (3, CFG.num_kv_heads, CAPACITY, CFG.head_dim)
  leaves = jax.tree.leaves(cache.layers)
  assert len(leaves) == (2 if stacked else 2 * LAYERS)
  for leaf in leaves:
    assert leaf.shape == ((LAYERS, *shape) if stacked else shape)
    assert leaf.dtype == jnp.bfloat16


def test_a_write_keeps_the_dtype_of_the_cache():
  cache = kv_cache.init(HALF, 2, 4, num_layers=LAYERS)
  written = kv_cache.write(cache, new_tokens(2))
  for leaf in jax.tree.leaves(written.layers):
    assert leaf.dtype == jnp.bfloat16
