import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import rope_scaling
from tests import oracles

# Llama 3.1's numbers; with theta 500000 and 64 dimensions all three of its
# cases occur (kept, blended, divided).
LLAMA31 = rope_scaling.Llama3Scaling(factor=8.0)
# Qwen's numbers for 128k positions; the ramp covers some of the 64 dimensions.
YARN = rope_scaling.YarnScaling(factor=4.0, original_max_positions=32768)
SCALINGS = [
  None,
  rope_scaling.LinearScaling(factor=2.5),
  LLAMA31,
  rope_scaling.Llama3Scaling(
    factor=32.0,
    low_freq_factor=1.5,
    high_freq_factor=3.0,
    original_max_positions=512,
  ),
  YARN,
  rope_scaling.YarnScaling(
    factor=8.0,
    original_max_positions=512,
    beta_fast=16.0,
    beta_slow=2.0,
    truncate=False,
  ),
  # A ramp that ends behind the last frequency.
  rope_scaling.YarnScaling(factor=4.0, original_max_positions=10**9),
  # No feature turns 32 times: the ramp begins at the first.
  rope_scaling.YarnScaling(factor=2.0, original_max_positions=32),
  # An empty ramp.
  rope_scaling.YarnScaling(
    factor=2.0,
    original_max_positions=512,
    beta_fast=3.0,
    beta_slow=3.0,
    truncate=False,
  ),
]


@pytest.mark.parametrize("scaling", SCALINGS)
def test_frequencies_are_those_of_the_formulas(scaling):
  got = rope_scaling.frequencies(64, 5e5, scaling)
  want = oracles.rope_frequencies(64, 5e5, scaling)
  assert got.dtype == jnp.float32
  np.testing.assert_allclose(got, want, rtol=2e-6)


@pytest.mark.parametrize(
  ("scaling", "factor"), [(LLAMA31, 8), (YARN, 4)], ids=["llama3", "yarn"]
)
def test_high_frequencies_are_kept_middle_ones_blended_low_ones_divided(
  scaling, factor
):
  plain = np.asarray(rope_scaling.frequencies(64, 5e5, None), np.float64)
  scaled = np.asarray(rope_scaling.frequencies(64, 5e5, scaling), np.float64)
  ratio = plain / scaled
  assert ratio[0] == 1 and ratio[-1] == factor
  middle = ratio[(ratio != 1) & (ratio != factor)]
  assert middle.size > 0
  assert (np.diff(ratio) >= 0).all()


@pytest.mark.parametrize(
  ("changes", "want"),
  [
    ({}, 1.138629436),
    ({"attention_factor": 1.3, "mscale": 2.0, "mscale_all_dim": 1.0}, 1.3),
    ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
    ({"mscale": 2.0, "mscale_all_dim": 1.0}, 1.277258872 / 1.138629436),
    ({"mscale": 2.0}, 1.138629436),
    ({"factor": 1.0}, 1.0),
  ],
)
def test_yarn_s_attention_factor_is_given_or_follows_the_factor(changes, want):
  fields = {"factor": 4.0, "original_max_positions": 64} | changes
  got = rope_scaling.amplitude(rope_scaling.YarnScaling(**fields))
  assert got == pytest.approx(want, rel=1e-9)


def test_only_yarn_changes_the_size_of_cosines():
  for scaling in (None, LLAMA31, rope_scaling.LinearScaling(factor=3.0)):
    assert rope_scaling.amplitude(scaling) == 1.0


@pytest.mark.parametrize(
  ("make", "match"),
  [
    (lambda: rope_scaling.LinearScaling(factor=0.5), "factor=0.5: must be at"),
    (lambda: rope_scaling.LinearScaling(factor=float("inf")), "factor=inf"),
    (
      lambda: rope_scaling.Llama3Scaling(factor=2.0, low_freq_factor=4.0),
      "low_freq_factor=4.0: must lie",
    ),
    (
      lambda: rope_scaling.Llama3Scaling(factor=2.0, original_max_positions=0),
      "original_max_positions=0",
    ),
    (
      lambda: rope_scaling.YarnScaling(
        factor=2.0, original_max_positions=8, beta_slow=33.0
      ),
      "beta_slow=33.0: must lie",
    ),
    (
      lambda: rope_scaling.YarnScaling(
        factor=2.0, original_max_positions=8, attention_factor=0.0
      ),
      "attention_factor=0.0: must be positive",
    ),
  ],
)
def test_impossible_values_are_named(make, match):
  with pytest.raises(ValueError, match=match):
    make()
