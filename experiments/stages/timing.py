"""Speculative against autoregressive decoding, timed in the same run."""

import jax
from jax import numpy as jnp

from dspine_jax.decoding import generate, metrics
from experiments.stages import speed


def time_generation(target, drafter, prompts, decode) -> dict:
  """Both ways over the same prompts at batch 1, turn and turn about."""
  keys = jax.random.key(0)[None]
  rounds, seconds, tokens = [], {"plain": 0.0, "speculative": 0.0}, 0
  equal = 0
  for index, prompt in enumerate(prompts):
    length = jnp.asarray([len(prompt)])
    arguments = (jnp.asarray(prompt)[None], length)

    def plain(arguments=arguments):
      return generate.autoregressive(
        target, *arguments, decode=decode, keys=keys
      )

    def speculative(arguments=arguments):
      return generate.generate(
        target, drafter, *arguments, decode=decode, keys=keys
      )

    if index == 0:
      jax.block_until_ready((plain(), speculative()))
    calls = {"plain": plain, "speculative": speculative}
    outs = {}
    for name, call in calls.items():
      elapsed, outs[name] = speed.timed(call)
      seconds[name] += elapsed
    out = outs["speculative"]
    tokens += int(out.num_tokens[0])
    rounds += metrics.round_lists(out.round_lengths, out.accepted)[0]
    equal += bool(jnp.array_equal(out.tokens, outs["plain"].tokens))
  count = sum(len(lengths) for lengths in rounds)
  return {
    "prompts": len(prompts),
    "equal_outputs": equal,
    "tokens": tokens,
    "rounds": count,
    "mean_advancement": metrics.mean_advancement(rounds),
    "autoregressive_tokens_per_second": tokens / seconds["plain"],
    "speculative_tokens_per_second": tokens / seconds["speculative"],
    "ratio": seconds["plain"] / seconds["speculative"],
    "rounds_per_second": count / seconds["speculative"],
  }
