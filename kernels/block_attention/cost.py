"""Work of block attention: least, ours, and XLA's.

XLA's stages are those of the program that it compiles for an H100: in training
it takes tiles of blocks one after another, and copies what a tile reads; in
decoding (one block a row) it takes the whole context; the scores of a
tile are written in float32, read for the maximum and again for the weights, and
in the backward computed anew and read once more. Arrays that stay in the cache
of the device between two of its kernels (the scores of one request do) count as
if they did not. Ours reads the context once for all blocks of a key head, which
the same cache must provide. Only positions that are seen count, plus what XLA's
prefixes round up.
"""

from typing import NamedTuple

from kernels.block_attention import heuristics
from kernels.cost import OpCost, Stage

# Of `context_tiles.py`: query slots of a tile, and prefixes of the context.
_TILE_SLOTS = 256
_PREFIXES = 4


class _Work(NamedTuple):
  """Numbers that a call handles, in elements.

  Attributes:
    head_dim: H.
    itemsize: bytes of an element.
    rows: queries of all heads.
    queries: elements of q.
    own: elements of own keys.
    own_scores: scores inside blocks.
    context: elements of context keys.
    seen: of them, those that some block sees.
    scores: scores on seen positions of the context.
    parts: elements of partial outputs, 0 where the context is not split.
    prefix: positions that XLA reads for a tile, on average.
    cut: of them, those that are copied first.
    tiles: XLA's tiles of the whole batch, times G H.
    positions: S.
    requests: B.
    is_tiled: whether XLA takes tiles of blocks one after another.
  """

  head_dim: int
  itemsize: int
  rows: int
  queries: int
  own: int
  own_scores: int
  context: int
  seen: float
  scores: float
  parts: int
  prefix: float
  cut: float
  tiles: int
  positions: int
  requests: int
  is_tiled: bool


def cost(
  batch: int,
  blocks: int,
  slots: int,
  heads: int,
  kv_heads: int,
  head_dim: int,
  context: int,
  *,
  mean_visible: float | int | None = None,
  backward: bool,
  itemsize: int = 2,
) -> OpCost:
  """Work at one shape.

  Args:
    batch: B.
    blocks: N.
    slots: K.
    heads: Q.
    kv_heads: G.
    head_dim: H.
    context: S.
    mean_visible: context positions that a block sees, on average; None for half
      of them, or all where a row has one block.
    backward: whether the gradient follows (which then counts, too).
    itemsize: bytes of a number.
  """
  shape = heuristics.Shape(
    batch=batch,
    blocks=blocks,
    slots=slots,
    groups=kv_heads,
    repeat=heads // kv_heads,
    width=head_dim,
    context=context,
    itemsize=itemsize,
  )
  return of_shape(shape, mean_visible=mean_visible, backward=backward)


def of_shape(
  shape: heuristics.Shape,
  *,
  mean_visible: float | int | None = None,
  backward: bool,
) -> OpCost:
  """As `cost`, of the sizes of a call."""
  work = _work(shape, mean_visible)
  triton, xla = _triton_forward(work), _xla_forward(work)
  if backward:
    triton += _triton_backward(work)
    xla += _xla_backward(work)
  return OpCost(_floor(work, backward), triton, xla)


def _work(shape: heuristics.Shape, visible: float | int | None) -> _Work:
  many = shape.blocks > 1
  if visible is None:
    visible = shape.context / 2 if many else shape.context
  step = shape.context / _PREFIXES
  if many:
    # Ends of tiles are spread over the context; a quarter of them needs it all.
    prefix = min(shape.context, visible + step / 2)
    cut = max(0.0, prefix - step)
  else:
    prefix, cut = float(shape.context), 0.0
  tokens = shape.batch * shape.blocks * shape.slots
  per_key = shape.groups * shape.width
  rows = shape.batch * shape.per_batch
  splits = heuristics.splits(shape)
  return _Work(
    head_dim=shape.width,
    itemsize=shape.itemsize,
    rows=rows,
    queries=rows * shape.width,
    own=tokens * per_key,
    own_scores=rows * shape.slots,
    context=shape.batch * shape.context * per_key,
    seen=shape.batch * (shape.context if many else visible) * per_key,
    scores=rows * visible,
    parts=rows * shape.width * splits if splits > 1 else 0,
    prefix=prefix,
    cut=cut,
    tiles=shape.batch * -(-shape.blocks * shape.slots // _TILE_SLOTS) * per_key,
    positions=shape.context,
    requests=shape.batch,
    is_tiled=many,
  )


def _floor(work: _Work, backward: bool) -> Stage:
  """Two products forward, four more backward; arrays once in each of them."""
  scores = work.scores + work.own_scores
  keys = 2 * (work.own + work.seen)
  numbers = 2 * work.queries + keys
  if backward:
    numbers += 4 * work.queries + 2 * keys
  products = 6 if backward else 2
  return Stage(
    "floor",
    2.0 * products * scores * work.head_dim,
    float(work.itemsize * numbers),
  )


def _triton_forward(work: _Work) -> list[Stage]:
  flops = 4.0 * (work.scores + work.own_scores) * work.head_dim
  read = work.itemsize * (work.queries + 2 * (work.own + work.seen))
  out = work.itemsize * work.queries + 4 * work.rows
  if not work.parts:
    return [Stage("forward", flops, float(read + out))]
  parts = 4 * work.parts * (1 + 1 / work.head_dim)
  return [
    Stage("forward", flops, float(read + parts)),
    Stage("merge", 0.0, float(parts + out)),
  ]


def _triton_backward(work: _Work) -> list[Stage]:
  """Both kernels compute the weights and their cotangents."""
  keys = work.own + work.seen
  return [
    Stage(
      "backward_q",
      2.0 * (3 * work.scores + 5 * work.own_scores) * work.head_dim,
      work.itemsize * (4.0 * work.queries + 2 * keys + 2 * work.own)
      + 8 * work.rows,
    ),
    Stage(
      "backward_context",
      8.0 * work.scores * work.head_dim,
      work.itemsize * (2.0 * work.queries + 2 * work.seen + 2 * work.context)
      + 8 * work.rows,
    ),
  ]


def _copies(work: _Work, name: str) -> Stage:
  """Keys and values of a request, and of a tile's prefix, read and written."""
  request = work.context if work.is_tiled and work.requests > 1 else 0
  prefixes = work.tiles * work.cut
  return Stage(name, 0.0, 4.0 * work.itemsize * (request + prefixes))


def _xla_forward(work: _Work) -> list[Stage]:
  item, wide, q = work.itemsize, 4, work.queries
  keys = work.tiles * work.prefix
  scores = work.rows * work.prefix

  def product(name, numbers, reads, writes):
    return Stage(name, 2.0 * numbers * work.head_dim, reads + writes)

  def softmax(name, numbers):
    return [
      Stage(f"{name} maximum", 0.0, wide * float(numbers)),
      Stage(f"{name} weights", 0.0, (wide + item) * float(numbers)),
    ]

  own = work.own_scores
  return [
    Stage("cut queries", 0.0, (4.0 if work.is_tiled else 2.0) * item * q),
    _copies(work, "copies"),
    product("scores", scores, item * (q + keys), wide * scores),
    *softmax("context", scores),
    product("weighted", scores, item * (scores + keys), wide * q),
    Stage("collect", 0.0, 2.0 * wide * q if work.is_tiled else 0.0),
    Stage("own transposes", 0.0, item * (2.0 * q + 4 * work.own)),
    product("own scores", own, item * (q + work.own), wide * own),
    *softmax("own", own),
    product("own weighted", own, item * (own + work.own), wide * q),
    Stage("merge", 0.0, (2.0 * wide + item) * q),
  ]


def _xla_backward(work: _Work) -> list[Stage]:
  item, wide, q = work.itemsize, 4, work.queries
  keys = work.tiles * work.prefix
  scores = work.rows * work.prefix

  def product(name, numbers, reads, writes):
    return Stage(name, 2.0 * numbers * work.head_dim, reads + writes)

  own = work.own_scores
  padded = work.positions if work.cut else 0.0
  return [
    Stage("merge backward", 0.0, (2.0 * wide + item) * q),
    Stage("cotangents of parts", 0.0, (3.0 * item + wide) * q),
    Stage("tiles of queries", 0.0, (2.0 * item + 2 * wide) * q),
    Stage("rounded cotangents", 0.0, (wide + item) * float(q)),
    _copies(work, "copies again"),
    product("scores again", scores, item * (q + keys), wide * scores),
    product("d_weights", scores, item * (q + keys), wide * scores),
    Stage("d_scores", 0.0, 2.0 * (wide + item) * scores),
    product("d_k", scores, item * (q + scores), wide * keys),
    product("d_v", scores, item * (q + scores), wide * keys),
    product("d_q", scores, item * (scores + keys), wide * q),
    Stage("pads", 0.0, 2.0 * wide * work.tiles * (work.cut + padded)),
    Stage("sums", 0.0, 6.0 * wide * work.tiles * work.positions),
    Stage("collect d_q", 0.0, 2.0 * wide * q),
    product("own d_weights", own, item * (q + work.own), wide * own),
    Stage("own d_scores", 0.0, (2.0 * wide + item) * own),
    product("own d_k", own, item * (q + own), wide * work.own),
    product("own d_v", own, item * (q + own), wide * work.own),
    product("own d_q", own, item * (own + work.own), item * q),
    Stage("transposes", 0.0, 2.0 * (wide + item) * (work.own + work.context)),
    Stage("d_q", 0.0, (wide + 2.0 * item) * q),
  ]
