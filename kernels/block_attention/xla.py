"""Block attention in JAX: the two parts by themselves, joined exactly.

What XLA runs on every device. The own block is one small product
(`partial.py`), the context is read in tiles (`context_tiles.py`). Not the
specification, which is `reference.py`.
"""

from jax import numpy as jnp
from jaxtyping import Array, Bool, Float, Int

from kernels.block_attention import context_tiles, partial


def block_attention(
  q: Float[Array, "b n k q h"],
  own_k: Float[Array, "b n k g h"],
  own_v: Float[Array, "b n k g h"],
  context_k: Float[Array, "b g s h"],
  context_v: Float[Array, "b g s h"],
  visible: Int[Array, "b n"],
  starts: Int[Array, "b n k"] | None,
  own_mask: Bool[Array, "k k"],
) -> Float[Array, "b n k q h"]:
  """As `api.block_attention`."""
  own = partial.partial_attention(
    q,
    jnp.swapaxes(own_k, 2, 3),
    jnp.swapaxes(own_v, 2, 3),
    own_mask[None, None],
  )
  seen = context_tiles.context_attention(
    q, context_k, context_v, visible, starts
  )
  return partial.merge(own, seen, dtype=q.dtype)
