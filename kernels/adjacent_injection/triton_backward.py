"""Backward of the adjacent injection: three Triton kernels, XLA's products.

The message z was saved times s = rms(h), and the gate before its sigmoid g. A
state's cotangent dh' and, with the feature, a read's dy' come in.

  message  dz = dh' O^T [+ dy' (O R)^T] and, each times the scale that its raw
           operand had in the forward,
             d_receiver, d_gate = dz * z * (1 - g),  d_content = dz * s * g
  read     dy_t = d_receiver_t W_q^T - y_t (f . df)_t / |y_t|^2 [+ dy'_t]
                  + d_gate_{t+1} W_p^T + d_content_{t+1} W_m^T,
           the second line where t + 1 read f_t; and the raw predecessors p
  input    dh = dh' + dy R^T + h (z . dz) / |h|^2

f . df is a sum over Z of what the message kernel has at hand, since f W is: so
dy needs no second pass over R. The gradient of a weight is a plain product over
all rows of two arrays that these kernels read or wrote. It is left to XLA: a
kernel of ours would have the same 2 T M N FLOPs and the same bytes. Only p has
no other reader: written here (T R numbers, from tiles of y at hand), it spares
XLA's gather and select, which moves 3 T R.
"""

from typing import NamedTuple

import jax
import triton
from jax import numpy as jnp

from kernels import batching, block_sizes
from kernels.adjacent_injection import (
  reference,
  triton_backward_kernels,
  triton_forward,
  triton_tiles,
)


class OfRows(NamedTuple):
  """What the row kernels give: a cotangent, and operands of the weights'.

  Attributes:
    dh: [*b, K, D].
    dy: [*b, K, R], of the reads.
    p: [*b, K, R], raw predecessors.
    d_receiver: [*b, K, Z], of the raw product y W_q.
    d_gate: [*b, K, Z], of the raw product p W_p.
    d_content: [*b, K, Z], of the raw product p W_m.
  """

  dh: jax.Array
  dy: jax.Array
  p: jax.Array
  d_receiver: jax.Array
  d_gate: jax.Array
  d_content: jax.Array


def backward(
  h: jax.Array,
  tokens: jax.Array,
  replaced: jax.Array,
  codes: jax.Array,
  weights: reference.Weights,
  saved: triton_forward.Saved,
  cotangent: reference.Injected,
  given: block_sizes.Given,
) -> tuple[jax.Array, reference.Weights]:
  """Cotangents of h and, in float32, of the weights (cast like `forward`'s)."""
  d_read = None
  if saved.y_after is not None:
    _, through_norm = jax.vjp(
      lambda y: reference.normalised(y).astype(y.dtype), saved.y_after
    )
    (d_read,) = through_norm(cotangent.feature)
  rows = (cotangent.h, h, *saved[:6], tokens, replaced)
  if d_read is not None:
    rows = (*rows, d_read)

  def of_rows(*arguments):
    d_out, h, *of_slots = arguments[: len(rows)]
    codes, through, *weights = arguments[len(rows) :]
    lead, slots = h.shape[:-1], h.shape[-2]

    def flat(x):
      return x.reshape(-1, *x.shape[len(lead) :])

    *kept, tokens, replaced = of_slots[:8]
    found = _of_flat_rows(
      flat(d_out),
      flat(h),
      triton_forward.Saved(*map(flat, kept), through=through),
      flat(of_slots[8]) if len(of_slots) > 8 else None,
      flat(tokens),
      replaced.reshape(-1).astype(jnp.int32),
      codes,
      reference.Weights(*weights),
      slots=slots,
      given=given,
    )
    return tuple(x.reshape(*lead, *x.shape[1:]) for x in found)

  found = OfRows(
    *batching.rows_first(of_rows, len(rows))(
      *rows, codes, saved.through, *weights
    )
  )
  return found.dh, of_weights(h, weights, saved, cotangent.h, d_read, found)


def _of_flat_rows(
  d_out, h, saved, d_read, tokens, replaced, codes, weights, *, slots, given
) -> OfRows:
  """The kernels over [T, D] rows."""
  *d_products, written, own, following = message_backward(
    d_out, saved, d_read, replaced, weights, slots=slots, given=given
  )
  dy, p = read_backward(
    d_products,
    saved,
    (own, following),
    d_read,
    tokens,
    replaced,
    codes,
    weights,
    slots=slots,
    given=given,
  )
  dh = input_backward(
    dy, weights.readout, d_out, h, saved.h_square, written, given
  )
  return OfRows(dh, dy, p, *d_products)


def message_backward(d_out, saved, d_read, replaced, weights, *, slots, given):
  """Three cotangents [T, Z] of raw products, three partial sums of rows."""
  (rows, width), dtype = d_out.shape, d_out.dtype
  size, rank = saved.z.shape[1], saved.y.shape[1]
  sizes = triton_tiles.choose(
    "message_backward", rows, size, given, dtype, d=width, z=size
  )
  parts = triton.cdiv(size, sizes.cols)
  of_size = triton_tiles.shape(dtype, rows, size)
  of_parts = triton_tiles.shape(jnp.float32, rows, parts)
  with_read = d_read is not None
  return triton_tiles.launch(
    triton_backward_kernels.injection_message_backward,
    d_out,
    weights.write,
    # The kernel has these pointers all the same, and never follows them.
    d_read if with_read else saved.y,
    saved.through if with_read else weights.readout,
    saved.z,
    saved.gate,
    saved.receiver,
    weights.bias,
    saved.h_square,
    saved.y_square,
    replaced,
    out_shape=(of_size,) * 3 + (of_parts,) * 3,
    cols=size,
    sizes=sizes,
    SLOTS=slots,
    D=width,
    R=rank,
    Z=size,
    SQRT_R=rank**0.5,
    PARTS=parts,
    WITH_READ=with_read,
  )


def read_backward(
  d_products,
  saved,
  parts,
  d_read,
  tokens,
  replaced,
  codes,
  weights,
  *,
  slots,
  given,
):
  """Cotangent of the reads and the raw predecessors, both [T, R]."""
  (rows, rank), dtype = saved.y.shape, saved.y.dtype
  size = saved.z.shape[1]
  sizes = triton_tiles.choose(
    "read_backward", rows, rank, given, dtype, r=rank, z=size
  )
  with_read = d_read is not None
  return triton_tiles.launch(
    triton_backward_kernels.injection_read_backward,
    *d_products,
    weights.receiver_gate,
    weights.predecessor_gate,
    weights.message,
    saved.y,
    saved.y_square,
    *parts,
    d_read if with_read else saved.y,
    tokens,
    replaced,
    codes,
    out_shape=(triton_tiles.shape(dtype, rows, rank),) * 2,
    cols=rank,
    sizes=sizes,
    SLOTS=slots,
    R=rank,
    Z=size,
    VOCAB=codes.shape[0],
    PARTS=parts[0].shape[1],
    BLOCK_PARTS=triton.next_power_of_2(parts[0].shape[1]),
    WITH_READ=with_read,
    SAME_DTYPE=codes.dtype == dtype,
  )


def input_backward(dy, readout, d_out, h, h_square, written, given):
  """Cotangent of the states, [T, D]."""
  (rows, rank), width = dy.shape, h.shape[1]
  sizes = triton_tiles.choose(
    "input_backward", rows, width, given, h.dtype, d=width, r=rank
  )
  (dh,) = triton_tiles.launch(
    triton_backward_kernels.injection_input_backward,
    dy,
    readout,
    d_out,
    h,
    h_square,
    written,
    out_shape=(triton_tiles.shape(h.dtype, rows, width),),
    cols=width,
    sizes=sizes,
    D=width,
    R=rank,
    PARTS=written.shape[1],
    BLOCK_PARTS=triton.next_power_of_2(written.shape[1]),
  )
  return dh


def of_weights(h, weights, saved, d_out, d_read, found) -> reference.Weights:
  """Cotangents of the weights in float32: products over all rows."""
  rank = saved.y.shape[-1]
  # The bias is added to the gate itself, whose cotangent was saved scaled.
  square = jnp.maximum(saved.y_square, reference.TINY)
  unscaled = found.d_receiver * (jnp.sqrt(square) * rank**-0.5)[..., None]
  d_write = _contracted(saved.z, d_out)
  d_readout = _contracted(h, found.dy)
  if d_read is not None:
    d_through = _contracted(saved.z, d_read).astype(h.dtype)
    d_write += _product(d_through, weights.readout.T)
    d_readout += _product(weights.write.T, d_through)
  return reference.Weights(
    readout=d_readout,
    write=d_write,
    message=_contracted(found.p, found.d_content),
    receiver_gate=_contracted(saved.y, found.d_receiver),
    predecessor_gate=_contracted(found.p, found.d_gate),
    bias=jnp.sum(unscaled, axis=tuple(range(unscaled.ndim - 1))),
  )


def _contracted(x, d):
  """x^T d over all rows."""
  x, d = x.reshape(-1, x.shape[-1]), d.reshape(-1, d.shape[-1])
  return _product(x.T, d)


def _product(a, b):
  return jnp.matmul(a, b, preferred_element_type=jnp.float32)
