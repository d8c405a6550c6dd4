"""Kernel bodies of adjacent injection on Mosaic GPU, and their shared memory.

In each, the third warpgroup fetches tiles through a ring of stages in shared
memory and two multiply. A stage is `filled` when its copies have arrived, and
`used` when both have read it. Rows beyond the last are read as zeros and not
written. Not here: the launches (`pallas_mosaic.py`).
"""

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

_TILE = plgpu.Layout.WGMMA
_PER_ROW = plgpu.Layout.WGMMA.reduce(1)
_PER_COL = plgpu.Layout.WGMMA.reduce(0)

# Registers of a thread: one that fetches needs few, so that others have more.
_FEW, _MANY = 40, 232


def read_scratch(sizes):
  """Shared memory of `read`, by name."""
  return {
    "h_smem": _smem(sizes.num_stages, sizes.rows, sizes.inner),
    "readout_smem": _smem(sizes.num_stages, sizes.inner, sizes.cols),
    "y_smem": _smem(2, sizes.rows, sizes.cols // 2),
    "y_square_smem": plgpu.SMEM((2, sizes.rows), jnp.float32),
    "h_square_smem": plgpu.SMEM((2, sizes.rows // 2), jnp.float32),
    **_ring(sizes.num_stages, copies=2),
  }


def read(
  h,  # [N, D]
  readout,  # [D, R]
  y,  # [N, R]
  y_squares,  # [2 * column tiles, rows of tiles]
  h_squares,  # [column tiles, rows of tiles]
  *,
  h_smem,  # [stages, rows, inner]
  readout_smem,  # [stages, inner, cols]
  y_smem,  # [2, rows, cols / 2]
  y_square_smem,  # [2, rows]
  h_square_smem,  # [2, rows / 2]
  filled,
  used,
  sizes,
):
  """h R_l, and parts of the square norms; a warpgroup has half of the columns.

  The blocks of one row of tiles, and their warpgroups, share the squares of h.
  """
  steps, stages = h.shape[1] // sizes.inner, sizes.num_stages
  half_rows, half_cols = sizes.rows // 2, sizes.cols // 2
  warpgroup = lax.axis_index("warpgroup")
  row, col = lax.axis_index("row") * sizes.rows, lax.axis_index("col")
  rows = pl.ds(row, sizes.rows)

  @pl.when(warpgroup == 2)
  def _fetch():
    plgpu.set_max_registers(_FEW, action="decrease")

    @pl.loop(0, steps)
    def _step(step):
      inner = pl.ds(step * sizes.inner, sizes.inner)
      cols = pl.ds(col * sizes.cols, sizes.cols)
      copies = (
        (h.at[rows, inner], h_smem),
        (readout.at[inner, cols], readout_smem),
      )
      _fetch_stage(step, copies, filled, used, stages)

  def h_square_of(slot):
    part = h_smem[slot, pl.ds(warpgroup * half_rows, half_rows)]
    # Orders it before the next copy to this place, which is asynchronous.
    plgpu.commit_smem()
    return _square_norm(part)

  def product(acc):
    def step(k, h_square):
      slot = lax.rem(k, stages)
      plgpu.barrier_wait(filled.at[slot])
      h_square = lax.cond(
        lax.rem(k, h_squares.shape[0]) == col,
        lambda: h_square + h_square_of(slot),
        lambda: h_square,
      )
      mine = pl.ds(warpgroup * half_cols, half_cols)
      plgpu.wgmma(acc, h_smem.at[slot], readout_smem.at[slot, :, mine])
      plgpu.wgmma_wait(1)
      _release_before(k, steps, used, stages)
      return h_square

    zero = plgpu.layout_cast(jnp.zeros((half_rows,), jnp.float32), _PER_ROW)
    h_square = lax.fori_loop(0, steps, step, zero)
    return acc[...], h_square

  @pl.when(warpgroup < 2)
  def _multiply():
    plgpu.set_max_registers(_MANY, action="increase")
    acc = plgpu.ACC((sizes.rows, half_cols), jnp.float32)
    tile, h_square = pl.run_scoped(product, acc)
    tile = tile.astype(y.dtype)
    y_smem[warpgroup] = tile
    y_square_smem[warpgroup] = _square_norm(tile)
    h_square_smem[warpgroup] = h_square
    plgpu.commit_smem()
    cols = pl.ds(col * sizes.cols + warpgroup * half_cols, half_cols)
    part = pl.ds(row + warpgroup * half_rows, half_rows)
    for source, target in (
      (y_smem, y.at[rows, cols]),
      (y_square_smem, y_squares.at[2 * col + warpgroup, rows]),
      (h_square_smem, h_squares.at[col, part]),
    ):
      plgpu.copy_smem_to_gmem(source.at[warpgroup], target)
    plgpu.wait_smem_to_gmem(0)


def message_scratch(sizes):
  """Shared memory of `message`, by name."""
  return {
    "rows_smem": _smem(sizes.num_stages, sizes.rows, sizes.inner),
    "weights_smem": _smem(2, sizes.num_stages, sizes.inner, sizes.cols),
    "z_smem": _smem(2, sizes.rows // 2, sizes.cols),
    **_ring(sizes.num_stages, copies=3),
  }


def message(
  y,  # [N, R]
  predecessors,  # [N, R]
  scale,  # [rows of tiles], float32 like the next
  scale_before,  # [rows of tiles]
  receiver_gate,  # [R, Z]
  predecessor_gate,  # [R, Z]
  content,  # [R, Z]
  bias,  # [Z], float32
  z,  # [N, Z]
  *,
  rows_smem,  # [stages, rows, inner]
  weights_smem,  # [2, stages, inner, cols]
  z_smem,  # [2, rows / 2, cols]
  filled,
  used,
  sizes,
):
  """The gated message; a warpgroup has half of the rows and three products."""
  steps, stages = y.shape[1] // sizes.inner, sizes.num_stages
  half = sizes.rows // 2
  warpgroup = lax.axis_index("warpgroup")
  row = lax.axis_index("row") * sizes.rows
  cols = pl.ds(lax.axis_index("col") * sizes.cols, sizes.cols)

  def fetch(start, source, kernels):
    @pl.loop(0, steps)
    def _step(step):
      inner = pl.ds(step * sizes.inner, sizes.inner)
      copies = [(source.at[pl.ds(row, sizes.rows), inner], rows_smem)]
      for i, kernel in enumerate(kernels):
        copies.append((kernel.at[inner, cols], weights_smem.at[i]))
      _fetch_stage(start + step, copies, filled, used, stages)
      if len(copies) == 2:  # In place of the third, for which others wait.
        plgpu.barrier_arrive(filled.at[lax.rem(start + step, stages)])

  @pl.when(warpgroup == 2)
  def _fetch():
    plgpu.set_max_registers(_FEW, action="decrease")
    fetch(0, y, (receiver_gate,))
    fetch(steps, predecessors, (predecessor_gate, content))

  def multiply(start, accumulators):
    @pl.loop(0, steps)
    def _step(k):
      step = start + k
      slot = lax.rem(step, stages)
      plgpu.barrier_wait(filled.at[slot])
      mine = rows_smem.at[slot, pl.ds(warpgroup * half, half)]
      for i, acc in enumerate(accumulators):
        plgpu.wgmma(acc, mine, weights_smem.at[i, slot])
      plgpu.wgmma_wait(len(accumulators))
      _release_before(step, 2 * steps, used, stages)

  def products(receiver, predecessor, content):
    multiply(0, (receiver,))
    multiply(steps, (predecessor, content))
    return receiver[...], predecessor[...], content[...]

  @pl.when(warpgroup < 2)
  def _multiply():
    plgpu.set_max_registers(_MANY, action="increase")
    shape = half, sizes.cols
    acc = plgpu.ACC(shape, jnp.float32)
    receiver, predecessor, content = pl.run_scoped(products, acc, acc, acc)
    mine = pl.ds(row + warpgroup * half, half)
    before = _spread(scale_before.at[mine], shape)
    gate = _spread(scale.at[mine], shape) * receiver + before * predecessor
    shift = plgpu.load(bias.at[cols], layout=_PER_COL, optimized=False)
    gate += lax.broadcast_in_dim(shift, shape, [1])
    message = jax.nn.sigmoid(gate) * (before * content)
    z_smem[warpgroup] = message.astype(z.dtype)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(z_smem.at[warpgroup], z.at[mine, cols])
    plgpu.wait_smem_to_gmem(0)


def write_scratch(sizes):
  """Shared memory of `write`, by name."""
  return {
    "z_smem": _smem(sizes.num_stages, sizes.rows, sizes.inner),
    "kernel_smem": _smem(sizes.num_stages, sizes.inner, sizes.cols),
    "h_smem": _smem(2, sizes.rows, sizes.cols // 2),
    "h_filled": plgpu.Barrier(num_arrivals=2),
    "h_used": plgpu.Barrier(num_arrivals=2),
    **_ring(sizes.num_stages, copies=2),
  }


def write(
  h,  # [N, D]
  z,  # [N, Z]
  rms,  # [rows of tiles]
  kernel,  # [Z, D]
  out,  # [N, D]
  *,
  z_smem,  # [stages, rows, inner]
  kernel_smem,  # [stages, inner, cols]
  h_smem,  # [2, rows, cols / 2]
  h_filled,
  h_used,
  filled,
  used,
  sizes,
  tiles,
):
  """h + rms z O; a block does several tiles, a warpgroup half of the columns.

  Products are short, so the ring runs ahead while the tile before is written.
  """
  steps, stages = z.shape[1] // sizes.inner, sizes.num_stages
  half = sizes.cols // 2
  warpgroup = lax.axis_index("warpgroup")
  core, cores = lax.axis_index("core"), lax.axis_size("core")
  count = lax.div(tiles - core + cores - 1, cores)

  def place(i):
    """Rows and first column of the block's i-th tile."""
    tile, across = core + i * cores, h.shape[1] // sizes.cols
    rows = pl.ds(lax.div(tile, across) * sizes.rows, sizes.rows)
    return rows, lax.rem(tile, across) * sizes.cols

  @pl.when(warpgroup == 2)
  def _fetch():
    plgpu.set_max_registers(_FEW, action="decrease")

    @pl.loop(0, count)
    def _tile(i):
      rows, col = place(i)

      @pl.loop(0, steps)
      def _step(k):
        inner = pl.ds(k * sizes.inner, sizes.inner)
        copies = (
          (z.at[rows, inner], z_smem),
          (kernel.at[inner, pl.ds(col, sizes.cols)], kernel_smem),
        )
        _fetch_stage(i * steps + k, copies, filled, used, stages)

      @pl.when(i > 0)
      def _():
        plgpu.barrier_wait(h_used)

      for side in range(2):
        source = h.at[rows, pl.ds(col + side * half, half)]
        plgpu.copy_gmem_to_smem(source, h_smem.at[side], h_filled)

  def product(i, acc):
    @pl.loop(0, steps)
    def _step(k):
      step = i * steps + k
      slot = lax.rem(step, stages)
      plgpu.barrier_wait(filled.at[slot])
      mine = pl.ds(warpgroup * half, half)
      plgpu.wgmma(acc, z_smem.at[slot], kernel_smem.at[slot, :, mine])
      plgpu.wgmma_wait(1)
      _release_before(step, count * steps, used, stages)

    return acc[...]

  @pl.when(warpgroup < 2)
  def _multiply():
    plgpu.set_max_registers(_MANY, action="increase")

    @pl.loop(0, count)
    def _tile(i):
      rows, col = place(i)
      acc = plgpu.ACC((sizes.rows, half), jnp.float32)
      added = pl.run_scoped(lambda acc: product(i, acc), acc)
      added *= _spread(rms.at[rows], added.shape)
      plgpu.barrier_wait(h_filled)
      mine = h_smem.at[warpgroup]
      state = plgpu.load(mine, layout=_TILE).astype(jnp.float32)
      h_smem[warpgroup] = (state + added).astype(out.dtype)
      plgpu.commit_smem()
      plgpu.copy_smem_to_gmem(
        mine, out.at[rows, pl.ds(col + warpgroup * half, half)]
      )
      plgpu.wait_smem_to_gmem(0, wait_read_only=True)

      @pl.when(i + 1 < count)
      def _():
        plgpu.barrier_arrive(h_used)

    plgpu.wait_smem_to_gmem(0)


def _smem(*shape):
  """bfloat16 as wgmma reads it: tiles of 8 x 64, swizzled.

  Both operands of a product need the same tiles, so `inner` is at least 64.
  """
  tiles = plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128)
  return plgpu.SMEM(shape, jnp.bfloat16, transforms=tiles)


def _ring(stages, copies):
  """Barriers of a ring; `copies` fill a stage, two warpgroups use it."""
  return {
    "filled": plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
    "used": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
  }


def _fetch_stage(step, copies, filled, used, stages):
  """Starts the copies (from, to) of a step, once its stage is free."""
  slot = lax.rem(step, stages)

  @pl.when(step >= stages)
  def _():
    plgpu.barrier_wait(used.at[slot])

  for source, target in copies:
    plgpu.copy_gmem_to_smem(source, target.at[slot], filled.at[slot])


def _release_before(step, steps, used, stages):
  """Frees the stage of the step before, whose products are done.

  Not if nobody will wait for it: a barrier must end as its waiters saw it.
  """

  @pl.when((step > 0) & (step - 1 + stages < steps))
  def _():
    plgpu.barrier_arrive(used.at[lax.rem(step - 1, stages)])


def _square_norm(tile):
  return jnp.square(tile.astype(jnp.float32)).sum(axis=1)


def _spread(vector, shape):
  """A number of each row from device memory, on all columns of a tile."""
  vector = plgpu.load(vector, layout=_PER_ROW, optimized=False)
  return lax.broadcast_in_dim(vector, shape, [0])
