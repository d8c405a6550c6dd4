"""Coefficients of a law by gradient descent, and the closed form as a check.

Laws are linear in theta, so that the common objectives are least squares in
other units: relative (the default; joules of requests span three decades),
absolute, of logarithms, or robust. Terms differ by fifteen orders of magnitude
and are nearly collinear. Descent therefore runs in coordinates in which the
weighted terms are orthonormal: L-BFGS then needs a handful of steps. Directions
that the rows do not determine (one model cannot split a cost per token from one
per token and layer) are left at zero and reported as missing rank.

Everything is float64, whatever JAX's default. Weights of rows let one compiled
program serve fits, held-out folds and bootstrap replicates: it runs in
milliseconds and takes seconds to compile, also under `vmap`, whose programs
differ with the number of fits.
"""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
import optax
import scipy.optimize
from jax import numpy as jnp

from energy import laws
from energy.measurements import Measurements

OBJECTIVES = ("relative", "absolute", "log", "soft_l1")
METHODS = ("lbfgs", "adam")

SOFT_L1_SCALE = 0.05  # Relative errors above it count less than squared.
_RANK_TOLERANCE = 1e-9
_GRADIENT_TOLERANCE = 1e-13
_LBFGS_STEPS = 300
_ADAM_STEPS = 6000
_SMALLEST_RATIO = 1e-3  # The logarithm goes on as a line below it.


class Fit(NamedTuple):
  """Coefficients and how they were reached.

  Attributes:
    theta: [coefficients] float64.
    loss: mean objective over the rows.
    rank: directions of theta that the rows determine.
    steps: of the optimiser.
    gradient_norm: at the end, in the scaled coordinates.
  """

  theta: np.ndarray
  loss: float
  rank: int
  steps: int
  gradient_norm: float


def fit(
  law: laws.Law,
  data: Measurements,
  *,
  objective: str = "relative",
  per_token: bool = False,
  method: str = "lbfgs",
  non_negative: bool = False,
) -> Fit:
  """The coefficients of least mean objective.

  Args:
    law: any of `laws.LAWS`.
    data: measured requests.
    objective: one of `OBJECTIVES`; soft_l1 is of relative errors.
    per_token: errors of joules per output token instead of joules; only the
      absolute objective knows the difference.
    method: one of `METHODS`.
    non_negative: no coefficient below zero.

  Raises:
    ValueError: an unknown objective or method, or data that the objective
      cannot take.
  """
  if method not in METHODS:
    raise ValueError(f"method={method!r}: not in {METHODS}")
  system = _system(law, data, objective, per_token)
  weights = np.ones((1, len(system.target)))
  found = _solve_all(system, weights, objective, method, non_negative)
  return Fit(
    theta=np.asarray(found.theta[0]),
    loss=float(found.loss[0]),
    rank=int(found.rank[0]),
    steps=int(found.steps[0]),
    gradient_norm=float(found.gradient_norm[0]),
  )


def fit_weighted(
  law: laws.Law,
  data: Measurements,
  row_weights: np.ndarray,
  *,
  objective: str = "relative",
  per_token: bool = False,
  non_negative: bool = False,
) -> np.ndarray:
  """One fit for each row of weights, by L-BFGS: [fits, coefficients].

  Args:
    law: any of `laws.LAWS`.
    data: n measured requests.
    row_weights: [fits, n]; 0 leaves a request out, 2 counts it twice.
    objective: as in `fit`.
    per_token: as in `fit`.
    non_negative: as in `fit`.
  """
  system = _system(law, data, objective, per_token)
  weights = np.asarray(row_weights, np.float64)
  found = _solve_all(system, weights, objective, "lbfgs", non_negative)
  return np.asarray(found.theta)


def closed_form(
  law: laws.Law,
  data: Measurements,
  *,
  objective: str = "relative",
  per_token: bool = False,
  non_negative: bool = False,
) -> np.ndarray:
  """The same coefficients from SciPy: lstsq, nnls or least_squares.

  No gradient descent and none of its scaling: what `fit` is checked against.
  """
  system = _system(law, data, objective, per_token)
  scale = np.linalg.norm(system.matrix, axis=0)
  matrix = system.matrix / scale
  if objective in ("relative", "absolute"):
    if non_negative:
      return scipy.optimize.nnls(matrix, system.target)[0] / scale
    return np.linalg.lstsq(matrix, system.target, rcond=None)[0] / scale
  start = scipy.optimize.nnls(matrix, system.target)[0]
  bounds = (0, np.inf) if non_negative else (-np.inf, np.inf)

  def residual(x):
    predicted = matrix @ x
    if objective == "log":
      return np.log(np.maximum(predicted, 1e-12))
    return predicted - system.target

  found = scipy.optimize.least_squares(
    residual,
    np.clip(start, 1e-12, None) if non_negative else start,
    bounds=bounds,
    loss="linear" if objective == "log" else "soft_l1",
    f_scale=SOFT_L1_SCALE,
    **dict.fromkeys(("xtol", "ftol", "gtol"), 1e-15),
  )
  return found.x / scale


class _System(NamedTuple):
  """Rows whose errors matrix @ theta - target are made small.

  Attributes:
    matrix: [n, coefficients].
    target: [n].
  """

  matrix: np.ndarray
  target: np.ndarray


def _system(
  law: laws.Law, data: Measurements, objective: str, per_token: bool
) -> _System:
  if objective not in OBJECTIVES:
    raise ValueError(f"objective={objective!r}: not in {OBJECTIVES}")
  with jax.enable_x64(True):
    design = np.asarray(law.design(data.architecture, *data.request))
  if not np.isfinite(design).all():
    row = int(np.flatnonzero(~np.isfinite(design).all(axis=1))[0])
    raise ValueError(
      f"law {law.name}: row {row} ({data.models[row]}) has a term that is not"
      " finite (weights that do not fit into the memory?)"
    )
  joules = np.asarray(data.joules, np.float64)
  if objective == "absolute":
    unit = np.asarray(data.output_tokens, np.float64) if per_token else 1.0
    if np.any(np.asarray(unit) <= 0):
      raise ValueError("joules per output token of a row without output")
    target = joules / unit
    # One scale for all rows makes the loss of the order of one.
    size = np.sqrt(np.mean(target**2))
    matrix = design / np.reshape(np.broadcast_to(unit, joules.shape), (-1, 1))
    return _System(matrix / size, target / size)
  return _System(design / joules[:, None], np.ones_like(joules))


def _mean_loss(errors: jax.Array, weights: jax.Array, objective: str):
  """Mean over the rows; `errors` are relative, or absolute in one unit."""
  if objective == "log":
    ratio = 1 + errors
    least = _SMALLEST_RATIO
    line = jnp.log(least) + (ratio - least) / least
    inside = ratio > least
    logs = jnp.where(inside, jnp.log(jnp.where(inside, ratio, 1.0)), line)
    values = logs**2
  elif objective == "soft_l1":
    scaled = (errors / SOFT_L1_SCALE) ** 2
    # The scale's square keeps it near the squared error for small ones.
    values = 2 * SOFT_L1_SCALE**2 * scaled / (jnp.sqrt(1 + scaled) + 1)
  else:
    values = errors**2
  return jnp.sum(weights * values) / jnp.sum(weights)


class _Found(NamedTuple):
  theta: jax.Array
  loss: jax.Array
  rank: jax.Array
  steps: jax.Array
  gradient_norm: jax.Array


def _solve_all(
  system: _System,
  weights: np.ndarray,
  objective: str,
  method: str,
  non_negative: bool,
) -> _Found:
  solve = _solver(objective, method, non_negative)
  with jax.enable_x64(True):
    matrix, target = jnp.asarray(system.matrix), jnp.asarray(system.target)
    found = [solve(matrix, target, jnp.asarray(row)) for row in weights]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *found)


@functools.cache
def _solver(objective: str, method: str, non_negative: bool) -> Callable:
  """jitted (matrix [n, k], target [n], weights [n]) -> `_Found`."""
  descend = _lbfgs if method == "lbfgs" else _adam

  def solve(matrix, target, weights):
    weights = weights / jnp.mean(weights)
    coordinates, start, rank = _coordinates(matrix, weights, non_negative)

    def loss(z, objective=objective):
      errors = matrix @ coordinates(z) - target
      return _mean_loss(errors, weights, objective)

    if objective in ("log", "soft_l1"):  # Not convex, or flat far away.
      squares = functools.partial(loss, objective="relative")
      start, _ = descend(squares, start)
    z, steps = descend(loss, start)
    return _Found(
      theta=coordinates(z),
      loss=loss(z),
      rank=rank,
      steps=steps,
      gradient_norm=jnp.linalg.norm(jax.grad(loss)(z)),
    )

  return jax.jit(solve)


def _coordinates(matrix, weights, non_negative):
  """z -> theta in which descent is easy, a start, and the rank.

  Free coefficients: z along the singular vectors of the weighted terms, each
  with mean square one. Coefficients >= 0: the square of z, in the size of its
  term; descent then stops at zero by itself.
  """
  root = jnp.sqrt(weights)[:, None]
  scale = jnp.linalg.norm(matrix * root, axis=0)
  scale = jnp.where(scale > 0, scale, 1.0)
  weighted = matrix * root / scale[None]
  _, singular, right = jnp.linalg.svd(weighted, full_matrices=False)
  known = singular > _RANK_TOLERANCE * singular[0]
  rank = jnp.sum(known)
  size = matrix.shape[0] ** 0.5
  if non_negative:
    return (lambda z: z**2 * size / scale), jnp.full(scale.shape, 0.5), rank
  inverse = jnp.where(known, size / jnp.where(known, singular, 1.0), 0.0)

  def theta(z):
    return right.T @ (inverse * z) / scale

  return theta, jnp.zeros_like(singular), rank


def _lbfgs(loss: Callable, start: jax.Array) -> tuple[jax.Array, jax.Array]:
  optimizer = optax.lbfgs()
  value_and_grad = optax.value_and_grad_from_state(loss)

  def step(carry):
    z, state, count, _ = carry
    value, grad = value_and_grad(z, state=state)
    updates, state = optimizer.update(
      grad, state, z, value=value, grad=grad, value_fn=loss
    )
    return (
      optax.apply_updates(z, updates),
      state,
      count + 1,
      optax.tree.norm(grad),
    )

  def goes_on(carry):
    _, _, count, norm = carry
    return (count < _LBFGS_STEPS) & (norm > _GRADIENT_TOLERANCE)

  first: Any = (start, optimizer.init(start), 0, jnp.inf)
  z, _, count, _ = jax.lax.while_loop(goes_on, step, first)
  return z, count


def _adam(loss: Callable, start: jax.Array) -> tuple[jax.Array, jax.Array]:
  # The rate falls to nothing: Adam alone circles round the optimum.
  rate = optax.exponential_decay(0.05, _ADAM_STEPS, 1e-9)
  optimizer = optax.adam(rate)

  def step(carry, _):
    z, state = carry
    updates, state = optimizer.update(jax.grad(loss)(z), state, z)
    return (optax.apply_updates(z, updates), state), None

  (z, _), _ = jax.lax.scan(
    step, (start, optimizer.init(start)), length=_ADAM_STEPS
  )
  return z, jnp.asarray(_ADAM_STEPS)
