"""What the injection's Triton kernels share: a product's loop, row statistics.

A row is one slot of one block, t = block * K + slot. Row statistics (squares of
norms) are handed from kernel to kernel as one partial sum for each column tile
of the kernel that made them, so that no kernel waits for another's tiles. Not
here: whole kernels (`triton_forward.py`, `triton_backward.py`).
"""

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import triton
import triton.language as tl
from jax import numpy as jnp

from kernels import block_sizes, triton_call
from kernels.block_sizes import BlockSizes

# Far below any real state's square norm, like `reference.TINY`.
TINY = tl.constexpr(1e-24)


@triton.jit
def add_product(
  acc,
  x_rows,
  in_rows,
  w_ptr,
  cols,
  in_cols,
  SIZE: tl.constexpr,
  INNER_STRIDE: tl.constexpr,
  COL_STRIDE: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """acc + x @ w for rows [rows] of pointers and w[inner, cols] in strides."""
  for start in range(0, SIZE, BLOCK_INNER):
    inner = start + tl.arange(0, BLOCK_INNER)
    in_x, in_w = in_rows[:, None], in_cols[None, :]
    if SIZE % BLOCK_INNER != 0:
      in_size = inner < SIZE
      in_x, in_w = in_x & in_size[None, :], in_w & in_size[:, None]
    x = tl.load(x_rows[:, None] + inner[None, :], mask=in_x, other=0.0)
    at_w = inner[:, None] * INNER_STRIDE + cols[None, :] * COL_STRIDE
    w = tl.load(w_ptr + at_w, mask=in_w, other=0.0)
    acc = tl.dot(x, w, acc, input_precision=PRECISION)
  return acc


@triton.jit
def row_total(
  parts_ptr, rows, in_rows, PARTS: tl.constexpr, BLOCK_PARTS: tl.constexpr
):
  """The sum of a row's partial sums; 0 for rows that are not `in_rows`."""
  parts = tl.arange(0, BLOCK_PARTS)
  values = tl.load(
    parts_ptr + rows.to(tl.int64)[:, None] * PARTS + parts[None, :],
    mask=in_rows[:, None] & (parts < PARTS)[None, :],
    other=0.0,
  )
  return tl.sum(values, axis=1)


@triton.jit
def feature_scale(square, SQRT_R: tl.constexpr):
  """What turns a read with this square norm into a feature of RMS 1."""
  return SQRT_R * tl.rsqrt(tl.maximum(square, TINY))


@triton.jit
def predecessor(
  rows,
  in_rows,
  tokens_ptr,
  replaced_ptr,
  y_ptr,
  codes_ptr,
  SLOTS: tl.constexpr,
  R: tl.constexpr,
  VOCAB: tl.constexpr,
):
  """Where the predecessor of each row lies.

  Returns whether the row has one, whether that is a token's code, and the two
  rows of pointers that `load_predecessor` chooses from. Like an index of JAX,
  a negative token counts from the end and others stop at the table's edge.
  """
  slot = rows % SLOTS
  follows = in_rows & (slot > 0)
  replaced = tl.load(replaced_ptr + rows // SLOTS, mask=in_rows, other=0)
  is_code = (slot == 1) | (replaced != 0)
  token = tl.load(tokens_ptr + rows - 1, mask=follows, other=0)
  token = tl.where(token < 0, token + VOCAB, token)
  token = tl.minimum(tl.maximum(token, 0), VOCAB - 1)
  y_rows = y_ptr + (rows.to(tl.int64) - 1) * R
  code_rows = codes_ptr + token.to(tl.int64) * R
  return follows, is_code, y_rows, code_rows


@triton.jit
def load_predecessor(
  is_code, y_rows, code_rows, cols, mask, SAME_DTYPE: tl.constexpr
):
  """Columns of the raw predecessors: a read or a code, neither scaled."""
  if SAME_DTYPE:
    rows = tl.where(is_code, code_rows, y_rows)
    p = tl.load(rows[:, None] + cols[None, :], mask=mask, other=0.0)
  else:
    # Each element comes from one of two tables of different dtypes.
    from_codes = is_code[:, None]
    at_code = code_rows[:, None] + cols[None, :]
    at_read = y_rows[:, None] + cols[None, :]
    code = tl.load(at_code, mask=mask & from_codes, other=0.0)
    read = tl.load(at_read, mask=mask & ~from_codes, other=0.0)
    p = tl.where(from_codes, code.to(read.dtype), read)
  return p


def choose(
  kernel: str,
  rows: int,
  cols: int,
  given: block_sizes.Given,
  dtype,
  *,
  widest: int = 128,
  inner: int = 64,
  **dims: int,
) -> BlockSizes:
  """Sizes of a kernel for an output of [rows, cols]; `dims` are its bucket."""
  return block_sizes.choose(
    "adjacent_injection",
    kernel,
    block_sizes.bucket_of(dtype, rows, **dims),
    given,
    lambda: heuristic(rows, cols, dtype.itemsize, widest, inner),
  )


def heuristic(
  rows: int, cols: int, itemsize: int, widest: int, inner: int
) -> BlockSizes:
  """Untuned sizes for an output of [rows, cols].

  The largest tile that still gives the 132 multiprocessors work: a large one
  reads its operands less often, and with few rows only many narrow tiles draw
  on the whole bandwidth.

  Args:
    rows: of the output.
    cols: of the output.
    itemsize: bytes of an element; float32 has no tensor cores here.
    widest: columns of a tile at most, for kernels with several accumulators.
    inner: step of large tiles along the contracted axis.
  """
  most = 128 if rows >= 1024 else min(64, max(16, triton.next_power_of_2(rows)))
  if itemsize == 4:
    return BlockSizes(rows=min(most, 32), cols=32, inner=32, num_stages=2)
  # Sizes, and how many programs make a tile worth its size.
  candidates = (
    (BlockSizes(rows=128, cols=256, inner=inner, num_warps=8), 132),
    (BlockSizes(rows=128, cols=128, inner=inner, num_warps=8), 64),
    (BlockSizes(rows=64, cols=64, inner=inner, num_stages=4), 100),
    (BlockSizes(rows=64, cols=32, inner=2 * inner, num_stages=4), 100),
  )
  for sizes, programs in candidates:
    if sizes.rows == 128 and (most < 128 or sizes.cols > widest):
      continue
    tall = min(sizes.rows, most)
    if math.ceil(rows / tall) * math.ceil(cols / sizes.cols) >= programs:
      return dataclasses.replace(sizes, rows=tall)
  return BlockSizes(rows=min(64, most), cols=16, inner=2 * inner, num_stages=4)


def launch(
  kernel: Any,
  *arrays: jax.Array,
  out_shape: Sequence[jax.ShapeDtypeStruct],
  cols: int,
  sizes: BlockSizes,
  **constants: Any,
) -> Sequence[jax.Array]:
  """Launches `kernel` over tiles of [rows of the first array, cols].

  Column tiles follow each other, so that those of the same rows run together
  and the rows come from device memory once.
  """
  first = arrays[0]
  rows = first.shape[0]
  return triton_call.call(
    kernel,
    *arrays,
    out_shape=out_shape,
    grid=(triton.cdiv(cols, sizes.cols), triton.cdiv(rows, sizes.rows)),
    num_warps=sizes.num_warps,
    num_stages=sizes.num_stages,
    ROWS=rows,
    BLOCK_ROWS=sizes.rows,
    BLOCK_COLS=sizes.cols,
    BLOCK_INNER=sizes.inner,
    # Exact in float32, and of no effect in bfloat16.
    PRECISION="ieee" if first.dtype == jnp.float32 else "tf32",
    **constants,
  )


def shape(dtype, *dims: int) -> jax.ShapeDtypeStruct:
  """The shape of an output."""
  return jax.ShapeDtypeStruct(dims, dtype)
