"""Building blocks of target and drafters: Linear, RMSNorm, RoPE, SwiGLU.

Linen modules hold the parameters; `apply_layers` runs a list of layers either
unrolled (a tuple of per-layer parameters, best on CPU) or scanned (one dict of
stacked parameters, best on GPU). Attention itself is in
`kernels.block_attention`.
"""

from collections.abc import Callable
from typing import Any

import jax
from flax import linen as nn
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int, Shaped

from dspine_jax import rope_scaling
from dspine_jax.typing import Params, PyTree
from kernels import dispatch


def matmul(
  x: Float[Array, "*rows i"], kernel: Float[Array, "i o"]
) -> Float[Array, "*rows o"]:
  """`x @ kernel` as one 2-D product, in the dtype of `x`.

  The gradient of a 3-D product contracts over two axes, which XLA:CPU does at
  about half the speed of the 2-D one.
  """
  flat = x.reshape(-1, x.shape[-1]) @ kernel.astype(x.dtype)
  return flat.reshape(*x.shape[:-1], kernel.shape[-1])


class Linear(nn.Module):
  """A linear map; `kernel` is [in, out], `bias` [out] where there is one."""

  features: int
  use_bias: bool = False
  kernel_init: Callable = nn.initializers.lecun_normal()

  @nn.compact
  def __call__(self, x: Float[Array, "*rows i"]) -> Float[Array, "*rows o"]:
    shape = (x.shape[-1], self.features)
    y = matmul(x, self.param("kernel", self.kernel_init, shape))
    if not self.use_bias:
      return y
    bias = self.param("bias", nn.initializers.zeros, (self.features,))
    return y + bias.astype(y.dtype).reshape((1,) * (y.ndim - 1) + (-1,))


class RMSNorm(nn.Module):
  """x / rms(x) * scale over the last axis, in float32, cast back."""

  eps: float

  @nn.compact
  def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    scale = self.param("scale", nn.initializers.ones, (x.shape[-1],))
    return rms_norm(x, scale, self.eps)


def rms_norm(
  x: Float[Array, "*rows d"], scale: Float[Array, "d"], eps: float
) -> Float[Array, "*rows d"]:
  """RMS normalisation in float32; returns the dtype of `x`."""
  x32 = x.astype(jnp.float32)
  mean_square = jnp.mean(jnp.square(x32), axis=-1, keepdims=True)
  normed = x32 * lax.rsqrt(mean_square + eps)
  scale = scale.reshape((1,) * (x.ndim - 1) + (-1,))
  return (normed * scale).astype(x.dtype)


class SwiGLU(nn.Module):
  """down(silu(gate(x)) * up(x)), the feed-forward part of a decoder layer."""

  intermediate_size: int

  @nn.compact
  def __call__(self, x: Float[Array, "*rows d"]) -> Float[Array, "*rows d"]:
    gate = Linear(self.intermediate_size, name="gate_proj")(x)
    up = Linear(self.intermediate_size, name="up_proj")(x)
    return Linear(x.shape[-1], name="down_proj")(nn.silu(gate) * up)


class RopeTable(tuple):
  """(cos, sin), each [..., T, H/2] float32; a tuple, hence a pytree."""


def rope_table(
  positions: Int[Array, "*bt"],
  head_dim: int,
  theta: float,
  scaling: rope_scaling.RopeScaling | None = None,
) -> tuple[Float[Array, "*bt half"], Float[Array, "*bt half"]]:
  """cos and sin of position * frequency, float32, times YaRN's factor."""
  frequencies = rope_scaling.frequencies(head_dim, theta, scaling)
  frequencies = frequencies.reshape((1,) * positions.ndim + (-1,))
  angles = positions.astype(jnp.float32)[..., None] * frequencies
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  amplitude = rope_scaling.amplitude(scaling)
  return (cos, sin) if amplitude == 1 else (amplitude * cos, amplitude * sin)


def apply_rope(
  x: Float[Array, "*bt heads h"],
  table: tuple[Float[Array, "*bt half"], Float[Array, "*bt half"]],
) -> Float[Array, "*bt heads h"]:
  """Rotates the two halves of each head (the `rotate_half` layout of HF)."""
  cos, sin = (part[..., None, :] for part in table)
  first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
  rotated = [first * cos - second * sin, second * cos + first * sin]
  return jnp.concatenate(rotated, axis=-1).astype(x.dtype)


class Projections(nn.Module):
  """q, k, v, o projections of one attention sublayer with optional QK-norm.

  Attributes:
    cfg: a TargetConfig or DrafterConfig; only widths, eps, qk_norm and
      biased_projections are used.
  """

  cfg: Any

  def setup(self):
    cfg = self.cfg

    def linear(name: str, features: int) -> Linear:
      return Linear(features, use_bias=name in cfg.biased_projections)

    self.q_proj = linear("q_proj", cfg.num_heads * cfg.head_dim)
    self.k_proj = linear("k_proj", cfg.num_kv_heads * cfg.head_dim)
    self.v_proj = linear("v_proj", cfg.num_kv_heads * cfg.head_dim)
    self.o_proj = linear("o_proj", cfg.hidden_size)
    if cfg.qk_norm:
      self.q_norm = RMSNorm(cfg.rms_norm_eps)
      self.k_norm = RMSNorm(cfg.rms_norm_eps)

  def queries(self, x, rope) -> Float[Array, "*bt q h"]:
    q = self.q_proj(x).reshape(*x.shape[:-1], -1, self.cfg.head_dim)
    if self.cfg.qk_norm:
      q = self.q_norm(q)
    return apply_rope(q, rope)

  def keys_values(
    self, x, rope
  ) -> tuple[Float[Array, "*bt g h"], Float[Array, "*bt g h"]]:
    k, v = self.k_proj(_unshared(x)), self.v_proj(_unshared(x))
    k = k.reshape(*x.shape[:-1], -1, self.cfg.head_dim)
    v = v.reshape(*x.shape[:-1], -1, self.cfg.head_dim)
    if self.cfg.qk_norm:
      k = self.k_norm(k)
    return apply_rope(k, rope), v

  def output(self, heads: Float[Array, "*bt q h"]) -> Float[Array, "*bt d"]:
    return self.o_proj(heads.reshape(*heads.shape[:-2], -1))


def _unshared(x: jax.Array) -> jax.Array:
  """`x` as an operand that no other product has, where XLA:GPU compiles.

  It joins products that share an operand if they are small, and copies their
  kernels together in every pass: in decoding twice the bytes of the kernels.
  """
  return lax.optimization_barrier(x) if dispatch.platform() == "gpu" else x


def apply_layers(
  layer: Callable[[Params, PyTree, PyTree], tuple[PyTree, PyTree]],
  layer_params: tuple[Params, ...] | Params,
  carry: PyTree,
  per_layer: PyTree,
) -> tuple[PyTree, PyTree]:
  """Runs `carry, out = layer(params_l, carry, per_layer_l)` over all layers.

  Args:
    layer: one layer.
    layer_params: a tuple of per-layer trees (unrolled) or one tree of leaves
      with a leading layer axis (scanned).
    carry: the state handed from layer to layer.
    per_layer: inputs of each layer, structured like `layer_params`: a tuple of
      trees, or one tree with a leading layer axis.

  Returns:
    The last carry, and the outputs as a tuple or stacked, like the inputs.
  """
  if isinstance(layer_params, tuple):
    outputs = []
    for params, inputs in zip(layer_params, per_layer, strict=True):
      carry, out = layer(params, carry, inputs)
      outputs.append(out)
    return carry, tuple(outputs)

  def step(carry, xs):
    return layer(xs[0], carry, xs[1])

  return lax.scan(step, carry, (layer_params, per_layer))


def stack_layers(layer_params: tuple[PyTree, ...]) -> PyTree:
  """A tuple of per-layer trees as one tree with a leading layer axis."""
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *layer_params)


def unstack_layers(stacked: PyTree) -> tuple[PyTree, ...]:
  """The inverse of `stack_layers`."""
  num_layers = jax.tree.leaves(stacked)[0].shape[0]
  return tuple(
    jax.tree.map(lambda leaf, i=i: leaf[i], stacked) for i in range(num_layers)
  )


def layer_indices(
  layer_params: tuple[Params, ...] | Params,
) -> tuple[int, ...] | Shaped[Array, "l"]:
  """0..L-1 in the form that `apply_layers` takes for these parameters."""
  if isinstance(layer_params, tuple):
    return tuple(range(len(layer_params)))
  return jnp.arange(jax.tree.leaves(layer_params)[0].shape[0])
