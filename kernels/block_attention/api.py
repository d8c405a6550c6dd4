"""The public op: draft blocks attend to their context and to themselves.

The context is one sequence for each row of the batch, common to its blocks; a
block sees the positions before its anchor, in sliding layers only the last of
them, and of its own slots those that the mask allows. Training has many blocks
over a sequence, decoding one block over a cache. Not here: what it computes
(`reference.py`), who may see what (the caller), positions, projections.
"""

import functools
from collections.abc import Mapping

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels import block_sizes as block_sizes_lib
from kernels import checks, dispatch, triton_call
from kernels import cost as cost_lib
from kernels.block_attention import cost, heuristics, xla
from kernels.block_sizes import BlockSizes


def block_attention(
  q: Float[Array, "b n k q h"],
  own_k: Float[Array, "b n k g h"],
  own_v: Float[Array, "b n k g h"],
  context_k: Float[Array, "b g s h"],
  context_v: Float[Array, "b g s h"],
  visible: Int[Array, "b n"],
  starts: Int[Array, "b n k"] | None,
  own_mask: Bool[Array, "k k"],
  *,
  implementation: str | None = None,
  block_sizes: Mapping[str, BlockSizes] | None = None,
) -> Float[Array, "b n k q h"]:
  """Attention of every slot to [context | own block] (baselines, 2).

  softmax([q context_k^T | q own_k^T] / sqrt(H)) [context_v | own_v] over the
  keys that are seen, scores and sums in float32; query head i reads key head
  i // (Q / G). A slot that sees nothing gives zeros.

  Args:
    q: queries of all slots; Q is a multiple of G.
    own_k: keys of the blocks' own slots.
    own_v: values, like `own_k`.
    context_k: keys of the context, heads before positions.
    context_v: values, like `context_k`.
    visible: a block sees context positions < visible; 0 for none of them. The
      others must hold finite numbers all the same: zero times NaN is NaN.
    starts: a slot sees context positions from here on; None for all.
    own_mask: True where query slot i sees slot j of its block.
    implementation: "xla", "triton", or None for the default.
    block_sizes: sizes of kernels by name (`heuristics.KERNELS`).

  Returns:
    The heads' outputs in the dtype of `q`.

  Raises:
    ValueError: shapes that do not fit, unknown names.
    NotImplementedError: the named implementation cannot do this call.
  """
  arrays = (q, own_k, own_v, context_k, context_v)
  _check(*arrays, visible, starts, own_mask)
  given = block_sizes_lib.freeze(block_sizes, heuristics.KERNELS)
  name = dispatch.resolve(
    heuristics.OP,
    implementation,
    q.dtype,
    {"triton": functools.partial(_triton_cannot, arrays)},
    functools.partial(_predicted_gain, q, context_k),
  )
  return _attend(name, given, *arrays, visible, starts, own_mask)


def _check(q, own_k, own_v, context_k, context_v, visible, starts, own_mask):
  """ValueError for the first argument that does not fit."""
  for name, array, axes in (("q", q, 5), ("context_k", context_k, 4)):
    if array.ndim != axes:
      raise ValueError(
        f"{name}: has shape {array.shape}, must have {axes} axes"
      )
  checks.floats(
    q=q, own_k=own_k, own_v=own_v, context_k=context_k, context_v=context_v
  )
  checks.integers(visible=visible, starts=starts)
  checks.booleans(own_mask=own_mask)
  checks.not_empty(q=q, context_k=context_k)
  *per_slot, heads, width = q.shape
  groups, context = context_k.shape[1:3]
  if groups < 1 or heads % groups:
    raise ValueError(
      f"q={q.shape}: its {heads} heads are no multiple of the {groups} key "
      "heads of context_k"
    )
  batch, _, slots = per_slot
  expected = {
    "own_k": (own_k, (*per_slot, groups, width)),
    "own_v": (own_v, (*per_slot, groups, width)),
    "context_k": (context_k, (batch, groups, context, width)),
    "context_v": (context_v, (batch, groups, context, width)),
    "visible": (visible, tuple(per_slot[:2])),
    "starts": (starts, tuple(per_slot)),
    "own_mask": (own_mask, (slots, slots)),
  }
  for name, (array, shape) in expected.items():
    if array is not None and array.shape != shape:
      raise ValueError(f"{name}: has shape {array.shape}, must be {shape}")


def _triton_cannot(arrays) -> str | None:
  """Why the Triton kernels cannot do this call, or None."""
  q, _, _, context_k, _ = arrays
  return triton_call.unavailable() or heuristics.unsupported(
    heuristics.shape_of(q, context_k), [x.dtype for x in arrays]
  )


def _predicted_gain(q, context_k) -> float:
  """Of the forward, which decoding has no more than; 0 in float32.

  Exact float32 products use no tensor cores in the kernels; XLA's may.
  """
  if q.dtype == jnp.float32:
    return 0.0
  shape = heuristics.shape_of(q, context_k)
  return cost_lib.gain(cost.of_shape(shape, backward=False))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0, 1))
def _attend(implementation, given, *arguments):
  if implementation == "triton":
    from kernels.block_attention import triton

    return triton.forward(given, *arguments)[0]
  return xla.block_attention(*arguments)


def _attend_forward(implementation, given, *arguments):
  if implementation == "triton":
    from kernels.block_attention import triton

    out, lse = triton.forward(given, *arguments)
    return out, (out, lse, arguments)
  arrays, bounds = arguments[:5], arguments[5:]

  def attend(*arrays):
    return xla.block_attention(*arrays, *bounds)

  return jax.vjp(attend, *arrays)


def _attend_backward(implementation, given, residuals, d_out):
  if implementation == "triton":
    from kernels.block_attention import triton

    out, lse, arguments = residuals
    grads = triton.backward(given, out, lse, d_out, *arguments)
  else:
    grads = residuals(d_out)
  # None for visible, starts and the mask.
  return (*grads, None, None, None)


_attend.defvjp(_attend_forward, _attend_backward)
