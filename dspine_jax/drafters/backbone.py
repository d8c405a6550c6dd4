"""The draft layers shared by all methods (baselines, section 2).

A few Qwen3-style layers over the slots of draft blocks. Every layer attends to
[context before the block's anchor | own block], of both as much as its `Sight`
allows (causal or not, sliding or full); the context is one fused
sequence made from tapped target layers, and its keys and values do not depend
on the block, so they are computed once (`context_kv`) and cached when decoding.
What a method changes inside or after a layer is a `Variant`; the methods
themselves are in their own files.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
from flax import linen as nn
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from dspine_jax import attention_masks, configs, layers
from dspine_jax.drafters import contract
from dspine_jax.typing import (
  BlockHidden,
  BlockTokens,
  Features,
  Hidden,
  Key,
  Params,
  PyTree,
)
from kernels.block_attention import api as block_attention


class Variant(NamedTuple):
  """What a method does to each layer; the default is DFlash: nothing.

  Attributes:
    layer_params: trainable trees per layer, in the form of the layers'
      parameters (tuple, or stacked); a tuple of Nones if there are none.
    around: (layer_params, name, sublayer, normed) -> output, wraps the
      "attention" and "mlp" sublayers; `sublayer` maps normed -> output.
    after: (layer_params, layer index, h) -> (h, extra), after each layer.
  """

  layer_params: PyTree
  around: Callable
  after: Callable


def _call(unused_params, unused_name, sublayer, normed):
  return sublayer(normed)


def _keep(unused_params, unused_index, h):
  return h, None


def plain(params: Params) -> Variant:
  """The variant that changes nothing."""
  none = (
    (None,) * len(params["layers"])
    if isinstance(params["layers"], tuple)
    else None
  )
  return Variant(layer_params=none, around=_call, after=_keep)


class Sight(NamedTuple):
  """What the slots of a layer see.

  Attributes:
    visible: [B, N], context positions before the anchor; 0 in padding blocks.
    starts: [B, N, K], first of them that a slot sees; None for all.
    own: [K, K], True where a slot sees a slot of its block.
  """

  visible: Int[Array, "b n"]
  starts: Int[Array, "b n k"] | None
  own: Bool[Array, "k k"]


def sight(
  index: int | Int[Array, ""],
  inputs: contract.BlockInputs,
  cfg: configs.DrafterConfig,
) -> Sight:
  """What a layer sees; its index is traced where layers are scanned."""
  visible = jnp.where(inputs.keep, inputs.anchors, 0)
  own = attention_masks.in_block(cfg.block_size, is_causal=cfg.is_causal)
  origins = inputs.origins
  if cfg.sliding_window is None:
    starts = None
    if origins is not None:
      starts = jnp.broadcast_to(origins[..., None], inputs.tokens.shape)
    return Sight(visible, starts, own)
  name = cfg.sliding_window_convention
  starts = attention_masks.window_starts(
    inputs.anchors, cfg.block_size, cfg.sliding_window, name
  )
  convention = attention_masks.WINDOW_CONVENTIONS[name]
  sliding_own = attention_masks.in_block(
    cfg.block_size, is_causal=cfg.is_causal or convention.is_causal
  )
  slides = jnp.asarray(attention_masks.sliding(cfg.layer_types))[index]
  starts = jnp.where(slides, starts, 0)
  if origins is not None:
    starts = jnp.maximum(starts, origins[..., None])
  return Sight(visible, starts, jnp.where(slides, sliding_own, own))


class DraftLayer(nn.Module):
  """One draft layer over blocks [B, N, K, D]."""

  cfg: configs.DrafterConfig

  def setup(self):
    cfg = self.cfg
    self.input_layernorm = layers.RMSNorm(cfg.rms_norm_eps)
    self.self_attn = layers.Projections(cfg)
    self.post_attention_layernorm = layers.RMSNorm(cfg.rms_norm_eps)
    self.mlp = layers.SwiGLU(cfg.intermediate_size)

  def context(self, context: Hidden, rope):
    """Keys and values of context states, [B, G, S, H] each.

    The context does not pass `input_layernorm`: it was normed by `hidden_norm`.
    """
    k, v = self.self_attn.keys_values(context, rope)
    return jnp.swapaxes(k, 1, 2), jnp.swapaxes(v, 1, 2)

  def __call__(self, h, rope, context, sight, around):
    def attend(x):
      return self._attend(x, rope, context, sight)

    h = h + around("attention", attend, self.input_layernorm(h))
    return h + around("mlp", self.mlp, self.post_attention_layernorm(h))

  def _attend(self, x, rope, context, sight):
    q = self.self_attn.queries(x, rope)
    k, v = self.self_attn.keys_values(x, rope)
    context_k, context_v = (part.astype(x.dtype) for part in context)
    heads = block_attention.block_attention(
      q, k, v, context_k, context_v, *sight
    )
    return self.self_attn.output(heads)


# Hugging Face's `initializer_range`, which the released drafters started from.
# LeCun's larger kernels learn more slowly under muon, whose steps do not grow
# with them.
_INIT_STD = 0.02


def init(key: Key, cfg: configs.DrafterConfig) -> Params:
  """Random float32 parameters: fc, hidden_norm, layers (unrolled), norm.

  Kernels have standard deviation 0.02, norms are ones.
  """
  fc_key, layer_key = jax.random.split(key)
  layer = DraftLayer(cfg)
  h = jnp.zeros((1, 1, 1, cfg.hidden_size))
  rope = layers.rope_table(jnp.zeros((1, 1, 1), jnp.int32), cfg.head_dim, 1.0)
  context = (jnp.zeros((1, cfg.num_kv_heads, 1, cfg.head_dim)),) * 2
  seen = Sight(jnp.ones((1, 1), jnp.int32), None, jnp.ones((1, 1), bool))

  def one_layer(key):
    arguments = (h, rope, context, seen, lambda name, f, x: f(x))
    return layer.init(key, *arguments)["params"]

  taps = len(cfg.target_layer_ids)
  fc = layers.Linear(cfg.hidden_size)
  features = jnp.zeros((1, taps * cfg.hidden_size))
  ones = {"scale": jnp.ones((cfg.hidden_size,))}
  params = {
    "fc": fc.init(fc_key, features)["params"],
    "hidden_norm": ones,
    "layers": tuple(
      one_layer(key) for key in jax.random.split(layer_key, cfg.num_layers)
    ),
    "norm": dict(ones),
  }
  return jax.tree.map(_rescale_kernel, params)


def _rescale_kernel(leaf: jax.Array) -> jax.Array:
  """LeCun-normal kernels [in, out] to the standard deviation above."""
  return leaf * _INIT_STD * leaf.shape[0] ** 0.5 if leaf.ndim == 2 else leaf


def context_states(
  params: Params, features: Features, *, cfg: configs.DrafterConfig
) -> Hidden:
  """hidden_norm(fc(features)): [B, S, taps * D] -> [B, S, D]."""
  features = features.astype(cfg.dtype)
  fused = layers.matmul(features, params["fc"]["kernel"])
  return layers.rms_norm(
    fused, params["hidden_norm"]["scale"], cfg.rms_norm_eps
  )


def context_kv(
  params: Params,
  features: Features,
  positions: Int[Array, "b s"],
  *,
  cfg: configs.DrafterConfig,
) -> PyTree:
  """Each layer's keys and values of the context, in the form of a KV cache.

  Args:
    params: of the backbone.
    features: [B, S, taps * D], outputs of the tapped target layers.
    positions: [B, S] absolute positions.
    cfg: the drafter's configuration.
  """
  states = context_states(params, features, cfg=cfg)
  rope = _rope(positions, cfg)
  layer = DraftLayer(cfg)

  def step(layer_params, carry, unused):
    kv = layer.apply(
      {"params": layer_params}, states, rope, method=DraftLayer.context
    )
    return carry, kv

  indices = layers.layer_indices(params["layers"])
  return layers.apply_layers(step, params["layers"], None, indices)[1]


def _rope(positions, cfg: configs.DrafterConfig):
  return layers.rope_table(
    positions, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling
  )


def noise_ids(
  tokens: BlockTokens, keep: jax.Array, mask_token_id: int
) -> BlockTokens:
  """[anchor, MASK, MASK, ...] per block; only MASK in padding blocks."""
  slots = jnp.arange(tokens.shape[-1])[None, None, :]
  is_anchor = (slots == 0) & keep[..., None]
  return jnp.where(is_anchor, tokens, mask_token_id)


def run_blocks(
  params: Params,
  tables: contract.TargetTables,
  inputs: contract.BlockInputs,
  variant: Variant,
  *,
  cfg: configs.DrafterConfig,
) -> tuple[BlockHidden, PyTree]:
  """All layers over all blocks.

  Returns:
    States before the final norm, [B, N, K, D], and what `variant.after` gave
    for each layer.
  """
  ids = noise_ids(inputs.tokens, inputs.keep, cfg.mask_token_id)
  h = jax.lax.stop_gradient(tables.embedding)[ids].astype(cfg.dtype)
  offsets = jnp.arange(cfg.block_size)[None, None, :]
  positions = inputs.anchors
  if inputs.origins is not None:
    positions = positions - inputs.origins
  rope = _rope(positions[..., None] + offsets, cfg)
  layer = DraftLayer(cfg)

  def step(layer_params, h, per_layer):
    index, context, extra_params = per_layer

    def around(name, sublayer, normed):
      return variant.around(extra_params, name, sublayer, normed)

    h = layer.apply(
      {"params": layer_params},
      h,
      rope,
      context,
      sight(index, inputs, cfg),
      around,
    )
    return variant.after(extra_params, index, h)

  indices = layers.layer_indices(params["layers"])
  per_layer = (indices, inputs.context, variant.layer_params)
  if isinstance(indices, tuple):
    per_layer = tuple(zip(*per_layer, strict=True))
  return layers.apply_layers(step, params["layers"], h, per_layer)


def final_norm(
  params: Params, h: Float[Array, "*rows d"], cfg: configs.DrafterConfig
) -> Float[Array, "*rows d"]:
  """The drafter's own final RMSNorm, before the borrowed head."""
  return layers.rms_norm(h, params["norm"]["scale"], cfg.rms_norm_eps)
