import jax
import numpy as np
import pytest

from dspine_jax import configs
from dspine_jax.training import schedules
from tests import oracles

OPTIONS = configs.DSpineOptions()
TOTAL = 600


@pytest.mark.parametrize(
  ("share", "want"),
  [(0, 0.5), (1 / 12, 0.5), (1 / 6, 0.5), (1 / 4, 0.25), (1 / 3, 0), (1, 0)],
)
def test_replacement_is_held_for_a_sixth_and_gone_at_a_third(share, want):
  got = schedules.replacement_probability(round(share * TOTAL), TOTAL, OPTIONS)
  assert float(got) == pytest.approx(want, abs=1e-6)


@pytest.mark.parametrize(
  ("step", "want"), [(0, 0), (73, 0.25), (146, 0.5), (147, 0.5), (9999, 0.5)]
)
def test_the_alignment_weight_rises_to_one_half_at_step_146(step, want):
  got = float(schedules.alignment_weight(step, OPTIONS))
  assert got == pytest.approx(want, abs=1e-7)


def test_both_schedules_agree_with_a_plain_loop_also_when_traced():
  options = configs.DSpineOptions(
    alignment_weight=0.8,
    alignment_warmup_steps=30,
    replacement_probability=0.9,
    replacement_hold_ratio=0.2,
    replacement_end_ratio=0.7,
  )
  beta = jax.jit(lambda step: schedules.alignment_weight(step, options))
  rho = jax.jit(
    lambda step: schedules.replacement_probability(step, 97, options)
  )
  for step in range(0, 110, 3):
    assert float(beta(step)) == pytest.approx(
      oracles.alignment_weight(step, options), abs=1e-6
    )
    assert float(rho(step)) == pytest.approx(
      oracles.replacement_probability(step, 97, options), abs=1e-6
    )


@pytest.mark.parametrize("total", [None, 0, -1])
def test_without_a_known_total_nothing_is_replaced(total):
  assert float(schedules.replacement_probability(0, total, OPTIONS)) == 0


def test_hold_and_end_may_coincide():
  options = configs.DSpineOptions(
    replacement_hold_ratio=0.5, replacement_end_ratio=0.5
  )
  got = [
    float(schedules.replacement_probability(step, 10, options))
    for step in (0, 4, 5, 10)
  ]
  np.testing.assert_array_equal(got, [0.5, 0.5, 0, 0])
