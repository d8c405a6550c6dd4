"""Dynamic grouped convolutions over the slots of a block (baselines, 4.1).

DFlash2 puts one on each side of every sublayer. With x the sublayer's normed
input, K taps and groups of g channels:

  dynamic   Delta_t = W_p x_t, one number for each side, tap and group
  conv_s    v_{t,c} <- sum_tau (beta[s,tau,c] + Delta_t[s,tau,c//g]) v_{t-tau,c}
  output    conv_1(sublayer(conv_0(x)))

Both sides use the Delta of x itself, and nothing crosses the block's first
slot. The residual is added outside, by the layer.
"""

from collections.abc import Callable

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float

from dspine_jax import configs, layers
from dspine_jax.checkpoints import names
from dspine_jax.typing import BlockHidden, Params

SUBLAYERS = ("attention", "mlp")
_SIDES = 2


def init(cfg: configs.DrafterConfig, options: configs.DFlash2Options) -> Params:
  """Convolutions that change nothing, so that DFlash is where training starts.

  Returns:
    `layers`, a tuple of {"attention", "mlp"}, each with `base_kernel`
    [2, taps, D] and `kernel_projection` [D, 2 * taps * groups].
  """
  width, taps = cfg.hidden_size, options.conv_kernel_size
  columns = _SIDES * taps * (width // options.conv_group_size)

  def one():
    identity = jnp.zeros((_SIDES, taps, width)).at[:, 0].set(1.0)
    projection = {"kernel": jnp.zeros((width, columns))}
    return {"base_kernel": identity, "kernel_projection": projection}

  per_layer = tuple(
    {name: one() for name in SUBLAYERS} for _ in range(cfg.num_layers)
  )
  return {"layers": per_layer}


def around(
  weights: Params,
  name: str,
  sublayer: Callable[[BlockHidden], BlockHidden],
  x: BlockHidden,
) -> BlockHidden:
  """conv_1(sublayer(conv_0(x))); the `backbone.Variant.around` of DFlash2.

  Args:
    weights: of this layer.
    name: "attention" or "mlp".
    sublayer: maps [B, N, K, D] to the same.
    x: [B, N, K, D], after the sublayer's norm.
  """
  base = weights[name]["base_kernel"]
  dynamic = dynamic_kernels(weights[name], x)
  inner = convolve(x, base[0], dynamic[..., 0, :, :])
  return convolve(sublayer(inner), base[1], dynamic[..., 1, :, :])


def dynamic_kernels(
  weights: Params, x: Float[Array, "*b k d"]
) -> Float[Array, "*b k sides taps groups"]:
  """Delta: what each slot's own input adds to the base kernels."""
  projected = layers.matmul(x, weights["kernel_projection"]["kernel"])
  sides, taps, _ = weights["base_kernel"].shape
  return projected.reshape(*x.shape[:-1], sides, taps, -1)


def convolve(
  v: Float[Array, "*b k d"],
  base: Float[Array, "taps d"],
  dynamic: Float[Array, "*b k taps groups"],
) -> Float[Array, "*b k d"]:
  """One side: tap tau of slot t reads slot t - tau, or zero before slot 0."""
  groups = dynamic.shape[-1]
  grouped = v.reshape(*v.shape[:-1], groups, -1)
  base = base.astype(v.dtype)
  total = jnp.zeros_like(grouped)
  for tap in range(base.shape[0]):
    fixed = base[tap].reshape((1,) * (v.ndim - 1) + (groups, -1))
    kernel = fixed + dynamic[..., tap, :, None]
    total = total + kernel * _later(grouped, tap)
  return total.reshape(v.shape)


def _later(grouped: jax.Array, tap: int) -> jax.Array:
  """[..., K, G, g] moved `tap` slots back, zeros in front."""
  slots = grouped.shape[-3]
  padding = [(0, 0)] * (grouped.ndim - 3) + [(tap, 0), (0, 0), (0, 0)]
  return jnp.pad(grouped, padding)[..., :slots, :, :]


def entries(
  cfg: configs.DrafterConfig, options: configs.DFlash2Options
) -> list[names.Entry]:
  """Released names: two tensors a sublayer."""
  width, taps = cfg.hidden_size, options.conv_kernel_size
  columns = _SIDES * taps * (width // options.conv_group_size)
  found = []
  for index in range(cfg.num_layers):
    for name in SUBLAYERS:
      at = ("params", "convolutions", "layers", index, name)
      released = f"layers.{index}.{name}_conv"
      found += [
        names.Entry(
          f"{released}.base_kernel", (*at, "base_kernel"), (_SIDES, taps, width)
        ),
        names.Entry(
          f"{released}.kernel_projection.weight",
          (*at, "kernel_projection", "kernel"),
          (width, columns),
          True,
        ),
      ]
  return found
