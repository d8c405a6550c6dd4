"""Forward of the adjacent injection in Triton: read, message, write.

  read     y = R h over [rows, R] tiles, and partial sums of |h|^2 and |y|^2
  message  rms(h) g * (W_m p) over [rows, Z] tiles; the predecessor's row is
           one step of a pointer away, or a row of the table of codes
  write    base + z W over [rows, columns] tiles: the states, and the reads of
           the written states, y + rms(h) z (O R), without a second pass over D

Rows are not scaled before the products but their results, so that operands go
from memory to the tensor cores as they are. Device memory sees reads (width R)
and messages (width Z), both of which the backward needs. Not here: gradients
(`triton_backward.py`), and any choice between implementations (`api.py`).
"""

from typing import NamedTuple

import jax
import triton
import triton.language as tl
from jax import numpy as jnp

from kernels import batching, block_sizes
from kernels.adjacent_injection import reference, triton_tiles


@triton.jit
def injection_read(
  h_ptr,
  readout_ptr,
  y_ptr,
  h_parts_ptr,
  y_parts_ptr,
  ROWS: tl.constexpr,
  D: tl.constexpr,
  R: tl.constexpr,
  PARTS: tl.constexpr,
  SLICE: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """y = h @ readout; a tile also sums squares of its y and a slice of h."""
  part = tl.program_id(0)
  rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  in_rows, in_cols = rows < ROWS, cols < R
  h_rows = h_ptr + rows.to(tl.int64) * D
  acc = triton_tiles.add_product(
    tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32),
    h_rows,
    in_rows,
    readout_ptr,
    cols,
    in_cols,
    SIZE=D,
    INNER_STRIDE=R,
    COL_STRIDE=1,
    BLOCK_INNER=BLOCK_INNER,
    PRECISION=PRECISION,
  )
  y = acc.to(y_ptr.dtype.element_ty)
  at = y_ptr + rows.to(tl.int64)[:, None] * R + cols[None, :]
  tl.store(at, y, mask=in_rows[:, None] & in_cols[None, :])
  # The norm is that of what is stored, which is what gets scaled by it.
  y32 = y.to(tl.float32)
  at_part = rows.to(tl.int64) * PARTS + part
  tl.store(y_parts_ptr + at_part, tl.sum(y32 * y32, axis=1), mask=in_rows)
  # The tiles of a row share the sum over D, a slice each.
  square = tl.zeros([BLOCK_ROWS], tl.float32)
  for start in range(0, SLICE, BLOCK_INNER):
    inner = start + tl.arange(0, BLOCK_INNER)
    in_slice = (inner < SLICE) & (part * SLICE + inner < D)
    inner += part * SLICE
    mask = in_rows[:, None] & in_slice[None, :]
    h = tl.load(h_rows[:, None] + inner[None, :], mask=mask, other=0.0)
    square += tl.sum(h.to(tl.float32) * h.to(tl.float32), axis=1)
  tl.store(h_parts_ptr + at_part, square, mask=in_rows)


@triton.jit
def injection_message(
  y_ptr,
  h_parts_ptr,
  y_parts_ptr,
  tokens_ptr,
  replaced_ptr,
  codes_ptr,
  receiver_gate_ptr,
  predecessor_gate_ptr,
  message_ptr,
  bias_ptr,
  z_ptr,
  gate_ptr,
  receiver_ptr,
  h_square_ptr,
  y_square_ptr,
  ROWS: tl.constexpr,
  SLOTS: tl.constexpr,
  D: tl.constexpr,
  R: tl.constexpr,
  Z: tl.constexpr,
  VOCAB: tl.constexpr,
  SQRT_R: tl.constexpr,
  PARTS: tl.constexpr,
  BLOCK_PARTS: tl.constexpr,
  SAVE: tl.constexpr,
  SAME_DTYPE: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """z = rms(h) sigmoid(f W_q + p W_p + b) (p W_m), and 0 for slot 0."""
  rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  in_rows, in_cols = rows < ROWS, cols < Z
  follows, is_code, y_before, code_rows = triton_tiles.predecessor(
    rows, in_rows, tokens_ptr, replaced_ptr, y_ptr, codes_ptr, SLOTS, R, VOCAB
  )
  y_square = triton_tiles.row_total(
    y_parts_ptr, rows, in_rows, PARTS, BLOCK_PARTS
  )
  square_before = triton_tiles.row_total(
    y_parts_ptr, rows - 1, follows, PARTS, BLOCK_PARTS
  )
  h_square = triton_tiles.row_total(
    h_parts_ptr, rows, in_rows, PARTS, BLOCK_PARTS
  )
  scale = triton_tiles.feature_scale(y_square, SQRT_R)
  scale_before = triton_tiles.feature_scale(square_before, SQRT_R)
  scale_before = tl.where(is_code, SQRT_R, scale_before)
  receiver = triton_tiles.add_product(
    tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32),
    y_ptr + rows.to(tl.int64) * R,
    in_rows,
    receiver_gate_ptr,
    cols,
    in_cols,
    SIZE=R,
    INNER_STRIDE=Z,
    COL_STRIDE=1,
    BLOCK_INNER=BLOCK_INNER,
    PRECISION=PRECISION,
  )
  receiver *= scale[:, None]
  at = rows.to(tl.int64)[:, None] * Z + cols[None, :]
  in_tile = in_rows[:, None] & in_cols[None, :]
  dtype: tl.constexpr = z_ptr.dtype.element_ty
  if SAVE:
    tl.store(receiver_ptr + at, receiver.to(dtype), mask=in_tile)
  # What follows is scaled as a whole, which saves a third accumulator.
  gate = receiver / scale_before[:, None]
  content = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
  for start in range(0, R, BLOCK_INNER):
    inner = start + tl.arange(0, BLOCK_INNER)
    in_p, in_w = follows[:, None], in_cols[None, :]
    if R % BLOCK_INNER != 0:
      in_size = inner < R
      in_p, in_w = in_p & in_size[None, :], in_w & in_size[:, None]
    p = triton_tiles.load_predecessor(
      is_code, y_before, code_rows, inner, in_p, SAME_DTYPE
    ).to(dtype)
    at_w = inner[:, None] * Z + cols[None, :]
    w = tl.load(predecessor_gate_ptr + at_w, mask=in_w, other=0.0)
    gate = tl.dot(p, w, gate, input_precision=PRECISION)
    w = tl.load(message_ptr + at_w, mask=in_w, other=0.0)
    content = tl.dot(p, w, content, input_precision=PRECISION)
  bias = tl.load(bias_ptr + cols, mask=in_cols, other=0.0)
  gate = gate * scale_before[:, None] + bias[None, :]
  rms = tl.sqrt(tl.maximum(h_square / D, triton_tiles.TINY))
  # Slot 0 has a predecessor of zeros, and so an empty message.
  z = tl.sigmoid(gate) * content * (scale_before * rms)[:, None]
  tl.store(z_ptr + at, z.to(dtype), mask=in_tile)
  if SAVE:
    tl.store(gate_ptr + at, gate.to(dtype), mask=in_tile)
    first = in_rows & (tl.program_id(0) == 0)
    tl.store(h_square_ptr + rows, h_square, mask=first)
    tl.store(y_square_ptr + rows, y_square, mask=first)


@triton.jit
def injection_write(
  base_ptr,
  z_ptr,
  w_ptr,
  out_ptr,
  ROWS: tl.constexpr,
  WIDTH: tl.constexpr,
  Z: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """base + z @ w, [ROWS, WIDTH]."""
  rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  in_rows, in_cols = rows < ROWS, cols < WIDTH
  acc = triton_tiles.add_product(
    tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32),
    z_ptr + rows.to(tl.int64) * Z,
    in_rows,
    w_ptr,
    cols,
    in_cols,
    SIZE=Z,
    INNER_STRIDE=WIDTH,
    COL_STRIDE=1,
    BLOCK_INNER=BLOCK_INNER,
    PRECISION=PRECISION,
  )
  at = rows.to(tl.int64)[:, None] * WIDTH + cols[None, :]
  in_tile = in_rows[:, None] & in_cols[None, :]
  base = tl.load(base_ptr + at, mask=in_tile, other=0.0).to(tl.float32)
  out = (base + acc).to(out_ptr.dtype.element_ty)
  tl.store(out_ptr + at, out, mask=in_tile)


class Saved(NamedTuple):
  """What the backward needs besides the arguments.

  Attributes:
    y: [*b, K, R], reads of the states.
    z: [*b, K, Z], messages times rms(h); zero for slot 0.
    gate: [*b, K, Z], the gate before its sigmoid.
    receiver: [*b, K, Z], the receiver's addend of it.
    h_square: [*b, K] float32, |h|^2.
    y_square: [*b, K] float32, |y|^2.
    y_after: [*b, K, R], reads of the written states, if they were asked for.
    through: [Z, R], O R, if they were asked for.
  """

  y: jax.Array
  z: jax.Array
  gate: jax.Array
  receiver: jax.Array
  h_square: jax.Array
  y_square: jax.Array
  y_after: jax.Array | None = None
  through: jax.Array | None = None


def forward(
  h: jax.Array,
  tokens: jax.Array,
  replaced: jax.Array,
  codes: jax.Array,
  weights: reference.Weights,
  with_feature: bool,
  given: block_sizes.Given,
  save: bool,
) -> tuple[reference.Injected, Saved | None]:
  """The injection, and with `save` what its backward needs.

  `weights` are in the dtype of `h`, but for the float32 bias.
  """
  through = weights.write @ weights.readout if with_feature else None

  def of_rows(h, tokens, replaced, codes, through, *weights):
    lead = h.shape[:-1]
    found = _of_flat_rows(
      h.reshape(-1, h.shape[-1]),
      tokens.reshape(-1),
      replaced.reshape(-1).astype(jnp.int32),
      codes,
      through,
      reference.Weights(*weights),
      slots=h.shape[-2],
      given=given,
      save=save,
    )
    return tuple(x.reshape(*lead, *x.shape[1:]) for x in found)

  out, *found = batching.rows_first(of_rows, 3)(
    h, tokens, replaced, codes, through, *weights
  )
  y_after = found.pop(0) if with_feature else None
  feature = None
  if y_after is not None:
    feature = reference.normalised(y_after).astype(h.dtype)
  saved = None
  if save:
    saved = Saved(*found, y_after=y_after, through=through)
  return reference.Injected(out, feature), saved


def _of_flat_rows(
  h, tokens, replaced, codes, through, weights, *, slots, given, save
):
  """The kernels over [T, D] rows: states, their reads, what is saved."""
  y, *parts = read(h, weights.readout, given)
  z, *kept = message(
    y,
    parts,
    tokens,
    replaced,
    codes,
    weights,
    slots=slots,
    width=h.shape[1],
    given=given,
    save=save,
  )
  found = [write(h, z, weights.write, given)]
  if through is not None:
    found.append(write(y, z, through, given))
  return (*found, y, z, *kept) if save else tuple(found)


def read(h, readout, given):
  """Reads [T, R], and partial sums of squares of states and reads."""
  (rows, width), rank = h.shape, readout.shape[1]
  sizes = triton_tiles.choose(
    "read", rows, rank, given, h.dtype, widest=256, d=width, r=rank
  )
  parts = triton.cdiv(rank, sizes.cols)
  of_parts = triton_tiles.shape(jnp.float32, rows, parts)
  return triton_tiles.launch(
    injection_read,
    h,
    readout,
    out_shape=(triton_tiles.shape(h.dtype, rows, rank), of_parts, of_parts),
    cols=rank,
    sizes=sizes,
    D=width,
    R=rank,
    PARTS=parts,
    SLICE=triton.cdiv(width, parts),
  )


def message(
  y, parts, tokens, replaced, codes, weights, *, slots, width, given, save
):
  """Messages [T, Z]; with `save` also the rest of `Saved`, up to y_square."""
  (rows, rank), size = y.shape, weights.message.shape[1]
  same_dtype = codes.dtype == y.dtype
  # Tiles of the predecessors' reads and codes are then both in shared memory.
  inner = 64 if same_dtype else 32
  sizes = triton_tiles.choose(
    "message",
    rows,
    size,
    given,
    y.dtype,
    inner=inner,
    r=rank,
    z=size,
    codes=codes.dtype.itemsize,
  )
  of_size = triton_tiles.shape(y.dtype, rows, size)
  of_rows = triton_tiles.shape(jnp.float32, rows)
  # The kernel has these pointers all the same, and never follows them.
  unused = (triton_tiles.shape(y.dtype, 1),) * 2
  unused += (triton_tiles.shape(jnp.float32, 1),) * 2
  found = triton_tiles.launch(
    injection_message,
    y,
    *parts,
    tokens,
    replaced,
    codes,
    weights.receiver_gate,
    weights.predecessor_gate,
    weights.message,
    weights.bias,
    out_shape=(
      of_size,
      *((of_size, of_size, of_rows, of_rows) if save else unused),
    ),
    cols=size,
    sizes=sizes,
    SLOTS=slots,
    D=width,
    R=rank,
    Z=size,
    VOCAB=codes.shape[0],
    SQRT_R=rank**0.5,
    PARTS=parts[0].shape[1],
    BLOCK_PARTS=triton.next_power_of_2(parts[0].shape[1]),
    SAVE=save,
    SAME_DTYPE=same_dtype,
  )
  return found if save else found[:1]


def write(base, z, kernel, given):
  """base + z @ kernel."""
  (rows, size), width = z.shape, kernel.shape[1]
  sizes = triton_tiles.choose(
    "write", rows, width, given, base.dtype, z=size, d=width
  )
  (out,) = triton_tiles.launch(
    injection_write,
    base,
    z,
    kernel,
    out_shape=(triton_tiles.shape(base.dtype, rows, width),),
    cols=width,
    sizes=sizes,
    WIDTH=width,
    Z=size,
  )
  return out
