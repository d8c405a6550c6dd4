"""Least work of the transition scores and of the greedy draft.

XLA's stages are those of the direct form, as its compiled program for an H100
has them: gathered codes and head rows, and the refined states, are written and
read; the sigmoid and the final norm are one fusion each, and the two products
of the codes are one. The kernels take the factored form, gather inside, and
keep everything D-wide out of device memory.

Expected time of XLA over ours, from `gain` (R 1024, Z 512, 15 slots, 16
predecessors and candidates, bfloat16, H100):

  requests            1     4    16    64
  scores, D 4096   1.36  1.76  2.48  2.75
  scores, D 5120   1.36  1.79  2.57  2.87
  draft,  D 4096   1.67  2.58  3.01  3.11
  draft,  D 5120   1.69  2.65  3.12  3.23

Float32 has no such gain: its exact products have no matrix unit.

Not used here: products of a token alone could be tables, made once when a
server starts. codes @ W_p and codes @ W_m are [V, Z] each, and so is O^T (g E)
of the whole vocabulary: 156 MB each at V 151936 in bfloat16. With them, 2 Z
numbers a predecessor are gathered instead of R, and Z a candidate besides its
head row (still needed for the base), and of the draft's FLOPs only `readout`,
`receiver` and `pairs` are left: 2.3 of 26.5 GFLOP at D 4096 and 16 requests.
"""

from kernels.cost import OpCost, Stage, matmul
from kernels.transition_scores import heuristics


def cost(
  requests: int,
  slots: int,
  predecessors: int,
  candidates: int,
  width: int,
  rank: int,
  message: int,
  itemsize: int = 2,
  *,
  draft: bool = False,
) -> OpCost:
  """Work of `transition_scores`, or of `greedy_draft`.

  Args:
    requests: B.
    slots: M, of a request.
    predecessors: P, of a slot.
    candidates: C, of a slot.
    width: D.
    rank: R.
    message: Z.
    itemsize: bytes of a number of states, weights, head and codes.
    draft: whether the best path is taken, and no scores are given.
  """
  n = requests * slots
  p_rows, c_rows = n * predecessors, n * candidates
  readout = matmul("readout", n, width, rank, itemsize)
  receiver = matmul("receiver", n, rank, message, itemsize)
  sizes = (n, p_rows, c_rows, width, rank, message, itemsize)
  walk = Stage("walk", 0.0, 4.0 * (p_rows + c_rows + n))
  triton = [readout, receiver, *_rows(*sizes)]
  triton += _best(*sizes) if draft else _scores(*sizes)
  xla = [readout, receiver, *_direct(*sizes)]
  out = 4.0 * n if draft else 4.0 * c_rows * predecessors
  if draft:
    triton.append(walk)
    best = Stage("best", 0.0, 4.0 * p_rows * (candidates + 1))
    xla += [best, walk]
  return OpCost(_floor(*sizes, out), triton, xla)


def _rows(n, p_rows, c_rows, width, rank, message, itemsize):
  """`scores_message` and `scores_through`."""
  codes = p_rows * rank + 2 * rank * message + p_rows * message
  heads = (c_rows + message + n) * width + c_rows * message
  return [
    Stage(
      "message",
      4.0 * p_rows * rank * message,
      itemsize * codes + 4.0 * n * message,
    ),
    Stage(
      "through",
      2.0 * c_rows * width * (message + 1),
      itemsize * heads + 4.0 * c_rows,
    ),
  ]


def _best(n, p_rows, c_rows, width, rank, message, itemsize):
  """`scores_best`."""
  del rank
  flops = 2.0 * p_rows * (c_rows // n) * message
  read = itemsize * ((p_rows + c_rows) * message + n * width)
  return [Stage("pairs", flops, read + 4.0 * (c_rows + p_rows))]


def _scores(n, p_rows, c_rows, width, rank, message, itemsize):
  """What the norm needs, and `scores_pairs`."""
  (best,) = _best(n, p_rows, c_rows, width, rank, message, itemsize)
  pairs = best.bytes + 4.0 * p_rows * (c_rows // n)
  cols, products = width, []
  if heuristics.by_gram(n, p_rows // n, width, message):
    cols = message
    products = [
      matmul("gram", message, width, message, itemsize),
      matmul("toward", n, width, message, itemsize),
    ]
  read = p_rows * message + (message + n) * cols
  length = 2.0 * p_rows * message * cols
  return [
    *products,
    Stage("length", length, itemsize * read + 8.0 * p_rows),
    Stage("pairs", best.flops, pairs + 8.0 * p_rows),
  ]


def _direct(n, p_rows, c_rows, width, rank, message, itemsize):
  """XLA's stages of the direct form, but for the two per slot."""
  pairs = p_rows * (c_rows // n)

  def moved(name, numbers):
    return Stage(name, 0.0, float(itemsize * numbers))

  return [
    moved("feature", 2 * n * rank),
    moved("gather codes", 2 * p_rows * rank),
    matmul("predecessor", p_rows, rank, 2 * message, itemsize),
    moved("message", 3 * p_rows * message + n * message),
    matmul("write", p_rows, message, width, itemsize),
    moved("refine and norm", 2 * p_rows * width + n * width),
    moved("gather head", 2 * c_rows * width),
    Stage(
      "pairs",
      2.0 * pairs * width,
      itemsize * (p_rows + c_rows) * width + 4.0 * pairs,
    ),
  ]


def _floor(n, p_rows, c_rows, width, rank, message, itemsize, out):
  """All FLOPs of the factored form; inputs and output once."""
  flops = 2.0 * n * (width + message) * rank
  flops += 4.0 * p_rows * rank * message
  flops += 2.0 * c_rows * width * message
  flops += 2.0 * p_rows * (c_rows // n) * message
  weights = (rank + message) * width + 3 * rank * message
  read = weights + (n + c_rows) * width + p_rows * rank
  return Stage("floor", flops, itemsize * read + out)
