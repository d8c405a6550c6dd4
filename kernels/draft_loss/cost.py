"""Work of the draft's loss: products with the head, and passes over logits.

XLA needs three products with the head (both logits, and dz times the head), and
has whole rows of logits in memory, so it makes passes over them. Kernels that
keep no rows must make logits again whenever something is known that needs all
of a row. Counted in products, with the cotangents of ce and l1 unknown until
the backward pass:

  normalisers           2   z and t
  distance and signs    2   needs both normalisers; z and t again
  gradient              2   z again, and dz times the head

Six is the least without rows. To make both z and t in the gradient would be
seven. To add up U = sum_v q_v s_v E_v and W = sum_v q_v E_v beside the
distance, from which the gradient needs no further pass, would be six as well
(each is a product), but move two chunks of weights and two sums [rows, D]
instead of one. What the gradient needs of t is one bit a logit, which the
distance keeps. Were the ratio of the two cotangents known in the forward pass,
one sum would do: five.

dz times the head cannot be added up on the chip: [rows, D] in float32 does not
fit, and atomic additions from each tile of 256 columns would write D / 64 bytes
a logit, 75 GB for 7,680 rows of D = 4,096 and V = 151,936. So dz of a chunk of
the vocabulary is written in the dtype of the states, and XLA multiplies it.

What the counts say for 7,680 rows in bfloat16: the kernels have 0.63 to 0.79 of
XLA's speed in chunks of 512 rows or more, so they are not the default. Their
reason is memory. XLA holds 9 bytes a logit (z and t in float32, a byte of
signs; dz takes the place of t): 10.5 GB for V = 151,936, or 0.70 GB in chunks
of 512 rows. The kernels hold 1/8 byte a logit, and dz and the head of one chunk
of the vocabulary: 0.15 + 0.13 + 0.07 GB, beside the gradient itself, for all
rows in one call. XLA with less than that must take 240 rows at a time and read
the head 96 times: the kernels have 0.85 to 0.91 of that speed on an H100. With
120 rows they are counted as 1.5 times faster.
"""

from kernels.cost import OpCost, Stage, matmul

FLOAT32 = 4

# Rows of a band whose programs share head rows, and columns of a chunk of dz.
BAND_ROWS, CHUNK = 8 * 128, 8192


def cost(
  rows: int,
  width: int,
  vocab: int,
  *,
  backward: bool,
  chunk_rows: int,
  itemsize: int = 2,
) -> OpCost:
  """Work of `draft_loss` over [rows, width] and a head of [vocab, width].

  Args:
    rows: predicting slots.
    width: D.
    vocab: V.
    backward: whether the gradient of the states is computed, too.
    chunk_rows: rows that XLA takes at a time, as its caller cuts them; the
      kernels take all.
    itemsize: bytes of an element of the states and the head.
  """
  states, head = rows * width * itemsize, vocab * width * itemsize
  products = 3 if backward else 2
  return OpCost(
    floor=Stage(
      "draft_loss",
      products * 2.0 * rows * width * vocab,
      (products * states) + head + 5 * FLOAT32 * rows,
    ),
    triton=_triton(rows, width, vocab, backward, itemsize),
    xla=-(-rows // chunk_rows)
    * _xla(chunk_rows, width, vocab, backward, itemsize),
  )


def _triton(rows, width, vocab, backward, itemsize) -> list[Stage]:
  """The kernels and the product between; partial sums are not worth counting.

  A band of rows stays in the L2 cache while the head goes by.
  """
  product = 2.0 * rows * width * vocab
  states = rows * width * itemsize
  heads = -(-rows // BAND_ROWS) * vocab * width * itemsize
  logits = rows * vocab
  signs = logits / 8 if backward else 0
  stages = [
    Stage("normalise", 2 * product, 2 * states + heads),
    Stage("distance", 2 * product, 2 * states + heads + signs),
  ]
  if not backward:
    return stages
  sums = 2 * FLOAT32 * rows * width * -(-vocab // CHUNK)
  return [
    *stages,
    Stage("gradient", product, states + heads + signs + itemsize * logits),
    Stage(
      "dz head",
      product,
      itemsize * logits + vocab * width * itemsize + sums,
    ),
    Stage("slices of the head", 0.0, 2.0 * vocab * width * itemsize),
  ]


def _xla(rows, width, vocab, backward, itemsize) -> list[Stage]:
  """What XLA makes of one chunk of rows, as its compiled program shows it.

  Each statistic is a fusion with a pass of its own over z or t in float32.
  With a gradient the signs are materialised as one byte a logit.
  """
  logits = rows * vocab
  row = FLOAT32 * logits
  product = 2.0 * rows * width * vocab
  written = Stage("logits", product, itemsize * width * (rows + vocab) + row)
  stages = [
    written,
    written._replace(name="teacher logits"),
    Stage("maxima", 0.0, 2 * row),
    Stage("sums", 0.0, 2 * row),
  ]
  if not backward:
    return [*stages, Stage("distance", 0.0, 2 * row)]
  return [
    *stages,
    Stage("signs", 0.0, 2 * row + logits),
    Stage("distance and slope", 0.0, 2 * row + logits),
    Stage("dz", 0.0, row + logits + itemsize * logits),
    matmul("dz head", rows, vocab, width, itemsize),
  ]
