import jax
import numpy as np
import pytest
from jax import numpy as jnp

from kernels.block_attention import context_tiles, masks, partial

SLOTS, HEADS, GROUPS, WIDTH, KEYS = 4, 4, 2, 8, 50


def case(blocks=6, dtype=jnp.float32, seed=0):
  keys = jax.random.split(jax.random.key(seed), 4)
  q = jax.random.normal(keys[0], (2, blocks, SLOTS, HEADS, WIDTH), dtype)
  k = jax.random.normal(keys[1], (2, GROUPS, KEYS, WIDTH), dtype)
  v = jax.random.normal(keys[2], (2, GROUPS, KEYS, WIDTH), dtype)
  anchors = jax.random.randint(keys[3], (2, blocks), 0, KEYS + 1)
  return q, k, v, anchors.at[0, 0].set(0).at[1, -1].set(KEYS)


def dense(q, k, v, visible):
  """Every block by itself over the whole context."""
  mask = masks.prefix(visible, KEYS)[:, :, None]
  k, v = (jnp.repeat(part[:, None], q.shape[1], axis=1) for part in (k, v))
  return partial.partial_attention(q, k, v, mask)


def finished(part):
  """The attention, with an own block of one key of score zero."""
  one = jnp.ones_like(part.total)
  own = partial.PartialAttention(
    jnp.ones_like(part.weighted), 0.0 * part.maximum, one
  )
  return partial.merge(part, own, dtype=jnp.float32)


def windows(visible, moves):
  """Starts of a window of seven positions, the same or later by the slot."""
  offsets = jnp.arange(SLOTS) if moves else jnp.zeros((SLOTS,), jnp.int32)
  return visible[..., None] + offsets[None, None] - 7


def textbook(q, k, v, visible, starts):
  """Softmax over the whole masked context and one key of score zero."""
  k, v = (jnp.repeat(part, HEADS // GROUPS, axis=1) for part in (k, v))
  scores = jnp.einsum("bnkqh,bqsh->bnqks", q, k) / WIDTH**0.5
  at = jnp.arange(KEYS)[None, None, None]
  seen = (at >= starts[..., None]) & (at < visible[..., None, None])
  scores = jnp.where(seen[:, :, None], scores, -jnp.inf)
  scores = jnp.pad(scores, [(0, 0)] * 4 + [(0, 1)])
  v = jnp.pad(v, [(0, 0), (0, 0), (0, 1), (0, 0)], constant_values=1.0)
  return jnp.einsum("bnqks,bqsh->bnkqh", jax.nn.softmax(scores), v)


@pytest.fixture(params=["whole", "tiles", "single_blocks"])
def tiling(request, monkeypatch):
  if request.param != "whole":
    monkeypatch.setattr(context_tiles, "_WHOLE", 0)
    size = {"tiles": 2 * SLOTS, "single_blocks": 1}[request.param]
    monkeypatch.setattr(context_tiles, "_TILE_TOKENS", size)
  return request.param


@pytest.mark.parametrize("order", ["ascending", "any"])
@pytest.mark.parametrize("blocks", [6, 7])
def test_tiles_equal_every_block_by_itself(tiling, order, blocks):
  q, k, v, visible = case(blocks)
  if order == "ascending":
    visible = jnp.sort(visible, axis=-1)
  got = context_tiles.context_attention(q, k, v, visible)
  want = dense(q, k, v, visible)
  assert got.weighted.shape == (2, blocks, HEADS, SLOTS, WIDTH)
  np.testing.assert_allclose(finished(got), finished(want), atol=2e-6)


def test_every_number_of_visible_keys_is_read_and_no_more(monkeypatch):
  monkeypatch.setattr(context_tiles, "_WHOLE", 0)
  monkeypatch.setattr(context_tiles, "_TILE_TOKENS", 1)
  q, k, v, _ = case(blocks=KEYS + 1)
  visible = jnp.stack([jnp.arange(KEYS + 1)] * 2)
  got = context_tiles.context_attention(q, k, v, visible)
  want = dense(q, k, v, visible)
  np.testing.assert_allclose(finished(got), finished(want), atol=2e-6)


def test_gradients_equal_those_of_every_block_by_itself(tiling):
  q, k, v, visible = case()

  def total(attend):
    return lambda *qkv: jnp.sum(jnp.sin(finished(attend(*qkv, visible))))

  got = jax.grad(total(context_tiles.context_attention), (0, 1, 2))(q, k, v)
  want = jax.grad(total(dense), (0, 1, 2))(q, k, v)
  for a, b in zip(got, want, strict=True):
    assert np.abs(b).max() > 0.1
    np.testing.assert_allclose(a, b, atol=3e-6)


@pytest.mark.parametrize("moves", [True, False])
def test_windows_and_their_gradients_equal_textbook_attention(tiling, moves):
  q, k, v, visible = case()
  # Blocks that see nothing, less than a window, and only a window.
  visible = jnp.stack([jnp.array([0, 1, 3, 9, 30, 50]), visible[1]])
  starts = windows(visible, moves)

  def total(attend):
    def value(q, k, v):
      out = attend(q, k, v, visible, starts)
      return jnp.sum(jnp.sin(out)), out

    return jax.jit(jax.value_and_grad(value, (0, 1, 2), has_aux=True))

  def tiled(*arguments):
    return finished(context_tiles.context_attention(*arguments))

  (_, got), got_grads = total(tiled)(q, k, v)
  (_, want), want_grads = total(textbook)(q, k, v)
  np.testing.assert_allclose(got, want, atol=2e-6)
  for a, b in zip(got_grads, want_grads, strict=True):
    assert np.abs(b).max() > 0.1
    np.testing.assert_allclose(a, b, atol=3e-6)


def test_a_key_behind_the_anchor_never_matters(tiling):
  q, k, v, _ = case()
  visible = jnp.full((2, 6), 20).at[0, 3].set(21)

  def attend(k):
    part = context_tiles.context_attention(q, k, v, visible)
    return finished(part)

  before, after = attend(k), attend(k.at[:, :, 20:].add(3.0))
  changed = np.abs(before - after).max(axis=(2, 3, 4)) > 0
  np.testing.assert_array_equal(changed, np.asarray(visible) == 21)


def test_vmapped_tiles_equal_a_loop(tiling):
  del tiling
  cases = [case(seed=seed) for seed in range(3)]
  attend = context_tiles.context_attention
  many = jax.vmap(attend)(*(jnp.stack(x) for x in zip(*cases, strict=True)))
  for index, one in enumerate(cases):
    np.testing.assert_allclose(
      finished(jax.tree.map(lambda x, i=index: x[i], many)),
      finished(attend(*one)),
      atol=2e-6,
    )


def test_bfloat16_keeps_float32_sums(tiling):
  del tiling
  got = context_tiles.context_attention(*case(dtype=jnp.bfloat16))
  want = dense(*case(dtype=jnp.bfloat16))
  assert got.weighted.dtype == got.total.dtype == jnp.float32
  np.testing.assert_allclose(finished(got), finished(want), atol=2e-2)


def test_no_score_matrix_of_all_blocks_is_held(monkeypatch):
  monkeypatch.setattr(context_tiles, "_WHOLE", 0)
  monkeypatch.setattr(context_tiles, "_TILE_TOKENS", SLOTS)
  num_keys = 600
  q, k, v, visible = case(blocks=40)
  k, v = (jnp.resize(part, (2, GROUPS, num_keys, WIDTH)) for part in (k, v))

  def total(q, k, v):
    part = context_tiles.context_attention(q, k, v, visible)
    return jnp.sum(finished(part) ** 2)

  compiled = jax.jit(jax.grad(total, (0, 1, 2))).lower(q, k, v).compile()
  scores = 2 * 40 * SLOTS * HEADS * num_keys * 4
  assert compiled.memory_analysis().temp_size_in_bytes < scores / 2
