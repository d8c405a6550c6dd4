"""What draft layers are supervised by besides the tokens (dspine, 7 and 8).

  code_cosine  beta sg[mean CE] sum_l (1 - cos(f_l, c_y)), over all layers, of
               the feature of the post-write state; as published
  token_ce     beta sum_l CE(y, head of the final-normed post-write state), over
               all layers but the last, whose cross-entropy is the base loss

Neither is computed if `alignment_weight` is zero. Sums are weighted like the
loss, of which they are one addend; beta comes with the window. Not here: the
warm-up of beta (`schedules.py`), the rest of the loss (`dspine.py`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from dspine_jax import configs
from dspine_jax.drafters import backbone, contract, dflash
from dspine_jax.target import model
from dspine_jax.training import losses
from kernels.adjacent_injection import reference as injection_math


class LayerSupervision(NamedTuple):
  """One way to supervise layers.

  Attributes:
    with_feature: whether `read` needs the feature of the post-write states.
    read: what an injection gave -> what the loss needs of that layer, kept as
      `DrafterOutput.layer_features`.
    loss: (params, buffers, tables, output, supervision, *, cfg, window,
      chunk_size) -> (addend of the loss, sums for the report), both before the
      division by the denominator; `window.ce_scale` is given.
  """

  with_feature: bool
  read: Callable[[injection_math.Injected], Any]
  loss: Callable[..., tuple[jax.Array, dict[str, jax.Array]]]


def token_alignment(
  output: contract.DrafterOutput,
  labels: Int[Array, "b n p"],
  codes: Float[Array, "v r"],
  first_slot: int,
) -> Float[Array, "b n p"]:
  """Sum over layers of 1 - cos(post-write feature, label's code)."""
  target = codes[labels]
  total = jnp.zeros(labels.shape)
  for features in output.layer_features:
    features = features[:, :, first_slot:].astype(jnp.float32)
    cosine = jnp.sum(features * target, axis=-1) * features.shape[-1] ** -0.5
    total = total + 1.0 - cosine
  return total


def _code_cosine(
  params, buffers, tables, output, supervision, *, cfg, window, chunk_size
):
  """The scale sg[mean CE] lets the term fade as the tokens are learned."""
  del params, tables, chunk_size
  codes = jax.lax.stop_gradient(buffers["transfer_codes"])
  per_token = token_alignment(output, supervision.labels, codes, cfg.first_slot)
  total = jnp.sum(per_token * supervision.weights)
  scale = jax.lax.stop_gradient(window.ce_scale) * window.scheduled_weight
  return scale * total, {"alignment": total}


def _token_ce(
  params, buffers, tables, output, supervision, *, cfg, window, chunk_size
):
  """No scale by the cross-entropy, which this term falls with by itself.

  Layers are further rows of the chunks, so that no more vocabulary rows exist
  together than in the base loss.
  """
  del buffers
  below = [
    dflash.flatten_blocks(states[:, :, cfg.first_slot :])
    for states in output.layer_features[:-1]
  ]
  constants = {"labels": supervision.labels, "weights": supervision.weights}
  constants = jax.tree.map(
    lambda x: jnp.concatenate([dflash.flatten_blocks(x)] * len(below)),
    constants,
  )
  total, _ = losses.chunked_sum(
    _through_the_head(cfg),
    chunk_size,
    {"norm": params["backbone"]["norm"]},
    jnp.concatenate(below),
    tables.head,
    constants,
  )
  return window.scheduled_weight * total, {"alignment": total}


def _through_the_head(cfg: configs.DrafterConfig):
  """The chunk loss of `losses.chunked_sum`: weighted cross-entropy."""

  def chunk_loss(core, states, head, constants):
    hidden = backbone.final_norm(core, states, cfg)
    log_q = jax.nn.log_softmax(model.head_logits(head, hidden))
    ce = losses.cross_entropy(log_q, constants["labels"])
    return jnp.sum(ce * constants["weights"]), {}

  return chunk_loss


def _nothing(
  params, buffers, tables, output, supervision, *, cfg, window, chunk_size
):
  del params, buffers, tables, output, supervision, cfg, window, chunk_size
  return jnp.zeros(()), {}


_NONE = LayerSupervision(
  with_feature=False, read=lambda injected: None, loss=_nothing
)

KINDS = {
  "code_cosine": LayerSupervision(
    with_feature=True,
    read=lambda injected: injected.feature,
    loss=_code_cosine,
  ),
  "token_ce": LayerSupervision(
    with_feature=False, read=lambda injected: injected.h, loss=_token_ce
  ),
}


def of(options: configs.DSpineOptions, for_loss: bool) -> LayerSupervision:
  """The supervision that the options name; none without weight or loss."""
  if options.alignment_weight == 0 or not for_loss:
    return _NONE
  return KINDS[options.layer_supervision]
