"""Scores by hand, the figures of the papers, and that nothing peeks."""

import numpy as np
import pytest

from energy import fit, laws, measurements, validation

GRID = measurements.reconstructed_grid()
NAMES = np.asarray(GRID.models)


def test_scores_by_hand():
  actual, predicted = np.asarray([1.0, 2.0, 4.0]), np.asarray([1.1, 2.0, 3.0])
  assert validation.mape(actual, predicted) == pytest.approx(35 / 3)
  mean = 7 / 3
  total = sum((y - mean) ** 2 for y in actual)
  assert validation.r2(actual, predicted) == pytest.approx(1 - 1.01 / total)
  assert np.isnan(validation.r2(np.ones(3), predicted))


def test_simple_is_as_good_as_its_paper_says():
  theta = laws.SIMPLE_OF_THE_PAPER
  of_paper = validation.score(
    GRID, validation.predict(laws.SIMPLE, theta, GRID)
  )
  assert of_paper.mape == pytest.approx(11.99, abs=0.01)
  in_sample = validation.score(
    GRID,
    validation.predict(
      laws.SIMPLE,
      fit.fit(laws.SIMPLE, GRID).theta,
      GRID,
    ),
  )
  assert in_sample.mape <= 12.2
  assert in_sample.r2_per_token >= 0.967
  outer = validation.score(
    GRID, validation.held_out(laws.SIMPLE, GRID, GRID.models)
  )
  assert outer.mape <= 13.5
  assert outer.r2 >= 0.944 and outer.r2_per_token >= 0.944


def test_capacity_predicts_unseen_models_and_families():
  law = laws.LAWS["capacity"]
  for groups in (GRID.models, GRID.families):
    outer = validation.held_out(law, GRID, groups)
    assert validation.score(GRID, outer).mape < 6


def test_held_out_predictions_do_not_depend_on_the_held_out_rows():
  law = laws.LAWS["capacity"]
  held = NAMES == "Gemma 2 9B"
  moved = GRID._replace(joules=np.where(held, 7 * GRID.joules, GRID.joules))
  plain = validation.held_out(law, GRID, GRID.models)
  other = validation.held_out(law, moved, GRID.models)
  np.testing.assert_allclose(other[held], plain[held], rtol=1e-9)
  assert np.abs(other[~held] / plain[~held] - 1).max() > 1e-3


def test_without_leaves_a_second_group_out():
  law = laws.SIMPLE
  kept = NAMES != "OPT 1.3B"
  part = GRID.select(kept)
  there = validation.held_out(law, GRID, GRID.models, without="OPT 1.3B")
  np.testing.assert_allclose(
    there[kept], validation.held_out(law, part, part.models), rtol=1e-8
  )
  with pytest.raises(ValueError, match="nothing to hold out"):
    validation.held_out(law, GRID, ["one"] * len(NAMES))


def test_a_band_is_that_of_a_normal_logarithm():
  rng = np.random.default_rng(0)
  models = np.repeat(np.arange(400), 20)
  log_error = rng.normal(0.1, 0.2, 400)[models] + rng.normal(0, 0.1, 8000)
  names = [f"m{i}" for i in models]
  band = validation.ErrorBand.of(np.exp(log_error), np.ones(8000), names)
  width = 1.645 * np.hypot(0.2, 0.1)
  assert np.log(band.low) == pytest.approx(0.1 - width, abs=0.04)
  assert np.log(band.high) == pytest.approx(0.1 + width, abs=0.04)
  with pytest.raises(ValueError, match="no band"):
    validation.ErrorBand.of(np.ones(2), np.ones(2), ["a", "a"])
  with pytest.raises(ValueError, match="not positive"):
    validation.ErrorBand.of(np.ones(2), -np.ones(2), ["a", "b"])


def test_nine_of_ten_rows_of_unseen_models_lie_in_the_band():
  coverage = validation.band_coverage(laws.LAWS["capacity"], GRID, GRID.models)
  assert len(coverage) == 13
  assert 0.85 < np.mean(list(coverage.values())) <= 1


def test_bootstrap_and_identifiability_show_the_ridge_of_simple():
  draws = validation.bootstrap(laws.SIMPLE, GRID, replicates=60)
  assert draws.shape == (60, 4)
  spread = draws.std(axis=0) / np.abs(draws.mean(axis=0))
  assert spread[0] > 0.5 > 2 * spread[1:].max()  # theta0 is hardly known.
  low, high = validation.interval(draws)
  assert ((low < draws.mean(axis=0)) & (draws.mean(axis=0) < high)).all()
  known = validation.identifiability(laws.SIMPLE, GRID)
  assert known.correlations[0, 3] < -0.8
  assert 1 < known.condition < 100
  assert set(np.argsort(np.abs(known.weakest))[-2:]) == {0, 3}
