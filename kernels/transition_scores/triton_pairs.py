"""Triton kernels that join rows to scores or a draft, in the factored form.

With z of each predecessor row, and O^T (g E_b) and (g E_b) . u of each
candidate row (`triton_rows.py`), `scores_pairs` writes the scores of a slot, or
`scores_best` the best candidate of each predecessor, which `scores_walk` then
follows. How they are launched: `triton.py`.
"""

import triton
import triton.language as tl


@triton.jit
def _square(u_ptr, slot, D: tl.constexpr, BLOCK_WIDTH: tl.constexpr):
  """|u|^2 of a slot."""
  squares = tl.zeros([BLOCK_WIDTH], tl.float32)
  for start in range(0, D, BLOCK_WIDTH):
    at = start + tl.arange(0, BLOCK_WIDTH)
    u = tl.load(u_ptr + slot * D + at, mask=at < D, other=0.0).to(tl.float32)
    squares += u * u
  return tl.sum(squares, axis=0)


@triton.jit
def _numerators(
  slot,
  rms,
  z_ptr,
  through_ptr,
  base_ptr,
  P: tl.constexpr,
  C: tl.constexpr,
  Z: tl.constexpr,
  BLOCK_P: tl.constexpr,
  BLOCK_C: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """(g E_b) . u + rms(u) through_b . z_a of a slot, [BLOCK_P, BLOCK_C]."""
  p, c = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
  is_p, is_c = p < P, c < C
  z_rows, through_rows = (slot * P + p) * Z, (slot * C + c) * Z
  change = tl.zeros([BLOCK_P, BLOCK_C], tl.float32)
  for start in range(0, Z, BLOCK_INNER):
    inner = start + tl.arange(0, BLOCK_INNER)
    is_inner = inner < Z
    z = tl.load(
      z_ptr + z_rows[:, None] + inner[None, :],
      mask=is_p[:, None] & is_inner[None, :],
      other=0.0,
    )
    through = tl.load(
      through_ptr + through_rows[None, :] + inner[:, None],
      mask=is_c[None, :] & is_inner[:, None],
      other=0.0,
    )
    change = tl.dot(z, through, change, input_precision=PRECISION)
  base = tl.load(base_ptr + slot * C + c, mask=is_c, other=0.0)
  return base[None, :] + rms * change


@triton.jit
def scores_pairs(
  u_ptr,  # [N, D]
  z_ptr,  # [N, P, Z]
  through_ptr,  # [N, C, Z]
  base_ptr,  # [N, C] float32
  parts_ptr,  # [2, PARTS, N, P] float32, of `scores_length`
  scores_ptr,  # [N, P, C] float32
  SLOTS: tl.constexpr,
  P: tl.constexpr,
  C: tl.constexpr,
  D: tl.constexpr,
  Z: tl.constexpr,
  PARTS: tl.constexpr,
  EPS: tl.constexpr,
  TINY: tl.constexpr,
  BLOCK_P: tl.constexpr,
  BLOCK_C: tl.constexpr,
  BLOCK_PARTS: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  BLOCK_WIDTH: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """All scores of one slot."""
  slot = tl.program_id(0)
  square = _square(u_ptr, slot, D, BLOCK_WIDTH)
  rms = tl.sqrt(tl.maximum(square / D, TINY))
  p, c = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
  part = tl.arange(0, BLOCK_PARTS)
  is_p, is_part = p < P, part < PARTS
  at = (part[:, None] * SLOTS + slot) * P + p[None, :]
  mask = is_part[:, None] & is_p[None, :]
  along = tl.sum(tl.load(parts_ptr + at, mask=mask, other=0.0), axis=0)
  at += PARTS * SLOTS * P
  length = tl.sum(tl.load(parts_ptr + at, mask=mask, other=0.0), axis=0)
  mean_square = (square + 2 * rms * along + rms * rms * length) / D
  # It is a square norm: less than zero is rounding.
  inverse = 1 / tl.sqrt(tl.maximum(mean_square, 0.0) + EPS)
  numerators = _numerators(
    slot,
    rms,
    z_ptr,
    through_ptr,
    base_ptr,
    P,
    C,
    Z,
    BLOCK_P,
    BLOCK_C,
    BLOCK_INNER,
    PRECISION,
  )
  tl.store(
    scores_ptr + (slot * P + p)[:, None] * C + c[None, :],
    numerators * inverse[:, None],
    mask=is_p[:, None] & (c < C)[None, :],
  )


@triton.jit
def scores_best(
  u_ptr,  # [N, D]
  z_ptr,  # [N, P, Z]
  through_ptr,  # [N, C, Z]
  base_ptr,  # [N, C] float32
  best_ptr,  # [N, P] int32
  P: tl.constexpr,
  C: tl.constexpr,
  D: tl.constexpr,
  Z: tl.constexpr,
  TINY: tl.constexpr,
  BLOCK_P: tl.constexpr,
  BLOCK_C: tl.constexpr,
  BLOCK_INNER: tl.constexpr,
  BLOCK_WIDTH: tl.constexpr,
  PRECISION: tl.constexpr,
):
  """The first best candidate of each predecessor of one slot.

  The final norm is one positive factor a predecessor: it changes no order.
  """
  slot = tl.program_id(0)
  square = _square(u_ptr, slot, D, BLOCK_WIDTH)
  rms = tl.sqrt(tl.maximum(square / D, TINY))
  numerators = _numerators(
    slot,
    rms,
    z_ptr,
    through_ptr,
    base_ptr,
    P,
    C,
    Z,
    BLOCK_P,
    BLOCK_C,
    BLOCK_INNER,
    PRECISION,
  )
  p, c = tl.arange(0, BLOCK_P), tl.arange(0, BLOCK_C)
  numerators = tl.where((c < C)[None, :], numerators, float("-inf"))
  best = tl.argmax(numerators, axis=1, tie_break_left=True)
  # A row of NaN must not lead the walk out of the table.
  tl.store(best_ptr + slot * P + p, tl.minimum(best, C - 1), mask=p < P)


@triton.jit
def scores_walk(
  best_ptr,  # [B, M, P] int32
  candidates_ptr,  # [B, M, C]
  tokens_ptr,  # [B, M] int32
  M: tl.constexpr,
  P: tl.constexpr,
  C: tl.constexpr,
  BLOCK_M: tl.constexpr,
  BLOCK_P: tl.constexpr,
):
  """Follows the best candidates of one request, from row 0 of slot 0.

  The table is in registers: a step is two small sums, not a trip to memory.
  """
  request = tl.program_id(0)
  m, p = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_P)
  is_m = m < M
  best = tl.load(
    best_ptr + (request * M + m)[:, None] * P + p[None, :],
    mask=is_m[:, None] & (p < P)[None, :],
    other=0,
  )
  index = 0
  path = tl.zeros([BLOCK_M], tl.int32)
  for step in range(M):
    row = tl.sum(tl.where((m == step)[:, None], best, 0), axis=0)
    index = tl.sum(tl.where(p == index, row, 0), axis=0)
    path = tl.where(m == step, index, path)
  slots = request * M + m
  token = tl.load(candidates_ptr + slots * C + path, mask=is_m, other=0)
  tl.store(tokens_ptr + slots, token, mask=is_m)
