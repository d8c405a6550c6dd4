"""Who may attend to whom, as boolean masks (True = may attend).

Three rules cover every pass of the package:

* own tokens of a pass attend causally to each other (`causal`), in packed rows
  inside their document (`same_document`), or, inside a bidirectional draft
  block, to all of their block;
* cached or context positions are seen up to a length (`masks.prefix`): the
  target sees what is committed, a draft block sees context strictly before its
  anchor (the anchor's own target state does not exist yet at inference);
* a sliding layer of a drafter sees only the end of that prefix, from
  `window_starts` on. Tools that train such drafters differ in where it begins
  and in the rule inside the block: `WINDOW_CONVENTIONS`.

Draft blocks are an axis of their own, so that no block can see another; a
padding block keeps its in-block attention and an empty context.
"""

from typing import NamedTuple

from jax import numpy as jnp
from jaxtyping import Array, Bool, Int

from dspine_jax.method_options import require
from kernels.block_attention import masks


def causal(num_tokens: int) -> Bool[Array, "t t"]:
  """Lower triangle: key offset <= query offset.

  causal(3) = [[1, 0, 0],
               [1, 1, 0],
               [1, 1, 1]]
  """
  return jnp.tril(jnp.ones((num_tokens, num_tokens), bool))


def same_document(documents: Int[Array, "b t"]) -> Bool[Array, "b t t"]:
  """Token pairs of one document of a packed row.

  Args:
    documents: position of the first token of each token's document.

  same_document([[0, 0, 2]]) = [[[1, 1, 0],
                                 [1, 1, 0],
                                 [0, 0, 1]]]
  """
  return documents[:, :, None] == documents[:, None, :]


def in_block(block_size: int, *, is_causal: bool) -> Bool[Array, "k k"]:
  """Attention inside one draft block, the anchor slot included."""
  if is_causal:
    return causal(block_size)
  return jnp.ones((block_size, block_size), bool)


LAYER_TYPES = ("full_attention", "sliding_attention")


class WindowConvention(NamedTuple):
  """What a sliding layer of a drafter sees (baselines, 2.3).

  Attributes:
    moves_with_slot: slot j of the block at anchor a sees context t if
      (a + j) - t < window, so that later slots see less of it; otherwise all
      slots see t >= a - window.
    is_causal: inside the block, slots see only slots at or before them, even
      where the drafter's full layers see all of their block.
  """

  moves_with_slot: bool
  is_causal: bool


# Which tool trains which combination. Automodel's is also how z-lab's drafters
# run; speculators has both in-block rules (`sliding_window_non_causal`). A
# drafter must run as it was trained.
WINDOW_CONVENTIONS = {
  "automodel": WindowConvention(moves_with_slot=True, is_causal=False),
  "specforge": WindowConvention(moves_with_slot=True, is_causal=True),
  "speculators": WindowConvention(moves_with_slot=False, is_causal=True),
  "speculators_non_causal": WindowConvention(
    moves_with_slot=False, is_causal=False
  ),
}
DEFAULT_CONVENTION = "automodel"


def sliding(layer_types: tuple[str, ...]) -> tuple[bool, ...]:
  """Which layers of a drafter have a window."""
  return tuple(kind == "sliding_attention" for kind in layer_types)


def check_windows(
  layer_types: tuple[str, ...],
  window: int | None,
  convention: str,
  *,
  num_layers: int,
  block_size: int,
) -> None:
  """ValueError unless a drafter can have these layers and this window.

  A window narrower than the block is refused: it would hide slots of the own
  block from each other, on which the tools do not agree. So is a convention
  that no layer would follow.
  """
  require(
    not layer_types or len(layer_types) == num_layers,
    "layer_types",
    layer_types,
    f"needs one for each of num_layers={num_layers}",
  )
  require(
    set(layer_types) <= set(LAYER_TYPES),
    "layer_types",
    layer_types,
    f"not all in {LAYER_TYPES}",
  )
  require(
    (window is not None) == any(sliding(layer_types)),
    "sliding_window",
    window,
    f"does not fit layer_types={layer_types}",
  )
  require(
    window is None or (isinstance(window, int) and window >= block_size),
    "sliding_window",
    window,
    f"must be an integer of at least block_size={block_size}",
  )
  require(
    convention in WINDOW_CONVENTIONS,
    "sliding_window_convention",
    convention,
    f"not in {tuple(WINDOW_CONVENTIONS)}",
  )
  require(
    window is not None or convention == DEFAULT_CONVENTION,
    "sliding_window_convention",
    convention,
    "needs a sliding_window",
  )


def window_starts(
  anchors: Int[Array, "b n"], block_size: int, window: int, convention: str
) -> Int[Array, "b n k"]:
  """First context position that each slot sees; below zero means all.

  Anchor 6, three slots, window 4: [3, 4, 5] where the window moves with the
  slot, else [2, 2, 2].
  """
  if WINDOW_CONVENTIONS[convention].moves_with_slot:
    offsets = jnp.arange(1, 1 + block_size)
  else:
    offsets = jnp.zeros((block_size,), jnp.int32)
  return anchors[..., None] + offsets[None, None] - window


def anchor_blocks(
  anchors: Int[Array, "b n"],
  keep: Bool[Array, "b n"],
  *,
  context_length: int,
  block_size: int,
  is_causal: bool,
  window: int | None = None,
  convention: str = DEFAULT_CONVENTION,
) -> Bool[Array, "b q s"]:
  """The whole training rule as one dense mask, for tests and for reading.

  Queries are the slots of all blocks; keys are [context | slots of all blocks].
  A padding block sees nothing here (the convention of the references). With a
  window it is the mask of a sliding layer, in one of `WINDOW_CONVENTIONS`.

  anchors [[1, 2]], context 3, block 2, causal gives, per query row,
    block 0 slot 0: context 0            | own slot 0
    block 0 slot 1: context 0            | own slots 0, 1
    block 1 slot 0: context 0, 1         | own slot 0
    block 1 slot 1: context 0, 1         | own slots 0, 1

  The last two rows with window 2, by convention:
                          automodel, specforge    speculators
    block 1 slot 0: context 1                     0, 1
    block 1 slot 1: context none                  0, 1
  """
  batch, num_blocks = anchors.shape
  ends = jnp.broadcast_to(anchors[..., None], (*anchors.shape, block_size))
  starts = None
  if window is not None:
    starts = window_starts(anchors, block_size, window, convention)
    is_causal = is_causal or WINDOW_CONVENTIONS[convention].is_causal
  context = masks.prefix(ends, context_length, starts)
  same_block = jnp.eye(num_blocks, dtype=bool)[:, None, :, None]
  inside = in_block(block_size, is_causal=is_causal)[None, :, None, :]
  own = (same_block & inside).reshape(
    1, num_blocks, block_size, num_blocks * block_size
  )
  own = jnp.broadcast_to(own, (batch, *own.shape[1:]))
  mask = jnp.concatenate([context, own], axis=-1) & keep[:, :, None, None]
  return mask.reshape(batch, num_blocks * block_size, -1)
