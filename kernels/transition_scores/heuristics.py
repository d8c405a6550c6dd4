"""What the kernels do at a shape that nobody tuned; pure functions of shape.

Few rows (one request has 240) want many small tiles, so that all 132 SMs of a
Hopper device stream; many rows want large ones, which read less.
"""

from kernels.block_sizes import BlockSizes

# From here on there are enough rows to fill the device with the largest tiles.
MANY_ROWS = 8192


def row_tiles(kernel: str, rows: int, cols: int, itemsize: int) -> BlockSizes:
  """Tiles of `scores_receiver`, `_message`, `_through` or `_length`.

  Args:
    kernel: its name.
    rows: (slot, predecessor), (slot, candidate) or slots.
    cols: Z.
    itemsize: bytes of a number of the states.
  """
  if itemsize > 2:
    # Exact float32 products have no matrix unit; a tile lives in registers.
    return BlockSizes(rows=32, cols=32, inner=32, num_warps=4, num_stages=2)
  if rows >= MANY_ROWS:
    # The others hold a second product, or more tiles, in registers.
    wide = 256 if kernel == "scores_through" else 128
    return BlockSizes(rows=128, cols=wide, inner=64, num_warps=8, num_stages=3)
  narrow = 32 if -(-rows // 64) * -(-cols // 64) < 64 else 64
  return BlockSizes(rows=64, cols=narrow, inner=128, num_warps=4, num_stages=3)


def pair_tiles(predecessors: int, candidates: int) -> BlockSizes:
  """Tiles of `scores_pairs` and `scores_best`: one slot, whole.

  Only `inner`, the step along Z, and the warps are free.
  """
  return BlockSizes(
    rows=padded(predecessors),
    cols=padded(candidates),
    inner=128,
    num_warps=4,
    num_stages=2,
  )


def padded(count: int, least: int = 16) -> int:
  """A power of two that a matrix unit takes."""
  return max(least, 1 << (count - 1).bit_length())


def by_gram(slots: int, predecessors: int, width: int, message: int) -> bool:
  """Whether |O z|^2 takes fewer FLOPs by G = O^T O than by O z itself."""
  by_write = slots * predecessors * message * width
  rows = slots * predecessors * message + slots * width
  return message * (rows + message * width) < by_write
