"""Launches of the Triton kernels, and what XLA does between them.

No row of logits lies in device memory: kernels give partial sums of groups of
vocabulary tiles, merged here, and for the gradient the signs of q - p, one bit
a logit, and dz of one chunk of the vocabulary at a time. `cost.py` says why
this split is the cheapest. Not here: the kernels (`triton_kernels.py`), the
rule of the gradient and the choice of implementation (`api.py`).
"""

from collections.abc import Callable

import jax
import triton
from jax import lax
from jax import numpy as jnp

from kernels import batching, block_sizes, triton_call
from kernels.block_sizes import BlockSizes
from kernels.draft_loss import triton_kernels

OP = "draft_loss"
WORD_BITS = 32

# Vocabulary tiles that one program takes, and row tiles whose programs run side
# by side, so that they share rows of the head in the L2 cache.
GROUP_TILES = 8
BAND = 8

# Columns of dz that exist at a time. XLA copies as many rows of the head, too.
CHUNK = 8192

# (hidden, teacher, labels, head, given) -> both normalisers, label's logit
Normalise = Callable[..., tuple[jax.Array, jax.Array, jax.Array]]


def forward(
  normalise: Normalise,
  given: block_sizes.Given,
  with_signs: bool,
  hidden: jax.Array,
  teacher: jax.Array,
  labels: jax.Array,
  head: jax.Array,
) -> tuple[jax.Array, ...]:
  """Terms of rows [*b], and what their gradient needs.

  Args:
    normalise: the first pass, by this module or another of the same signature.
    given: block sizes.
    with_signs: whether there will be a gradient.
    hidden: [*b, D].
    teacher: [*b, D].
    labels: [*b] int32.
    head: [V, D].

  Returns:
    ce, l1, both normalisers, sum of q s, each [*b] float32; the signs
    [*b, ceil(V / 32)] int32 if asked for.
  """
  rows, width = hidden.shape[:-1], hidden.shape[-1]
  hidden, teacher = (x.reshape(-1, width) for x in (hidden, teacher))
  log_normaliser, teacher_log_normaliser, label_logit = normalise(
    hidden, teacher, labels.reshape(-1), head, given
  )
  l1, slope, signs = distance(
    hidden,
    teacher,
    log_normaliser,
    teacher_log_normaliser,
    head,
    with_signs,
    given,
  )
  out = (
    log_normaliser - label_logit,
    l1,
    log_normaliser,
    teacher_log_normaliser,
    slope,
  )
  out = tuple(x.reshape(rows) for x in out)
  return (*out, signs.reshape(*rows, -1)) if with_signs else out


def normalise(
  hidden: jax.Array,
  teacher: jax.Array,
  labels: jax.Array,
  head: jax.Array,
  given: block_sizes.Given,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Both normalisers and the label's logit of rows [T, D], each [T]."""
  sizes = _sizes("normalise", hidden, head, given)
  programs, tiles = _groups(sizes, hidden, head)
  grid = (tiles["ROW_TILES"] * tiles["COL_GROUPS"],)
  (partials,) = triton_call.call(
    triton_kernels.draft_loss_normalise,
    hidden,
    teacher,
    labels,
    head,
    out_shape=[_float32(5, tiles["COL_GROUPS"], hidden.shape[0])],
    grid=grid,
    **programs,
    **tiles,
  )
  maximum, total, teacher_maximum, teacher_total, label_logit = partials
  return (
    _merge(maximum, total),
    _merge(teacher_maximum, teacher_total),
    jnp.sum(label_logit, axis=0),
  )


def distance(
  hidden: jax.Array,
  teacher: jax.Array,
  log_normaliser: jax.Array,
  teacher_log_normaliser: jax.Array,
  head: jax.Array,
  with_signs: bool,
  given: block_sizes.Given,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """sum |q - p| and sum q s of rows [T, D], each [T], and the signs' words."""
  sizes = _sizes("distance", hidden, head, given)
  programs, tiles = _groups(sizes, hidden, head)
  grid = (tiles["ROW_TILES"] * tiles["COL_GROUPS"],)
  words = triton.cdiv(head.shape[0], WORD_BITS)
  # Without signs the argument of the kernel is one word that nobody writes.
  signs = (hidden.shape[0], words) if with_signs else (1,)
  partials, signs = triton_call.call(
    triton_kernels.draft_loss_distance,
    hidden,
    teacher,
    log_normaliser,
    teacher_log_normaliser,
    head,
    out_shape=[
      _float32(2, tiles["COL_GROUPS"], hidden.shape[0]),
      jax.ShapeDtypeStruct(signs, jnp.int32),
    ],
    grid=grid,
    WORDS=words,
    WITH_SIGNS=with_signs,
    **programs,
    **tiles,
  )
  l1, slope = jnp.sum(partials, axis=1)
  return l1, slope, signs


def gradient(
  given: block_sizes.Given,
  hidden: jax.Array,
  labels: jax.Array,
  log_normaliser: jax.Array,
  slope: jax.Array,
  signs: jax.Array,
  g_ce: jax.Array,
  g_l1: jax.Array,
  head: jax.Array,
) -> tuple[jax.Array]:
  """Cotangent of `hidden` [*b, D], from those of ce and l1 [*b].

  One chunk of the vocabulary after another: the kernel makes dz, XLA adds its
  product with those rows of the head. What is left over has the same kernel.
  """
  shape, (vocab, width) = hidden.shape, head.shape
  hidden = hidden.reshape(-1, width)
  num_rows = hidden.shape[0]
  vectors = (labels, log_normaliser, slope, g_ce, g_l1)
  vectors = tuple(x.reshape(-1) for x in vectors)
  sizes = _sizes("gradient", hidden, head, given)
  # A multiple of the tile: chunks begin where tiles and words of signs do.
  chunk = max(min(CHUNK, triton.next_power_of_2(vocab)), sizes.cols)

  def add(total, start, head_rows):
    d_logits = _d_logits(
      sizes, chunk, start, hidden, vectors, signs.reshape(num_rows, -1), head
    )
    return total + jnp.einsum(
      "nv,vd->nd",
      d_logits[:, : head_rows.shape[0]],
      head_rows,
      preferred_element_type=jnp.float32,
    )

  def visit(i, total):
    start = i * chunk
    return add(total, start, lax.dynamic_slice_in_dim(head, start, chunk))

  total = batching.vary_like(
    jnp.zeros(hidden.shape, jnp.float32), hidden, signs, g_ce
  )
  whole = vocab // chunk
  if whole:
    total = lax.fori_loop(0, whole, visit, total)
  if vocab % chunk:
    total = add(total, jnp.int32(whole * chunk), head[whole * chunk :])
  return (total.astype(hidden.dtype).reshape(shape),)


def _d_logits(sizes, chunk, start, hidden, vectors, signs, head):
  """dz of the chunk that begins at `start`, in the dtype of the states."""
  programs, tiles = _tiles(sizes, hidden, head)
  col_tiles = triton.cdiv(chunk, sizes.cols)
  (d_logits,) = triton_call.call(
    triton_kernels.draft_loss_gradient,
    hidden,
    *vectors,
    signs,
    head,
    jnp.asarray(start, jnp.int32).reshape(1),
    out_shape=[jax.ShapeDtypeStruct((hidden.shape[0], chunk), hidden.dtype)],
    grid=(tiles["ROW_TILES"] * col_tiles,),
    WORDS=signs.shape[1],
    CHUNK=chunk,
    COL_TILES=col_tiles,
    **programs,
    **tiles,
  )
  return d_logits


def _merge(maxima, totals):
  """logsumexp of groups [groups, T] from their maxima and sums."""
  maximum = jnp.max(maxima, axis=0)
  total = jnp.sum(totals * jnp.exp(maxima - maximum[None]), axis=0)
  return maximum + jnp.log(total)


def _groups(sizes, hidden, head):
  """Warps and constants where a program takes a group of column tiles."""
  programs, tiles = _tiles(sizes, hidden, head)
  groups = triton.cdiv(head.shape[0], GROUP_TILES * sizes.cols)
  return programs, {**tiles, "COL_GROUPS": groups, "GROUP": GROUP_TILES}


def _tiles(sizes, hidden, head):
  programs = {"num_warps": sizes.num_warps, "num_stages": sizes.num_stages}
  return programs, {
    "ROWS": hidden.shape[0],
    "WIDTH": head.shape[1],
    "VOCAB": head.shape[0],
    "ROW_TILES": triton.cdiv(hidden.shape[0], sizes.rows),
    "BAND": BAND,
    "TILE_ROWS": sizes.rows,
    "TILE_COLS": sizes.cols,
    "STEP": sizes.inner,
  }


def _sizes(kernel, hidden, head, given) -> BlockSizes:
  """The tile of `kernel` for rows [T, D]."""
  vocab, width = head.shape
  sizes = block_sizes.choose(
    OP,
    kernel,
    block_sizes.bucket_of(hidden.dtype, hidden.shape[0], d=width, v=vocab),
    given,
    lambda: default_sizes(kernel, hidden.shape[0], hidden.dtype.itemsize),
  )
  if sizes.cols < WORD_BITS:
    raise ValueError(f"block_sizes: {kernel}: cols={sizes.cols} is below 32")
  return sizes


def default_sizes(kernel: str, num_rows: int, itemsize: int) -> BlockSizes:
  """Sizes that nobody tuned: as large as accumulators and stages allow."""
  rows = max(triton.next_power_of_2(num_rows), 16)
  if itemsize == 4:  # Without tensor cores, for exactness rather than speed.
    return BlockSizes(rows=min(rows, 32), cols=64, inner=32, num_stages=2)
  rows = min(rows, 128)
  return BlockSizes(
    rows=rows,
    # Two tiles of logits, or one of twice the width, fill the registers.
    cols=256 if kernel == "gradient" else 128,
    inner=64,
    num_warps=8 if rows >= 64 else 4,
  )


def _float32(*shape):
  return jax.ShapeDtypeStruct(shape, jnp.float32)
