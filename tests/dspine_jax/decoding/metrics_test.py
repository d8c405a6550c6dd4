import math

import numpy as np
import pytest

from dspine_jax.decoding import metrics


def test_round_lists_leave_out_what_a_finished_row_ran_along():
  lengths, accepted = metrics.round_lists(
    np.array([[3, 1, 0, 0], [2, 2, 1, 0]]),
    np.array([[2, 0, -1, -1], [1, 4, 0, -1]]),
  )
  assert lengths == [[3, 1], [2, 2, 1]]
  assert accepted == [[2, 0], [1, 4, 0]]  # A draft of which none stood counts.
  assert all(type(x) is int for row in lengths + accepted for x in row)


def test_the_three_means_are_the_hand_computed_ones():
  # Requests of 8 tokens in 2 rounds, 3 in 3, 2 in 1: all means differ.
  means = metrics.mean_advancement([[5, 3], [1, 1, 1], [2]])
  assert means["pooled"] == pytest.approx(13 / 6)
  assert means["per_request"] == pytest.approx((4 + 1 + 2) / 3)
  assert means["token_weighted"] == pytest.approx((8 * 4 + 3 * 1 + 2 * 2) / 13)
  assert metrics.mean_advancement([[3, 1], [2]]) == {
    "pooled": 2.0,
    "per_request": 2.0,
    "token_weighted": 2.0,
  }


def test_a_request_without_rounds_counts_nowhere():
  rounds = [[5, 3], [2]]
  with_empty = metrics.mean_advancement([[], *rounds, []])
  assert with_empty == metrics.mean_advancement(rounds)


@pytest.mark.parametrize("rounds", [[], [[]], [[], []]])
def test_means_without_any_round_are_nan(rounds):
  means = metrics.mean_advancement(rounds)
  assert list(means) == ["pooled", "per_request", "token_weighted"]
  assert all(math.isnan(value) for value in means.values())


def test_acceptance_by_position_is_the_share_of_rounds_that_got_so_far():
  shares = metrics.acceptance_by_position([[3, 0], [1, 4]], 4)
  np.testing.assert_allclose(shares, [3 / 4, 2 / 4, 2 / 4, 1 / 4])
  assert np.isnan(metrics.acceptance_by_position([[], []], 4)).all()


def paired_rounds(factor, requests=40):
  """Rounds of two methods; the second advances `factor` times as far."""
  rng = np.random.default_rng(3)
  first = [
    rng.integers(1, 9, rng.integers(4, 9)).tolist() for _ in range(requests)
  ]
  return first, [[factor * x for x in lengths] for lengths in first]


def ratio(first, second, **options):
  """Of one set of requests and one training seed."""
  found = [
    metrics.resample([metrics.tally([rounds])], **options)
    for rounds in (first, second)
  ]
  return found[1].interval(found[0])


def test_a_tally_has_tokens_and_rounds_by_seed_and_request():
  tally = metrics.tally([[[3, 1], []], [[2], [5, 5, 5]]])
  np.testing.assert_array_equal(tally[0], [[4, 0], [2, 15]])
  np.testing.assert_array_equal(tally[1], [[2, 0], [1, 3]])


def test_the_ratio_is_the_pooled_one_and_lies_in_its_interval():
  rng = np.random.default_rng(4)
  first, second = paired_rounds(1)
  second = [[x + int(rng.integers(0, 3)) for x in row] for row in second]
  found = ratio(first, second)
  pooled = [
    metrics.mean_advancement(rounds)["pooled"] for rounds in (first, second)
  ]
  assert found["mean"] == pytest.approx(pooled[1] / pooled[0])
  assert 1 < found["low"] < found["mean"] < found["high"] < 1.5


def test_the_bootstrap_draws_both_methods_of_a_request_together():
  # Requests differ much, the ratio of a request never.
  found = ratio(*paired_rounds(2))
  assert found["low"] == pytest.approx(2)
  assert found["high"] == pytest.approx(2)


def test_the_interval_is_a_function_of_its_seed():
  first, second = paired_rounds(1)
  second = second[::-1]
  found = ratio(first, second, seed=1)
  again = ratio(first, second, seed=1)
  other = ratio(first, second, seed=2)
  assert found == again
  assert found["mean"] == other["mean"]
  assert (found["low"], found["high"]) != (other["low"], other["high"])


def test_the_interval_covers_the_truth_about_as_often_as_it_says():
  rng = np.random.default_rng(0)
  covered = 0
  for seed in range(200):
    first = rng.integers(1, 6, (30, 4))  # Mean 3.
    second = rng.integers(1, 8, (30, 4))  # Mean 4.
    found = ratio(first.tolist(), second.tolist(), seed=seed, samples=300)
    covered += found["low"] <= 4 / 3 <= found["high"]
  assert 0.88 <= covered / 200 <= 0.99


def test_seeds_that_differ_widen_the_interval():
  rounds = [[2, 2]] * 50
  better = [[4, 4]] * 50
  alike = metrics.resample([metrics.tally([rounds, rounds])]).interval()
  assert (alike["low"], alike["mean"], alike["high"]) == (2, 2, 2)
  found = metrics.resample([metrics.tally([rounds, better])]).interval()
  assert (found["low"], found["mean"], found["high"]) == (2, 3, 4)


def test_benchmarks_count_alike_whatever_their_size():
  short, long = metrics.tally([[[2]]]), metrics.tally([[[4, 4, 4]] * 9])
  assert metrics.resample([short, long]).interval()["mean"] == 3
  empty = metrics.tally([[]])
  assert metrics.resample([short, empty]).interval()["mean"] == 2


@pytest.mark.parametrize("rounds", [[], [[]]])
def test_an_interval_of_no_request_is_nan(rounds):
  found = ratio(rounds, rounds)
  assert all(math.isnan(found[name]) for name in ("mean", "low", "high"))


def unrepeated(size):
  return list(range(100, 100 + size))


@pytest.mark.parametrize("period", [1, 2, 7, 39, 40])
def test_a_period_of_up_to_forty_loops_when_it_ends_the_text_three_times(
  period,
):
  period = unrepeated(period)
  assert metrics.loops(period * 3)
  assert metrics.loops([1, 2, 3] + period * 3)
  assert metrics.loops(period * 5)


@pytest.mark.parametrize("period", [1, 2, 7, 40])
def test_two_times_and_a_part_are_no_loop(period):
  period = unrepeated(period)
  assert not metrics.loops([1, 2, 3] + period * 2)
  assert not metrics.loops([1, 2, 3] + period[1:] + period * 2)


def test_a_longer_period_is_no_loop():
  assert not metrics.loops(unrepeated(41) * 3)
  assert metrics.loops(unrepeated(41) * 3, max_period=41)


def test_only_the_tail_is_looked_at():
  loop = unrepeated(3) * 5
  assert metrics.loops(loop)
  assert not metrics.loops([*loop, 1])
  assert not metrics.loops(loop + unrepeated(200))


@pytest.mark.parametrize("tokens", [[], [5], [5, 5]])
def test_too_few_tokens_are_no_loop(tokens):
  assert not metrics.loops(tokens)


def test_loops_takes_arrays():
  assert metrics.loops(np.array([9, 1, 2, 1, 2, 1, 2], np.int32)) is True
