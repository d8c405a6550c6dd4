"""Gradient descent finds what SciPy finds, and says what it cannot know."""

import numpy as np
import pytest

from energy import architecture, fit, laws, measurements, validation

GRID = measurements.reconstructed_grid()
SHARED = [laws.LAWS["simple"], laws.LAWS["capacity"]]


def largest_difference(theta, reference):
  """Relative to each coefficient, or to nothing where that is zero."""
  scale = np.where(reference == 0, 1.0, np.abs(reference))
  return np.max(np.abs(theta - reference) / scale)


@pytest.mark.parametrize("law", SHARED, ids=lambda law: law.name)
@pytest.mark.parametrize("objective", fit.OBJECTIVES)
def test_descent_agrees_with_the_closed_form(law, objective):
  found = fit.fit(law, GRID, objective=objective)
  reference = fit.closed_form(law, GRID, objective=objective)
  assert largest_difference(found.theta, reference) < 1e-6
  assert found.rank == len(law.coefficients)
  assert found.gradient_norm < 1e-12


def test_joules_per_token_are_an_objective_of_their_own():
  options = {"objective": "absolute", "per_token": True}
  found = fit.fit(laws.SIMPLE, GRID, **options).theta
  assert (
    largest_difference(found, fit.closed_form(laws.SIMPLE, GRID, **options))
    < 1e-6
  )
  whole = fit.fit(laws.SIMPLE, GRID, objective="absolute").theta
  assert largest_difference(found, whole) > 0.1


@pytest.mark.parametrize("objective", ["relative", "absolute"])
def test_no_coefficient_below_zero_where_that_is_asked_for(objective):
  options = {"objective": objective, "non_negative": True}
  free = fit.fit(laws.SIMPLE, GRID, objective=objective).theta
  assert free[0] < 0
  found = fit.fit(laws.SIMPLE, GRID, **options).theta
  assert (found >= 0).all()
  reference = fit.closed_form(laws.SIMPLE, GRID, **options)
  assert reference[0] == 0
  assert found[0] < 1e-8
  assert largest_difference(found[1:], reference[1:]) < 1e-6


def test_adam_arrives_at_the_same_place():
  found = fit.fit(laws.SIMPLE, GRID, method="adam").theta
  reference = fit.closed_form(laws.SIMPLE, GRID)
  assert largest_difference(found, reference) < 1e-6


def test_sweetspot_refitted_to_each_model_recovers_the_published_table():
  theta = validation.fit_each_model(laws.SWEETSPOT, GRID)
  for name, published in measurements.sweetspot_coefficients().items():
    assert largest_difference(theta[name], published) < 1e-6, name


def test_coefficients_of_data_that_a_law_made_are_recovered():
  law = laws.LAWS["capacity"]
  truth = np.asarray([2e-12, 9e-10, 5e-10, 1e-7, 0.5])
  made = GRID._replace(joules=validation.predict(law, truth, GRID))
  for objective in fit.OBJECTIVES:
    found = fit.fit(law, made, objective=objective).theta
    assert largest_difference(found, truth) < 1e-6, objective


def test_weights_are_as_good_as_leaving_rows_out():
  law = laws.SIMPLE
  kept = np.asarray([name != "Gemma 2 9B" for name in GRID.models])
  weighted = fit.fit_weighted(law, GRID, kept[None].astype(float))[0]
  subset = fit.fit(law, GRID.select(kept)).theta
  assert largest_difference(weighted, subset) < 1e-6


def test_one_model_cannot_split_a_token_from_its_layers():
  rows = np.asarray([name == "Llama 3.1 8B" for name in GRID.models])
  one = GRID.select(rows)
  found = fit.fit(laws.SIMPLE, one)
  assert found.rank == 3
  predicted = validation.predict(laws.SIMPLE, found.theta, one)
  assert validation.mape(one.joules, predicted) < 10


def test_what_cannot_be_fitted_is_an_error():
  with pytest.raises(ValueError, match="objective='l2'"):
    fit.fit(laws.SIMPLE, GRID, objective="l2")
  with pytest.raises(ValueError, match="method='sgd'"):
    fit.fit(laws.SIMPLE, GRID, method="sgd")
  with pytest.raises(ValueError, match=r"row 49 \(OPT 1.3B\) has a term"):
    fit.fit(laws.capacity_law(memory_bytes=2.6e9), GRID)
  model = architecture.shipped_models()["OPT 1.3B"]
  silent = measurements.measurements([model], [10], [0], [1.0])
  with pytest.raises(ValueError, match="a row without output"):
    fit.fit(laws.SIMPLE, silent, objective="absolute", per_token=True)
