"""Times speculative against autoregressive decoding, and the parts of a round.

  python -m experiments.benchmark_decode --target=embedded --drafter=embedded
  python -m experiments.benchmark_decode --preset=bench

With a target and a drafter, held-out prompts are decoded at batch 1 both ways
in the same run. With a preset both have random weights, and rounds per second
are what is measured. Parts are timed as differences of programs that end after
draft, candidates, cache, walk, verify and commit. Time: about two minutes.
"""

import dataclasses
import functools
import sys

import jax
import numpy as np
from absl import flags
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate
from dspine_jax.decoding import round as round_lib
from dspine_jax.drafters import candidates, dspine, methods
from dspine_jax.target import model
from experiments import benchmark_presets, run_io, targets
from experiments.stages import evaluation, speed, timing, training

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/benchmark_decode", "Where results go."
)
_PRESET = flags.DEFINE_enum(
  "preset", None, sorted(benchmark_presets.PRESETS), "Random weights."
)
_METHOD = flags.DEFINE_enum(
  "method", "dspine", sorted(methods.DRAFTERS), "Drafter of the preset."
)
_TARGET = flags.DEFINE_string(
  "target", targets.EMBEDDED, "`embedded`, or a Hugging Face folder."
)
_DRAFTER = flags.DEFINE_string(
  "drafter", targets.EMBEDDED, "`embedded`, or a folder of a drafter."
)
_ANSWERS = flags.DEFINE_string(
  "answers", None, "Work directory of make_answers with held-out prompts."
)
_PROMPTS = flags.DEFINE_integer(
  "prompts", 16, "Prompts to decode.", lower_bound=1
)
_PROMPT_TOKENS = flags.DEFINE_integer(
  "prompt_tokens", 64, "Tokens of a preset's prompts.", lower_bound=1
)
_NEW = flags.DEFINE_integer(
  "max_new_tokens", 144, "Tokens to generate.", lower_bound=2
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 15, "Timed calls of each part.", lower_bound=1
)


def round_parts(target, drafter, state, decode) -> dict:
  """Programs that run one round up to and including each part.

  Each is a function of the state that returns (state, a number that depends on
  everything computed), for `loop_time`.
  """
  cfg, tables = drafter.cfg, target.tables

  def draft(state):
    return round_lib.draft(target, drafter, state.anchor, state.draft_cache)

  def draft_only(state):
    output = draft(state)
    used = jnp.sum(output.hidden)
    if output.pre_injection is not None:
      used = used + jnp.sum(output.pre_injection)
    return state, used

  def select(state):
    output = draft(state)
    logits = model.head_logits(
      tables.head, output.hidden[:, 0, cfg.first_slot :]
    )
    top_k = cfg.dspine.top_k if cfg.dspine is not None else 1
    return output, candidates.top_candidates(logits, top_k)[1]

  def to_candidates(state):
    return state, jnp.sum(select(state)[1])

  def to_cache(state):
    output, ids = select(state)
    assert output.pre_injection is not None
    predecessors = candidates.predecessor_ids(state.anchor, ids)
    scores = dspine.transition_scores(
      dspine.refinement_params(drafter.params),
      output.pre_injection[:, 0, cfg.first_slot :],
      drafter.buffers["transfer_codes"][predecessors],
      tables.head[ids],
      cfg.rms_norm_eps,
    )
    return state, jnp.sum(scores)

  def to_walk(state):
    proposal = round_lib.propose(
      target, drafter, draft(state), state.anchor, state.keys, decode=decode
    )
    return state, jnp.sum(proposal.tokens)

  def to_verify(state):
    proposal = round_lib.propose(
      target, drafter, draft(state), state.anchor, state.keys, decode=decode
    )
    checked = jnp.concatenate([state.anchor[:, None], proposal.tokens], axis=1)
    out = model.forward(
      target.params,
      checked,
      cfg=target.cfg,
      cache=state.target_cache,
      tap_layers=cfg.target_layer_ids,
    )
    best = jnp.argmax(model.logits(target.params, out.hidden), axis=-1)
    state = dataclasses.replace(state, target_cache=out.cache)
    return state, jnp.sum(best) + jnp.sum(out.features)

  def to_commit(state):
    frozen = state.done, state.num_tokens, state.rounds
    state = round_lib.speculative_round(target, drafter, state, decode=decode)
    # Every repetition is the same round at the same length.
    committed = state.num_tokens - frozen[1]
    back = {"lengths": state.target_cache.lengths - committed}
    state = dataclasses.replace(
      state,
      done=frozen[0],
      num_tokens=frozen[1],
      rounds=frozen[2],
      target_cache=dataclasses.replace(state.target_cache, **back),
      draft_cache=dataclasses.replace(state.draft_cache, **back),
    )
    return state, jnp.sum(committed)

  parts = {"draft": draft_only, "candidates": to_candidates}
  if cfg.dspine is not None and cfg.dspine.refines:
    parts["cache"] = to_cache
  return parts | {"walk": to_walk, "verify": to_verify, "commit": to_commit}


def loop_time(part, state, *, repeats: int, rounds: int = 16) -> float:
  """Seconds of one call of `part`, from a device loop of `rounds` calls."""

  @functools.partial(jax.jit, donate_argnums=0)
  def loop(state):
    def body(_, state):
      new, used = part(state)
      # Ties each call to the one before it, so that none is hoisted.
      anchor = (new.anchor + (used > 1e30).astype(jnp.int32)) % 64
      return dataclasses.replace(new, anchor=anchor)

    return jax.lax.fori_loop(0, rounds, body, state)

  holder = [loop(jax.tree.map(jnp.copy, state))]

  def call():
    holder[0] = loop(holder[0])
    return holder[0].anchor

  return float(np.median(speed.seconds(call, repeats=repeats))) / rounds


def time_parts(target, drafter, prompt, decode, *, repeats: int) -> dict:
  """Seconds of each part of a round in the middle of a generation."""
  state = generate.start(
    target,
    drafter,
    jnp.asarray(prompt)[None],
    jnp.asarray([len(prompt)]),
    decode=decode,
    keys=jax.random.key(0)[None],
  )
  seconds, before = {}, 0.0
  for name, part in round_parts(target, drafter, state, decode).items():
    until = loop_time(part, state, repeats=repeats)
    seconds[name] = max(0.0, until - before)
    before = until
  seconds["round"] = before
  return seconds


def round_flops(target, drafter, context: int) -> float:
  """Matmul FLOPs of one round at batch 1 with `context` cached positions."""
  cfg = drafter.cfg
  checked = cfg.num_proposals + 1
  verify = target.cfg.num_layers * speed.layer_flops(
    target.cfg, checked, context + checked
  )
  heads = speed.head_flops(cfg, checked + cfg.num_proposals)
  heads += speed.selection_flops(cfg, cfg.num_proposals)
  return verify + heads + speed.draft_flops(cfg, 1, context, checked)


def load_models():
  """The preset's random models, or the named ones, with prompts."""
  if _PRESET.value:
    preset = benchmark_presets.PRESETS[_PRESET.value]
    target, drafter = benchmark_presets.random_models(preset, _METHOD.value)
    generator = np.random.default_rng(0)
    shape = (_PROMPTS.value, _PROMPT_TOKENS.value)
    prompts = generator.integers(0, target.cfg.vocab_size, shape)
    return target, drafter, prompts.astype(np.int32)
  if not _ANSWERS.value:
    raise ValueError("--answers (or --preset) is needed for prompts")
  named = targets.load(_TARGET.value)
  drafter = evaluation.load_drafter(_DRAFTER.value, named)
  answers = training.load_parts(_ANSWERS.value, ["held_out"], named)
  size = int(answers.prompt_lengths.max())
  return named.model, drafter, answers.tokens[: _PROMPTS.value, :size]


def main(unused_argv):
  target, drafter, prompts = load_models()
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={name: flags.FLAGS[name].value for name in _RECORDED},
    argv=sys.argv,
    resume=False,
  )
  decode = configs.DecodeConfig(
    max_new_tokens=_NEW.value,
    stop_tokens=() if _PRESET.value else target.cfg.eos_token_ids,
  )
  peak = speed.matmul_peak()
  results = timing.time_generation(target, drafter, prompts, decode)
  parts = time_parts(
    target, drafter, prompts[0], decode, repeats=_REPEATS.value
  )
  peak = max(peak, speed.matmul_peak())
  context = prompts.shape[1] + _NEW.value // 2
  flops = round_flops(target, drafter, context)
  results |= {
    "part_seconds": parts,
    "round_flops": flops,
    "matmul_peak_flops": peak,
    "floor_fraction": flops / peak * results["rounds_per_second"],
    "device": run_io.device_summary(),
  }
  run_io.write_json(work_dir.path / "results.json", results)
  for name in (
    "autoregressive_tokens_per_second",
    "speculative_tokens_per_second",
    "ratio",
    "rounds_per_second",
    "floor_fraction",
  ):
    print(f"{name.replace('_', ' ')}: {results[name]:.3g}")
  print(f"equal outputs: {results['equal_outputs']} of {len(prompts)}")
  print(
    run_io.table(
      [
        [name, f"{1e3 * value:.3f}", f"{value / parts['round']:.0%}"]
        for name, value in parts.items()
      ],
      ["part of a round", "ms", "share"],
    )
  )


_RECORDED = (
  "preset",
  "method",
  "target",
  "drafter",
  "answers",
  "prompts",
  "prompt_tokens",
  "max_new_tokens",
)

if __name__ == "__main__":
  run_io.run_app(main)
