"""The target (verifier): a Qwen3- or Llama-family decoder as pure functions.

`forward` is the only pass: a prefill, one cached step, the verification of a
block and a training pass differ in their arguments alone. It reads the cache
and returns the new tokens' keys and values already written behind each row's
length; the caller commits them with `kv_cache.advance`. Parameters are a plain
dict; `params["layers"]` is a tuple of layers (unrolled) or one stacked tree
(scanned). Not here: loading (`checkpoints`), sampling (`decoding`).
"""

import dataclasses

import jax
from flax import linen as nn
from flax import struct
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from dspine_jax import attention_masks, configs, kv_cache, layers
from dspine_jax.typing import (
  Features,
  Hidden,
  Key,
  Lengths,
  Params,
  PyTree,
  Tokens,
)
from kernels.block_attention import api as block_attention
from kernels.block_attention import partial
from kernels.draft_loss import reference as draft_loss


@struct.dataclass
class TargetOutput:
  """What one pass of the target gives.

  Attributes:
    hidden: [B, T, D] after the final norm, the input of the head.
    features: [B, T, taps * D], outputs of the tapped layers, ascending; the
      drafter's context features. [B, T, 0] without taps.
    cache: a KVCache with the new keys and values written, lengths not yet
      advanced; None if the pass had none.
  """

  hidden: Hidden
  features: Features
  cache: PyTree = None


class DecoderLayer(nn.Module):
  """x + attention(norm(x)), then x + SwiGLU(norm(x))."""

  cfg: configs.TargetConfig

  @nn.compact
  def __call__(self, x, rope, past, lengths, own_mask):
    cfg = self.cfg
    attend = layers.Projections(cfg, name="self_attn")
    normed = layers.RMSNorm(cfg.rms_norm_eps, name="input_layernorm")(x)
    q = attend.queries(normed, rope)
    own = attend.keys_values(normed, rope)
    k, v = (jnp.swapaxes(part, 1, 2) for part in own)
    if past is None:
      mask = own_mask if own_mask.ndim == 3 else own_mask[None]
      part = partial.partial_attention(q, k, v, mask)
      heads = partial.merge(part, dtype=x.dtype)
    else:
      # The pass is one block after its cache.
      past_k, past_v = (part.astype(x.dtype) for part in past)
      heads = block_attention.block_attention(
        q[:, None],
        own[0][:, None],
        own[1][:, None],
        past_k,
        past_v,
        lengths[:, None],
        None,
        own_mask,
      )[:, 0]
    x = x + attend.output(heads)
    normed = layers.RMSNorm(cfg.rms_norm_eps, name="post_attention_layernorm")(
      x
    )
    mlp = layers.SwiGLU(cfg.intermediate_size, name="mlp")
    return x + mlp(normed), (k, v)


def init(key: Key, cfg: configs.TargetConfig) -> Params:
  """Random float32 parameters with unrolled layers.

  Embeddings are N(0, 0.02); projections LeCun-normal; the two that write into
  the residual stream are divided by sqrt(2 L), as GPT-2 does.
  """
  embed_key, head_key, layer_key = jax.random.split(key, 3)
  layer = DecoderLayer(cfg)
  token = jnp.zeros((1, 1, cfg.hidden_size))
  rope = layers.rope_table(jnp.zeros((1, 1), jnp.int32), cfg.head_dim, 1.0)
  mask = attention_masks.causal(1)

  def one_layer(key):
    params = layer.init(key, token, rope, None, None, mask)["params"]
    shrink = (2 * cfg.num_layers) ** -0.5
    for block, name in (("self_attn", "o_proj"), ("mlp", "down_proj")):
      kernel = params[block][name]["kernel"]
      params[block][name]["kernel"] = kernel * shrink
    return params

  shape = (cfg.vocab_size, cfg.hidden_size)
  params = {
    "embed_tokens": 0.02 * jax.random.normal(embed_key, shape),
    "layers": tuple(
      one_layer(key) for key in jax.random.split(layer_key, cfg.num_layers)
    ),
    "norm": {"scale": jnp.ones((cfg.hidden_size,))},
  }
  if not cfg.tie_embeddings:
    params["lm_head"] = 0.02 * jax.random.normal(head_key, shape)
  return params


def embedding(params: Params) -> Float[Array, "v d"]:
  """The token embedding table, also the drafter's."""
  return params["embed_tokens"]


def head(params: Params) -> Float[Array, "v d"]:
  """Rows of the LM head; the embedding table where the two are tied."""
  return params.get("lm_head", params["embed_tokens"])


def logits(params: Params, hidden: Float[Array, "*rows d"]):
  """Head applied to final-normed states: [..., V] float32."""
  return head_logits(head(params), hidden)


def head_logits(
  head_rows: Float[Array, "v d"], hidden: Float[Array, "*rows d"]
) -> Float[Array, "*rows v"]:
  """`hidden @ head_rows.T` as one 2-D product with float32 results."""
  flat = draft_loss.logits(
    hidden.reshape(-1, hidden.shape[-1]), head_rows.astype(hidden.dtype)
  )
  return flat.reshape(*hidden.shape[:-1], -1)


def forward(
  params: Params,
  tokens: Tokens,
  *,
  cfg: configs.TargetConfig,
  cache: kv_cache.KVCache | None = None,
  cache_is_empty: bool = False,
  tap_layers: tuple[int, ...] = (),
  documents: Int[Array, "b t"] | None = None,
) -> TargetOutput:
  """One pass over T tokens that follow each row's cached positions.

  Args:
    params: from `init` or a checkpoint.
    tokens: [B, T]. Rows may be padded on the right: causal attention keeps the
      padding from what comes before it.
    cfg: the target's configuration.
    cache: committed keys and values with room for T more positions. None runs
      the tokens alone from position 0 and returns no cache.
    cache_is_empty: the cache is written but not read (a prefill).
    tap_layers: layers whose outputs are returned as features.
    documents: [B, T] of a packed row, offset of the first token of the document
      that a token belongs to: attention stays in the document, positions count
      from its start. None where a row is one document. Not with a cache.

  Returns:
    Final-normed states, tapped features and the written cache.
  """
  if documents is not None and cache is not None:
    raise ValueError("documents: packed rows have no cache")
  num_tokens = tokens.shape[1]
  offsets = jnp.arange(num_tokens)
  starts = (
    jnp.zeros((tokens.shape[0],), jnp.int32) if cache is None else cache.lengths
  )
  positions = starts[:, None] + offsets[None, :]
  own_mask = attention_masks.causal(num_tokens)
  if documents is not None:
    positions = positions - documents
    own_mask = own_mask[None] & attention_masks.same_document(documents)
  rope = layers.rope_table(
    positions, cfg.head_dim, cfg.rope_theta, cfg.rope_scaling
  )
  past_layers = None
  if cache is not None and not cache_is_empty:
    past_layers = cache.layers
  layer = DecoderLayer(cfg)

  def step(layer_params, carry, inputs):
    x, taps = carry
    index, past = inputs
    x, kv = layer.apply(
      {"params": layer_params}, x, rope, past, starts, own_mask
    )
    return (x, _tap(taps, x, index, tap_layers)), kv

  x = params["embed_tokens"][tokens].astype(cfg.dtype)
  taps = tuple(jnp.zeros_like(x) for _ in tap_layers)
  indices = layers.layer_indices(params["layers"])
  if isinstance(indices, tuple):
    past = past_layers or (None,) * cfg.num_layers
    per_layer = tuple(zip(indices, past, strict=True))
  else:
    per_layer = (indices, past_layers)
  (x, taps), new_kv = layers.apply_layers(
    step, params["layers"], (x, taps), per_layer
  )
  hidden = layers.rms_norm(x, params["norm"]["scale"], cfg.rms_norm_eps)
  features = (
    jnp.concatenate(taps, axis=-1)
    if tap_layers
    else jnp.zeros((*tokens.shape, 0), x.dtype)
  )
  if cache is not None:
    cache = kv_cache.write(cache, new_kv)
  return TargetOutput(hidden=hidden, features=features, cache=cache)


def _tap(taps, x, index, tap_layers):
  """Keeps `x` in the slot of its layer, if that layer is tapped."""
  if isinstance(index, int):
    return tuple(
      x if layer == index else tap
      for layer, tap in zip(tap_layers, taps, strict=True)
    )
  return tuple(
    jnp.where(index == layer, x, tap)
    for layer, tap in zip(tap_layers, taps, strict=True)
  )


def prefill(
  params: Params,
  prompts: Tokens,
  prompt_lengths: Lengths,
  *,
  cfg: configs.TargetConfig,
  capacity: int,
  tap_layers: tuple[int, ...] = (),
) -> TargetOutput:
  """Runs right-padded prompts and keeps each row's own length in the cache.

  The empty cache is not read: the pass costs only the prompt.

  Args:
    params: the target's parameters.
    prompts: [B, T], padded on the right with any token.
    prompt_lengths: [B], positions of each row to keep; may be shorter than the
      row's prompt (the last token is often left for the first round).
    cfg: the target's configuration.
    capacity: positions of the cache, at least T.
    tap_layers: layers whose outputs are returned as features.
  """
  if prompts.shape[1] > capacity:
    raise ValueError(
      f"prompt of {prompts.shape[1]} tokens is longer than the cache"
      f" (capacity={capacity})"
    )
  stacked = not isinstance(params["layers"], tuple)
  empty = kv_cache.init(
    cfg,
    prompts.shape[0],
    capacity,
    num_layers=cfg.num_layers,
    stacked=stacked,
  )
  out = forward(
    params,
    prompts,
    cfg=cfg,
    cache=empty,
    cache_is_empty=True,
    tap_layers=tap_layers,
  )
  return dataclasses.replace(
    out, cache=kv_cache.advance(out.cache, prompt_lengths)
  )
