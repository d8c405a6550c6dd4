"""Normalisers of draft and target logits on Mosaic GPU; the head is read once.

Both products, hidden E^T and teacher E^T, need the same tiles of E. A block of
the grid owns a tile of rows and a group of vocabulary tiles. One warpgroup
fetches tiles through a ring in shared memory, one multiplies those of the
draft, one those of the target; each keeps the running maximum and sum of its
rows, so no logits reach device memory. Not here: the loss and its gradient.
"""

import functools
import math

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import block_sizes
from kernels.block_sizes import BlockSizes

OP = "draft_loss"
KERNEL = "pallas_normalise"

CORES = 132  # Streaming multiprocessors of an H100 or H200.

_LOG2_E = math.log2(math.e)
_ROWS = plgpu.Layout.WGMMA.reduce(1)  # One number for each row of a tile.


def unsupported(hidden: jax.Array, head: jax.Array) -> str | None:
  """Why these inputs have no kernel, or None."""
  for name, array in (("hidden", hidden), ("head", head)):
    if array.size == 0:
      return f"{name} is empty"
    if array.dtype != jnp.bfloat16:
      return f"{name} is {array.dtype}, and it multiplies only bfloat16"
  if hidden.shape[-1] % 64:
    return f"the width {hidden.shape[-1]} is no multiple of 64"
  if len(head) % 8:
    return f"the {len(head)} rows of head are no multiple of 8"
  return None


def normalise(
  hidden: jax.Array,
  teacher: jax.Array,
  labels: jax.Array,
  head: jax.Array,
  given: block_sizes.Given = (),
  interpret: plgpu.InterpretGPUParams | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Log-normalisers of both products with the head, and the label's logit.

  Args:
    hidden: [T, D] bfloat16, of the draft.
    teacher: [T, D] bfloat16, of the target.
    labels: [T] int32.
    head: [V, D] bfloat16, V a multiple of 8.
    given: block sizes by kernel; `num_warps` is not read.
    interpret: runs the kernel on the CPU, through Mosaic GPU's interpreter.

  Returns:
    log sum_v exp(hidden E_v), the same of the teacher, and hidden E_label;
    each [T] float32.
  """
  rows, width = hidden.shape
  sizes = block_sizes.choose(
    OP,
    KERNEL,
    block_sizes.bucket_of(hidden.dtype, rows, d=width, v=head.shape[0]),
    given,
    lambda: BlockSizes(rows=128, cols=128, inner=64, num_warps=8, num_stages=4),
  )
  # The hardware copies whole tiles of 8 rows; beyond them it gives zeros.
  missing = (0, -rows % 8), (0, 0)
  partials = _launch(
    jnp.pad(hidden, missing), jnp.pad(teacher, missing), head, sizes, interpret
  )
  # [2, groups, T] -> [2, T]
  both = jax.nn.logsumexp(partials[:, :, :rows], axis=1)
  # One row of the head for each row: not worth a select on every logit.
  label_logit = jnp.einsum(
    "td,td->t", hidden, head[labels], preferred_element_type=jnp.float32
  )
  return both[0], both[1], label_logit


def groups_of(row_tiles: int, vocab_tiles: int) -> int:
  """Into how many groups the vocabulary is cut, so that the last wave is full.

  Blocks that run together should share few tiles of rows, which then stay in
  the L2 cache: so at least 11 groups, which divide the cores, if there are.
  """

  def waste(groups):
    blocks = row_tiles * groups
    return -(-blocks // CORES) * CORES / blocks

  counts = range(min(11, vocab_tiles), min(CORES, vocab_tiles) + 1)
  return min(counts, key=lambda groups: (round(waste(groups), 2), groups))


def _launch(hidden, teacher, head, sizes, interpret):
  row_tiles = -(-len(hidden) // sizes.rows)
  vocab_tiles = -(-len(head) // sizes.cols)
  groups = groups_of(row_tiles, vocab_tiles)
  tiled = _transforms(sizes.inner)
  stages = sizes.num_stages
  return plgpu.kernel(
    functools.partial(
      _kernel, sizes=sizes, vocab_tiles=vocab_tiles, groups=groups
    ),
    out_type=jax.ShapeDtypeStruct(
      (2, groups, row_tiles * sizes.rows), jnp.float32
    ),
    # The groups of a tile of rows run side by side.
    grid=(row_tiles, groups),
    grid_names=("rows", "groups"),
    num_threads=3,
    thread_name="warpgroup",
    scratch_types={
      "rows_smem": plgpu.SMEM(
        (2, stages, sizes.rows, sizes.inner), jnp.bfloat16, transforms=tiled
      ),
      "head_smem": plgpu.SMEM(
        (stages, sizes.cols, sizes.inner), jnp.bfloat16, transforms=tiled
      ),
      "out_smem": plgpu.SMEM((2, sizes.rows), jnp.float32),
      "filled": plgpu.Barrier(num_arrivals=3, num_barriers=stages),
      "used": plgpu.Barrier(num_arrivals=2, num_barriers=stages),
    },
    kernel_name="draft_loss_normalise",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
  )(hidden, teacher, head)


def _transforms(inner):
  """How shared memory holds operands of a product whose rows are `inner` long.

  What wgmma reads: tiles of 8 rows, swizzled.
  """
  swizzle = plgpu.find_swizzle(inner * 16)
  return (
    plgpu.TilingTransform((8, swizzle // 2)),
    plgpu.SwizzleTransform(swizzle),
  )


def _kernel(
  hidden,  # [T, D]
  teacher,  # [T, D]
  head,  # [V, D]
  out,  # [2, groups, row_tiles * rows]
  *,
  rows_smem,  # [2, stages, rows, inner]
  head_smem,  # [stages, cols, inner]
  out_smem,  # [2, rows]
  filled,
  used,
  sizes,
  vocab_tiles,
  groups,
):
  steps = -(-hidden.shape[1] // sizes.inner)  # Of one product.
  group = lax.axis_index("groups")
  first = lax.div(group * vocab_tiles, groups)
  count = lax.div((group + 1) * vocab_tiles, groups) - first
  rows = pl.ds(lax.axis_index("rows") * sizes.rows, sizes.rows)
  warpgroup = lax.axis_index("warpgroup")

  @pl.when(warpgroup == 2)
  def _fetch():
    plgpu.set_max_registers(40, action="decrease")

    @pl.loop(0, count * steps)
    def _step(step):
      slot = lax.rem(step, sizes.num_stages)

      @pl.when(step >= sizes.num_stages)
      def _():
        plgpu.barrier_wait(used.at[slot])

      inner = pl.ds(lax.rem(step, steps) * sizes.inner, sizes.inner)
      cols = pl.ds((first + lax.div(step, steps)) * sizes.cols, sizes.cols)
      for source, target in (
        (hidden.at[rows, inner], rows_smem.at[0, slot]),
        (teacher.at[rows, inner], rows_smem.at[1, slot]),
        (head.at[cols, inner], head_smem.at[slot]),
      ):
        plgpu.copy_gmem_to_smem(source, target, filled.at[slot])

  @pl.when(warpgroup < 2)
  def _multiply():
    plgpu.set_max_registers(232, action="increase")
    top = plgpu.layout_cast(
      jnp.full((sizes.rows,), -jnp.inf, jnp.float32), _ROWS
    )
    total = plgpu.layout_cast(jnp.zeros((sizes.rows,), jnp.float32), _ROWS)

    def tile(i, carry):
      operands = rows_smem.at[warpgroup], head_smem
      scores = _product(
        operands, filled, used, i * steps, steps, count * steps, sizes
      )
      vocab = head.shape[0]
      if vocab % sizes.cols:
        scores = _mask(scores, vocab - (first + i) * sizes.cols)
      return _add(scores * _LOG2_E, *carry)

    top, total = lax.fori_loop(0, count, tile, (top, total))
    out_smem[warpgroup] = top * (1 / _LOG2_E) + jnp.log(total)
    plgpu.commit_smem()
    plgpu.copy_smem_to_gmem(
      out_smem.at[warpgroup], out.at[warpgroup, group, rows]
    )
    plgpu.wait_smem_to_gmem(0)


def _product(operands, filled, used, start, steps, total_steps, sizes):
  """One tile of logits: `steps` stages of the ring, from step `start` on."""
  rows_smem, head_smem = operands

  def accumulate(acc):
    @pl.loop(0, steps)
    def _step(k):
      step = start + k
      slot = lax.rem(step, sizes.num_stages)
      plgpu.barrier_wait(filled.at[slot])
      plgpu.wgmma(acc, rows_smem.at[slot], head_smem.at[slot].transpose((1, 0)))
      plgpu.wgmma_wait(1)

      # The product of the step before is done, and its stage free. Not said if
      # nobody waits for it: a barrier must end as its waiters saw it.
      @pl.when((step > 0) & (step - 1 + sizes.num_stages < total_steps))
      def _():
        plgpu.barrier_arrive(used.at[lax.rem(step - 1, sizes.num_stages)])

    return acc[...]

  return pl.run_scoped(
    accumulate, plgpu.ACC((sizes.rows, sizes.cols), jnp.float32)
  )


def _mask(scores, valid):
  """Columns from `valid` on are beyond the vocabulary."""
  columns = plgpu.broadcasted_iota(
    jnp.int32, scores.shape, 1, layout=plgpu.Layout.WGMMA
  )
  return jnp.where(columns < valid, scores, -jnp.inf)


def _add(scores, top, total):
  """Running maximum and sum of 2**(score - maximum) with one more tile."""
  new_top = jnp.maximum(top, scores.max(axis=1))
  terms = jnp.exp2(scores - lax.broadcast_in_dim(new_top, scores.shape, [0]))
  return new_top, total * jnp.exp2(top - new_top) + terms.sum(axis=1)
