"""Decodes held-out prompts with a drafter and checks the output.

  python -m experiments.evaluate_drafter --drafter=runs/dspine/drafter \\
      --answers=runs/answers --work_dir=runs/dspine_eval

At temperature 0 the output must be the target's own answer token by token; at
higher temperatures every rule and every way to draw the draft is measured. Mean
advancement counts the bonus token and is given for looping and non-looping
answers apart (a loop: the target's own answer ends in a period of at most 40
tokens, three times). Beside it stands the teacher-forced proxy, what rejection
sampling would keep at random places of the target's own answers. Results, with
every raw round length, go to WORK_DIR/results.json. Time on two CPU cores, 200
prompts: half a minute at temperature 0, and as long for each rule and way to
draw at the others.
"""

import functools
import sys
from collections.abc import Sequence

from absl import flags

from dspine_jax import configs
from dspine_jax.drafters import methods
from experiments import run_io, targets
from experiments.stages import answers as answers_stage
from experiments.stages import evaluation, feature_sources, proxy, training

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/evaluation", "Where results go."
)
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
_DRAFTER = flags.DEFINE_string(
  "drafter", targets.EMBEDDED, "`embedded`, or a folder of a drafter."
)
_ANSWERS = flags.DEFINE_string(
  "answers", "runs/answers", "Work directory of make_answers."
)
_PART = flags.DEFINE_string(
  "part", "held_out", "Which of its parts to decode (a benchmark's name)."
)
_EVAL = flags.DEFINE_integer(
  "eval_prompts", 200, "How many of its prompts.", lower_bound=1
)
_TEMPERATURES = flags.DEFINE_list(
  "temperatures", ["0", "1"], "Temperatures to decode at."
)
_RULES = flags.DEFINE_multi_enum(
  "rule",
  ["rejection", "exact_match"],
  ["rejection", "exact_match"],
  "Rules above temperature 0; may be repeated.",
)
_TOP_K = flags.DEFINE_integer("sampling_top_k", 0, "Tokens kept; 0: all.")
_TOP_P = flags.DEFINE_float("sampling_top_p", 1.0, "Mass kept; 1: all.")
_BATCH = flags.DEFINE_integer(
  "batch_size", 16, "Prompts decoded together.", lower_bound=1
)
_SEED = flags.DEFINE_integer("seed", 0, "Seed of the draws.", lower_bound=0)


def decode_configs(
  method: str,
  temperature: float,
  max_new_tokens: int,
  stop_tokens: tuple[int, ...],
  rules: Sequence[str] = ("rejection", "exact_match"),
  top_k: int = 0,
  top_p: float = 1.0,
) -> dict[str, configs.DecodeConfig]:
  """Given rules and every proposal of a method at one temperature, by name."""
  sampling = configs.SamplingConfig(
    temperature=temperature, top_k=top_k, top_p=top_p
  )
  common = {"max_new_tokens": max_new_tokens, "stop_tokens": stop_tokens}
  if temperature == 0:
    greedy = configs.DecodeConfig(sampling=sampling, **common)
    return {"T=0 greedy": greedy}
  kinds = methods.DRAFTERS[method].proposal_kinds
  by_rule = {"rejection": kinds, "exact_match": ("greedy", *kinds)}
  return {
    f"T={temperature:g} {rule}, {kind}": configs.DecodeConfig(
      sampling=sampling, rule=rule, proposal=kind, **common
    )
    for rule in rules
    for kind in by_rule[rule]
  }


def main(unused_argv):
  temperatures = answers_stage.parse_temperatures(_TEMPERATURES.value)
  target = targets.load(_TARGET.value)
  drafter = evaluation.load_drafter(_DRAFTER.value, target)
  answers = training.load_benchmarks(
    _ANSWERS.value, [_PART.value], target, limit=_EVAL.value
  )[_PART.value]
  variants: dict[str, configs.DecodeConfig] = {}
  for temperature in temperatures:
    variants |= decode_configs(
      drafter.cfg.method,
      temperature,
      answers.new_tokens,
      target.model.cfg.eos_token_ids,
      rules=_RULES.value,
      top_k=_TOP_K.value,
      top_p=_TOP_P.value,
    )
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "target": _TARGET.value,
      "drafter": _DRAFTER.value,
      "answers": _ANSWERS.value,
      "part": _PART.value,
      "eval_prompts": _EVAL.value,
      "temperatures": temperatures,
      "rules": _RULES.value,
      "sampling_top_k": _TOP_K.value,
      "sampling_top_p": _TOP_P.value,
      "seed": _SEED.value,
    },
    argv=sys.argv,
    resume=False,
  )

  @functools.cache
  def features(sampling):
    drawn = answers_stage.sampled(
      target, answers, sampling, None, seed=_SEED.value
    )
    taps = drafter.cfg.target_layer_ids
    return feature_sources.in_memory(target, drawn, taps)

  results, rows = {}, []
  for name, decode in variants.items():
    decoded = evaluation.decode_prompts(
      target.model,
      drafter,
      answers,
      decode,
      batch_size=_BATCH.value,
      seed=_SEED.value,
      label=name,
    )
    report = evaluation.advancement_report(
      decoded, answers.loops, drafter.cfg.num_proposals
    )
    if decode.sampling.temperature == 0:
      report["lossless"] = evaluation.losslessness(
        target.model, answers, decoded
      )
      lossless = report["lossless"]
      print(f"equal outputs: {lossless['equal']} of {lossless['prompts']}")
    if decode.rule != "exact_match":
      report["expected"] = proxy.expected_advancement(
        target.model,
        drafter,
        features(decode.sampling),
        decode,
        seed=_SEED.value,
        label=f"proxy {name}",
      )
    results[name] = report
    expected = report.get("expected")
    rows.append(
      [
        *evaluation.row_for_table(name, report),
        "-" if expected is None else f"{expected:.2f}",
      ]
    )
    run_io.write_json(work_dir.path / "results.json", results)
  headers = ["mean advancement", "all", "non-looping", "looping", "expected"]
  print(run_io.table(rows, headers))


if __name__ == "__main__":
  run_io.run_app(main)
