"""Triton kernels of the gradient of block attention.

Weights are computed anew from the log-sum-exp of the forward. One kernel has
the forward's programs and gives the cotangents of the queries and of the tile's
own keys and values; the other has a program for each tile of context positions
and walks over the blocks that see it. Tiles: `triton_tiles.py`; launches:
`triton.py`.
"""

import triton
import triton.language as tl

from kernels.block_attention import triton_tiles as tiles

MASKED = tiles.MASKED


@triton.jit
def _weights(q, k, d_out, v, seen, lse, delta, SCALE: tl.constexpr):
  """[rows, keys]: weights, and cotangents of the scores before H**-0.5."""
  scores = tl.dot(q, tl.trans(k), input_precision="ieee") * SCALE
  scores = tl.where(seen, scores, MASKED)
  weights = tl.math.exp2(scores - lse[:, None])
  d_weights = tl.dot(d_out, tl.trans(v), input_precision="ieee")
  return weights, weights * (d_weights - delta[:, None])


@triton.jit
def block_attention_backward_q(
  q_ptr,  # [B, N, K, Q, H]
  own_k_ptr,  # [B, N, K, G, H]
  own_v_ptr,  # [B, N, K, G, H]
  k_ptr,  # [B, G, S, H]
  v_ptr,  # [B, G, S, H]
  out_ptr,  # [B, N, K, Q, H]
  lse_ptr,  # [B, N, K, Q] float32
  d_out_ptr,  # [B, N, K, Q, H]
  visible_ptr,  # [B, N]
  starts_ptr,  # [B, N, K], not read without HAS_STARTS
  own_mask_ptr,  # [K, K]
  d_q_ptr,  # [B, N, K, Q, H]
  d_own_k_ptr,  # [B, N, K, G, H]
  d_own_v_ptr,  # [B, N, K, G, H]
  delta_ptr,  # [B, N, K, Q] float32
  BLOCKS: tl.constexpr,
  SLOTS: tl.constexpr,
  GROUPS: tl.constexpr,
  REPEAT: tl.constexpr,
  WIDTH: tl.constexpr,
  CONTEXT: tl.constexpr,
  HAS_STARTS: tl.constexpr,
  SCALE: tl.constexpr,
  ROOT: tl.constexpr,
  PER_TILE: tl.constexpr,
  ROWS: tl.constexpr,
  KEYS: tl.constexpr,
  COLS: tl.constexpr,
):
  """Of a tile: cotangents of q and its own keys and values, and out . d_out."""
  count: tl.constexpr = (BLOCKS + PER_TILE - 1) // PER_TILE
  tile = count - 1 - tl.program_id(0)
  head, batch = tl.program_id(1), tl.program_id(2)
  batch64 = batch.to(tl.int64)
  slot, block, is_row = tiles.tile_rows(
    tile, BLOCKS, SLOTS, REPEAT, PER_TILE, ROWS
  )
  at = tiles.row_offsets(tile, head, SLOTS, GROUPS, REPEAT, PER_TILE, ROWS)
  base = batch64 * (BLOCKS * SLOTS * GROUPS * REPEAT)
  q = tiles.load_rows(q_ptr + base * WIDTH, at, is_row, WIDTH)
  d_out = tiles.load_rows(d_out_ptr + base * WIDTH, at, is_row, WIDTH)
  out = tiles.load_rows(out_ptr + base * WIDTH, at, is_row, WIDTH)
  delta = tl.sum(out.to(tl.float32) * d_out.to(tl.float32), 1)
  tl.store(delta_ptr + base + at, delta, mask=is_row)
  lse = tl.load(lse_ptr + base + at, mask=is_row, other=0.0)

  own_slot, is_own = tiles.tile_keys(tile, BLOCKS, SLOTS, PER_TILE, KEYS)
  own_at = tiles.key_offsets(tile, head, SLOTS, GROUPS, PER_TILE, KEYS)
  own_base = batch64 * (BLOCKS * SLOTS * GROUPS * WIDTH)
  own_k = tiles.load_rows(own_k_ptr + own_base, own_at, is_own, WIDTH)
  own_v = tiles.load_rows(own_v_ptr + own_base, own_at, is_own, WIDTH)
  weights, d_own = _weights(
    q,
    own_k,
    d_out,
    own_v,
    tiles.own_seen(own_mask_ptr, slot, is_row, own_slot, is_own, SLOTS),
    lse,
    delta,
    SCALE,
  )
  d_own = d_own.to(q.dtype)
  d_own_k = tl.dot(tl.trans(d_own), q, input_precision="ieee") * ROOT
  d_own_v = tl.dot(tl.trans(weights.to(q.dtype)), d_out, input_precision="ieee")
  tiles.store_rows(d_own_k_ptr + own_base, own_at, is_own, d_own_k, WIDTH)
  tiles.store_rows(d_own_v_ptr + own_base, own_at, is_own, d_own_v, WIDTH)
  d_q = tl.dot(d_own, own_k, input_precision="ieee")

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
  first = tl.min(tl.where(end > 0, start, CONTEXT)) // COLS * COLS
  last = tl.max(end)
  base = (batch64 * GROUPS + head) * (CONTEXT * WIDTH)
  for position in tl.range(first, last, COLS):
    key = position + tl.arange(0, COLS)
    seen = key[None, :] < end[:, None]
    if HAS_STARTS:
      seen = seen & (key[None, :] >= start[:, None])
    k = tiles.load_rows(k_ptr + base, key, key < last, WIDTH)
    v = tiles.load_rows(v_ptr + base, key, key < last, WIDTH)
    _, d_scores = _weights(q, k, d_out, v, seen, lse, delta, SCALE)
    d_q = tl.dot(d_scores.to(k.dtype), k, d_q, input_precision="ieee")
  base = batch64 * (BLOCKS * SLOTS * GROUPS * REPEAT * WIDTH)
  tiles.store_rows(d_q_ptr + base, at, is_row, d_q * ROOT, WIDTH)


@triton.jit
def block_attention_backward_context(
  q_ptr,  # [B, N, K, Q, H]
  k_ptr,  # [B, G, S, H]
  v_ptr,  # [B, G, S, H]
  lse_ptr,  # [B, N, K, Q] float32
  delta_ptr,  # [B, N, K, Q] float32
  d_out_ptr,  # [B, N, K, Q, H]
  visible_ptr,  # [B, N]
  starts_ptr,  # [B, N, K], not read without HAS_STARTS
  lowest_ptr,  # [B, N], least start of a block; not read without HAS_STARTS
  d_k_ptr,  # [B, G, S, H]
  d_v_ptr,  # [B, G, S, H]
  BLOCKS: tl.constexpr,
  SLOTS: tl.constexpr,
  GROUPS: tl.constexpr,
  REPEAT: tl.constexpr,
  WIDTH: tl.constexpr,
  CONTEXT: tl.constexpr,
  HAS_STARTS: tl.constexpr,
  SCALE: tl.constexpr,
  ROOT: tl.constexpr,
  PER_TILE: tl.constexpr,
  ROWS: tl.constexpr,
  COLS: tl.constexpr,
  PADDED_BLOCKS: tl.constexpr,
):
  """Cotangents of one tile of context keys and values.

  Blocks that see it are all between the first and the last that do; with sorted
  anchors those are no more than needed. Early positions are seen by the most
  blocks, and are the first programs.
  """
  head, batch = tl.program_id(0), tl.program_id(1)
  batch64 = batch.to(tl.int64)
  position = tl.program_id(2) * COLS
  key = position + tl.arange(0, COLS)
  base = (batch64 * GROUPS + head) * (CONTEXT * WIDTH)
  k = tiles.load_rows(k_ptr + base, key, key < CONTEXT, WIDTH)
  v = tiles.load_rows(v_ptr + base, key, key < CONTEXT, WIDTH)
  d_k = tl.zeros([COLS, WIDTH], tl.float32)
  d_v = tl.zeros([COLS, WIDTH], tl.float32)

  blocks = tl.arange(0, PADDED_BLOCKS)
  is_block = blocks < BLOCKS
  bounds_at = batch * BLOCKS + blocks
  sees = tl.load(visible_ptr + bounds_at, mask=is_block, other=0) > position
  if HAS_STARTS:
    lowest = tl.load(lowest_ptr + bounds_at, mask=is_block, other=0)
    sees = sees & (lowest < position + COLS)
  first = tl.min(tl.where(sees, blocks, BLOCKS)) // PER_TILE
  last = (tl.max(tl.where(sees, blocks + 1, 0)) + PER_TILE - 1) // PER_TILE

  base = batch64 * (BLOCKS * SLOTS * GROUPS * REPEAT)
  for tile in tl.range(first, last):
    slot, block, is_row = tiles.tile_rows(
      tile, BLOCKS, SLOTS, REPEAT, PER_TILE, ROWS
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
    at = tiles.row_offsets(tile, head, SLOTS, GROUPS, REPEAT, PER_TILE, ROWS)
    q = tiles.load_rows(q_ptr + base * WIDTH, at, is_row, WIDTH)
    d_out = tiles.load_rows(d_out_ptr + base * WIDTH, at, is_row, WIDTH)
    lse = tl.load(lse_ptr + base + at, mask=is_row, other=0.0)
    delta = tl.load(delta_ptr + base + at, mask=is_row, other=0.0)
    # Transposed, so that both sums are products of plain matrices.
    seen = key[:, None] < end[None, :]
    if HAS_STARTS:
      seen = seen & (key[:, None] >= start[None, :])
    scores = tl.zeros([COLS, ROWS], tl.float32) - lse[None, :] * (1.0 / SCALE)
    scores = tl.dot(k, tl.trans(q), scores, input_precision="ieee") * SCALE
    weights = tl.math.exp2(tl.where(seen, scores, MASKED))
    d_v = tl.dot(weights.to(v.dtype), d_out, d_v, input_precision="ieee")
    d_weights = tl.zeros([COLS, ROWS], tl.float32) - delta[None, :]
    d_weights = tl.dot(v, tl.trans(d_out), d_weights, input_precision="ieee")
    d_scores = (weights * d_weights).to(k.dtype)
    d_k = tl.dot(d_scores, q, d_k, input_precision="ieee")

  base = (batch64 * GROUPS + head) * (CONTEXT * WIDTH)
  tiles.store_rows(d_k_ptr + base, key, key < CONTEXT, d_k * ROOT, WIDTH)
  tiles.store_rows(d_v_ptr + base, key, key < CONTEXT, d_v, WIDTH)
