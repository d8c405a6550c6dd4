"""How rotary frequencies are stretched for sequences longer than trained.

Three rules besides none: linear, Llama 3.1's and YaRN (Peng et al. 2023), in
the conventions of Hugging Face's `rope_type`. The angles and rotations made of
the frequencies are in `layers.py`, the keys of `config.json` in
`checkpoints/hf_config.py`. Not here: rules that depend on the length of the
request (dynamic, longrope).
"""

import dataclasses
import math

import jax
import numpy as np
from jax import numpy as jnp
from jaxtyping import Array, Float

from dspine_jax.method_options import require as _require


@dataclasses.dataclass(frozen=True, kw_only=True)
class LinearScaling:
  """All frequencies divided by `factor` (`rope_type: linear`)."""

  factor: float

  def __post_init__(self):
    _check_factor(self.factor)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Llama3Scaling:
  """Low frequencies divided, high ones kept (`rope_type: llama3`).

  Attributes:
    factor: divisor of the low frequencies.
    low_freq_factor: wavelengths above original / low are divided by `factor`.
    high_freq_factor: wavelengths below original / high are left alone.
    original_max_positions: context length of the unscaled model.
  """

  factor: float
  low_freq_factor: float = 1.0
  high_freq_factor: float = 4.0
  original_max_positions: int = 8192

  def __post_init__(self):
    _check_factor(self.factor)
    _require(
      0 < self.low_freq_factor < self.high_freq_factor,
      "low_freq_factor",
      self.low_freq_factor,
      f"must lie between 0 and high_freq_factor={self.high_freq_factor}",
    )
    _check_original(self.original_max_positions)


@dataclasses.dataclass(frozen=True, kw_only=True)
class YarnScaling:
  """YaRN: a ramp between kept and divided frequencies (`rope_type: yarn`).

  Attributes:
    factor: divisor of the low frequencies.
    original_max_positions: context length of the unscaled model.
    beta_fast: features that turn at least so often in that length are kept.
    beta_slow: those that turn at most so often are divided by `factor`.
    attention_factor: of cos and sin, hence twice in a score; None takes it
      from `factor` and the next two.
    mscale, mscale_all_dim: the attention factor is (0.1 mscale ln(factor) + 1)
      over the same of mscale_all_dim; 0.1 ln(factor) + 1 unless both are set.
    truncate: the ramp begins and ends at whole features.
  """

  factor: float
  original_max_positions: int
  beta_fast: float = 32.0
  beta_slow: float = 1.0
  attention_factor: float | None = None
  mscale: float | None = None
  mscale_all_dim: float | None = None
  truncate: bool = True

  def __post_init__(self):
    _check_factor(self.factor)
    _check_original(self.original_max_positions)
    _require(
      0 < self.beta_slow <= self.beta_fast,
      "beta_slow",
      self.beta_slow,
      f"must lie between 0 and beta_fast={self.beta_fast}",
    )
    if self.attention_factor is not None:
      _require(
        self.attention_factor > 0,
        "attention_factor",
        self.attention_factor,
        "must be positive",
      )


RopeScaling = LinearScaling | Llama3Scaling | YarnScaling


def _check_factor(factor: float) -> None:
  _require(
    math.isfinite(factor) and factor >= 1,
    "factor",
    factor,
    "must be at least 1",
  )


def _check_original(positions: int) -> None:
  _require(
    positions > 0, "original_max_positions", positions, "must be positive"
  )


def frequencies(
  head_dim: int, theta: float, scaling: RopeScaling | None = None
) -> Float[Array, "half"]:
  """Inverse frequencies [H/2] of the rotated pairs, float32."""
  exponent = jnp.arange(0, head_dim, 2, dtype=jnp.float32) / head_dim
  inverse = 1.0 / theta**exponent
  if scaling is None:
    return inverse
  if isinstance(scaling, LinearScaling):
    return inverse / scaling.factor
  if isinstance(scaling, Llama3Scaling):
    return _llama3(inverse, scaling)
  kept = 1 - _yarn_ramp(head_dim, theta, scaling)
  return inverse / scaling.factor * (1 - kept) + inverse * kept


def amplitude(scaling: RopeScaling | None) -> float:
  """What cos and sin are multiplied by: 1 but for YaRN."""
  if not isinstance(scaling, YarnScaling):
    return 1.0
  if scaling.attention_factor is not None:
    return scaling.attention_factor

  def grown(mscale: float) -> float:
    return 0.1 * mscale * math.log(scaling.factor) + 1.0

  if scaling.mscale and scaling.mscale_all_dim:
    return grown(scaling.mscale) / grown(scaling.mscale_all_dim)
  return grown(1.0)


def _llama3(inverse: jax.Array, scaling: Llama3Scaling) -> jax.Array:
  wavelength = 2 * jnp.pi / inverse
  original = scaling.original_max_positions
  low = original / scaling.low_freq_factor
  high = original / scaling.high_freq_factor
  # Between the two bounds the divisor is interpolated (Llama 3.1).
  smooth = (original / wavelength - scaling.low_freq_factor) / (
    scaling.high_freq_factor - scaling.low_freq_factor
  )
  blended = (1 - smooth) * inverse / scaling.factor + smooth * inverse
  scaled = jnp.where(wavelength > low, inverse / scaling.factor, blended)
  return jnp.where(wavelength < high, inverse, scaled)


def _yarn_ramp(head_dim: int, theta: float, scaling: YarnScaling) -> np.ndarray:
  """[H/2] float32: 0 where a frequency is kept, 1 where it is divided."""

  def feature(turns: float) -> float:
    """Which feature turns so often within the original length."""
    ratio = scaling.original_max_positions / (turns * 2 * math.pi)
    return head_dim * math.log(ratio) / (2 * math.log(theta))

  low, high = feature(scaling.beta_fast), feature(scaling.beta_slow)
  if scaling.truncate:
    low, high = math.floor(low), math.ceil(high)
  # As released: the upper bound is of the features, not of their pairs.
  low, high = max(low, 0), min(high, head_dim - 1)
  width = (high - low) or 1e-3
  pairs = np.arange(head_dim // 2, dtype=np.float32)
  return np.clip((pairs - low) / width, 0, 1).astype(np.float32)
