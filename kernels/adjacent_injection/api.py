"""The public op: adjacent injection of one layer, with its gradient.

Not here: what it computes (`reference.py`), the kernels (`triton_forward.py`,
`triton_backward.py`, `pallas_mosaic.py`), what they cost (`cost.py`).
"""

import functools
from collections.abc import Mapping
from typing import NamedTuple

import jax
from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels import batching, checks, dispatch, triton_call
from kernels import block_sizes as block_sizes_lib
from kernels import cost as cost_lib
from kernels.adjacent_injection import cost, reference
from kernels.block_sizes import BlockSizes

OP = "adjacent_injection"
# Kernels that block sizes may be given for: Triton's, and Pallas's.
KERNELS = (
  "read",
  "message",
  "write",
  "message_backward",
  "read_backward",
  "input_backward",
  "pallas_read",
  "pallas_message",
  "pallas_write",
)


class _Options(NamedTuple):
  """What is known when the op is traced."""

  implementation: str
  with_feature: bool
  given: block_sizes_lib.Given


def adjacent_injection(
  h: Float[Array, "*b k d"],
  tokens: Int[Array, "*b k"],
  replaced: Bool[Array, "*b"],
  codes: Float[Array, "v r"],
  weights: reference.Weights,
  *,
  with_feature: bool = False,
  implementation: str | None = None,
  block_sizes: Mapping[str, BlockSizes] | None = None,
) -> reference.Injected:
  """One layer's write for all slots of all blocks (dspine, 4).

  Products accumulate in float32 and norms are float32; the rest has the dtype
  of `h`, to which the weights are cast. Gradients reach `h` and the weights,
  each in its own dtype; codes are frozen and get none. The gradient of "pallas"
  is that of the reference, computed anew from the arguments.

  Args:
    h: the layer's output before the write, bfloat16 or float32.
    tokens: the true token of each slot; only that of slot 0 (the anchor) is
      read where a block is not `replaced`. Not checked to be in [0, V).
    replaced: blocks that read true predecessors instead of predicted features.
    codes: frozen token codes, bfloat16 or float32.
    weights: of this layer's injection, best float32.
    with_feature: whether to give the feature of the written states, too.
    implementation: "xla", "triton", "pallas", or None for the default.
    block_sizes: sizes of kernels by name (`KERNELS`), untuned for the rest.

  Returns:
    States after the write, slot 0 unchanged, and their features or None.

  Raises:
    ValueError: shapes or dtypes that do not fit, unknown names.
    NotImplementedError: the named implementation cannot do this call.
  """
  check(h, tokens, replaced, codes, weights)
  given = block_sizes_lib.freeze(block_sizes, KERNELS)
  name = dispatch.resolve(
    OP,
    implementation,
    h.dtype,
    {
      "triton": triton_call.unavailable,
      "pallas": functools.partial(_pallas_cannot, h, weights),
    },
    functools.partial(_predicted_gain, h, weights, with_feature),
  )
  options = _Options(name, with_feature, given)
  h, codes, weights = batching.vary_like(
    (h, codes, weights), h, *jax.tree.leaves(weights)
  )
  return _injection(options, h, tokens, replaced, codes, weights)


def check(h, tokens, replaced, codes, weights):
  """ValueError for the first argument that does not fit."""
  if not isinstance(weights, reference.Weights):
    raise ValueError(f"weights: is {type(weights)}, must be reference.Weights")
  checks.floats(h=h, codes=codes, **weights._asdict())
  checks.integers(tokens=tokens)
  checks.booleans(replaced=replaced)
  checks.not_empty(codes=codes)
  for name, array, axes in (("h", h, 2), ("weights.bias", weights.bias, 1)):
    if array.ndim < axes:
      raise ValueError(f"{name}: has shape {array.shape}, needs {axes} axes")
  if codes.ndim != 2:
    raise ValueError(f"codes: has shape {codes.shape}, must be [V, R]")
  width, rank, size = h.shape[-1], codes.shape[1], weights.bias.shape[-1]
  expected = {
    "tokens": (tokens, h.shape[:-1]),
    "replaced": (replaced, h.shape[:-2]),
    "weights.readout": (weights.readout, (width, rank)),
    "weights.write": (weights.write, (size, width)),
    "weights.message": (weights.message, (rank, size)),
    "weights.receiver_gate": (weights.receiver_gate, (rank, size)),
    "weights.predecessor_gate": (weights.predecessor_gate, (rank, size)),
    "weights.bias": (weights.bias, (size,)),
  }
  for name, (array, shape) in expected.items():
    if array.shape != shape:
      raise ValueError(f"{name}: has shape {array.shape}, must be {shape}")


def _pallas_cannot(h, weights) -> str | None:
  """Why the Pallas kernel cannot do this call, or None."""
  reason = dispatch.needs_hopper()
  if reason is None:
    from kernels.adjacent_injection import pallas_mosaic

    reason = pallas_mosaic.unsupported(h, weights)
  return reason


def _predicted_gain(h, weights, with_feature) -> float:
  """Of the forward, which decoding has no more than; 0 in float32.

  Exact float32 products use no tensor cores in the kernels; XLA's may.
  """
  if h.dtype == jnp.float32:
    return 0.0
  counted = cost.cost(
    rows=h.size // h.shape[-1],
    width=h.shape[-1],
    rank=weights.readout.shape[1],
    message=weights.bias.shape[0],
    with_feature=with_feature,
    backward=False,
  )
  return cost_lib.gain(counted)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _injection(options: _Options, h, tokens, replaced, codes, weights):
  arguments = (h, tokens, replaced, codes)
  if options.implementation == "triton":
    return _triton(options, *arguments, weights, save=False)[0]
  if options.implementation == "pallas":
    from kernels.adjacent_injection import pallas_mosaic

    return pallas_mosaic.forward(
      *arguments, weights, options.with_feature, options.given
    )
  return reference.adjacent_injection(*arguments, weights, options.with_feature)


def _triton(options, h, tokens, replaced, codes, weights, *, save):
  from kernels.adjacent_injection import triton_forward

  return triton_forward.forward(
    h,
    tokens.astype(jnp.int32),
    replaced,
    codes,
    _cast(weights, h.dtype),
    options.with_feature,
    options.given,
    save,
  )


def _cast(weights, dtype):
  """The operands of products in `dtype`; the bias is an addend of sums."""
  cast = jax.tree.map(lambda x: x.astype(dtype), weights)
  return cast._replace(bias=weights.bias.astype(jnp.float32))


def _forward(options, h, tokens, replaced, codes, weights):
  """The result, and what `_backward` needs of it."""
  arguments = (h, tokens, replaced, codes, weights)
  if options.implementation == "xla":
    out, vjp = _reference_vjp(options, *arguments)
    return out, vjp
  if options.implementation == "pallas":
    return _injection(options, *arguments), arguments
  out, saved = _triton(options, *arguments, save=True)
  return out, (arguments, saved)


def _reference_vjp(options, h, tokens, replaced, codes, weights):
  return jax.vjp(
    lambda h, weights: reference.adjacent_injection(
      h, tokens, replaced, codes, weights, options.with_feature
    ),
    h,
    weights,
  )


def _backward(options, residuals, cotangent):
  if options.implementation == "xla":
    d_h, d_weights = residuals(cotangent)
  elif options.implementation == "pallas":
    _, vjp = _reference_vjp(options, *residuals)
    d_h, d_weights = vjp(cotangent)
  else:
    from kernels.adjacent_injection import triton_backward

    (h, tokens, replaced, codes, weights), saved = residuals
    d_h, d_weights = triton_backward.backward(
      h,
      tokens.astype(jnp.int32),
      replaced,
      codes,
      _cast(weights, h.dtype),
      saved,
      cotangent,
      options.given,
    )
    d_weights = jax.tree.map(
      lambda d, weight: d.astype(weight.dtype), d_weights, weights
    )
  return d_h, None, None, None, d_weights


_injection.defvjp(_forward, _backward)
