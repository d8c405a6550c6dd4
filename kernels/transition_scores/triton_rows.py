"""Triton kernels of the parts of the transition scores that are per row.

A row is a slot, a (slot, predecessor) or a (slot, candidate). Rows of head and
codes are gathered by token id inside the kernels that contract them; ids must
lie in the vocabulary. What becomes of the rows: `triton_pairs.py`. How they
are launched: `triton.py`.
"""

import triton
import triton.language as tl


@triton.jit
def scores_receiver(
  read_ptr,  # [N, R], u @ readout
  gate_ptr,  # [R, Z]
  bias_ptr,  # [Z]
  receiver_ptr,  # [N, Z] float32
  ROWS: tl.constexpr,
  R: tl.constexpr,
  Z: tl.constexpr,
  TINY: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """W_q f + b of each slot; f is `read` scaled to coordinates of RMS 1.

  The scale is one factor a row, so it comes after the product.
  """
  col_tiles: tl.constexpr = (Z + BLOCK_COLS - 1) // BLOCK_COLS
  tile = tl.program_id(0)
  rows = tile // col_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = tile % col_tiles * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  is_row, is_col = rows < ROWS, cols < Z
  product = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
  square = tl.zeros([BLOCK_ROWS], tl.float32)
  for start in range(0, R, BLOCK_INNER):
    inner = start + tl.arange(0, BLOCK_INNER)
    is_inner = inner < R
    read = tl.load(
      read_ptr + rows[:, None] * R + inner[None, :],
      mask=is_row[:, None] & is_inner[None, :],
      other=0.0,
    )
    gate = tl.load(
      gate_ptr + inner[:, None] * Z + cols[None, :],
      mask=is_inner[:, None] & is_col[None, :],
      other=0.0,
    )
    product = tl.dot(read, gate, product, input_precision=PRECISION)
    read32 = read.to(tl.float32)
    square += tl.sum(read32 * read32, axis=1)
  scale = tl.sqrt(R / tl.maximum(square, TINY))
  bias = tl.load(bias_ptr + cols, mask=is_col, other=0.0).to(tl.float32)
  tl.store(
    receiver_ptr + rows[:, None] * Z + cols[None, :],
    product * scale[:, None] + bias[None, :],
    mask=is_row[:, None] & is_col[None, :],
  )


@triton.jit
def scores_message(
  predecessors_ptr,  # [N, P]
  codes_ptr,  # [V, R]
  gate_ptr,  # [R, Z]
  content_ptr,  # [R, Z]
  receiver_ptr,  # [N, Z] float32
  z_ptr,  # [N, P, Z]
  ROWS: tl.constexpr,
  P: tl.constexpr,
  R: tl.constexpr,
  Z: tl.constexpr,
  CODE_SCALE: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """sigmoid(receiver + W_p p) * (W_m p) with p = sqrt(R) times the code."""
  col_tiles: tl.constexpr = (Z + BLOCK_COLS - 1) // BLOCK_COLS
  tile = tl.program_id(0)
  rows = tile // col_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = tile % col_tiles * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  is_row, is_col = rows < ROWS, cols < Z
  # 64 bits: a table of the vocabulary may pass 2**31 numbers.
  token = tl.load(predecessors_ptr + rows, mask=is_row, other=0).to(tl.int64)
  code_rows = codes_ptr + token * R
  gate = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
  content = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
  for start in range(0, R, BLOCK_INNER):
    inner = start + tl.arange(0, BLOCK_INNER)
    is_inner = inner < R
    code = tl.load(
      code_rows[:, None] + inner[None, :],
      mask=is_row[:, None] & is_inner[None, :],
      other=0.0,
    ).to(z_ptr.dtype.element_ty)
    kernel_mask = is_inner[:, None] & is_col[None, :]
    kernel_at = inner[:, None] * Z + cols[None, :]
    w_gate = tl.load(gate_ptr + kernel_at, mask=kernel_mask, other=0.0)
    w_content = tl.load(content_ptr + kernel_at, mask=kernel_mask, other=0.0)
    gate = tl.dot(code, w_gate, gate, input_precision=PRECISION)
    content = tl.dot(code, w_content, content, input_precision=PRECISION)
  mask = is_row[:, None] & is_col[None, :]
  receiver = tl.load(
    receiver_ptr + (rows // P)[:, None] * Z + cols[None, :],
    mask=mask,
    other=0.0,
  )
  z = tl.sigmoid(gate * CODE_SCALE + receiver) * (content * CODE_SCALE)
  tl.store(
    z_ptr + rows[:, None] * Z + cols[None, :],
    z.to(z_ptr.dtype.element_ty),
    mask=mask,
  )


@triton.jit
def scores_through(
  u_ptr,  # [N, D]
  candidates_ptr,  # [N, C]
  head_ptr,  # [V, D]
  scale_ptr,  # [D], g
  write_ptr,  # [Z, D], O^T
  through_ptr,  # [N, C, Z]
  base_ptr,  # [N, C] float32
  ROWS: tl.constexpr,
  C: tl.constexpr,
  D: tl.constexpr,
  Z: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """O^T (g E_b), and by the first column tile (g E_b) . u.

  Column tiles of the same rows are neighbours in the grid: the gathered rows
  come from device memory once, and from the L2 cache for the other tiles.
  """
  col_tiles: tl.constexpr = (Z + BLOCK_COLS - 1) // BLOCK_COLS
  tile = tl.program_id(0)
  col_tile = tile % col_tiles
  rows = tile // col_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = col_tile * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  is_row, is_col = rows < ROWS, cols < Z
  token = tl.load(candidates_ptr + rows, mask=is_row, other=0).to(tl.int64)
  head_rows = head_ptr + token * D
  u_rows = u_ptr + rows // C * D
  product = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
  base = tl.zeros([BLOCK_ROWS], tl.float32)
  for start in range(0, D, BLOCK_INNER):
    inner = start + tl.arange(0, BLOCK_INNER)
    is_inner = inner < D
    mask = is_row[:, None] & is_inner[None, :]
    row = tl.load(head_rows[:, None] + inner[None, :], mask=mask, other=0.0)
    scale = tl.load(scale_ptr + inner, mask=is_inner, other=0.0)
    row32 = row.to(tl.float32) * scale.to(tl.float32)[None, :]
    write = tl.load(
      write_ptr + cols[None, :] * D + inner[:, None],
      mask=is_col[None, :] & is_inner[:, None],
      other=0.0,
    )
    product = tl.dot(
      row32.to(write.dtype), write, product, input_precision=PRECISION
    )
    if col_tile == 0:
      u = tl.load(u_rows[:, None] + inner[None, :], mask=mask, other=0.0)
      base += tl.sum(row32 * u.to(tl.float32), axis=1)
  tl.store(
    through_ptr + rows[:, None] * Z + cols[None, :],
    product.to(through_ptr.dtype.element_ty),
    mask=is_row[:, None] & is_col[None, :],
  )
  if col_tile == 0:
    tl.store(base_ptr + rows, base, mask=is_row)


@triton.jit
def scores_length(
  z_ptr,  # [N, P, Z]
  matrix_ptr,  # [Z, COLS]
  beside_ptr,  # [N, COLS]
  parts_ptr,  # [2, column tiles, N, P] float32
  ROWS: tl.constexpr,
  P: tl.constexpr,
  Z: tl.constexpr,
  COLS: tl.constexpr,
  BY_GRAM: tl.constexpr,
  BLOCK_ROWS: tl.constexpr,
  BLOCK_COLS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """The shares of a column tile in u . O z and in |O z|^2.

  Either from the write, whose products w = O z are summed as u . w and w . w
  (`beside` is u), or by the matrix G = O^T O, as O^T u . z and G z . z
  (`beside` is O^T u, the columns those of z).
  """
  col_tiles: tl.constexpr = (COLS + BLOCK_COLS - 1) // BLOCK_COLS
  tile = tl.program_id(0)
  col_tile = tile % col_tiles
  rows = tile // col_tiles * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
  cols = col_tile * BLOCK_COLS + tl.arange(0, BLOCK_COLS)
  is_row, is_col = rows < ROWS, cols < COLS
  product = tl.zeros([BLOCK_ROWS, BLOCK_COLS], tl.float32)
  for start in range(0, Z, BLOCK_INNER):
    inner = start + tl.arange(0, BLOCK_INNER)
    is_inner = inner < Z
    z = tl.load(
      z_ptr + rows[:, None] * Z + inner[None, :],
      mask=is_row[:, None] & is_inner[None, :],
      other=0.0,
    )
    matrix = tl.load(
      matrix_ptr + inner[:, None] * COLS + cols[None, :],
      mask=is_inner[:, None] & is_col[None, :],
      other=0.0,
    )
    product = tl.dot(z, matrix, product, input_precision=PRECISION)
  mask = is_row[:, None] & is_col[None, :]
  factor = product
  if BY_GRAM:
    z_at = rows[:, None] * Z + cols[None, :]
    factor = tl.load(z_ptr + z_at, mask=mask, other=0.0).to(tl.float32)
  beside = tl.load(
    beside_ptr + (rows // P)[:, None] * COLS + cols[None, :],
    mask=mask,
    other=0.0,
  )
  along = tl.sum(factor * beside.to(tl.float32), axis=1)
  length = tl.sum(factor * product, axis=1)
  part = parts_ptr + col_tile * ROWS + rows
  tl.store(part, along, mask=is_row)
  tl.store(part + col_tiles * ROWS, length, mask=is_row)
