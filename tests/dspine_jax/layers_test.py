import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import layers, rope_scaling
from tests import oracles

# float32 against float64 for values of order one.
TOLERANCE = 2e-6
# Angles up to 60 rad are rounded to 4e-6 before the cosine.
ROPE_TOLERANCE = 1e-5
LLAMA31 = rope_scaling.Llama3Scaling(factor=8.0)
YARN = rope_scaling.YarnScaling(factor=4.0, original_max_positions=64)


def random(*shape, seed=0):
  values = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(values, jnp.float32)


def test_rms_norm_divides_by_the_root_mean_square():
  x, scale = random(3, 4, 8), random(8, seed=1)
  got = layers.rms_norm(x, scale, 1e-3)
  np.testing.assert_allclose(
    got, oracles.rms_norm(x, scale, 1e-3), atol=TOLERANCE
  )


def test_rms_norm_of_bfloat16_is_computed_in_float32():
  x = (300 * random(5, 64)).astype(jnp.bfloat16)
  got = layers.rms_norm(x, jnp.ones(64), 1e-6)
  want = oracles.rms_norm(np.asarray(x, np.float64), np.ones(64), 1e-6)
  assert got.dtype == jnp.bfloat16
  # One rounding to bfloat16, 2^-9 relative, and no other.
  np.testing.assert_allclose(np.asarray(got, np.float64), want, rtol=2**-8)


def test_linear_maps_are_in_out_and_keep_leading_axes():
  x, kernel = random(2, 3, 5), random(5, 7, seed=1)
  got = layers.Linear(7).apply({"params": {"kernel": kernel}}, x)
  want = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
  np.testing.assert_allclose(got, want, atol=TOLERANCE * 5)


def test_a_bias_is_added_to_every_row_in_the_dtype_of_the_input():
  x, kernel, bias = random(2, 3, 5), random(5, 7, seed=1), random(7, seed=2)
  params = {"params": {"kernel": kernel, "bias": bias}}
  got = layers.Linear(7, use_bias=True).apply(params, x)
  want = np.asarray(x, np.float64) @ np.asarray(kernel, np.float64)
  want = want + np.asarray(bias, np.float64)
  np.testing.assert_allclose(got, want, atol=TOLERANCE * 5)
  half = layers.Linear(7, use_bias=True).apply(params, x.astype(jnp.bfloat16))
  assert half.dtype == jnp.bfloat16


def test_swiglu_gates_with_silu():
  x = random(3, 6)
  mlp = {
    "gate_proj": {"kernel": random(6, 9, seed=1)},
    "up_proj": {"kernel": random(6, 9, seed=2)},
    "down_proj": {"kernel": random(9, 6, seed=3)},
  }
  got = layers.SwiGLU(9).apply({"params": mlp}, x)
  want = oracles.swiglu(mlp, np.asarray(x, np.float64))
  np.testing.assert_allclose(got, want, atol=3e-5)  # Values of order 10.


@pytest.mark.parametrize("scaling", [None, LLAMA31, YARN])
def test_rope_turns_halves_by_position_times_frequency(scaling):
  positions = np.array([0, 1, 7, 60], np.int32)
  x = random(4, 3, 8)
  table = layers.rope_table(jnp.asarray(positions), 8, 1e4, scaling)
  got = layers.apply_rope(x, table)
  want = oracles.rope(x, positions, 1e4, scaling)
  np.testing.assert_allclose(got, want, atol=ROPE_TOLERANCE)
  # Position 0 turns nothing; YaRN makes all longer.
  size = oracles.rope_amplitude(scaling)
  np.testing.assert_allclose(got[0], size * x[0], rtol=1e-6)


def test_rope_scores_depend_on_the_distance_alone():
  q, k = random(1, 1, 8), random(1, 1, 8, seed=1)

  def score(query_at, key_at):
    turned = [
      layers.apply_rope(x, layers.rope_table(jnp.array([at]), 8, 1e4))
      for x, at in ((q, query_at), (k, key_at))
    ]
    return float(jnp.vdot(*turned))

  assert score(9, 4) == pytest.approx(score(25, 20), abs=1e-5)
  assert score(9, 4) != pytest.approx(score(4, 9), abs=1e-2)


def test_rope_keeps_the_dtype_but_not_the_rounding_of_bfloat16():
  # In bfloat16 position 257 would already be 256.
  x = jnp.ones((1, 1, 2), jnp.bfloat16)
  table = layers.rope_table(jnp.array([257]), 2, 1e4)
  got = layers.apply_rope(x, table)
  want = oracles.rope(np.ones((1, 1, 2)), [257], 1e4)
  assert got.dtype == jnp.bfloat16
  np.testing.assert_allclose(np.asarray(got, np.float64), want, atol=2**-7)


def affine(params, carry, shift):
  carry = jnp.tanh(carry @ params["w"]) + shift
  return carry, {"sum": jnp.sum(carry)}


def test_scanned_layers_equal_unrolled_layers_and_their_outputs():
  unrolled = tuple({"w": random(4, 4, seed=i)} for i in range(3))
  shifts = tuple(random(4, seed=9 + i) for i in range(3))
  carry, outputs = layers.apply_layers(affine, unrolled, random(4), shifts)
  stacked = layers.stack_layers(unrolled)
  scanned, stacked_outputs = layers.apply_layers(
    affine, stacked, random(4), jnp.stack(shifts)
  )
  np.testing.assert_allclose(carry, scanned, atol=TOLERANCE)
  assert isinstance(outputs, tuple) and len(outputs) == 3
  np.testing.assert_allclose(
    [out["sum"] for out in outputs], stacked_outputs["sum"], atol=TOLERANCE
  )


def test_unrolled_layers_and_inputs_must_be_equally_many():
  two = ({"w": jnp.eye(2)},) * 2
  with pytest.raises(ValueError, match="shorter"):
    layers.apply_layers(affine, two, jnp.ones(2), (jnp.ones(2),))


def test_unstacking_undoes_stacking():
  layer_params = tuple({"a": random(2, seed=i), "b": {}} for i in range(3))
  back = layers.unstack_layers(layers.stack_layers(layer_params))
  assert isinstance(back, tuple)
  jax.tree.map(np.testing.assert_array_equal, back, layer_params)


def test_layer_indices_take_the_form_of_the_parameters():
  assert layers.layer_indices(({"w": 0.0},) * 3) == (0, 1, 2)
  stacked = {"w": jnp.zeros((3, 2))}
  np.testing.assert_array_equal(layers.layer_indices(stacked), [0, 1, 2])
