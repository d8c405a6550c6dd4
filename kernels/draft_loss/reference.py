"""Cross-entropy and L1 distance over the vocabulary in plain JAX.

With z = E h of the draft, t = E g of the teacher (the target's state at the
position before), q = softmax(z), p = softmax(t) and the label y (dspine, 7):

  ce = logsumexp(z) - z_y
  l1 = sum_v |q_v - p_v|, twice the total variation
  d/dz_v = g_ce (q_v - 1[v = y]) + g_l1 q_v (s_v - sum_u q_u s_u),
  s = 1 where q >= p, else -1 (the slope of `jnp.abs`)

It is the specification and what XLA runs. Whole rows of logits exist here: the
caller takes few rows at a time (`dspine_jax.training.losses.chunked_sum`). Two
steps have a written-out gradient, the same one in a form that XLA does faster.
"""

from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import batching


class LossTerms(NamedTuple):
  """Terms of each row, all [*b] float32.

  Attributes:
    ce: cross-entropy of the label under the draft.
    l1: L1 distance of draft and teacher.
    log_normaliser: logsumexp of the draft's logits, without gradient.
    teacher_log_normaliser: that of the teacher's, without gradient.
  """

  ce: Float[Array, "*b"]
  l1: Float[Array, "*b"]
  log_normaliser: Float[Array, "*b"]
  teacher_log_normaliser: Float[Array, "*b"]


def logits(
  hidden: Float[Array, "n d"], head: Float[Array, "v d"]
) -> Float[Array, "n v"]:
  """`hidden @ head.T` with float32 results; both have one dtype.

  The cotangent is rounded to that dtype before its products. Left in float32,
  as autodiff leaves it, it would have XLA convert the head to float32 too, and
  multiply at half the rate.
  """
  return _product(hidden, batching.vary_like(head, hidden))


@jax.custom_vjp
def _product(hidden, head):
  return _float32("nd,vd->nv", hidden, head)


def _product_forward(hidden, head):
  return _product(hidden, head), (hidden, head)


def _product_backward(residuals, cotangent):
  hidden, head = residuals
  cotangent = cotangent.astype(hidden.dtype)
  d_hidden = _float32("nv,vd->nd", cotangent, head)
  d_head = _float32("nv,nd->vd", cotangent, hidden)
  return d_hidden.astype(hidden.dtype), d_head.astype(head.dtype)


def _float32(subscripts, *operands):
  return jnp.einsum(subscripts, *operands, preferred_element_type=jnp.float32)


_product.defvjp(_product_forward, _product_backward)


@jax.custom_vjp
def at_labels(
  scores: Float[Array, "n v"], labels: Int[Array, "n"]
) -> Float[Array, "n"]:
  """The score of each row's label.

  Its gradient is a comparison instead of a scatter, which would be a pass of
  its own over the cotangent of `scores`.
  """
  return jnp.take_along_axis(scores, labels[:, None], axis=-1)[:, 0]


def _at_labels_forward(scores, labels):
  like = jnp.zeros((0, scores.shape[-1]), scores.dtype)
  return at_labels(scores, labels), (labels, like)


def _at_labels_backward(residuals, cotangent):
  labels, like = residuals
  is_label = jnp.arange(like.shape[-1])[None] == labels[:, None]
  return jnp.where(is_label, cotangent[:, None], 0.0), None


at_labels.defvjp(_at_labels_forward, _at_labels_backward)


def draft_loss(
  hidden: Float[Array, "*b d"],
  teacher: Float[Array, "*b d"],
  labels: Int[Array, "*b"],
  head: Float[Array, "v d"],
) -> LossTerms:
  """The terms of all rows at once; gradient to `hidden` alone.

  Args:
    hidden: the draft's states before the head.
    teacher: the target's, which predict the same positions.
    labels: ids below V.
    head: one row a token, in the dtype of the states.
  """
  rows, width = hidden.shape[:-1], hidden.shape[-1]
  head = lax.stop_gradient(head)
  z = logits(hidden.reshape(-1, width), head)
  t = logits(lax.stop_gradient(teacher).reshape(-1, width), head)
  log_normaliser = jax.nn.logsumexp(z, axis=-1)
  teacher_log_normaliser = jax.nn.logsumexp(t, axis=-1)
  q = jnp.exp(z - log_normaliser[:, None])
  p = jnp.exp(t - teacher_log_normaliser[:, None])
  terms = LossTerms(
    ce=log_normaliser - at_labels(z, labels.reshape(-1)),
    l1=jnp.sum(jnp.abs(q - p), axis=-1),
    log_normaliser=lax.stop_gradient(log_normaliser),
    teacher_log_normaliser=teacher_log_normaliser,
  )
  return LossTerms(*(term.reshape(rows) for term in terms))
