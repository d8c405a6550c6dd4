"""Triton kernels of the draft's loss: logits made tile by tile and used up.

  normalise  running maximum and sum of z and t, and the label's z
  distance   with both normalisers: sum |q - p|, sum q s, and on request the
             signs s, one bit a logit
  gradient   with the signs: z once more, and dz of one chunk of the vocabulary

The letters are those of `reference.py`. Rows and vocabulary may be of any size;
tiles of columns are multiples of 32, a word of signs. Not here: launches, and
the sums over groups of tiles (`triton.py`).
"""

import triton
from triton import language as tl

# Of a word of signs.
BITS = tl.constexpr(32)  # of a word of signs


@triton.jit
def _place(
  ROW_TILES: tl.constexpr, COL_GROUPS: tl.constexpr, BAND: tl.constexpr
):
  """This program's row tile and column group: bands of rows, row by row."""
  program = tl.program_id(0)
  first = program // (BAND * COL_GROUPS) * BAND
  height = tl.minimum(ROW_TILES - first, BAND)
  within = program % (BAND * COL_GROUPS)
  return first + within % height, within // height


@triton.jit
def _load(
  pointers, known, inner, start, WIDTH: tl.constexpr, STEP: tl.constexpr
):
  """[rows, STEP] from `start` on, zeros outside."""
  if WIDTH % STEP == 0:
    return tl.load(pointers + start, mask=known[:, None], other=0.0)
  mask = known[:, None] & (inner < WIDTH - start)[None, :]
  return tl.load(pointers + start, mask=mask, other=0.0)


@triton.jit
def _pointers(base, ids, inner, WIDTH: tl.constexpr):
  # A table of vocabulary by width may have more than 2**31 elements.
  return base + ids.to(tl.int64)[:, None] * WIDTH + inner[None, :]


@triton.jit
def _both_logits(
  hidden,
  teacher,
  head,
  rows,
  cols,
  ROWS: tl.constexpr,
  WIDTH: tl.constexpr,
  VOCAB: tl.constexpr,
  TILE_ROWS: tl.constexpr,
  TILE_COLS: tl.constexpr,
  STEP: tl.constexpr,
):
  """z and t of a tile; one load of the head serves both."""
  inner = tl.arange(0, STEP)
  hidden_at = _pointers(hidden, rows, inner, WIDTH)
  teacher_at = _pointers(teacher, rows, inner, WIDTH)
  head_at = _pointers(head, cols, inner, WIDTH)
  z = tl.zeros((TILE_ROWS, TILE_COLS), tl.float32)
  t = tl.zeros((TILE_ROWS, TILE_COLS), tl.float32)
  for start in range(0, WIDTH, STEP):
    h = _load(hidden_at, rows < ROWS, inner, start, WIDTH, STEP)
    g = _load(teacher_at, rows < ROWS, inner, start, WIDTH, STEP)
    e = tl.trans(_load(head_at, cols < VOCAB, inner, start, WIDTH, STEP))
    z = tl.dot(h, e, z, input_precision="ieee")
    t = tl.dot(g, e, t, input_precision="ieee")
  return z, t


@triton.jit
def _add_exp(maximum, total, scores):
  """Running maximum and sum of exp(score - maximum) with more scores."""
  larger = tl.maximum(maximum, tl.max(scores, axis=1))
  total = total * tl.exp(maximum - larger)
  return larger, total + tl.sum(tl.exp(scores - larger[:, None]), axis=1)


@triton.jit
def draft_loss_normalise(
  hidden,  # [ROWS, WIDTH]
  teacher,  # [ROWS, WIDTH]
  labels,  # [ROWS]
  head,  # [VOCAB, WIDTH]
  partials,  # [5, COL_GROUPS, ROWS]: max, sum of z; max, sum of t; z of label
  ROWS: tl.constexpr,
  WIDTH: tl.constexpr,
  VOCAB: tl.constexpr,
  ROW_TILES: tl.constexpr,
  COL_GROUPS: tl.constexpr,
  GROUP: tl.constexpr,
  BAND: tl.constexpr,
  TILE_ROWS: tl.constexpr,
  TILE_COLS: tl.constexpr,
  STEP: tl.constexpr,
):
  """Softmax statistics of a row tile over one group of vocabulary tiles."""
  row_tile, group = _place(ROW_TILES, COL_GROUPS, BAND)
  rows = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
  label = tl.load(labels + rows, mask=rows < ROWS, other=-1)
  maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
  teacher_maximum = tl.full((TILE_ROWS,), float("-inf"), tl.float32)
  total = tl.zeros((TILE_ROWS,), tl.float32)
  teacher_total = tl.zeros((TILE_ROWS,), tl.float32)
  label_logit = tl.zeros((TILE_ROWS,), tl.float32)
  # The last group may have tiles past the vocabulary, which add nothing.
  for i in range(GROUP):
    start = (group * GROUP + i) * TILE_COLS
    cols = start + tl.arange(0, TILE_COLS)
    z, t = _both_logits(
      hidden, teacher, head, rows, cols, ROWS, WIDTH, VOCAB,
      TILE_ROWS, TILE_COLS, STEP,
    )  # fmt: skip
    is_label = cols[None, :] == label[:, None]
    label_logit += tl.sum(tl.where(is_label, z, 0.0), axis=1)
    known = (cols < VOCAB)[None, :]
    z = tl.where(known, z, float("-inf"))
    t = tl.where(known, t, float("-inf"))
    maximum, total = _add_exp(maximum, total, z)
    teacher_maximum, teacher_total = _add_exp(teacher_maximum, teacher_total, t)
  at = partials + group * ROWS + rows
  size: tl.constexpr = COL_GROUPS * ROWS
  tl.store(at, maximum, mask=rows < ROWS)
  tl.store(at + size, total, mask=rows < ROWS)
  tl.store(at + 2 * size, teacher_maximum, mask=rows < ROWS)
  tl.store(at + 3 * size, teacher_total, mask=rows < ROWS)
  tl.store(at + 4 * size, label_logit, mask=rows < ROWS)


@triton.jit
def draft_loss_distance(
  hidden,  # [ROWS, WIDTH]
  teacher,  # [ROWS, WIDTH]
  log_normaliser,  # [ROWS]
  teacher_log_normaliser,  # [ROWS]
  head,  # [VOCAB, WIDTH]
  partials,  # [2, COL_GROUPS, ROWS]: sums of |q - p| and of q s
  signs,  # [ROWS, WORDS], bit i of word w is that of column 32 w + i
  ROWS: tl.constexpr,
  WIDTH: tl.constexpr,
  VOCAB: tl.constexpr,
  WORDS: tl.constexpr,
  WITH_SIGNS: tl.constexpr,
  ROW_TILES: tl.constexpr,
  COL_GROUPS: tl.constexpr,
  GROUP: tl.constexpr,
  BAND: tl.constexpr,
  TILE_ROWS: tl.constexpr,
  TILE_COLS: tl.constexpr,
  STEP: tl.constexpr,
):
  """Distance of a row tile over one group of vocabulary tiles."""
  row_tile, group = _place(ROW_TILES, COL_GROUPS, BAND)
  rows = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
  normaliser = tl.load(log_normaliser + rows, mask=rows < ROWS, other=0.0)
  teacher_normaliser = tl.load(
    teacher_log_normaliser + rows, mask=rows < ROWS, other=0.0
  )
  distance = tl.zeros((TILE_ROWS,), tl.float32)
  slope = tl.zeros((TILE_ROWS,), tl.float32)
  for i in range(GROUP):
    start = (group * GROUP + i) * TILE_COLS
    cols = start + tl.arange(0, TILE_COLS)
    z, t = _both_logits(
      hidden, teacher, head, rows, cols, ROWS, WIDTH, VOCAB,
      TILE_ROWS, TILE_COLS, STEP,
    )  # fmt: skip
    known = (cols < VOCAB)[None, :]
    q = tl.where(known, tl.exp(z - normaliser[:, None]), 0.0)
    p = tl.where(known, tl.exp(t - teacher_normaliser[:, None]), 0.0)
    distance += tl.sum(tl.abs(q - p), axis=1)
    slope += tl.sum(tl.where(q >= p, q, -q), axis=1)
    if WITH_SIGNS:
      words = start // BITS + tl.arange(0, TILE_COLS // BITS)
      bits = tl.reshape(
        (q >= p).to(tl.int32), (TILE_ROWS, TILE_COLS // BITS, BITS)
      )
      packed = tl.sum(bits << tl.arange(0, BITS)[None, None, :], axis=2)
      tl.store(
        signs + rows.to(tl.int64)[:, None] * WORDS + words[None, :],
        packed,
        mask=(rows < ROWS)[:, None] & (words < WORDS)[None, :],
      )
  at = partials + group * ROWS + rows
  tl.store(at, distance, mask=rows < ROWS)
  tl.store(at + COL_GROUPS * ROWS, slope, mask=rows < ROWS)


@triton.jit
def draft_loss_gradient(
  hidden,  # [ROWS, WIDTH]
  labels,  # [ROWS]
  log_normaliser,  # [ROWS]
  slope,  # [ROWS], sum of q s
  g_ce,  # [ROWS]
  g_l1,  # [ROWS]
  signs,  # [ROWS, WORDS]
  head,  # [VOCAB, WIDTH]
  chunk_start,  # [1], a multiple of TILE_COLS
  d_logits,  # [ROWS, CHUNK]
  ROWS: tl.constexpr,
  WIDTH: tl.constexpr,
  VOCAB: tl.constexpr,
  WORDS: tl.constexpr,
  CHUNK: tl.constexpr,
  ROW_TILES: tl.constexpr,
  COL_TILES: tl.constexpr,
  BAND: tl.constexpr,
  TILE_ROWS: tl.constexpr,
  TILE_COLS: tl.constexpr,
  STEP: tl.constexpr,
):
  """dz of one tile of a chunk; what lies past the vocabulary means nothing."""
  row_tile, col_tile = _place(ROW_TILES, COL_TILES, BAND)
  rows = row_tile * TILE_ROWS + tl.arange(0, TILE_ROWS)
  places = col_tile * TILE_COLS + tl.arange(0, TILE_COLS)
  start = tl.load(chunk_start)
  cols = start + places
  inner = tl.arange(0, STEP)
  hidden_at = _pointers(hidden, rows, inner, WIDTH)
  head_at = _pointers(head, cols, inner, WIDTH)
  z = tl.zeros((TILE_ROWS, TILE_COLS), tl.float32)
  for step in range(0, WIDTH, STEP):
    h = _load(hidden_at, rows < ROWS, inner, step, WIDTH, STEP)
    e = tl.trans(_load(head_at, cols < VOCAB, inner, step, WIDTH, STEP))
    z = tl.dot(h, e, z, input_precision="ieee")

  known_rows = rows < ROWS
  words = (start + col_tile * TILE_COLS) // BITS
  words += tl.arange(0, TILE_COLS // BITS)
  packed = tl.load(
    signs + rows.to(tl.int64)[:, None] * WORDS + words[None, :],
    mask=known_rows[:, None] & (words < WORDS)[None, :],
    other=0,
  )
  bits = (packed[:, :, None] >> tl.arange(0, BITS)[None, None, :]) & 1
  # Narrow: they share the registers with z.
  bits = tl.reshape(bits.to(tl.int8), (TILE_ROWS, TILE_COLS))
  label = tl.load(labels + rows, mask=known_rows, other=-1)
  normaliser = tl.load(log_normaliser + rows, mask=known_rows, other=0.0)
  mean = tl.load(slope + rows, mask=known_rows, other=0.0)
  of_ce = tl.load(g_ce + rows, mask=known_rows, other=0.0)
  of_l1 = tl.load(g_l1 + rows, mask=known_rows, other=0.0)

  # g_ce + g_l1 (s - mean) is one of two numbers of the row.
  upper = (of_ce + of_l1 * (1.0 - mean))[:, None]
  lower = (of_ce + of_l1 * (-1.0 - mean))[:, None]
  d_z = tl.exp(z - normaliser[:, None]) * tl.where(bits != 0, upper, lower)
  d_z -= tl.where(cols[None, :] == label[:, None], of_ce[:, None], 0.0)
  tl.store(
    d_logits + rows.to(tl.int64)[:, None] * CHUNK + places[None, :],
    d_z.to(d_logits.dtype.element_ty),
    mask=known_rows[:, None] & (places < CHUNK)[None, :],
  )
