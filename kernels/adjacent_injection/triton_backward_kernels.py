"""The backward kernels of the adjacent injection; see `triton_backward.py`."""

import triton
import triton.language as tl

from kernels.adjacent_injection import triton_tiles


@triton.jit
def injection_message_backward(
  d_out_ptr,
  write_ptr,
  d_read_ptr,
  through_ptr,
  z_ptr,
  gate_ptr,
  receiver_ptr,
  bias_ptr,
  h_square_ptr,
  y_square_ptr,
  replaced_ptr,
  d_receiver_ptr,
  d_gate_ptr,
  d_content_ptr,
  written_parts_ptr,
  own_parts_ptr,
  next_parts_ptr,
  ROWS: tl.constexpr,
  SLOTS: tl.constexpr,
  D: tl.constexpr,
  R: tl.constexpr,
  Z: tl.constexpr,
  SQRT_R: tl.constexpr,
  PARTS: tl.constexpr,
  WITH_READ: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """Cotangents of the three products of the message, and sums over Z."""
  part = tl.program_id(0)
  rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = part * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  in_rows, in_cols = rows < ROWS, cols < Z
  # The cotangent of z, of which what is saved is rms(h) times the message.
  dz = triton_tiles.add_product(
    tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32),
    d_out_ptr + rows.to(tl.int64) * D,
    in_rows,
    write_ptr,
    cols,
    in_cols,
    SIZE=D,
    INNER_STRIDE=1,
    COL_STRIDE=D,
    BLOCK_INNER=BLOCK_INNER,
    PRECISION=PRECISION,
  )
  if WITH_READ:
    dz = triton_tiles.add_product(
      dz,
      d_read_ptr + rows.to(tl.int64) * R,
      in_rows,
      through_ptr,
      cols,
      in_cols,
      SIZE=R,
      INNER_STRIDE=1,
      COL_STRIDE=R,
      BLOCK_INNER=BLOCK_INNER,
      PRECISION=PRECISION,
    )
  # Halves, one after the other, so that few tiles are in registers together.
  half: tl.constexpr = BLOCK_COLS // 2
  dz = tl.permute(tl.reshape(dz, [BLOCK_ROWS, 2, half]), [0, 2, 1])
  left, right = tl.split(dz)
  first = part * BLOCK_COLS + tl.arange(0, half)
  written, own, following = _message_products_backward(
    left,
    rows,
    first,
    z_ptr,
    gate_ptr,
    receiver_ptr,
    bias_ptr,
    h_square_ptr,
    y_square_ptr,
    replaced_ptr,
    d_receiver_ptr,
    d_gate_ptr,
    d_content_ptr,
    ROWS,
    SLOTS,
    D,
    Z,
    SQRT_R,
  )
  more_written, more_own, more_following = _message_products_backward(
    right,
    rows,
    first + half,
    z_ptr,
    gate_ptr,
    receiver_ptr,
    bias_ptr,
    h_square_ptr,
    y_square_ptr,
    replaced_ptr,
    d_receiver_ptr,
    d_gate_ptr,
    d_content_ptr,
    ROWS,
    SLOTS,
    D,
    Z,
    SQRT_R,
  )
  at_part = rows.to(tl.int64) * PARTS + part
  tl.store(written_parts_ptr + at_part, written + more_written, mask=in_rows)
  tl.store(own_parts_ptr + at_part, own + more_own, mask=in_rows)
  tl.store(next_parts_ptr + at_part, following + more_following, mask=in_rows)


@triton.jit
def _message_products_backward(
  dz,
  rows,
  cols,
  z_ptr,
  gate_ptr,
  receiver_ptr,
  bias_ptr,
  h_square_ptr,
  y_square_ptr,
  replaced_ptr,
  d_receiver_ptr,
  d_gate_ptr,
  d_content_ptr,
  ROWS: tl.constexpr,
  SLOTS: tl.constexpr,
  D: tl.constexpr,
  Z: tl.constexpr,
  SQRT_R: tl.constexpr,
):
  """Stores three cotangents of a tile; returns three sums of its rows."""
  in_rows, in_cols = rows < ROWS, cols < Z
  bias = tl.load(bias_ptr + cols, mask=in_cols, other=0.0)
  h_square = tl.load(h_square_ptr + rows, mask=in_rows, other=0.0)
  y_square = tl.load(y_square_ptr + rows, mask=in_rows, other=0.0)
  slot = rows % SLOTS
  follows = in_rows & (slot > 0)
  before = tl.load(y_square_ptr + rows - 1, mask=follows, other=0.0)
  replaced = tl.load(replaced_ptr + rows // SLOTS, mask=in_rows, other=0)
  is_code = (slot == 1) | (replaced != 0)
  scale = triton_tiles.feature_scale(y_square, SQRT_R)
  scale_before = triton_tiles.feature_scale(before, SQRT_R)
  scale_before = tl.where(is_code, SQRT_R, scale_before)
  rms = tl.sqrt(tl.maximum(h_square / D, triton_tiles.TINY))
  dtype: tl.constexpr = d_gate_ptr.dtype.element_ty

  at = rows.to(tl.int64)[:, None] * Z + cols[None, :]
  in_tile = in_rows[:, None] & in_cols[None, :]
  z = tl.load(z_ptr + at, mask=in_tile, other=0.0).to(tl.float32)
  written = z * dz
  of_written = tl.sum(written, axis=1)
  gate = tl.load(gate_ptr + at, mask=in_tile, other=0.0).to(tl.float32)
  opened = tl.sigmoid(gate)
  # That of slot 0 meets only zeros, but might overflow by their scale.
  d_content = dz * opened * tl.where(follows, rms * scale_before, 0.0)[:, None]
  tl.store(d_content_ptr + at, d_content.to(dtype), mask=in_tile)
  d_gate = written * (1.0 - opened)
  d_raw = (d_gate * scale_before[:, None]).to(dtype)
  tl.store(d_gate_ptr + at, d_raw, mask=in_tile)
  d_raw = (d_gate * scale[:, None]).to(dtype)
  tl.store(d_receiver_ptr + at, d_raw, mask=in_tile)
  # The gate without its bias is f W_q + p W_p, and d_content * content is
  # dz * z, so that one sum is left for each of f's two places.
  of_gate = tl.sum(d_gate * (gate - bias[None, :]), axis=1)
  receiver = tl.load(receiver_ptr + at, mask=in_tile, other=0.0)
  own = tl.sum(d_gate * receiver.to(tl.float32), axis=1)
  return of_written, own, of_gate - own + of_written


@triton.jit
def injection_read_backward(
  d_receiver_ptr,
  d_gate_ptr,
  d_content_ptr,
  receiver_gate_ptr,
  predecessor_gate_ptr,
  message_ptr,
  y_ptr,
  y_square_ptr,
  own_parts_ptr,
  next_parts_ptr,
  d_read_ptr,
  tokens_ptr,
  replaced_ptr,
  codes_ptr,
  dy_ptr,
  p_ptr,
  ROWS: tl.constexpr,
  SLOTS: tl.constexpr,
  R: tl.constexpr,
  Z: tl.constexpr,
  VOCAB: tl.constexpr,
  PARTS: tl.constexpr,
  BLOCK_PARTS: tl.constexpr,
  WITH_READ: tl.constexpr,
  SAME_DTYPE: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """Cotangent of the reads y, and the raw predecessors p, [ROWS, R]."""
  rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  in_rows, in_cols = rows < ROWS, cols < R
  follows, is_code, y_before, code_rows = triton_tiles.predecessor(
    rows, in_rows, tokens_ptr, replaced_ptr, y_ptr, codes_ptr, SLOTS, R, VOCAB
  )
  # Whether the next slot of this block read this one's feature.
  replaced = tl.load(replaced_ptr + rows // SLOTS, mask=in_rows, other=0)
  leads = follows & (rows % SLOTS < SLOTS - 1) & (replaced == 0)
  rows64 = rows.to(tl.int64)
  acc = triton_tiles.add_product(
    tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32),
    d_receiver_ptr + rows64 * Z,
    in_rows,
    receiver_gate_ptr,
    cols,
    in_cols,
    SIZE=Z,
    INNER_STRIDE=1,
    COL_STRIDE=Z,
    BLOCK_INNER=BLOCK_INNER,
    PRECISION=PRECISION,
  )
  acc = triton_tiles.add_product(
    acc,
    d_gate_ptr + (rows64 + 1) * Z,
    leads,
    predecessor_gate_ptr,
    cols,
    in_cols,
    SIZE=Z,
    INNER_STRIDE=1,
    COL_STRIDE=Z,
    BLOCK_INNER=BLOCK_INNER,
    PRECISION=PRECISION,
  )
  acc = triton_tiles.add_product(
    acc,
    d_content_ptr + (rows64 + 1) * Z,
    leads,
    message_ptr,
    cols,
    in_cols,
    SIZE=Z,
    INNER_STRIDE=1,
    COL_STRIDE=Z,
    BLOCK_INNER=BLOCK_INNER,
    PRECISION=PRECISION,
  )
  along = triton_tiles.row_total(
    own_parts_ptr, rows, in_rows, PARTS, BLOCK_PARTS
  )
  along += triton_tiles.row_total(
    next_parts_ptr, rows + 1, leads, PARTS, BLOCK_PARTS
  )
  square = tl.load(y_square_ptr + rows, mask=in_rows, other=0.0)
  # Below TINY the scale is a constant.
  moves = square > triton_tiles.TINY
  along = tl.where(moves, along / tl.where(moves, square, 1.0), 0.0)
  at = rows64[:, None] * R + cols[None, :]
  in_tile = in_rows[:, None] & in_cols[None, :]
  y = tl.load(y_ptr + at, mask=in_tile, other=0.0).to(tl.float32)
  acc -= along[:, None] * y
  if WITH_READ:
    acc += tl.load(d_read_ptr + at, mask=in_tile, other=0.0).to(tl.float32)
  dtype: tl.constexpr = dy_ptr.dtype.element_ty
  tl.store(dy_ptr + at, acc.to(dtype), mask=in_tile)
  p = triton_tiles.load_predecessor(
    is_code,
    y_before,
    code_rows,
    cols,
    follows[:, None] & in_cols[None, :],
    SAME_DTYPE,
  )
  tl.store(p_ptr + at, p.to(dtype), mask=in_tile)


@triton.jit
def injection_input_backward(
  dy_ptr,
  readout_ptr,
  d_out_ptr,
  h_ptr,
  h_square_ptr,
  written_parts_ptr,
  dh_ptr,
  ROWS: tl.constexpr,
  D: tl.constexpr,
  R: tl.constexpr,
  PARTS: tl.constexpr,
  BLOCK_PARTS: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """dh = d_out + dy @ readout^T + h (z . dz) / |h|^2."""
  rows = tl.program_id(1) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = tl.program_id(0) * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  in_rows, in_cols = rows < ROWS, cols < D
  acc = triton_tiles.add_product(
    tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32),
    dy_ptr + rows.to(tl.int64) * R,
    in_rows,
    readout_ptr,
    cols,
    in_cols,
    SIZE=R,
    INNER_STRIDE=1,
    COL_STRIDE=R,
    BLOCK_INNER=BLOCK_INNER,
    PRECISION=PRECISION,
  )
  written = triton_tiles.row_total(
    written_parts_ptr, rows, in_rows, PARTS, BLOCK_PARTS
  )
  square = tl.load(h_square_ptr + rows, mask=in_rows, other=0.0)
  # Below TINY the RMS is a constant.
  moves = square > triton_tiles.TINY * D
  along = tl.where(moves, written / tl.where(moves, square, 1.0), 0.0)
  at = rows.to(tl.int64)[:, None] * D + cols[None, :]
  in_tile = in_rows[:, None] & in_cols[None, :]
  h = tl.load(h_ptr + at, mask=in_tile, other=0.0).to(tl.float32)
  d_out = tl.load(d_out_ptr + at, mask=in_tile, other=0.0).to(tl.float32)
  acc += d_out + along[:, None] * h
  tl.store(dh_ptr + at, acc.to(dh_ptr.dtype.element_ty), mask=in_tile)
