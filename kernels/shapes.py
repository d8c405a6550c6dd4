"""The shapes that kernels are compiled, counted, tuned and timed at.

Drafters of Qwen3-8B (DSpine's published sizes) and of a 27B target, in training
(512 anchors over a sequence) and in decoding (1 to 64 requests).
"""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Model:
  """Sizes of a target and its drafter.

  Attributes:
    name: of the shape.
    width: D.
    vocab: V.
    heads: query heads Q of the drafter.
    kv_heads: key and value heads G.
    head_dim: H.
    layers: draft layers.
    intermediate: F, feed-forward width.
  """

  name: str
  width: int
  vocab: int
  heads: int = 32
  kv_heads: int = 8
  head_dim: int = 128
  layers: int = 5
  intermediate: int = 12288


QWEN3_8B = Model("8B", width=4096, vocab=151936)
QWEN3_27B = Model("27B", width=5120, vocab=248320, intermediate=17408)
MODELS = (QWEN3_8B, QWEN3_27B)

RANK = 1024  # R
MESSAGE = 512  # Z
BLOCK = 16  # K
CANDIDATES = 16  # C
ANCHORS = 512  # draft blocks of a training sequence
CONTEXT = 3072  # S, positions of a training sequence
BATCHES = (1, 4, 16, 64)  # concurrent requests in decoding
DECODE_CONTEXT = 4096  # cached positions of a request in decoding
