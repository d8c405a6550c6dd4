import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.target import model
from experiments import targets
from experiments.stages import evaluation, training


@pytest.fixture(name="target", scope="module")
def fixture_target(tiny):
  return targets.load(str(tiny.target))


@pytest.fixture(name="answers", scope="module")
def fixture_answers(tiny, target):
  return training.load_parts(tiny.answers, ["held_out"], target)


def decoded(answers):
  """An output that is the target's own answer, token by token."""
  start = int(answers.prompt_lengths[0])
  return evaluation.Decoded(
    tokens=answers.tokens[:, start:].copy(),
    num_tokens=answers.lengths - start,
    rounds=[[4, 4, 3], [5, 5], [1] * 11],
    accepted=[[3, 3, 2], [4, 4], [0] * 11],
  )


def test_equal_outputs_are_all_counted(target, answers):
  found = evaluation.losslessness(target.model, answers, decoded(answers))
  assert found == {"prompts": 3, "equal": 3, "differing": []}


def test_a_differing_output_is_told_with_its_place_and_margin(target, answers):
  output = decoded(answers)
  own = int(output.tokens[1, 4])
  other = 5 if own != 5 else 6
  output.tokens[1, 4] = other
  output.tokens[1, 6] = other
  found = evaluation.losslessness(target.model, answers, output)
  assert (found["prompts"], found["equal"]) == (3, 2)
  (one,) = found["differing"]
  assert (one["prompt"], one["place"]) == (1, 4)
  prefix = jnp.asarray(answers.tokens[1:2, : answers.prompt_lengths[1] + 4])
  hidden = model.forward(
    target.model.params, prefix, cfg=target.model.cfg
  ).hidden
  logits = model.logits(target.model.params, hidden)[0, -1]
  margin = abs(float(logits[own] - logits[other]))
  assert margin > 0
  assert one["margin"] == pytest.approx(margin, rel=1e-4)


def test_an_output_that_ends_early_differs_at_its_end(target, answers):
  output = decoded(answers)
  output.num_tokens[2] -= 3
  found = evaluation.losslessness(target.model, answers, output)
  place = int(output.num_tokens[2])
  assert found["differing"] == [{"prompt": 2, "place": place, "margin": None}]


def test_reports_are_of_all_looping_and_other_prompts(answers):
  looping = np.array([False, True, False])
  report = evaluation.advancement_report(decoded(answers), looping, 4)
  assert [report[name]["prompts"] for name in ("all", "looping")] == [3, 1]
  means = {
    name: report[name]["mean_advancement"]["pooled"]
    for name in ("all", "looping", "non_looping")
  }
  assert means["looping"] == 5
  assert means["non_looping"] == pytest.approx(22 / 14)
  assert means["all"] == pytest.approx(32 / 16)
  np.testing.assert_allclose(
    report["all"]["acceptance_by_position"], [5 / 16, 5 / 16, 4 / 16, 2 / 16]
  )


# As it is computed, and as it comes back from a JSON file.
@pytest.mark.parametrize("empty", [float("nan"), None])
def test_a_group_without_rounds_has_a_dash_in_the_table(empty):
  means = {"all": 2.345, "non_looping": 2.0, "looping": empty}
  report = {
    name: {"mean_advancement": {"pooled": mean}} for name, mean in means.items()
  }
  row = evaluation.row_for_table("dspine T=0", report)
  assert row == ["dspine T=0", "2.35", "2.00", "-"]
