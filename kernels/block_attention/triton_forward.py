"""Triton kernels of block attention: forward, and the merge of its splits.

A program holds the queries of a tile (`triton_tiles.py`) and walks over the
part of the context that one of them sees, with a running softmax; the tile's
own keys come first, as one small block-diagonal product. Where a batch has too
few tiles to fill the device (decoding), the context of a tile is split over
several programs, whose results `block_attention_merge` joins. How they are
launched: `triton.py`.
"""

import triton
import triton.language as tl

from kernels.block_attention import triton_tiles as tiles

FLOOR = tiles.FLOOR
MASKED = tiles.MASKED


@triton.jit
def _join(q, k, v, seen, maximum, total, weighted, SCALE: tl.constexpr):
  """The running softmax after one more tile of keys."""
  scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
  scores = tl.where(seen, scores, MASKED)
  higher = tl.maximum(maximum, tl.max(scores, 1))
  weights = tl.math.exp2(scores - higher[:, None])
  shrink = tl.math.exp2(maximum - higher)
  total = total * shrink + tl.sum(weights, 1)
  weighted = weighted * shrink[:, None]
  weighted = tl.dot(weights.to(v.dtype), v, weighted, input_precision="ieee")
  return higher, total, weighted


@triton.jit
def _share(start, end, split, COLS: tl.constexpr, SPLITS: tl.constexpr):
  """The positions from one of a tile's splits, and up to where."""
  first = start // COLS * COLS
  if SPLITS > 1:
    steps = (tl.maximum(end - first, 0) + COLS - 1) // COLS
    size = (steps + SPLITS - 1) // SPLITS * COLS
    first += split * size
    end = tl.minimum(end, first + size)
  return first, end


@triton.jit
def block_attention_forward(
  q_ptr,  # [B, N, K, Q, H]
  own_k_ptr,  # [B, N, K, G, H]
  own_v_ptr,  # [B, N, K, G, H]
  k_ptr,  # [B, G, S, H]
  v_ptr,  # [B, G, S, H]
  visible_ptr,  # [B, N]
  starts_ptr,  # [B, N, K], not read without HAS_STARTS
  own_mask_ptr,  # [K, K]
  out_ptr,  # [B, SPLITS, N, K, Q, H]
  lse_ptr,  # [B, SPLITS, N, K, Q] float32
  BLOCKS: tl.constexpr,
  SLOTS: tl.constexpr,
  GROUPS: tl.constexpr,
  REPEAT: tl.constexpr,
  WIDTH: tl.constexpr,
  CONTEXT: tl.constexpr,
  HAS_STARTS: tl.constexpr,
  SCALE: tl.constexpr,
  PER_TILE: tl.constexpr,
  ROWS: tl.constexpr,
  KEYS: tl.constexpr,
  COLS: tl.constexpr,
  SPLITS: tl.constexpr,
):
  """Attention of one tile to one of SPLITS parts of its keys."""
  count: tl.constexpr = (BLOCKS + PER_TILE - 1) // PER_TILE
  # Anchors come sorted: the tiles with the longest contexts start first.
  tile = count - 1 - tl.program_id(0) // SPLITS
  split = tl.program_id(0) % SPLITS
  head, batch = tl.program_id(1), tl.program_id(2)
  batch64 = batch.to(tl.int64)
  slot, block, is_row = tiles.tile_rows(
    tile, BLOCKS, SLOTS, REPEAT, PER_TILE, ROWS
  )
  at = tiles.row_offsets(tile, head, SLOTS, GROUPS, REPEAT, PER_TILE, ROWS)
  q_ptr += batch64 * (BLOCKS * SLOTS * GROUPS * REPEAT * WIDTH)
  q = tiles.load_rows(q_ptr, at, is_row, WIDTH)

  own_slot, is_own = tiles.tile_keys(tile, BLOCKS, SLOTS, PER_TILE, KEYS)
  is_own = is_own & (split == 0)
  own_at = tiles.key_offsets(tile, head, SLOTS, GROUPS, PER_TILE, KEYS)
  own_base = batch64 * (BLOCKS * SLOTS * GROUPS * WIDTH)
  maximum, total, weighted = _join(
    q,
    tiles.load_rows(own_k_ptr + own_base, own_at, is_own, WIDTH),
    tiles.load_rows(own_v_ptr + own_base, own_at, is_own, WIDTH),
    tiles.own_seen(own_mask_ptr, slot, is_row, own_slot, is_own, SLOTS),
    tl.full([ROWS], FLOOR, tl.float32),
    tl.zeros([ROWS], tl.float32),
    tl.zeros([ROWS, WIDTH], tl.float32),
    SCALE,
  )

  start, end = tiles.row_bounds(
    visible_ptr,
    starts_ptr,
    batch,
    slot,
    block,
    is_row,
    BLOCKS,
    SLOTS,
    CONTEXT,
    HAS_STARTS,
  )
  first, last = _share(
    tl.min(tl.where(end > 0, start, CONTEXT)), tl.max(end), split, COLS, SPLITS
  )
  base = (batch64 * GROUPS + head) * (CONTEXT * WIDTH)
  for position in tl.range(first, last, COLS):
    key = position + tl.arange(0, COLS)
    seen = key[None, :] < end[:, None]
    if HAS_STARTS:
      seen = seen & (key[None, :] >= start[:, None])
    maximum, total, weighted = _join(
      q,
      tiles.load_rows(k_ptr + base, key, key < last, WIDTH),
      tiles.load_rows(v_ptr + base, key, key < last, WIDTH),
      seen,
      maximum,
      total,
      weighted,
      SCALE,
    )

  # A row without keys has zeros, and FLOOR for its log-sum-exp.
  total = tl.where(total == 0.0, 1.0, total)
  lse = maximum + tl.math.log2(total)
  part = (batch64 * SPLITS + split) * (BLOCKS * SLOTS * GROUPS * REPEAT)
  tl.store(lse_ptr + part + at, lse, mask=is_row)
  out = weighted / total[:, None]
  tiles.store_rows(out_ptr + part * WIDTH, at, is_row, out, WIDTH)


@triton.jit
def block_attention_merge(
  parts_ptr,  # [B, SPLITS, R, H] float32
  parts_lse_ptr,  # [B, SPLITS, R] float32
  out_ptr,  # [B, R, H]
  lse_ptr,  # [B, R] float32
  TOTAL: tl.constexpr,  # R
  WIDTH: tl.constexpr,
  SPLITS: tl.constexpr,
  ROWS: tl.constexpr,
):
  """Joins the normalised outputs of splits by their log-sum-exp."""
  batch = tl.program_id(1).to(tl.int64)
  row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
  is_row = row < TOTAL
  maximum = tl.full([ROWS], FLOOR, tl.float32)
  total = tl.zeros([ROWS], tl.float32)
  weighted = tl.zeros([ROWS, WIDTH], tl.float32)
  for split in range(SPLITS):
    base = (batch * SPLITS + split) * TOTAL
    lse = tl.load(parts_lse_ptr + base + row, mask=is_row, other=FLOOR)
    part = tiles.load_rows(parts_ptr + base * WIDTH, row, is_row, WIDTH)
    higher = tl.maximum(maximum, lse)
    shrink = tl.math.exp2(maximum - higher)
    weight = tl.math.exp2(lse - higher)
    total = total * shrink + weight
    weighted = weighted * shrink[:, None] + part * weight[:, None]
    maximum = higher
  base = batch * TOTAL
  lse = maximum + tl.math.log2(total)
  tl.store(lse_ptr + base + row, lse, mask=is_row)
  out = weighted / total[:, None]
  tiles.store_rows(out_ptr + base * WIDTH, row, is_row, out, WIDTH)
