"""What the Triton kernels of block attention share: rows, and loads of them.

A tile is PER_TILE whole blocks of one row of the batch and one key head. Its
rows are the queries of that head's group, in the order (block, slot, repeat),
which is also their order in memory; its own keys are the slots of its blocks.
Rows and keys past the end of a tile are padding. Everything is in base two:
scores are multiplied by log2(e), so that weights are exp2.
"""

import triton
import triton.language as tl

# Finite, so that no row is NaN. The maximum of a row is kept above FLOOR, so
# that exp2(MASKED - maximum) is exactly zero even where everything is masked.
MASKED = tl.constexpr(-1e30)
FLOOR = tl.constexpr(-1e29)


@triton.jit
def tile_rows(
  tile,
  BLOCKS: tl.constexpr,
  SLOTS: tl.constexpr,
  REPEAT: tl.constexpr,
  PER_TILE: tl.constexpr,
  ROWS: tl.constexpr,
):
  """Of each row: its slot in the tile, its block, whether it is real."""
  slot = tl.arange(0, ROWS) // REPEAT
  block = tile * PER_TILE + slot // SLOTS
  return slot, block, (slot < PER_TILE * SLOTS) & (block < BLOCKS)


@triton.jit
def row_offsets(
  tile,
  head,
  SLOTS: tl.constexpr,
  GROUPS: tl.constexpr,
  REPEAT: tl.constexpr,
  PER_TILE: tl.constexpr,
  ROWS: tl.constexpr,
):
  """Place of each row in [N, K, Q]."""
  row = tl.arange(0, ROWS)
  slot = tile * PER_TILE * SLOTS + row // REPEAT
  return slot * (GROUPS * REPEAT) + head * REPEAT + row % REPEAT


@triton.jit
def key_offsets(
  tile,
  head,
  SLOTS: tl.constexpr,
  GROUPS: tl.constexpr,
  PER_TILE: tl.constexpr,
  KEYS: tl.constexpr,
):
  """Place of each own key of a tile in [N, K, G]."""
  slot = tile * PER_TILE * SLOTS + tl.arange(0, KEYS)
  return slot * GROUPS + head


@triton.jit
def tile_keys(
  tile,
  BLOCKS: tl.constexpr,
  SLOTS: tl.constexpr,
  PER_TILE: tl.constexpr,
  KEYS: tl.constexpr,
):
  """Of each own key: its slot in the tile, whether it is real."""
  slot = tl.arange(0, KEYS)
  block = tile * PER_TILE + slot // SLOTS
  return slot, (slot < PER_TILE * SLOTS) & (block < BLOCKS)


@triton.jit
def own_seen(own_mask_ptr, row_slot, is_row, key_slot, is_key, SLOTS):
  """[rows, keys]: the key is of the row's block, and the mask allows it."""
  same = (row_slot // SLOTS)[:, None] == (key_slot // SLOTS)[None, :]
  same = same & is_row[:, None] & is_key[None, :]
  at = (row_slot % SLOTS)[:, None] * SLOTS + (key_slot % SLOTS)[None, :]
  return tl.load(own_mask_ptr + at, mask=same, other=0) != 0


@triton.jit
def row_bounds(
  visible_ptr,
  starts_ptr,
  batch,
  row_slot,
  block,
  is_row,
  BLOCKS: tl.constexpr,
  SLOTS: tl.constexpr,
  CONTEXT: tl.constexpr,
  HAS_STARTS: tl.constexpr,
):
  """Of each row: context positions start <= s < end that it sees."""
  at = batch * BLOCKS + block
  end = tl.load(visible_ptr + at, mask=is_row, other=0)
  end = tl.minimum(end, CONTEXT)
  if HAS_STARTS:
    at = at * SLOTS + row_slot % SLOTS
    start = tl.load(starts_ptr + at, mask=is_row, other=0)
    start = tl.maximum(start, 0)
  else:
    start = tl.zeros_like(end)
  return start, end


@triton.jit
def load_rows(ptr, offsets, is_row, WIDTH: tl.constexpr):
  """[rows, WIDTH], zeros where a row is padding."""
  at = offsets[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
  return tl.load(ptr + at, mask=is_row[:, None], other=0.0)


@triton.jit
def store_rows(ptr, offsets, is_row, value, WIDTH: tl.constexpr):
  """Writes [rows, WIDTH] in the dtype of `ptr`."""
  at = offsets[:, None] * WIDTH + tl.arange(0, WIDTH)[None, :]
  value = value.to(ptr.dtype.element_ty)
  tl.store(ptr + at, value, mask=is_row[:, None])
