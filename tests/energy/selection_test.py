"""Terms are chosen without the model that they are judged on."""

import numpy as np
import pytest

from energy import laws, measurements, selection, validation

GRID = measurements.reconstructed_grid()
CHOOSER = selection.Selection(GRID)
EVERY = range(13)


@pytest.mark.parametrize(
  ("terms", "law"),
  [
    (selection.SIMPLE_TERMS, laws.SIMPLE),
    (selection.CAPACITY_TERMS, laws.LAWS["capacity"]),
  ],
)
def test_normal_equations_agree_with_descent(terms, law):
  outer = validation.held_out(law, GRID, GRID.models)
  assert CHOOSER.held_out_error(terms, EVERY) == pytest.approx(
    validation.mape(GRID.joules, outer), rel=1e-6
  )


def test_the_known_starting_point():
  found = CHOOSER.held_out_error(selection.PARAMETER_TERMS, EVERY)
  assert found == pytest.approx(8.04, abs=0.05)


def test_nested_selection_beats_the_aim_and_ends_at_the_capacity_law():
  error, chosen = CHOOSER.nested()
  assert error <= 7.5
  assert set(chosen) == set(GRID.models)
  assert CHOOSER.best(EVERY) == selection.CAPACITY_TERMS
  # Nothing of a model enters the choice that is made without it.
  held = "Granite 3B"
  rows = np.asarray([name == held for name in GRID.models])
  moved = GRID._replace(
    joules=np.where(rows, GRID.joules * GRID.output_tokens, GRID.joules)
  )
  rest = [i for i in EVERY if CHOOSER.folds[i] != held]
  assert selection.Selection(moved).best(rest) == chosen[held]


def test_every_term_of_ours_is_worth_its_place():
  errors = selection.ablation(GRID)
  ours = errors["capacity"]
  for name, error in errors.items():
    if name.startswith(("no ", "prefill", "KV", "SIMPLE", "N I")):
      assert error > 1.1 * ours, name
    else:
      assert error >= 0.95 * ours, name
