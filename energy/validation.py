"""How wrong a law is: R2 and MAPE, held-out models, intervals, identifiability.

R2 and MAPE are defined here once. Held-out figures are pooled: every request is
predicted by coefficients that were fitted without its model (or family), and
the figure is taken over all predictions together.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from scipy import stats

from energy import fit, laws
from energy.measurements import Measurements

# A name for each row, such as that of its model.
Groups = Sequence[str] | np.ndarray


class Scores(NamedTuple):
  """Errors of predictions.

  Attributes:
    mape: mean absolute relative error in percent; the same for joules and for
      joules per output token.
    r2: 1 - residual over total sum of squares, of joules.
    r2_per_token: the same of joules per output token; NaN if a row has none.
  """

  mape: float
  r2: float
  r2_per_token: float


def r2(actual: np.ndarray, predicted: np.ndarray) -> float:
  """1 - sum (y - f)^2 / sum (y - mean y)^2; NaN if y does not vary."""
  total = np.sum((actual - np.mean(actual)) ** 2)
  left = np.sum((actual - predicted) ** 2)
  return float(1 - left / total) if total > 0 else float("nan")


def mape(actual: np.ndarray, predicted: np.ndarray) -> float:
  """100 mean |f / y - 1|, in percent."""
  return float(100 * np.mean(np.abs(predicted / actual - 1)))


def score(data: Measurements, predicted: np.ndarray) -> Scores:
  """`Scores` of predicted joules [n]."""
  outputs = data.output_tokens
  per_token = float("nan")
  if (outputs > 0).all():
    per_token = r2(data.joules / outputs, predicted / outputs)
  return Scores(
    mape=mape(data.joules, predicted),
    r2=r2(data.joules, predicted),
    r2_per_token=per_token,
  )


def predict(law: laws.Law, theta: Any, data: Measurements) -> np.ndarray:
  """Joules [n] in float64; theta is [coefficients] or one for each row."""
  with jax.enable_x64(True):
    return np.asarray(law(theta, data.architecture, *data.request))


def held_out(
  law: laws.Law,
  data: Measurements,
  groups: Groups,
  without: str | None = None,
  **objective: Any,
) -> np.ndarray:
  """Predictions [n], each by a fit without the row's group.

  Args:
    law: a law whose coefficients serve all models.
    data: n measurements.
    groups: [n], such as `data.models` or `data.families`.
    without: a group that no fit sees, whose rows are predicted by fits to all
      others.
    **objective: as in `fit.fit_weighted`.

  Raises:
    ValueError: fewer than two groups.
  """
  names = np.asarray(groups)
  folds = np.unique(names)
  if len(folds) < 2:
    raise ValueError(f"only {folds.tolist()}: nothing to hold out")
  weights = np.asarray(
    [(names != fold) & (names != without) for fold in folds], np.float64
  )
  theta = fit.fit_weighted(law, data, weights, **objective)
  return predict(law, theta[np.searchsorted(folds, names)], data)


def fit_each_model(
  law: laws.Law, data: Measurements, **objective: Any
) -> dict[str, np.ndarray]:
  """Coefficients of every model by itself."""
  names = np.asarray(data.models)
  folds = list(dict.fromkeys(data.models))
  weights = np.asarray([names == fold for fold in folds], np.float64)
  theta = fit.fit_weighted(law, data, weights, **objective)
  return dict(zip(folds, theta, strict=True))


def bootstrap(
  law: laws.Law,
  data: Measurements,
  *,
  replicates: int = 500,
  seed: int = 0,
  **objective: Any,
) -> np.ndarray:
  """Coefficients [replicates, k] of fits to models drawn with replacement."""
  names = np.asarray(data.models)
  folds = np.unique(names)
  rng = np.random.default_rng(seed)
  counts = rng.multinomial(
    len(folds), np.full(len(folds), 1 / len(folds)), size=replicates
  )
  weights = counts[:, np.searchsorted(folds, names)]
  return fit.fit_weighted(law, data, weights, **objective)


def interval(values: np.ndarray, level: float = 0.9) -> np.ndarray:
  """[2, ...] quantiles that hold the middle `level` of the first axis."""
  tail = (1 - level) / 2
  return np.quantile(values, [tail, 1 - tail], axis=0)


class Identifiability(NamedTuple):
  """What the rows say about theta.

  Attributes:
    condition: largest over smallest singular value of the relative terms, each
      scaled to one.
    correlations: [k, k] of the estimates.
    weakest: [k] share of each coefficient (in units of its term) in the
      direction that the rows determine least.
  """

  condition: float
  correlations: np.ndarray
  weakest: np.ndarray


def identifiability(law: laws.Law, data: Measurements) -> Identifiability:
  """Of relative least squares."""
  with jax.enable_x64(True):
    design = np.asarray(law.design(data.architecture, *data.request))
  terms = design / data.joules[:, None]
  norms = np.linalg.norm(terms, axis=0)
  scaled = terms / np.where(norms > 0, norms, 1.0)
  _, singular, right = np.linalg.svd(scaled, full_matrices=False)
  covariance = np.linalg.pinv(scaled.T @ scaled)
  sigma = np.sqrt(np.diag(covariance))
  known = len(singular) == len(law.coefficients) and singular[-1] > 0
  return Identifiability(
    condition=float(singular[0] / singular[-1]) if known else float("inf"),
    # NaN for a coefficient of which the rows say nothing.
    correlations=covariance
    / np.where(np.outer(sigma, sigma) > 0, np.outer(sigma, sigma), np.nan),
    weakest=right[-1],
  )


class ErrorBand(NamedTuple):
  """Factors on a prediction for a model that was not fitted.

  Attributes:
    low: the actual energy is above low * predicted,
    high: and below high * predicted, with probability `level`.
    level: nominal.
  """

  low: float
  high: float
  level: float

  @classmethod
  def of(
    cls,
    actual: np.ndarray,
    predicted: np.ndarray,
    groups: Groups,
    level: float = 0.9,
  ) -> "ErrorBand":
    """The band from held-out predictions.

    The errors of one model go together, so that n models give n pieces of
    evidence, not one for each row. The logarithm of actual over predicted is
    taken as normal, with the variance between models and that within one, and
    the quantile as Student's for n - 1 models, who also set the mean's error.

    Raises:
      ValueError: predictions that are not positive.
    """
    if not (np.asarray(predicted) > 0).all():
      raise ValueError("a predicted energy is not positive: no band of factors")
    errors = np.log(np.asarray(actual) / np.asarray(predicted))
    names = np.asarray(groups)
    by_group = [errors[names == name] for name in np.unique(names)]
    means = np.asarray([one.mean() for one in by_group])
    within = np.mean([one.var() for one in by_group])
    count = len(means)
    if count < 2:
      raise ValueError(f"{count} group: no band")
    between = np.var(means, ddof=1)
    width = stats.t.ppf((1 + level) / 2, count - 1) * np.sqrt(
      between * (1 + 1 / count) + within
    )
    center = means.mean()
    return cls(
      float(np.exp(center - width)), float(np.exp(center + width)), level
    )


def band_coverage(
  law: laws.Law,
  data: Measurements,
  groups: Groups,
  level: float = 0.9,
  **objective: Any,
) -> dict[str, float]:
  """Group -> share of its rows inside a band made without that group.

  Nested: the band of a group comes from held-out predictions among the others,
  around the prediction by coefficients fitted to the others.
  """
  names = np.asarray(groups)
  if len(np.unique(names)) < 3:
    raise ValueError(f"{len(np.unique(names))} groups: 3 are needed at least")
  outer = held_out(law, data, groups, **objective)
  found = {}
  for name in np.unique(names):
    rest = names != name
    inner = held_out(law, data, groups, without=name, **objective)[rest]
    band = ErrorBand.of(data.joules[rest], inner, names[rest], level)
    ratio = data.joules[~rest] / outer[~rest]
    inside = (ratio >= band.low) & (ratio <= band.high)
    found[str(name)] = float(inside.mean())
  return found
