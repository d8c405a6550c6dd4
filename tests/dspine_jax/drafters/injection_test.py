import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.drafters import injection
from kernels.adjacent_injection import reference as injection_math
from tests import oracles, tiny_models

TOLERANCE = 1e-5  # float32 against float64, values of order one.
SLOTS, WIDTH, RANK, SIZE, LAYERS = 6, 12, 8, 5, 2

TOKENS = jnp.arange(SLOTS)


@jax.jit
def inject(shared, layer, h, block_codes, replaced):
  """The states after the write of one block whose tokens have these codes."""
  return injection.adjacent_injection(
    shared, layer, h, TOKENS, replaced, block_codes
  ).h


def weights(seed=0):
  shapes = jax.eval_shape(
    lambda: injection.init(
      jax.random.key(0), LAYERS, jnp.zeros((WIDTH, RANK)), SIZE
    )
  )
  params = tiny_models.fill(shapes, seed)
  return params["shared"], params["layers"][0]


def states(seed=1):
  rng = np.random.default_rng(seed)
  return jnp.asarray(2 * rng.standard_normal((SLOTS, WIDTH)), jnp.float32)


def codes(seed=2):
  rng = np.random.default_rng(seed)
  rows = rng.standard_normal((SLOTS, RANK))
  rows /= np.linalg.norm(rows, axis=1, keepdims=True)
  return jnp.asarray(rows, jnp.float32)


@pytest.mark.parametrize("replaced", [False, True])
def test_the_write_follows_its_equations(replaced):
  shared, layer = weights()
  got = inject(shared, layer, states(), codes(), jnp.asarray(replaced))
  want = oracles.inject(shared, layer, states(), codes(), replaced)
  np.testing.assert_allclose(got, want, atol=TOLERANCE)
  assert (np.abs(got - states())[1:] > 1e-3).any(axis=-1).all()


@pytest.mark.parametrize("replaced", [False, True])
def test_slot_zero_is_never_written(replaced):
  shared, layer = weights()
  got = inject(shared, layer, states(), codes(), jnp.asarray(replaced))
  np.testing.assert_array_equal(got[0], states()[0])


def test_zero_writes_change_nothing_at_all():
  shared, layer = weights()
  layer = layer | {"write": {"kernel": jnp.zeros((SIZE, WIDTH))}}
  got = inject(shared, layer, states(), codes(), jnp.asarray(False))
  np.testing.assert_array_equal(got, states())


def test_a_slot_reads_itself_and_its_predecessor_before_their_writes():
  shared, layer = weights()
  base = inject(shared, layer, states(), codes(), jnp.asarray(False))
  for slot in range(SLOTS):
    moved = states().at[slot].add(1.0)
    other = inject(shared, layer, moved, codes(), jnp.asarray(False))
    changed = (base != other).any(axis=-1)
    # Slot 1's predecessor is the anchor's code and not slot 0's state; and a
    # change does not travel further than one slot a layer.
    want = {slot, slot + 1} if slot > 0 else {0}
    assert set(np.flatnonzero(changed)) == want & set(range(SLOTS))


@pytest.mark.parametrize("replaced", [False, True])
def test_codes_are_read_at_the_anchor_or_where_they_replace(replaced):
  shared, layer = weights()
  base = inject(shared, layer, states(), codes(), jnp.asarray(replaced))
  for slot in range(SLOTS):
    moved = codes().at[slot].set(codes(seed=9)[slot])
    other = inject(shared, layer, states(), moved, jnp.asarray(replaced))
    changed = set(np.flatnonzero((base != other).any(axis=-1)))
    reads = slot == 0 or (replaced and slot < SLOTS - 1)
    assert changed == ({slot + 1} if reads else set())


def test_vmapped_blocks_equal_a_python_loop():
  shared, layer = weights()
  h = jnp.stack([states(seed) for seed in range(3)])
  block_codes = jnp.stack([codes(seed) for seed in range(3)])
  replaced = jnp.array([True, False, True])
  over_blocks = jax.vmap(inject, in_axes=(None, None, 0, 0, 0))
  got = over_blocks(shared, layer, h, block_codes, replaced)
  for block in range(3):
    want = inject(shared, layer, h[block], block_codes[block], replaced[block])
    np.testing.assert_allclose(got[block], want, atol=TOLERANCE)


def test_features_have_coordinates_of_rms_one_whatever_the_scale():
  readout = weights()[1]["readout"]["kernel"]
  for scale in (1e-3, 1.0, 1e4):
    got = injection_math.feature(readout, scale * states())
    np.testing.assert_allclose(
      jnp.sqrt(jnp.mean(got**2, axis=-1)), np.ones(SLOTS), rtol=1e-5
    )


def test_features_are_normed_in_float32_and_cast_back():
  readout = weights()[1]["readout"]["kernel"]
  h = states().astype(jnp.bfloat16)
  got = injection_math.feature(readout, h)
  assert got.dtype == jnp.bfloat16
  norms = np.linalg.norm(np.asarray(got, np.float64), axis=-1)
  np.testing.assert_allclose(norms, RANK**0.5, rtol=2**-8)


def test_gradients_are_finite_at_zero_states():
  shared, layer = weights()

  def total(shared, layer, h):
    out = injection.adjacent_injection(
      shared,
      layer,
      h,
      TOKENS,
      jnp.asarray(False),
      codes(),
      with_feature=True,
    )
    return jnp.sum(jnp.sin(out.h)) + jnp.sum(out.feature)

  zero = jnp.zeros((SLOTS, WIDTH))
  mixed = states().at[2].set(0.0)
  grad = jax.jit(jax.grad(total, argnums=(0, 1, 2)))
  for h in (zero, mixed):
    for leaf in jax.tree.leaves(grad(shared, layer, h)):
      assert np.isfinite(leaf).all()
  # The write is proportional to the state's norm.
  got = inject(shared, layer, zero, codes(), jnp.asarray(False))
  np.testing.assert_allclose(got, zero, atol=1e-10)


def test_init_starts_at_the_causal_backbone():
  rng = np.random.default_rng(0)
  directions = jnp.asarray(rng.standard_normal((WIDTH, RANK)), jnp.float32)
  params = injection.init(jax.random.key(3), LAYERS, directions, 200)
  assert len(params["layers"]) == LAYERS
  for layer in params["layers"]:
    np.testing.assert_array_equal(layer["readout"]["kernel"], directions)
    assert not layer["write"]["kernel"].any()
  shared = params["shared"]
  assert not shared["predecessor_gate"]["kernel"].any()
  assert not shared["bias"].any()
  for name in ("message", "receiver_gate"):
    # PyTorch's default: uniform within 1 / sqrt(fan-in).
    kernel = np.abs(shared[name]["kernel"])
    assert kernel.max() <= RANK**-0.5
    assert kernel.max() > 0.98 * RANK**-0.5
  first, second = shared["message"], shared["receiver_gate"]
  assert (first["kernel"] != second["kernel"]).any()
