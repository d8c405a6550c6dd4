"""The two pictures of a comparison of drafters."""

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
