import dataclasses
import fractions

import pytest

from dspine_jax import configs, target_config
from dspine_jax.target import tapped_layers


@pytest.mark.parametrize(
  ("target", "draft", "want"),
  [
    (36, 5, (1, 9, 17, 25, 33)),  # Qwen3-4B and 8B.
    (40, 5, (1, 10, 19, 28, 37)),
    (28, 5, (1, 7, 13, 19, 25)),
    (36, 1, (18,)),
    (12, 3, (1, 5, 9)),
    (7, 3, (1, 2, 4)),  # 2.5 is rounded to even, not up.
  ],
)
def test_taps_of_known_targets(target, draft, want):
  assert tapped_layers.tapped_layers(target, draft) == want


def half_to_even(value):
  floor = value.numerator // value.denominator
  rest = value - floor
  half = fractions.Fraction(1, 2)
  return floor + (rest > half or (rest == half and floor % 2 == 1))


def test_taps_follow_the_rule():
  for target in range(2, 50):
    for draft in range(2, 8):
      step = fractions.Fraction(target - 4, draft - 1)
      want = tuple(half_to_even(1 + i * step) for i in range(draft))
      assert tapped_layers.tapped_layers(target, draft) == want


@pytest.mark.parametrize(
  ("ids", "message"),
  [
    ((1, 6), "layer 6 cannot be tapped in a target of 6 layers"),
    ((1, 5), "layer 5 .* the last layer is never tapped"),
    ((-1, 2), "layer -1"),
    ((3, 1), "ascending"),
    ((2, 2), "without repeats"),
  ],
)
def test_a_layer_that_cannot_be_tapped_is_named(ids, message):
  with pytest.raises(ValueError, match=message):
    tapped_layers.check_tapped_layers(ids, 6)


def test_layers_before_the_last_can_be_tapped():
  assert tapped_layers.check_tapped_layers((0, 4), 6) == (0, 4)


@pytest.mark.parametrize(("target", "draft"), [(2, 1), (5, 3), (3, 2)])
def test_a_drafter_for_too_shallow_a_target_is_refused(target, draft):
  cfg = dataclasses.replace(target_config.embedded_target(), num_layers=target)
  with pytest.raises(ValueError, match="target_layer_ids"):
    configs.drafter_for(cfg, "dflash", num_layers=draft, mask_token_id=1)
