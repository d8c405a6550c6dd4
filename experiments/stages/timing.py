"""Speculative against autoregressive decoding, timed in the same run."""

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.data import answers as answers_lib
from dspine_jax.decoding import generate, metrics
from experiments.stages import speed


def time_generation(
  target: generate.TargetModel,
  drafter: generate.DrafterModel,
  prompts: answers_lib.AnswerSet,
  decode: configs.DecodeConfig,
  *,
  batch_size: int = 1,
) -> dict:
  """Both ways over the same prompts, turn and turn about.

  Args:
    target: the verifier.
    drafter: the drafter.
    prompts: whose answers are not read.
    decode: greedy, so that both ways give the same tokens.
    batch_size: prompts decoded together; as many as fill whole batches, and at
      least one batch, are timed.
  """
  count = len(prompts.lengths)
  size = min(batch_size, count)
  width = int(prompts.prompt_lengths.max())
  rounds, seconds, tokens = [], {"plain": 0.0, "speculative": 0.0}, 0
  equal, passes = 0, 0
  for start in range(0, count - size + 1, size):
    rows = np.arange(start, start + size)
    arguments = (
      jnp.asarray(prompts.tokens[rows, :width]),
      jnp.asarray(prompts.prompt_lengths[rows]),
    )
    keys = jax.random.split(jax.random.key(0), size)

    def plain(arguments=arguments, keys=keys):
      return generate.autoregressive(
        target, *arguments, decode=decode, keys=keys
      )

    def speculative(arguments=arguments, keys=keys):
      return generate.generate(
        target, drafter, *arguments, decode=decode, keys=keys
      )

    if start == 0:
      jax.block_until_ready((plain(), speculative()))
    calls = {"plain": plain, "speculative": speculative}
    outs = {}
    for name, call in calls.items():
      elapsed, outs[name] = speed.timed(call)
      seconds[name] += elapsed
    out = outs["speculative"]
    tokens += int(jnp.sum(out.num_tokens))
    passes += int(out.rounds)
    rounds += metrics.round_lists(out.round_lengths, out.accepted)[0]
    same = jnp.all(out.tokens == outs["plain"].tokens, axis=1)
    equal += int(jnp.sum(same))
  return {
    "prompts": len(rounds),
    "batch_size": size,
    "equal_outputs": equal,
    "tokens": tokens,
    "rounds": passes,
    "mean_advancement": metrics.mean_advancement(rounds),
    "autoregressive_tokens_per_second": tokens / seconds["plain"],
    "speculative_tokens_per_second": tokens / seconds["speculative"],
    "ratio": seconds["plain"] / seconds["speculative"],
    "rounds_per_second": passes / seconds["speculative"],
  }
