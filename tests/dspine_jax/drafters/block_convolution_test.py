import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.drafters import block_convolution
from tests import head_oracles, tiny_models

CFG = tiny_models.drafter_config("dflash2")
SETUP = tiny_models.drafter(CFG)
GROUP, WIDTH, SLOTS = CFG.dflash2.conv_group_size, CFG.hidden_size, 5
WEIGHTS = SETUP.params["convolutions"]["layers"][0]
TOLERANCE = 1e-5  # A few float32 products against float64.


def states(seed=0, blocks=3):
  rng = np.random.default_rng(seed)
  shape = (2, blocks, SLOTS, WIDTH)
  return jnp.asarray(rng.standard_normal(shape), jnp.float32)


def mix(x):
  """A sublayer in which slots and channels meet."""
  return jnp.tanh(x[..., ::-1, :] + 0.5 * jnp.roll(x, 1, axis=-1))


def plain(weights, x):
  """The oracle, block by block."""
  out = [
    head_oracles.around(weights, lambda v: np.asarray(mix(v)), block, GROUP)
    for block in np.asarray(x, np.float64).reshape(-1, SLOTS, WIDTH)
  ]
  return np.array(out).reshape(x.shape)


@pytest.mark.parametrize("name", block_convolution.SUBLAYERS)
def test_both_sides_equal_a_plain_loop(name):
  x = states()
  got = jax.jit(block_convolution.around, static_argnums=(1, 2))(
    WEIGHTS, name, mix, x
  )
  np.testing.assert_allclose(got, plain(WEIGHTS[name], x), atol=TOLERANCE)


def test_kernels_projected_behind_the_first_convolution_would_be_seen():
  x, weights = states(), WEIGHTS["attention"]
  base = weights["base_kernel"]

  def wrong(x):
    first = block_convolution.dynamic_kernels(weights, x)[..., 0, :, :]
    inner = mix(block_convolution.convolve(x, base[0], first))
    second = block_convolution.dynamic_kernels(weights, inner)[..., 1, :, :]
    return block_convolution.convolve(inner, base[1], second)

  assert np.abs(wrong(x) - plain(weights, x)).max() > 0.1


def test_three_taps_reach_two_slots_back():
  rng = np.random.default_rng(1)
  base = rng.standard_normal((3, WIDTH)).astype(np.float32)
  dynamic = rng.standard_normal((SLOTS, 3, WIDTH // GROUP)).astype(np.float32)
  v = np.asarray(states()[0, 0])
  got = block_convolution.convolve(*map(jnp.asarray, (v, base, dynamic)))
  want = head_oracles.convolution(v, base, dynamic, GROUP)
  np.testing.assert_allclose(got, want, atol=TOLERANCE)


def reach(around):
  """[K, K] whether output slot t depends on input slot s of the same block."""
  x = states(blocks=1)[0, 0]

  def block(x):
    return around(WEIGHTS, "mlp", lambda v: v, x[None, None])[0, 0]

  jacobian = jax.jacobian(block)(x)
  return np.abs(jacobian).max(axis=(1, 3)) > 0


def test_a_slot_reads_itself_and_two_before_over_both_sides():
  slots = np.arange(SLOTS)
  gap = slots[:, None] - slots[None]
  np.testing.assert_array_equal(
    reach(block_convolution.around), (gap >= 0) & (gap <= 2)
  )


def test_a_convolution_that_goes_round_the_block_would_be_seen(monkeypatch):
  monkeypatch.setattr(
    block_convolution, "_later", lambda x, tap: jnp.roll(x, tap, axis=-3)
  )
  assert reach(block_convolution.around)[0, -1]


def test_fresh_convolutions_are_the_identity_bit_for_bit():
  fresh = block_convolution.init(CFG, CFG.dflash2)["layers"]
  assert len(fresh) == CFG.num_layers
  x = states()
  for weights in fresh:
    for name in block_convolution.SUBLAYERS:
      got = block_convolution.around(weights, name, lambda v: v, x)
      np.testing.assert_array_equal(got, x)


def test_a_fresh_dflash2_drafter_is_dflash_bit_for_bit():
  tables = SETUP.tables
  shared = SETUP.method.init(jax.random.key(3), CFG, tables)
  dflash_cfg = tiny_models.drafter_config("dflash")
  dflash = tiny_models.Setup(
    dflash_cfg, {"backbone": shared["backbone"]}, {}, tables
  )
  ours = tiny_models.Setup(CFG, shared, {}, tables)
  got, want = (tiny_models.run(one).output.hidden for one in (ours, dflash))
  np.testing.assert_array_equal(got, want)
  # With other weights the convolutions do something.
  changed = ours._replace(
    params=shared | {"convolutions": SETUP.params["convolutions"]}
  )
  assert np.abs(tiny_models.run(changed).output.hidden - want).max() > 0.1


def test_a_block_is_not_touched_by_the_one_before_it():
  batch = tiny_models.train_batch(CFG)
  base = np.asarray(tiny_models.run(SETUP).output.hidden)
  # Position 4 is the anchor of block 1 and lies inside block 0.
  tokens = batch.tokens.at[0, 4].set((batch.tokens[0, 4] + 1) % 60)
  other = batch.replace(tokens=tokens)
  other = np.asarray(tiny_models.run(SETUP, batch=other).output.hidden)
  assert (base[0, 1] != other[0, 1]).any(axis=-1).all()
  np.testing.assert_array_equal(base[0, [0, 2, 3]], other[0, [0, 2, 3]])


def test_scanned_layers_equal_unrolled_layers():
  want = tiny_models.run(SETUP).output.hidden
  got = tiny_models.run(tiny_models.stacked(SETUP)).output.hidden
  np.testing.assert_allclose(got, want, atol=3e-5)
