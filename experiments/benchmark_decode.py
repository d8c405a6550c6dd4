"""Times speculative against autoregressive decoding, and the parts of a round.

  python -m experiments.benchmark_decode --target=embedded --drafter=embedded
  python -m experiments.benchmark_decode --preset=bench

With a target and a drafter, held-out prompts are decoded at batch 1 both ways
in the same run. With a preset both have random weights, and rounds per second
are what is measured. Parts are timed as differences of programs that end after
draft, candidates, cache, walk, verify and commit. Time: about two minutes.
"""

import sys

import numpy as np
from absl import flags

from dspine_jax import configs
from dspine_jax.data import answers as answers_lib
from dspine_jax.drafters import methods
from experiments import benchmark_presets, provenance, run_io, targets
from experiments.stages import (
  evaluation,
  round_parts,
  speed,
  timing,
  training,
)

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/benchmark_decode", "Where results go."
)
_PRESET = flags.DEFINE_enum(
  "preset", None, sorted(benchmark_presets.PRESETS), "Random weights."
)
_METHOD = flags.DEFINE_enum(
  "method", "dspine", sorted(methods.DRAFTERS), "Drafter of the preset."
)
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
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
    return target, drafter, answers_lib.pad_prompts(prompts)
  if not _ANSWERS.value:
    raise ValueError("--answers (or --preset) is needed for prompts")
  named = targets.load(_TARGET.value)
  drafter = evaluation.load_drafter(_DRAFTER.value, named)
  answers = training.load_parts(_ANSWERS.value, ["held_out"], named)
  rows = np.arange(min(_PROMPTS.value, len(answers.lengths)))
  return named.model, drafter, answers.select(rows)


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
  parts = round_parts.time_parts(
    target,
    drafter,
    prompts.tokens[0, : prompts.prompt_lengths[0]],
    decode,
    repeats=_REPEATS.value,
  )
  peak = max(peak, speed.matmul_peak())
  context = int(prompts.prompt_lengths.mean()) + _NEW.value // 2
  flops = round_flops(target, drafter, context)
  results |= {
    "part_seconds": parts,
    "round_flops": flops,
    "matmul_peak_flops": peak,
    "floor_fraction": flops / peak * results["rounds_per_second"],
    "device": provenance.device_summary(),
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
  print(f"equal outputs: {results['equal_outputs']} of {results['prompts']}")
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
