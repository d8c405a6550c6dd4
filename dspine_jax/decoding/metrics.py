"""Mean advancement and acceptance from the rounds of decoded requests.

Advancement counts the tokens of a round, the correction or bonus token
included. Three means are in use (baselines, 7.1): pooled over rounds, per
request, and token-weighted; all come from the same raw round lengths.
"""

from collections.abc import Sequence

import numpy as np
from numpy import typing as npt


def round_lists(
  round_lengths: npt.ArrayLike, accepted: npt.ArrayLike
) -> tuple[list[list[int]], list[list[int]]]:
  """Each row's rounds as plain lists, finished rounds left out.

  Args:
    round_lengths: [B, R], 0 where the row was finished.
    accepted: [B, R], -1 where the row was finished.
  """
  lengths = [
    [int(x) for x in row if x > 0] for row in np.asarray(round_lengths)
  ]
  drafts = [[int(x) for x in row if x >= 0] for row in np.asarray(accepted)]
  return lengths, drafts


def mean_advancement(rounds: Sequence[Sequence[int]]) -> dict[str, float]:
  """pooled, per_request and token_weighted means; NaN without any round.

  [[3, 1], [2]] gives pooled 2, per_request 2, token_weighted
  (4 * 2 + 2 * 2) / 6 = 2.
  """
  rounds = [lengths for lengths in rounds if lengths]
  if not rounds:
    nan = float("nan")
    return {"pooled": nan, "per_request": nan, "token_weighted": nan}
  totals = np.asarray([sum(lengths) for lengths in rounds], float)
  means = np.asarray([np.mean(lengths) for lengths in rounds])
  counts = np.asarray([len(lengths) for lengths in rounds])
  return {
    "pooled": float(totals.sum() / counts.sum()),
    "per_request": float(means.mean()),
    "token_weighted": float((totals * means).sum() / totals.sum()),
  }


def acceptance_by_position(
  accepted: Sequence[Sequence[int]], num_proposals: int
) -> np.ndarray:
  """[M], share of rounds in which proposal 1..M stood, with all before it."""
  flat = np.asarray([x for row in accepted for x in row], int)
  if not len(flat):
    return np.full(num_proposals, np.nan)
  return np.asarray([(flat > i).mean() for i in range(num_proposals)])


def paired_ratio_interval(
  first: Sequence[Sequence[int]],
  second: Sequence[Sequence[int]],
  *,
  seed: int = 0,
  samples: int = 4000,
) -> dict[str, float]:
  """Bootstrap over requests of pooled advancement, second over first.

  Args:
    first: rounds of each request, one method.
    second: rounds of the same requests, another method.
    seed: of the resampling.
    samples: resamples.

  Returns:
    ratio, and the ends low and high of its 95 % interval.
  """
  if len(first) != len(second):
    raise ValueError(
      f"{len(first)} and {len(second)} requests cannot be paired"
    )
  pairs = [
    (sum(a), len(a), sum(b), len(b))
    for a, b in zip(first, second, strict=True)
    if a and b
  ]
  if not pairs:
    nan = float("nan")
    return {"ratio": nan, "low": nan, "high": nan, "requests": 0}
  table = np.asarray(pairs, float)
  generator = np.random.default_rng(seed)
  picks = generator.integers(0, len(table), (samples, len(table)))
  sums = table[picks].sum(axis=1)
  ratios = (sums[:, 2] / sums[:, 3]) / (sums[:, 0] / sums[:, 1])
  whole = table.sum(axis=0)
  low, high = np.quantile(ratios, [0.025, 0.975])
  return {
    "ratio": float((whole[2] / whole[3]) / (whole[0] / whole[1])),
    "low": float(low),
    "high": float(high),
    "requests": len(pairs),
  }


def loops(
  tokens: Sequence[int] | np.ndarray,
  *,
  max_period: int = 40,
  repeats: int = 3,
) -> bool:
  """Whether the end repeats a period of at most `max_period` `repeats` times.

  loops([9, 1, 2, 1, 2, 1, 2]) is True (period 2); three times are needed.
  """
  array = np.asarray(tokens)
  for period in range(1, min(max_period, len(array) // repeats) + 1):
    tail = array[-period * repeats :].reshape(repeats, period)
    if (tail == tail[0]).all():
      return True
  return False
