"""Who may attend to whom, as boolean masks (True = may attend).

Three rules cover every pass of the package:

* own tokens of a pass attend causally to each other (`causal`), or, inside a
  bidirectional draft block, to all of their block;
* cached or context positions are seen up to a length (`prefix`): the target
  sees what is committed, a draft block sees context strictly before its anchor
  (the anchor's own target state does not exist yet at inference);
* a sliding window narrows the prefix (`prefix` with `window`).

Draft blocks are an axis of their own, so that no block can see another; a
padding block keeps its in-block attention and an empty context.
"""

from jax import numpy as jnp
from jaxtyping import Array, Bool, Int


def causal(num_tokens: int) -> Bool[Array, "t t"]:
  """Lower triangle: key offset <= query offset.

  causal(3) = [[1, 0, 0],
               [1, 1, 0],
               [1, 1, 1]]
  """
  return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def in_block(block_size: int, *, is_causal: bool) -> Bool[Array, "k k"]:
  """Attention inside one draft block, the anchor slot included."""
  if is_causal:
    return causal(block_size)
  return jnp.ones((block_size, block_size), bool)


def prefix(lengths: Int[Array, "*b"], num_keys: int) -> Bool[Array, "*b s"]:
  """Keys at positions < length: prefix([2], 4) = [[1, 1, 0, 0]]."""
  bound = lengths[..., None]
  return jnp.arange(num_keys).reshape((1,) * lengths.ndim + (-1,)) < bound


def anchor_blocks(
  anchors: Int[Array, "b n"],
  keep: Bool[Array, "b n"],
  *,
  context_length: int,
  block_size: int,
  is_causal: bool,
) -> Bool[Array, "b q s"]:
  """The whole training rule as one dense mask, for tests and for reading.

  Queries are the slots of all blocks; keys are [context | slots of all blocks].
  A padding block sees nothing here (the convention of the references).

  anchors [[1, 2]], context 3, block 2, causal gives, per query row,
    block 0 slot 0: context 0            | own slot 0
    block 0 slot 1: context 0            | own slots 0, 1
    block 1 slot 0: context 0, 1         | own slot 0
    block 1 slot 1: context 0, 1         | own slots 0, 1
  """
  batch, num_blocks = anchors.shape
  context = prefix(anchors, context_length)[:, :, None, :]
  context = jnp.broadcast_to(
    context, (batch, num_blocks, block_size, context_length)
  )
  same_block = jnp.eye(num_blocks, dtype=bool)[:, None, :, None]
  inside = in_block(block_size, is_causal=is_causal)[None, :, None, :]
  own = (same_block & inside).reshape(
    1, num_blocks, block_size, num_blocks * block_size
  )
  own = jnp.broadcast_to(own, (batch, *own.shape[1:]))
  mask = jnp.concatenate([context, own], axis=-1) & keep[:, :, None, None]
  return mask.reshape(batch, num_blocks * block_size, -1)
