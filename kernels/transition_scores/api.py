"""Scores of adjacent pairs of candidate tokens, and the greedy draft of them.

The transition cache of DSpine (section 6 of the method's description): a
slot's last write is redone with the code of each token that may precede it, and
the final-normed result scores each token that may follow. `reference.py` is the
specification. Not here: top-k, sampling, and how a method uses the draft.
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from kernels import block_sizes as tiles
from kernels import checks, dispatch, triton_call
from kernels import cost as device_cost
from kernels.adjacent_injection import reference as injection
from kernels.block_sizes import BlockSizes
from kernels.transition_scores import cost as cost_lib
from kernels.transition_scores import reference

KERNELS = (
  "scores_receiver",
  "scores_message",
  "scores_through",
  "scores_length",
  "scores_pairs",
  "scores_best",
)

# Predecessors and candidates of a slot are one tile of a program; more of them,
# by bytes of a number, would not fit its registers.
MOST_PER_SLOT = {2: 128, 4: 32}


def transition_scores(
  u: Float[Array, "*b d"],
  predecessors: Int[Array, "*b p"],
  candidates: Int[Array, "*b c"],
  codes: Float[Array, "v r"],
  head: Float[Array, "v d"],
  weights: injection.Weights,
  norm_scale: Float[Array, "d"],
  *,
  eps: float,
  implementation: str | None = None,
  block_sizes: Mapping[str, BlockSizes] | None = None,
) -> Float[Array, "*b p c"]:
  """s(a, b) = E_b . q(a) of all pairs, float32 (dspine, 6).

  q(a) is the final norm of the last write of `u`, redone with a's code. `u`,
  `weights` and `norm_scale` have gradients; `codes` and `head` are constants.

  Args:
    u: [..., D], each slot's state before the last write; its dtype (bfloat16 or
      float32) is that of the products.
    predecessors: [..., P], tokens a that may come before the slot. Not checked
      to be within the vocabulary.
    candidates: [..., C], tokens b that may take it, likewise.
    codes: [V, R], frozen token codes.
    head: [V, D], frozen LM head E.
    weights: of the last layer's injection.
    norm_scale: [D], of the final norm.
    eps: of the final norm.
    implementation: "xla", "triton", or None for the default.
    block_sizes: tiles of kernels by name, see `KERNELS`.

  Returns:
    [..., P, C] float32.

  Raises:
    ValueError: a shape does not fit, or a name is unknown.
    NotImplementedError: the named implementation cannot do this call.
  """
  sizes = tiles.freeze(block_sizes, KERNELS)
  _check(u, 1, codes, head, weights, norm_scale)
  checks.integers(predecessors=predecessors, candidates=candidates)
  _check_shape("predecessors", predecessors, (*u.shape[:-1], None))
  _check_shape("candidates", candidates, (*u.shape[:-1], None))
  name = dispatch.resolve(
    "transition_scores",
    implementation,
    u.dtype,
    {"triton": lambda: _limits(u, predecessors, candidates)},
    lambda: _gain(u, predecessors.shape[-1], candidates, codes, weights),
  )
  return _scores(
    _Static(name, float(eps), sizes),
    u,
    predecessors.astype(jnp.int32),
    candidates.astype(jnp.int32),
    codes,
    head,
    weights,
    norm_scale,
  )


def greedy_draft(
  u: Float[Array, "*b m d"],
  anchor: Int[Array, "*b"],
  candidates: Int[Array, "*b m c"],
  codes: Float[Array, "v r"],
  head: Float[Array, "v d"],
  weights: injection.Weights,
  norm_scale: Float[Array, "d"],
  *,
  eps: float,
  implementation: str | None = None,
  block_sizes: Mapping[str, BlockSizes] | None = None,
) -> Int[Array, "*b m"]:
  """The draft that takes the best successor of each token it has taken.

  b_1 = argmax_b s(anchor, b), b_t = argmax_b s(b_{t-1}, b) over the candidates
  of slot t, where the first of equal scores counts. The kernels compare scores
  without the norm, a positive factor common to all b, so only ties that its
  rounding makes can fall differently. There is no gradient.

  Args:
    u: [..., M, D], states of the proposed slots before the last write.
    anchor: [...], the token before slot 0.
    candidates: [..., M, C]; within the vocabulary.
    codes: [V, R], frozen token codes.
    head: [V, D], frozen LM head.
    weights: of the last layer's injection.
    norm_scale: [D], of the final norm.
    eps: of the final norm.
    implementation: "xla", "triton", or None for the default.
    block_sizes: tiles of kernels by name, see `KERNELS`.

  Returns:
    [..., M] int32 tokens.

  Raises:
    ValueError: a shape does not fit, or a name is unknown.
    NotImplementedError: the named implementation cannot do this call.
  """
  sizes = tiles.freeze(block_sizes, KERNELS)
  _check(u, 2, codes, head, weights, norm_scale)
  _check_shape("candidates", candidates, (*u.shape[:-1], None))
  _check_shape("anchor", anchor, u.shape[:-2])
  checks.integers(anchor=anchor, candidates=candidates)
  checks.not_empty(candidates=candidates)
  name = dispatch.resolve(
    "greedy_draft",
    implementation,
    u.dtype,
    {"triton": lambda: _limits(u, candidates, candidates)},
    lambda: _gain(u, candidates.shape[-1], candidates, codes, weights, True),
  )
  u, codes, head, weights, norm_scale = lax.stop_gradient(
    (u, codes, head, weights, norm_scale)
  )
  anchor, candidates = anchor.astype(jnp.int32), candidates.astype(jnp.int32)
  if name == "xla":
    return reference.greedy_draft(
      u, anchor, candidates, codes, head, weights, norm_scale, eps
    )
  from kernels.transition_scores import triton

  return triton.greedy_draft(
    u, anchor, candidates, codes, head, weights, norm_scale, sizes
  )


class _Static(NamedTuple):
  """What `_scores` is compiled for."""

  implementation: str
  eps: float
  sizes: tiles.Given


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _scores(
  static, u, predecessors, candidates, codes, head, weights, norm_scale
):
  arrays = u, predecessors, candidates, codes, head, weights, norm_scale
  if static.implementation == "xla":
    return reference.transition_scores(*arrays, static.eps)
  from kernels.transition_scores import triton

  return triton.transition_scores(*arrays, static.eps, static.sizes)


def _forward(
  static, u, predecessors, candidates, codes, head, weights, norm_scale
):
  constants = predecessors, candidates, codes, head
  if static.implementation == "xla":
    return _differentiated(static, u, constants, weights, norm_scale)
  out = _scores(static, u, *constants, weights, norm_scale)
  return out, (u, constants, weights, norm_scale)


def _backward(static, residuals, cotangent):
  """The reference's, for every implementation; none for ids and tables."""
  if static.implementation != "xla":
    residuals = _differentiated(static, *residuals)[1]
  d_u, d_weights, d_scale = residuals(cotangent)
  return d_u, None, None, None, None, d_weights, d_scale


def _differentiated(static, u, constants, weights, norm_scale):
  """Scores and their vjp with respect to u, weights and norm_scale."""

  predecessors, candidates, codes, head = constants

  def of_varied(u, weights, norm_scale):
    arrays = u, predecessors, candidates, codes, head, weights, norm_scale
    return reference.transition_scores(*arrays, static.eps)

  return jax.vjp(of_varied, u, weights, norm_scale)


_scores.defvjp(_forward, _backward)


def _gain(u, count, candidates, codes, weights, draft=False) -> float:
  """Expected time of XLA over that of the kernels.

  Exact float32 products have no matrix unit: there the kernels promise nothing.
  """
  if u.dtype != jnp.bfloat16:
    return 0.0
  slots, per_slot = (
    candidates.size // candidates.shape[-1],
    candidates.shape[-1],
  )
  counted = cost_lib.cost(
    1,
    slots,
    count,
    per_slot,
    u.shape[-1],
    codes.shape[-1],
    weights.bias.shape[0],
    u.dtype.itemsize,
    draft=draft,
  )
  return device_cost.gain(counted)


def _limits(u, predecessors, candidates) -> str | None:
  """Why the kernels cannot do this call, or None."""
  reason = triton_call.unavailable()
  if reason is not None:
    return reason
  if 0 in (u.size, predecessors.size, candidates.size):
    return "an array is empty"
  count = max(predecessors.shape[-1], candidates.shape[-1])
  most = MOST_PER_SLOT[u.dtype.itemsize]
  if count > most:
    return f"{count} tokens a slot of {u.dtype}: the kernels take {most}"
  return None


def _check(u, least_axes, codes, head, weights, norm_scale) -> None:
  """Raises ValueError where shapes contradict `u`, `codes` and the bias."""
  if not isinstance(weights, injection.Weights):
    raise ValueError(f"weights: is {type(weights)}, must be reference.Weights")
  checks.floats(
    u=u,
    codes=codes,
    head=head,
    norm_scale=norm_scale,
    **weights._asdict(),
  )
  if u.ndim < least_axes:
    raise ValueError(f"u has shape {u.shape}, expected {least_axes} axes")
  _check_shape("codes", codes, (None, None))
  _check_shape("weights.bias", weights.bias, (None,))
  width, (vocab, rank) = u.shape[-1], codes.shape
  size = weights.bias.shape[0]
  expected = {
    "head": (head, (vocab, width)),
    "norm_scale": (norm_scale, (width,)),
    "weights.readout": (weights.readout, (width, rank)),
    "weights.write": (weights.write, (size, width)),
    "weights.message": (weights.message, (rank, size)),
    "weights.receiver_gate": (weights.receiver_gate, (rank, size)),
    "weights.predecessor_gate": (weights.predecessor_gate, (rank, size)),
  }
  for name, (array, shape) in expected.items():
    _check_shape(name, array, shape)


def _check_shape(name: str, array, shape) -> None:
  """Raises ValueError unless `array` has the shape; None is any size."""
  fits = len(array.shape) == len(shape) and all(
    want in (None, size) for size, want in zip(array.shape, shape, strict=True)
  )
  if not fits:
    wanted = ", ".join("any" if size is None else str(size) for size in shape)
    raise ValueError(f"{name} has shape {array.shape}, expected ({wanted})")
