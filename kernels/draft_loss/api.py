"""Cross-entropy and L1 distance of a draft to its teacher (dspine, 7).

Both need the softmax of two rows over the vocabulary, and nothing of them after
their sums. XLA writes the rows to memory; the kernels multiply by the head
again instead, which takes longer and less memory (`cost.py`). Not here: weights
of slots, chunks of rows (`dspine_jax.training.losses`), candidates.
"""

import functools
import math
from collections.abc import Mapping

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import batching, checks, dispatch, triton_call
from kernels import block_sizes as sizes_lib
from kernels import cost as device_cost
from kernels.draft_loss import cost, reference

LossTerms = reference.LossTerms

OP = "draft_loss"
KERNELS = ("normalise", "distance", "gradient", "pallas_normalise")


def draft_loss(
  hidden: Float[Array, "*b d"],
  teacher: Float[Array, "*b d"],
  labels: Int[Array, "*b"],
  head: Float[Array, "v d"],
  *,
  implementation: str | None = None,
  block_sizes: Mapping[str, sizes_lib.BlockSizes] | None = None,
) -> LossTerms:
  """Terms of each row, from the states that the head would be applied to.

  With z = head @ hidden and t = head @ teacher:

    ce = logsumexp(z) - z[label]
    l1 = sum_v |softmax(z) - softmax(t)|

  The gradient goes to `hidden` alone, through ce and l1: teacher and head are
  frozen, and the normalisers are constants to whoever uses them.

  Args:
    hidden: states of the draft, bfloat16 or float32; they set the dtype of the
      products, whose sums are float32.
    teacher: states of the target that predict the same positions.
    labels: ids in [0, V).
    head: one row a token.
    implementation: "xla", "triton", "pallas" (its first pass; the others are
      Triton's) or None for the default.
    block_sizes: tiles of the kernels by name, see `KERNELS`. `rows` and `cols`
      (at least 32) are a tile of logits, `inner` the step along the width.

  Returns:
    ce, l1, and both normalisers (logsumexp of z and of t), float32.

  Raises:
    ValueError: shapes or names that do not fit.
    NotImplementedError: the named implementation cannot do this call.
  """
  check(hidden, teacher, labels, head)
  given = sizes_lib.freeze(block_sizes, KERNELS)
  teacher, head = teacher.astype(hidden.dtype), head.astype(hidden.dtype)
  name = dispatch.resolve(
    OP,
    implementation,
    hidden.dtype,
    {
      "triton": lambda: _no_triton(hidden, head),
      "pallas": lambda: _no_pallas(hidden, head),
    },
    lambda: _predicted(hidden, head),
  )
  return _draft_loss(
    name, given, hidden, teacher, labels.astype(jnp.int32), head
  )


def check(hidden, teacher, labels, head) -> None:
  """Raises ValueError where arguments of `draft_loss` do not fit together."""
  checks.floats(hidden=hidden, teacher=teacher, head=head)
  checks.integers(labels=labels)
  checks.not_empty(head=head)
  if hidden.ndim < 1 or teacher.shape != hidden.shape:
    raise ValueError(
      f"teacher: its shape {teacher.shape} is not that of hidden, "
      f"{hidden.shape}"
    )
  if labels.shape != hidden.shape[:-1]:
    raise ValueError(
      f"labels: the shape {labels.shape} is not that of the rows of hidden, "
      f"{hidden.shape[:-1]}"
    )
  if head.ndim != 2 or head.shape[1] != hidden.shape[-1]:
    raise ValueError(
      f"head: the shape {head.shape} is not [V, {hidden.shape[-1]}]"
    )


def _no_triton(hidden, head) -> str | None:
  """Why the Triton kernels cannot do this call, or None."""
  reason = triton_call.unavailable()
  if reason is not None:
    return reason
  if 0 in (hidden.size, head.size):
    return "an array is empty"
  return None


def _no_pallas(hidden, head) -> str | None:
  """Why the first pass cannot be Pallas's, or the others Triton's, or None."""
  reason = _no_triton(hidden, head)
  if reason is not None:
    return reason
  from kernels.draft_loss import pallas_mosaic

  return pallas_mosaic.unsupported(hidden, head)


def _predicted(hidden, head) -> float:
  """Expected time of XLA over that of the Triton kernels, in training."""
  vocab, width = head.shape
  rows = math.prod(hidden.shape[:-1])
  return device_cost.gain(
    cost.cost(
      rows,
      width,
      vocab,
      backward=True,
      chunk_rows=rows,
      itemsize=hidden.dtype.itemsize,
    )
  )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _draft_loss(name, given, hidden, teacher, labels, head):
  if name == "xla":
    return reference.draft_loss(hidden, teacher, labels, head)
  arrays = hidden, teacher, labels, head
  return LossTerms(*_kernels_forward(name, given, False, *arrays)[:4])


def _forward(name, given, hidden, teacher, labels, head):
  if name == "xla":

    def of_hidden(hidden):
      return reference.draft_loss(hidden, teacher, labels, head)

    return jax.vjp(of_hidden, hidden)
  out = _kernels_forward(name, given, True, hidden, teacher, labels, head)
  terms = LossTerms(*out[:4])
  slope, signs = out[4:]
  return terms, (hidden, labels, terms.log_normaliser, slope, signs, head)


def _backward(name, given, residuals, cotangent: LossTerms):
  if name == "xla":
    (d_hidden,) = residuals(cotangent)
    return d_hidden, None, None, None
  from kernels.draft_loss import triton

  *rows, head = residuals
  gradient = functools.partial(triton.gradient, given)
  (d_hidden,) = batching.rows_first(gradient, num_rows=7)(
    *rows, cotangent.ce, cotangent.l1, head
  )
  return d_hidden, None, None, None


_draft_loss.defvjp(_forward, _backward)


def _kernels_forward(name, given, with_signs, *arrays):
  """The four terms, and for the gradient: slope and signs."""
  from kernels.draft_loss import triton

  normalise = triton.normalise
  if name == "pallas":
    from kernels.draft_loss import pallas_mosaic

    normalise = pallas_mosaic.normalise
  forward = functools.partial(triton.forward, normalise, given, with_signs)
  return batching.rows_first(forward, num_rows=3)(*arrays)
