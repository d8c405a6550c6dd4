"""Axis letters and array aliases, defined once for the whole package.

B  batch (requests or training sequences)
T  query tokens of one pass
S  context or cache positions
N  draft blocks per sequence        K  slots of one draft block
M  proposed tokens of one round     C  candidates per slot (top-k)
Q  query heads    G  key/value heads    H  head dimension
D  model width    F  feed-forward width    V  vocabulary    L  layers
R  transfer rank  Z  message size

Shapes in annotations use these letters in lower case where jaxtyping would
otherwise bind them across an unrelated call; plain comments use capitals.
"""

from typing import Any

import jax
from jaxtyping import Array, Bool, Float, Int

PyTree = Any
Params = dict[str, Any]

# A batch of typed PRNG keys has no jaxtyping dtype of its own.
Key = jax.Array

Tokens = Int[Array, "b t"]
Lengths = Int[Array, "b"]
Hidden = Float[Array, "b t d"]
Features = Float[Array, "b t taps_d"]
Logits = Float[Array, "b t v"]
BlockHidden = Float[Array, "b n k d"]
BlockTokens = Int[Array, "b n k"]
BlockWeights = Float[Array, "b n k"]
Anchors = Int[Array, "b n"]
BlockKeep = Bool[Array, "b n"]
