"""The pictures of comparisons of drafters."""

import pathlib
from collections.abc import Mapping, Sequence

import matplotlib
import numpy as np

matplotlib.use("Agg")
from matplotlib import pyplot as plt

# One colour a method, in every picture.
COLORS = {
  "autoregressive": "#8c8c8c",
  "dflash": "#1f77b4",
  "dflash2": "#17becf",
  "domino": "#2ca02c",
  "dspark": "#ff7f0e",
  "dspine": "#d62728",
}


def acceptance_by_position(
  path: pathlib.Path, curves: Mapping[str, Sequence[float]], title: str
) -> None:
  """Share of rounds in which each proposal stood, a line a method.

  Args:
    path: PNG file to write.
    curves: method -> share for proposals 1...
    title: of the picture.
  """
  figure, axes = plt.subplots(figsize=(6.4, 4.0), layout="constrained")
  _draw_acceptance(axes, curves)
  axes.set_title(title)
  figure.savefig(path, dpi=150)
  plt.close(figure)


def _draw_acceptance(axes, curves: Mapping[str, Sequence[float]]) -> None:
  for name, curve in curves.items():
    places = np.arange(1, len(curve) + 1)
    shares = np.asarray(curve, float)  # Without any round: None, then NaN.
    axes.plot(places, shares, marker="o", label=name, color=COLORS.get(name))
  axes.set_xlabel("position in the block")
  axes.set_ylabel("share of rounds accepted up to here")
  axes.set_ylim(0, 1)
  axes.set_xlim(left=0.5)
  axes.grid(alpha=0.3)
  axes.legend()


def comparison(
  path: pathlib.Path,
  bars: Mapping[str, Mapping[str, Mapping[str, float]]],
  curves: Mapping[str, Sequence[float]],
  title: str,
) -> None:
  """Mean advancement with intervals, and acceptance by position.

  Args:
    path: PNG file to write.
    bars: group of prompts -> method -> mean, low and high.
    curves: as in `acceptance_by_position`.
    title: of the picture.
  """
  figure, (left, right) = plt.subplots(
    1, 2, figsize=(11.0, 4.2), layout="constrained", width_ratios=(3, 2)
  )
  names = list(curves)
  width = 0.8 / len(names)
  for index, name in enumerate(names):
    intervals = [group[name] for group in bars.values()]
    mean, low, high = (
      np.asarray([one[key] for one in intervals], float)
      for key in ("mean", "low", "high")
    )
    places = np.arange(len(intervals)) + (index - (len(names) - 1) / 2) * width
    left.bar(
      places,
      mean,
      width,
      yerr=(mean - low, high - mean),
      capsize=2,
      color=COLORS.get(name),
      label=name,
    )
  left.set_xticks(np.arange(len(bars)), list(bars))
  left.set_ylabel("mean advancement (tokens per round)")
  # A round commits at least one token.
  left.set_ylim(bottom=1)
  left.grid(axis="y", alpha=0.3)
  left.legend()
  _draw_acceptance(right, curves)
  figure.suptitle(title)
  figure.savefig(path, dpi=150)
  plt.close(figure)


def intervals(
  path: pathlib.Path,
  groups: Mapping[str, Mapping[str, Mapping[str, float]]],
  label: str,
  title: str,
) -> None:
  """Horizontal bars with intervals, a line a name, a bar a group.

  Args:
    path: PNG file to write.
    groups: group -> name -> mean, low and high; NaN leaves a bar out. Every
      group has the same names, drawn from top to bottom.
    label: of the values.
    title: of the picture.
  """
  names = list(next(iter(groups.values())))
  figure, axes = plt.subplots(
    figsize=(8.0, 1.4 + 0.36 * len(names)), layout="constrained"
  )
  height = 0.8 / len(groups)
  for index, (group, by_name) in enumerate(groups.items()):
    mean, low, high = (
      np.asarray([by_name[name][key] for name in names], float)
      for key in ("mean", "low", "high")
    )
    places = np.arange(len(names)) + (index - (len(groups) - 1) / 2) * height
    axes.barh(
      places,
      mean,
      height,
      # A ratio's mean may lie a rounding outside of its interval.
      xerr=np.maximum((mean - low, high - mean), 0),
      capsize=2,
      label=group,
    )
  axes.axvline(0, color="black", linewidth=0.8)
  axes.set_yticks(np.arange(len(names)), names)
  axes.margins(y=0.02)
  axes.invert_yaxis()
  axes.set_xlabel(label)
  axes.grid(axis="x", alpha=0.3)
  axes.legend()
  axes.set_title(title)
  figure.savefig(path, dpi=150)
  plt.close(figure)


def advancement_and_speed(
  path: pathlib.Path,
  advancement: Mapping[str, float],
  tokens_per_second: Mapping[str, float],
  title: str,
) -> None:
  """Mean advancement and tokens/s side by side, a bar a method."""
  figure, axes = plt.subplots(1, 2, figsize=(8.0, 3.8), layout="constrained")
  pairs = (
    (axes[0], advancement, "mean advancement (tokens per round)"),
    (axes[1], tokens_per_second, "tokens/s at batch 1"),
  )
  for axis, values, label in pairs:
    names = list(values)
    colors = [COLORS.get(name, "#444444") for name in names]
    heights = np.asarray([values[name] for name in names], float)
    bars = axis.bar(names, heights, color=colors)
    axis.bar_label(bars, fmt="%.3g")
    axis.set_ylabel(label)
    axis.margins(y=0.12)
  figure.suptitle(title)
  figure.savefig(path, dpi=150)
  plt.close(figure)
