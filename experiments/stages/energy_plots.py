"""The pictures of the energy law, and the numbers behind them."""

import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import matplotlib
import numpy as np

from energy import architecture, laws, prediction, sweet_spot

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_LENGTHS = np.unique(np.round(np.geomspace(16, 16384, 61)))


def sweep(
  path: pathlib.Path,
  fitted: prediction.FittedLaw,
  model: architecture.Model,
  input_tokens: float,
  cached_tokens: float = 0.0,
  concurrency: float | None = None,
) -> dict[str, Any]:
  """Joules per output token: its parts over O, and a map over I x O.

  Args:
    path: PNG to write.
    fitted: the law.
    model: whose energy.
    input_tokens: I of the left picture.
    cached_tokens: C of the left picture.
    concurrency: requests in a decoding step, in both; None leaves it to the
      law.

  Returns:
    What was drawn.
  """
  law, theta = fitted.function, fitted.theta
  with jax.enable_x64(True):
    parts = law.parts(
      theta,
      model.architecture,
      input_tokens,
      _LENGTHS,
      cached_tokens,
      concurrency,
    )
    curves = {
      name: np.asarray(joules) / _LENGTHS
      for name, joules in parts.items()
      if np.any(np.asarray(joules) != 0)
    }
    best = float(
      sweet_spot.by_gradient(
        law,
        theta,
        model.architecture,
        input_tokens,
        cached_tokens,
        concurrency,
      )
    )
    grid = np.asarray(
      law(
        theta,
        model.architecture,
        _LENGTHS[:, None],
        _LENGTHS[None, :],
        0,
        concurrency,
      )
    )
    line = np.asarray(
      sweet_spot.by_gradient(
        law, theta, model.architecture, _LENGTHS, 0, concurrency
      )
    )
  total = np.sum(list(curves.values()), axis=0)
  per_token = grid / _LENGTHS[None, :]
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(11.0, 4.4), layout="constrained"
  )
  for name, curve in curves.items():
    left.plot(_LENGTHS, curve, label=name.replace("_", " "))
  left.plot(_LENGTHS, total, color="black", label="total")
  if np.isfinite(best):
    left.axvline(best, color="grey", linestyle=":", label=f"O* = {best:.0f}")
  left.set(
    xscale="log",
    yscale="log",
    xlabel="output tokens O",
    ylabel="J per output token",
    title=f"{input_tokens:g} tokens in, {cached_tokens:g} cached",
  )
  left.set_ylim(bottom=max(total.min() / 100, 1e-9))
  left.grid(alpha=0.3)
  left.legend(loc="upper center")
  drawn = right.pcolormesh(
    _LENGTHS, _LENGTHS, per_token, norm="log", shading="nearest"
  )
  finite = np.isfinite(line) & (line >= _LENGTHS[0]) & (line <= _LENGTHS[-1])
  right.plot(line[finite], _LENGTHS[finite], color="white", label="O*")
  right.set(
    xscale="log",
    yscale="log",
    xlabel="output tokens O",
    ylabel="input tokens I",
  )
  right.set_title("J per output token")
  right.legend(loc="lower right")
  figure.colorbar(drawn, ax=right)
  figure.suptitle(f"{model.name}, law {fitted.law}, {fitted.source}", size=9)
  figure.savefig(path, dpi=150)
  plt.close(figure)
  return {
    "model": model.name,
    "law": fitted.law,
    "input_tokens": input_tokens,
    "cached_tokens": cached_tokens,
    "concurrency": concurrency,
    "optimum_output_tokens": best,
    "output_tokens": _LENGTHS,
    "joules_per_output_token": total,
    "parts_per_output_token": curves,
    "map": {
      "lengths": _LENGTHS,
      "joules_per_output_token": per_token,
      "optimum_output_tokens": line,
    },
  }


def fit_quality(
  path: pathlib.Path,
  actual: np.ndarray,
  predicted: np.ndarray,
  groups: Sequence[str],
  title: str,
) -> None:
  """Predicted against actual joules, and relative errors of every group.

  Args:
    path: PNG to write.
    actual: [n] joules.
    predicted: [n] joules.
    groups: [n] name of each row's model or family.
    title: of the picture.
  """
  names = list(dict.fromkeys(groups))
  index = np.asarray([names.index(group) for group in groups])
  colors = plt.get_cmap("tab20")(np.arange(len(names)) % 20)
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(11.0, 0.6 + max(3.8, 0.3 * len(names))), layout="constrained"
  )
  errors = 100 * (predicted / actual - 1)
  for i, name in enumerate(names):
    rows = index == i
    left.scatter(
      actual[rows], predicted[rows], s=8, color=colors[i], label=name
    )
  positive = predicted[predicted > 0]
  ends = [min(actual.min(), positive.min(initial=np.inf)), actual.max()]
  left.plot(ends, ends, color="black", linewidth=0.8)
  left.set(xscale="log", yscale="log", xlabel="actual J", ylabel="predicted J")
  left.grid(alpha=0.3)
  right.boxplot(
    [errors[index == i] for i in range(len(names))],
    orientation="horizontal",
    tick_labels=names,
    whis=(5, 95),
    showfliers=False,
  )
  right.axvline(0, color="black", linewidth=0.8)
  right.invert_yaxis()
  right.set_xlabel("error, % (box: quartiles, whiskers: 5 and 95 %)")
  right.grid(axis="x", alpha=0.3)
  figure.suptitle(title, size=10)
  figure.savefig(path, dpi=150)
  plt.close(figure)


def break_even(
  path: pathlib.Path,
  maps: Mapping[str, np.ndarray],
  concurrency: np.ndarray,
  contexts: np.ndarray,
  advancement: float | None,
  title: str,
) -> None:
  """Break-even advancement over concurrency and context, a map a quantity.

  Args:
    path: PNG to write.
    maps: quantity -> [contexts, concurrencies] break-even advancement.
    concurrency: of the columns.
    contexts: of the rows, in tokens.
    advancement: what the drafter reaches; its contour is drawn. None: no line.
    title: of the picture.
  """
  figure, axes = plt.subplots(
    1, len(maps), figsize=(5.5 * len(maps), 4.2), layout="constrained"
  )
  for one, (name, values) in zip(
    np.atleast_1d(axes), maps.items(), strict=True
  ):
    drawn = one.pcolormesh(
      concurrency, contexts, values, shading="nearest", vmin=1, vmax=8
    )
    lines = one.contour(
      concurrency, contexts, values, [1.5, 2, 3, 4, 6], colors="white"
    )
    one.clabel(lines, fmt="%g")
    if advancement is not None:
      one.contour(
        concurrency, contexts, values, [advancement], colors="red", linewidths=2
      )
    one.set(
      xscale="log",
      yscale="log",
      xlabel="concurrency",
      ylabel="context, tokens",
      title=f"break-even advancement, {name}",
    )
    figure.colorbar(drawn, ax=one)
  figure.suptitle(title, size=10)
  figure.savefig(path, dpi=150)
  plt.close(figure)


def law_summary(
  law: laws.Law, theta: Sequence[float] | np.ndarray
) -> list[list[Any]]:
  """Rows of a table of coefficients."""
  return [
    [one.name, float(value), one.unit, one.meaning]
    for one, value in zip(law.coefficients, theta, strict=True)
  ]
