"""The limits of the model of speculative decoding."""

import jax
import numpy as np
import pytest

from energy import architecture, laws, prediction, speculative

QWEN = architecture.shipped_models()["Qwen3 8B"].architecture
FITTED = prediction.shipped()["capacity"]
PRICES = speculative.prices_of(FITTED.theta, FITTED.function)
HARDWARE = speculative.Hardware()
DRAFTER = speculative.block_drafter(
  QWEN, vocab_size=151936, intermediate_size=12288, extra_parameters=33e6
)


def operation(context=2000.0, concurrency=8.0, width=16.0):
  return speculative.Operation(context, concurrency, width)


def test_the_drafter_has_the_published_size():
  head = 151936 * 4096
  own = DRAFTER.architecture.parameters - head
  assert own == pytest.approx(1.05e9 + 33e6, rel=0.01)


def test_one_token_a_pass_without_drafter_is_the_law():
  law, inputs, outputs, batch = FITTED.function, 300, 50, 4.0
  with jax.enable_x64(True):
    # A token reads all positions before it, and half of itself.
    contexts = inputs + np.arange(outputs) + 0.5
    tokens = speculative.joules_per_token(
      PRICES, QWEN, None, operation(contexts, batch, 1.0), 1.0
    )
    parts = law.parts(FITTED.theta, QWEN, inputs, outputs, concurrency=batch)
    expected = float(parts["kv_reads"] + parts["next_token"])
    assert float(tokens.sum()) == pytest.approx(expected, rel=1e-9)


def test_break_even_without_drafter_at_width_one_is_one():
  at = operation(width=1.0)
  joules = speculative.break_even_joules(PRICES, QWEN, None, at)
  seconds = speculative.break_even_seconds(HARDWARE, QWEN, None, at)
  assert float(joules) == float(seconds) == 1.0


def test_costs_fall_with_advancement_and_rise_with_width_and_context():
  at = operation()
  a = np.linspace(1, 16, 9)
  for cost in (
    speculative.joules_per_token(PRICES, QWEN, DRAFTER, at, a),
    speculative.seconds_per_token(HARDWARE, QWEN, DRAFTER, at, a),
  ):
    assert (np.diff(cost) < 0).all()
    np.testing.assert_allclose(cost * a, cost[0], rtol=1e-5)
  widths = np.arange(1.0, 17.0)
  wider = speculative.joules_per_token(
    PRICES, QWEN, DRAFTER, operation(width=widths), 1.0
  )
  assert (np.diff(wider) > 0).all()
  longer = speculative.seconds_per_token(
    HARDWARE, QWEN, DRAFTER, operation(np.geomspace(100, 1e5, 9)), 1.0
  )
  assert (np.diff(longer) >= 0).all()


def test_gains_shrink_with_concurrency():
  batch = np.asarray([1.0, 8.0, 32.0, 128.0])
  for needed in (
    speculative.break_even_joules(
      PRICES, QWEN, DRAFTER, operation(concurrency=batch)
    ),
    speculative.break_even_seconds(
      HARDWARE, QWEN, DRAFTER, operation(concurrency=batch)
    ),
  ):
    assert needed[0] < 1.6
    # Below some 8 requests both passes wait for the memory alike.
    assert (np.diff(needed[1:]) > 0).all()
    assert needed[-1] > 2 * needed[0]


def test_break_even_is_where_both_cost_the_same():
  at = operation()
  needed = speculative.break_even_joules(PRICES, QWEN, DRAFTER, at)
  drafted = speculative.joules_per_token(PRICES, QWEN, DRAFTER, at, needed)
  plain = speculative.joules_per_token(
    PRICES, QWEN, None, speculative.autoregressive(at), 1.0
  )
  assert float(drafted) == pytest.approx(float(plain), rel=1e-5)


def test_where_it_pays():
  def needed(batch):
    return speculative.break_even_joules(
      PRICES, QWEN, DRAFTER, operation(concurrency=batch)
    )

  crossing = speculative.where_it_pays(needed, 3.0, 1, 1024)
  assert crossing.pays == "below"
  assert float(needed(crossing.at)) == pytest.approx(3.0, rel=1e-3)
  found = speculative.where_it_pays(needed, 16.0, 1, 1024)
  assert found == ("everywhere", None)
  assert speculative.where_it_pays(needed, 1.0, 1, 1024) == ("nowhere", None)


def test_a_long_context_makes_a_drafter_pay():
  def needed(context):
    return speculative.break_even_joules(
      PRICES, QWEN, DRAFTER, operation(context)
    )

  crossing = speculative.where_it_pays(needed, 1.6, 16, 1e6)
  assert crossing.pays == "above"
  assert float(needed(crossing.at)) == pytest.approx(1.6, rel=1e-3)


def test_other_laws_have_no_prices():
  with pytest.raises(ValueError, match="'capacity' is needed"):
    speculative.prices_of(laws.SIMPLE_OF_THE_PAPER, laws.SIMPLE)
  with pytest.raises(ValueError, match="kv below zero, which is no price"):
    speculative.prices_of((1, -1, 1, 1, 1), laws.LAWS["capacity"])
