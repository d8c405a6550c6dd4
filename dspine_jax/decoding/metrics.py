"""Mean advancement and acceptance from the rounds of decoded requests.

Advancement counts the tokens of a round, the correction or bonus token
included. Three means are in use (baselines, 7.1): pooled over rounds, per
request, and token-weighted; all come from the same raw round lengths.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
from jaxtyping import Float
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


def tally(
  rounds_by_seed: Sequence[Sequence[Sequence[int]]],
) -> Float[np.ndarray, "2 s n"]:
  """Tokens and rounds of each request, for each training seed.

  Args:
    rounds_by_seed: seed -> request -> tokens of each round; the same requests
      for every seed.
  """
  return np.asarray(
    [
      [[sum(lengths) for lengths in requests] for requests in rounds_by_seed],
      [[len(lengths) for lengths in requests] for requests in rounds_by_seed],
    ],
    float,
  )


class Resampled(NamedTuple):
  """A mean of pooled advancements, and the same of bootstrap resamples.

  Attributes:
    value: the mean over sets of requests; NaN without any round.
    samples: [samples], of resampled seeds and requests.
  """

  value: float
  samples: Float[np.ndarray, "k"]

  def interval(self, over: "Resampled | None" = None) -> dict[str, float]:
    """mean, and the ends low and high of its 95 % interval.

    Args:
      over: divides by this, draw by draw: the ratio of two drafters that were
        resampled with the same seed over the same requests is paired.
    """
    value, samples = self.value, self.samples
    if over is not None:
      value, samples = value / over.value, samples / over.samples
    samples = samples[np.isfinite(samples)]
    if not np.isfinite(value) or not len(samples):
      return dict.fromkeys(("mean", "low", "high"), float("nan"))
    low, high = np.quantile(samples, [0.025, 0.975])
    return {"mean": float(value), "low": float(low), "high": float(high)}


def resample(
  tallies: Sequence[Float[np.ndarray, "2 s _"]],
  *,
  seed: int = 0,
  samples: int = 4000,
) -> Resampled:
  """Bootstrap over training seeds and, within each set, over requests.

  Args:
    tallies: one set of requests each (a benchmark); see `tally`. The pooled
      advancements of the sets are averaged with equal weight.
    seed: of the resampling. Equal shapes and seeds give equal draws.
    samples: resamples.
  """
  generator = np.random.default_rng(seed)
  num_seeds = tallies[0].shape[1]
  seeds = generator.integers(0, num_seeds, (samples, num_seeds))
  whole, drawn = [], []
  for counts in tallies:
    requests = counts.shape[2]
    if not requests:
      continue
    rows = generator.integers(0, requests, (samples, requests))
    with np.errstate(invalid="ignore"):
      tokens, rounds = counts.sum(axis=(1, 2))
      whole.append(np.divide(tokens, rounds))
      # Multiplicities instead of gathered copies.
      of_seed = _multiplicity(seeds, num_seeds)
      of_row = _multiplicity(rows, requests)
      sums = np.einsum("ks,csn,kn->ck", of_seed, counts, of_row, optimize=True)
      drawn.append(sums[0] / sums[1])
  if not whole:
    return Resampled(float("nan"), np.full(samples, np.nan))
  return Resampled(float(np.mean(whole)), np.mean(drawn, axis=0))


def _multiplicity(picks: np.ndarray, count: int) -> np.ndarray:
  """[samples, picks] -> [samples, count], how often each was picked."""
  flat = picks + count * np.arange(len(picks))[:, None]
  counts = np.bincount(flat.ravel(), minlength=count * len(picks))
  return counts.reshape(len(picks), count).astype(float)


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
