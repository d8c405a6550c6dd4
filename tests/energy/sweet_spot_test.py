"""The output length of least joules per token."""

import jax
import numpy as np
import pytest

from energy import architecture, laws, measurements, prediction, sweet_spot

MODELS = architecture.shipped_models()
TABLE = measurements.sweetspot_coefficients()
PRINTED = measurements.sweetspot_optimum_outputs()


@pytest.mark.parametrize("name", TABLE)
def test_all_printed_optima(name):
  sizes = MODELS[name].architecture
  for find in (sweet_spot.closed_form, sweet_spot.by_gradient):
    found = float(find(laws.SWEETSPOT, TABLE[name], sizes, 64))
    assert round(found) == PRINTED[name]


def test_gradient_and_closed_form_agree_for_arrays():
  inputs = np.asarray([16.0, 1000.0, 60000.0])
  sizes = MODELS["Llama 3.1 8B"].architecture
  with jax.enable_x64(True):
    arguments = (laws.SIMPLE, laws.SIMPLE_OF_THE_PAPER, sizes, inputs, 8.0)
    closed = sweet_spot.closed_form(*arguments)
    np.testing.assert_allclose(
      sweet_spot.by_gradient(*arguments), closed, rtol=1e-6
    )
  assert closed.shape == (3,)


def test_the_minimum_is_one():
  fitted = prediction.shipped()["capacity"]
  sizes = MODELS["Qwen 2 7B"].architecture
  law, theta = fitted.function, fitted.theta
  best = float(sweet_spot.by_gradient(law, theta, sizes, 500))
  lengths = best * np.asarray([0.5, 0.9, 1.0, 1.1, 2.0])
  per_token = np.asarray(law(theta, sizes, 500, lengths)) / lengths
  assert per_token.argmin() == 2


def test_a_law_that_only_falls_has_no_optimum():
  law, theta = laws.LAWS["baseline2"], (0.1, 2.0)
  sizes = MODELS["OPT 1.3B"].architecture
  assert np.isinf(float(sweet_spot.closed_form(law, theta, sizes, 64)))
  assert np.isinf(float(sweet_spot.by_gradient(law, theta, sizes, 64)))
