"""The serial part of methods whose head reads the token before.

Domino and DSpark. One step a slot: from the token chosen before to the logits
of the next one. Unlike `candidates.py`, which follows indices through a table
of scores, a step here computes; the backbone is not run again. What a step does
is the method's own affair.
"""

from collections.abc import Callable

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Int

from dspine_jax import configs
from dspine_jax.decoding import sampling
from dspine_jax.drafters import contract
from dspine_jax.typing import PyTree

# (state, tokens [B], inputs of the slot) -> (state, logits [B, V], extra)
Step = Callable[[PyTree, jax.Array, PyTree], tuple[PyTree, jax.Array, PyTree]]


def walk(
  step: Step,
  state: PyTree,
  inputs: PyTree,
  anchor_tokens: Int[Array, "b"],
  *,
  sampling_cfg: configs.SamplingConfig,
  kind: str,
  keys: jax.Array,
  forced: Int[Array, "b m"] | None = None,
) -> tuple[contract.Proposal, PyTree]:
  """Chooses token after token, each from the logits given the one before.

  Args:
    step: one slot.
    state: of the head before the first slot.
    inputs: trees [B, M, ...], what each slot has besides its predecessor.
    anchor_tokens: [B], predecessor of the first slot.
    sampling_cfg: temperature, top-k and top-p of the request.
    kind: "greedy" takes the argmax; anything else samples.
    keys: [B].
    forced: as in `contract.Drafter.propose`.

  Returns:
    The proposal, whose `probs` are the laws that the tokens were drawn from
    (None if greedy), and the steps' extras as [B, M, ...].
  """

  def one_slot(carry, at_slot):
    state, tokens = carry
    slot, inputs, known = at_slot
    state, logits, extra = step(state, tokens, inputs)
    if kind == "greedy":
      tokens, q = sampling.argmax(logits), None
    else:
      q = sampling.probabilities(logits, sampling_cfg)
      slot_keys = jax.vmap(lambda key: jax.random.fold_in(key, slot))(keys)
      tokens = sampling.draw(slot_keys, q) if known is None else known
    return (state, tokens), (tokens, q, extra)

  by_slot = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), (inputs, forced))
  count = jax.tree.leaves(by_slot)[0].shape[0]
  start = (state, anchor_tokens.astype(jnp.int32))
  _, found = lax.scan(one_slot, start, (jnp.arange(count), *by_slot))
  tokens, q, extras = jax.tree.map(lambda x: jnp.swapaxes(x, 0, 1), found)
  return contract.Proposal(tokens=tokens, probs=q), extras
