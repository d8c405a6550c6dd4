"""Work of the adjacent injection: least, ours, and XLA's.

XLA's stages are those of the program that it compiles for an H100 (every
product by itself, the norm as one fusion, the two products of the predecessor
as one with copies of its halves after it). Weights are counted in the dtype of
the states; a cast from float32 is the same for all. A predecessor's code counts
once a block (the anchor's): blocks that are `replaced` read up to K - 1 more.
"""

from kernels.cost import OpCost, Stage, matmul

SLOTS = 16  # of a block


def cost(
  rows: int,
  width: int,
  rank: int,
  message: int,
  *,
  with_feature: bool,
  backward: bool,
  itemsize: int = 2,
) -> OpCost:
  """Work at one shape.

  Args:
    rows: T, slots of all blocks.
    width: D.
    rank: R.
    message: Z.
    with_feature: whether the features of the written states are asked for.
    backward: whether the gradient follows (which then counts, too).
    itemsize: bytes of a number of states and weights.
  """
  sizes = (rows, width, rank, message, itemsize)
  triton = _triton_forward(*sizes, with_feature, save=backward)
  xla = _xla_forward(*sizes, with_feature)
  if backward:
    triton += _triton_backward(*sizes, with_feature)
    xla += _xla_backward(*sizes, with_feature)
  return OpCost(_floor(*sizes, with_feature, backward), triton, xla)


def _floor(t, d, r, z, itemsize, with_feature, backward) -> Stage:
  """Two products in the backward for each one in the forward."""
  multiplied = t * (d * r + 3 * r * z + z * d)
  states = 2 * t * d
  weights = d * r + z * d + 3 * r * z
  if with_feature:
    multiplied += t * z * r + z * d * r
    states += t * r
  factor = 3 if backward else 1
  codes = t // SLOTS * r
  return Stage(
    "floor",
    2.0 * factor * multiplied,
    float(itemsize) * (factor * (states + weights) + codes),
  )


def _triton_forward(t, d, r, z, itemsize, with_feature, *, save):
  def fused(product, numbers):
    return product._replace(bytes=product.bytes + itemsize * numbers)

  stages = [
    matmul("read", t, d, r, itemsize),
    Stage(
      "message",
      6.0 * t * r * z,
      itemsize
      * (t * r + t // SLOTS * r + 3.0 * r * z + (3 if save else 1) * t * z),
    ),
    fused(matmul("write", t, z, d, itemsize), t * d),
  ]
  if with_feature:
    stages += [
      matmul("O R (XLA)", z, d, r, itemsize),
      fused(matmul("read after", t, z, r, itemsize), t * r),
      Stage("feature (XLA)", 0.0, itemsize * 2.0 * t * r),
    ]
  return stages


def _triton_backward(t, d, r, z, itemsize, with_feature):
  through, reads = (z * r, t * r) if with_feature else (0, 0)
  stages = [
    Stage(
      "message backward",
      2.0 * t * z * (d + (r if with_feature else 0)),
      itemsize * (t * d + z * d + 6.0 * t * z + through + reads),
    ),
    Stage(
      "read backward",
      6.0 * t * r * z,
      itemsize
      * (3.0 * t * z + 3.0 * r * z + 3.0 * t * r + t // SLOTS * r + reads),
    ),
    Stage(
      "input backward",
      2.0 * t * d * r,
      itemsize * (3.0 * t * d + t * r + d * r),
    ),
    matmul("write' (XLA)", z, t, d, itemsize),
    matmul("readout' (XLA)", d, t, r, itemsize),
    *[matmul("message and gates' (XLA)", r, t, z, itemsize)] * 3,
    Stage("bias' (XLA)", 0.0, itemsize * float(t * z)),
  ]
  if with_feature:
    stages += [
      Stage("feature' (XLA)", 0.0, itemsize * 5.0 * t * r),
      matmul("(O R)' (XLA)", z, t, r, itemsize),
      matmul("(O R)' to O (XLA)", z, r, d, itemsize),
      matmul("(O R)' to R (XLA)", d, z, r, itemsize),
    ]
  return stages


def _xla_forward(t, d, r, z, itemsize, with_feature):
  def moved(name, numbers):
    return Stage(name, 0.0, itemsize * float(numbers))

  stages = [
    moved("rms", t * d),
    matmul("read", t, d, r, itemsize),
    moved("feature", 2 * t * r),
    matmul("receiver", t, r, z, itemsize),
    moved("predecessor", 3 * t * r),
    matmul("predecessor's products", t, r, 2 * z, itemsize),
    moved("halves", 4 * t * z),
    moved("gate", 4 * t * z),
    matmul("write", t, z, d, itemsize),
    moved("add", 3 * t * d),
  ]
  if with_feature:
    stages += [
      matmul("read after", t, d, r, itemsize),
      moved("feature after", 2 * t * r),
    ]
  return stages


def _xla_backward(t, d, r, z, itemsize, with_feature):
  def moved(name, numbers):
    return Stage(name, 0.0, itemsize * float(numbers))

  stages = []
  if with_feature:
    into = matmul("read after' to h", t, r, d, itemsize)
    stages += [
      moved("feature after'", 5 * t * r),
      matmul("read after' to R", d, t, r, itemsize),
      into._replace(bytes=into.bytes + itemsize * t * d),
      moved("sum of R'", 3 * d * r),
    ]
  return [
    *stages,
    moved("rms'", 2 * t * d),
    moved("written'", 2 * t * d),
    matmul("write' to O", z, t, d, itemsize),
    matmul("write' to z", t, d, z, itemsize),
    moved("gate'", 5 * t * z),
    matmul("gates' to W", 2 * r, t, z, itemsize),
    matmul("message' to W", r, t, z, itemsize),
    matmul("message' to p", t, z, r, itemsize),
    matmul("gates' to f and p", t, z, 2 * r, itemsize),
    moved("feature', sum", 4 * t * r),
    moved("feature'", 5 * t * r),
    matmul("read' to R", d, t, r, itemsize),
    matmul("read' to h", t, r, d, itemsize),
    moved("sum of h'", 4 * t * d),
  ]
