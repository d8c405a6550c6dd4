"""Fitted laws as files, and what is said beside a prediction."""

import dataclasses
import json

import numpy as np
import pytest

from energy import architecture, fit, laws, measurements, prediction

MODELS = architecture.shipped_models()
SHIPPED = prediction.shipped()


def test_shipped_coefficients_are_those_of_the_grid():
  grid = measurements.reconstructed_grid()
  for name, law in (("capacity", "capacity"), ("simple_refit", "simple")):
    theta = fit.closed_form(laws.LAWS[law], grid)
    np.testing.assert_allclose(SHIPPED[name].theta, theta, rtol=1e-6)
    assert "reconstructed from published fits" in SHIPPED[name].source
  assert SHIPPED["simple"].theta == laws.SIMPLE_OF_THE_PAPER


def test_files_round_trip(tmp_path):
  path = tmp_path / "results.json"
  path.write_text(json.dumps({"fitted": SHIPPED["capacity"].to_json()}))
  read = prediction.read(path)
  assert list(read) == ["capacity"]
  assert read["capacity"].theta == SHIPPED["capacity"].theta
  assert read["capacity"].band == SHIPPED["capacity"].band


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "not readable as JSON"),
    ("{}", "no fitted laws"),
    ('{"a": 1}', "no fitted laws"),
    ('{"a": {"law": "simple"}}', "no fitted law: 'theta'"),
    (
      '{"a": {"law": "x", "theta": [1], "families": [], "source": "",'
      ' "ranges": {}}}',
      "law 'x' is not among",
    ),
    (
      '{"a": {"law": "simple", "theta": [1], "families": [], "source": "",'
      ' "ranges": {}}}',
      "has 4 coefficients, not 1",
    ),
    (
      '{"a": {"law": "baseline1", "theta": [NaN], "families": [],'
      ' "source": "", "ranges": {}}}',
      "coefficients",
    ),
  ],
)
def test_files_that_hold_no_law(tmp_path, text, message):
  path = tmp_path / "bad.json"
  path.write_text(text)
  with pytest.raises(ValueError) as error:
    prediction.read(path)
  assert str(error.value).startswith(f"{path}: ")
  assert message in str(error.value)


def test_a_request_inside_of_what_was_fitted_needs_no_note():
  found = prediction.predict(
    SHIPPED["capacity"], MODELS["Llama 3.1 8B"], 500, 200
  )
  assert found.notes == []
  assert found.low < found.joules < found.high
  assert sum(found.parts.values()) == pytest.approx(found.joules)


def test_whatever_lies_outside_is_noted():
  found = prediction.predict(
    SHIPPED["simple"], MODELS["Gemma 2 9B"], 68000, 5, 63000
  )
  text = "\n".join(found.notes)
  assert "input_tokens=68,000 outside of 64 to 4,096, 16.6 times" in text
  assert "output_tokens=5 outside" in text
  assert "no request with a cached prefix was fitted" in text
  assert "21 of 42 layers see only 4096 positions" in text
  other = prediction.predict(
    SHIPPED["simple"], MODELS["mistralai/Mistral-Nemo-Instruct-2407"], 100, 100
  )
  text = "\n".join(other.notes)
  assert "parameters=" in text
  assert "no model of the family 'Mistral' was fitted" in text


def test_impossible_requests_and_models_that_do_not_fit():
  model = MODELS["Llama 3.1 8B"]
  with pytest.raises(ValueError, match="cached_tokens=2: more than"):
    prediction.predict(SHIPPED["simple"], model, 1, 1, 2)
  with pytest.raises(ValueError, match="law simple does not know of it"):
    prediction.predict(SHIPPED["simple"], model, 1, 1, concurrency=8)
  with pytest.raises(ValueError, match="concurrency=0: must be positive"):
    prediction.predict(SHIPPED["capacity"], model, 1, 1, concurrency=0)
  huge = model._replace(
    architecture=model.architecture._replace(parameters=7e10)
  )
  with pytest.raises(ValueError, match="do not fit into 80 GB"):
    prediction.predict(SHIPPED["capacity"], huge, 100, 100)
  for found in (
    prediction.predict(SHIPPED["capacity"], huge, 100, 100, concurrency=8),
    prediction.predict(SHIPPED["capacity"], model, 4000, 4000, concurrency=99),
    prediction.predict(SHIPPED["capacity"], model, 4000000, 100),
  ):
    assert any("do not fit into 80 GB" in note for note in found.notes)


def test_coefficients_of_one_model_are_for_no_other():
  grid = measurements.reconstructed_grid()
  name = "Llama 3.1 8B"
  one = grid.select(np.asarray([model == name for model in grid.models]))
  law = laws.LAWS["sweetspot"]
  theta = measurements.sweetspot_coefficients()[name]
  fitted = prediction.fitted_on(law, theta, one, "one model")
  assert prediction.predict(fitted, MODELS[name], 64, 64).joules > 0
  with pytest.raises(ValueError, match="of one model of 8,030,261,248"):
    prediction.predict(fitted, MODELS["OPT 1.3B"], 64, 64)


def test_ranges_that_are_a_point_are_noted_without_a_factor():
  fitted = dataclasses.replace(
    SHIPPED["simple"], ranges={"output_tokens": (0.0, 0.0)}
  )
  (note, *_) = prediction.predict(fitted, MODELS["OPT 1.3B"], 9, 9).notes
  assert note == "extrapolation: output_tokens=9 outside of 0 to 0"
