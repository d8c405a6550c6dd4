"""Adjacent injection on Mosaic GPU, forward: three matrix products by wgmma.

  read     y = h R_l, and square norms of the rows of h and y
  message  z_t = sigmoid(s_t y_t W_q + s'_t p_t W_p + b) * s'_t p_t W_m
  write    out = h + rms(h) z O_l

Products take unscaled rows, and the scale s_t = sqrt(R) / ||y_t|| comes after
them, so that no features are written. Of the predecessors p_t, row t - 1 of y
or a token's code, XLA makes an array of its own, which costs moving 2 N R
elements: a fetch for wgmma must begin at a multiple of 8 rows, so a shifted one
of y is impossible, and codes would have to come into its tile row by row.

Here are the launches and what lies between them; the kernels are in
`pallas_mosaic_kernels.py`. Not here: gradients, other dtypes than bfloat16.
"""

import functools

import jax
from jax import lax
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import block_sizes
from kernels.adjacent_injection import pallas_mosaic_kernels, reference
from kernels.block_sizes import BlockSizes

OP = "adjacent_injection"

# Names of the kernels in block sizes; `num_warps` is not read.
READ, MESSAGE, WRITE = "pallas_read", "pallas_message", "pallas_write"

CORES = 132  # Streaming multiprocessors of an H100 or H200.


def unsupported(h: jax.Array, weights: reference.Weights) -> str | None:
  """Why these inputs have no kernel, or None."""
  if h.size == 0:
    return "h is empty"
  if h.dtype != jnp.bfloat16:
    return f"h is {h.dtype}, and it multiplies only bfloat16"
  rank, message = weights.message.shape
  for name, size in (("D", h.shape[-1]), ("R", rank), ("Z", message)):
    if size % 128:
      return f"{name}={size} is no multiple of 128"
  rows = h.size // h.shape[-1]
  if rows % 8:  # The hardware copies whole tiles of 8 rows.
    return f"{rows} rows of h are no multiple of 8"
  return None


def forward(
  h: jax.Array,
  tokens: jax.Array,
  replaced: jax.Array,
  codes: jax.Array,
  weights: reference.Weights,
  with_feature: bool,
  given: block_sizes.Given = (),
  interpret: plgpu.InterpretGPUParams | None = None,
) -> reference.Injected:
  """`reference.adjacent_injection` without its gradient.

  Args:
    h: [*b, K, D] bfloat16.
    tokens: [*b, K].
    replaced: [*b].
    codes: [V, R].
    weights: of this layer; operands of products are cast to bfloat16.
    with_feature: whether to give the feature of the written states, too.
    given: block sizes by kernel.
    interpret: runs the kernels on the CPU, through Mosaic GPU's interpreter.
  """
  slots, width = h.shape[-2:]
  states = h.reshape(-1, width)
  bias = weights.bias.astype(jnp.float32)
  weights = jax.tree.map(lambda x: x.astype(h.dtype), weights)
  weights = weights._replace(bias=bias)
  y, y_square, h_square = _read(states, weights.readout, given, interpret)
  scale = _scale(y_square, y.shape[1])
  predecessors, scale_before = _predecessors(
    y, scale, tokens.reshape(-1, slots), replaced.reshape(-1), codes
  )
  message = _message(
    y, predecessors, scale, scale_before, weights, given, interpret
  )
  rms = jnp.sqrt(jnp.maximum(h_square / width, reference.TINY))
  out = _write(states, message, rms, weights.write, given, interpret)
  feature = None
  if with_feature:
    y, y_square, _ = _read(out, weights.readout, given, interpret)
    feature = y * _scale(y_square, y.shape[1])[: len(out), None]
    feature = feature.astype(h.dtype).reshape(*h.shape[:-1], y.shape[1])
  return reference.Injected(out.reshape(h.shape), feature)


def _scale(square, rank):
  return rank**0.5 * lax.rsqrt(jnp.maximum(square, reference.TINY))


def _predecessors(y, scale, tokens, replaced, codes):
  """Unscaled predecessor of each row [N, R], and its scale [rows of tiles].

  Slot 0 gets the scale zero, and so no message.
  """
  (blocks, slots), (rows, rank) = tokens.shape, y.shape
  slot = jnp.arange(slots)[None, :]
  is_code = (replaced[:, None] | (slot < 2)).reshape(-1)
  down = ((1, -1, 0),)  # Padding that moves everything by one row.
  # Rows that read no code take any: one row is read, from a cache.
  known = lax.pad(tokens.reshape(-1), jnp.zeros((), tokens.dtype), down)
  known = codes[jnp.where(is_code, known, 0)].astype(y.dtype)
  before = lax.pad(y, jnp.zeros((), y.dtype), (*down, (0, 0, 0)))
  before = jnp.where(is_code[:, None], known, before)
  scale_before = lax.pad(scale[:rows], 0.0, down)
  scale_before = jnp.where(is_code, rank**0.5, scale_before)
  is_first = jnp.broadcast_to(slot == 0, (blocks, slots)).reshape(-1)
  scale_before = jnp.where(is_first, 0.0, scale_before)
  return before, jnp.pad(scale_before, (0, len(scale) - rows))


def _read(h, readout, given, interpret):
  """Reads [N, R], and per row of tiles the square norms of reads and states."""
  (rows, width), rank = h.shape, readout.shape[1]
  bucket = block_sizes.bucket_of(h.dtype, rows, d=width, r=rank)
  sizes = _sizes(READ, bucket, given, (rows, rank))
  row_tiles, col_tiles = -(-rows // sizes.rows), rank // sizes.cols
  tile_rows = row_tiles * sizes.rows
  y, y_squares, h_squares = _call(
    functools.partial(pallas_mosaic_kernels.read, sizes=sizes),
    {"row": row_tiles, "col": col_tiles},
    (
      jax.ShapeDtypeStruct((rows, rank), h.dtype),
      jax.ShapeDtypeStruct((2 * col_tiles, tile_rows), jnp.float32),
      jax.ShapeDtypeStruct((col_tiles, tile_rows), jnp.float32),
    ),
    pallas_mosaic_kernels.read_scratch(sizes),
    interpret,
  )(h, readout)
  return y, y_squares.sum(axis=0), h_squares.sum(axis=0)


def _message(y, predecessors, scale, scale_before, weights, given, interpret):
  """Messages [N, Z]."""
  rows, (rank, width) = len(y), weights.message.shape
  bucket = block_sizes.bucket_of(y.dtype, rows, r=rank, z=width)
  sizes = _sizes(MESSAGE, bucket, given, (rows, width), most_cols=128)
  return _call(
    functools.partial(pallas_mosaic_kernels.message, sizes=sizes),
    {"row": -(-rows // sizes.rows), "col": width // sizes.cols},
    jax.ShapeDtypeStruct((rows, width), y.dtype),
    pallas_mosaic_kernels.message_scratch(sizes),
    interpret,
  )(
    y,
    predecessors,
    scale,
    scale_before,
    weights.receiver_gate,
    weights.predecessor_gate,
    weights.message,
    weights.bias,
  )


def _write(h, z, rms, kernel, given, interpret):
  """h + rms z O, [N, D]."""
  (rows, width), message = h.shape, z.shape[1]
  bucket = block_sizes.bucket_of(h.dtype, rows, d=width, z=message)
  sizes = _sizes(WRITE, bucket, given, (rows, width))
  tiles = -(-rows // sizes.rows) * (width // sizes.cols)
  return _call(
    functools.partial(pallas_mosaic_kernels.write, sizes=sizes, tiles=tiles),
    {"core": min(CORES, tiles)},
    jax.ShapeDtypeStruct(h.shape, h.dtype),
    pallas_mosaic_kernels.write_scratch(sizes),
    interpret,
  )(h, z, rms, kernel)


def _sizes(kernel, bucket, given, shape, most_cols=256):
  """Tiles of an output [N, cols]; its columns must be whole tiles."""
  rows, cols = shape

  def heuristic():
    wide = cols % most_cols == 0
    wide &= -(-rows // 128) * (cols // most_cols) >= CORES
    return BlockSizes(
      rows=128,
      cols=most_cols if wide else 128,
      inner=64,
      num_warps=8,
      num_stages=3,
    )

  sizes = block_sizes.choose(OP, kernel, bucket, given, heuristic)
  if sizes.rows != 128 or sizes.cols % 128 or cols % sizes.cols:
    raise ValueError(
      f"block_sizes: {kernel}={sizes} does not fit {bucket}: rows must be 128, "
      f"and cols a multiple of 128 that divides {cols}"
    )
  return sizes


def _call(body, grid, out, scratch, interpret):
  """A kernel of three warpgroups; the last axis of the grid runs side by side.

  Args:
    body: takes references to inputs and outputs, and scratch by name.
    grid: sizes by name.
    out: shapes of the outputs.
    scratch: shared memory and barriers by name.
    interpret: see `forward`.
  """
  return plgpu.kernel(
    body,
    out_type=out,
    grid=tuple(grid.values()),
    grid_names=tuple(grid),
    num_threads=3,
    thread_name="warpgroup",
    scratch_types=scratch,
    kernel_name=f"{OP}_{body.func.__name__}",
    compiler_params=plgpu.CompilerParams(approx_math=True),
    interpret=interpret,
  )
