"""When does a drafter pay? Joules and time at given operating conditions.

  python -m experiments.plan_serving --model="Qwen3 8B" --advancement=4.82 \\
      --concurrency=8 --context_tokens=2k --work_dir=runs/plan

Prices of the capacity law and a roofline of the GPU give what a round of draft
and verification costs, hence the break-even advancement: below it, plain
decoding is cheaper. WORK_DIR gets plan.json and break_even.png, a map over
concurrency and context. It is a model, and its assumptions are printed.
"""

import sys

import jax
import numpy as np
from absl import flags

from energy import prediction, speculative
from experiments import run_io
from experiments.stages import energy_inputs, energy_plots

_MODEL = flags.DEFINE_string("model", None, "A shipped target, by name.")
_CONFIG = flags.DEFINE_string("config", None, "A target's config.json.")
_VOCAB = flags.DEFINE_integer(
  "vocab_size",
  None,
  "Rows of the head that a draft pass reads; default: the target's.",
  lower_bound=1,
)
_INTERMEDIATE = flags.DEFINE_integer(
  "intermediate_size",
  None,
  "Width of the drafter's MLP; default: the target's.",
  lower_bound=1,
)
_LAYERS = flags.DEFINE_integer("num_layers", 5, "Draft layers.", lower_bound=1)
_BLOCK = flags.DEFINE_integer("block_size", 16, "Slots.", lower_bound=2)
_EXTRA = flags.DEFINE_float(
  "extra_parameters", 33.0e6, "Of the method (DSpine beside Qwen3-8B: 33 M)."
)
_WIDTH = flags.DEFINE_integer(
  "verify_width",
  None,
  "Tokens verified a round; default: the block.",
  lower_bound=1,
)
_ADVANCEMENT = flags.DEFINE_float(
  "advancement", 4.82, "Tokens a round that the drafter reaches."
)
_CONCURRENCY = flags.DEFINE_float("concurrency", 8.0, "Requests in a pass.")
_CONTEXT = flags.DEFINE_string("context_tokens", "2k", "Positions before.")
_LAW = flags.DEFINE_string("law", "capacity", "Fitted law that has the prices.")
_COEFFICIENTS = flags.DEFINE_string(
  "coefficients", None, "A results.json of fit_energy; default: shipped."
)
_WORK_DIR = flags.DEFINE_string("work_dir", "runs/plan_serving", "For results.")

_CONCURRENCIES = np.geomspace(1, 256, 33)
_CONTEXTS = np.geomspace(128, 65536, 28)


def main(unused_argv):
  context = energy_inputs.tokens(_CONTEXT)
  advancement, width = _ADVANCEMENT.value, _WIDTH.value or _BLOCK.value
  for flag, least in ((_CONCURRENCY, 1), (_ADVANCEMENT, 1), (_EXTRA, 0)):
    if not least <= flag.value < 1e12:
      raise ValueError(
        f"--{flag.name}={flag.value:g}: must be at least {least}"
      )
  if not 1 <= width <= _BLOCK.value or advancement > width:
    raise ValueError(
      f"--verify_width={width}: must lie between 1 and --block_size="
      f"{_BLOCK.value}, and no smaller than --advancement={advancement:g}"
    )
  model = energy_inputs.model(_MODEL, _CONFIG)
  fitted = energy_inputs.fitted_law(_COEFFICIENTS, _LAW)
  prices = speculative.prices_of(fitted.theta, fitted.function)
  target = model.architecture
  drafter = speculative.block_drafter(
    target,
    vocab_size=_VOCAB.value or model.vocab_size,
    num_layers=_LAYERS.value,
    block_size=_BLOCK.value,
    intermediate_size=_INTERMEDIATE.value or model.intermediate_size,
    extra_parameters=_EXTRA.value,
  )
  hardware = speculative.Hardware()
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "model": model.name,
      "drafter": jax.tree.map(float, drafter),
      "law": fitted.to_json(),
      "verify_width": width,
      "advancement": advancement,
      "concurrency": _CONCURRENCY.value,
      "context_tokens": context,
    },
    argv=sys.argv,
    resume=True,
  )
  notes = model.notes(context) + prediction.memory_notes(
    fitted, model, context, _CONCURRENCY.value
  )

  def operation(concurrency, tokens):
    return speculative.Operation(tokens, concurrency, float(width))

  at = operation(_CONCURRENCY.value, context)
  quantities = {
    "joules": (
      lambda draft, at, a: speculative.joules_per_token(
        prices, target, draft, at, a
      ),
      lambda at: speculative.break_even_joules(prices, target, drafter, at),
      speculative.round_joules(prices, target, drafter, at),
    ),
    "seconds": (
      lambda draft, at, a: speculative.seconds_per_token(
        hardware, target, draft, at, a
      ),
      lambda at: speculative.break_even_seconds(hardware, target, drafter, at),
      speculative.round_seconds(hardware, target, drafter, at),
    ),
  }
  plan, maps, rows = {}, {}, []
  for name, (per_token, break_even, parts) in quantities.items():
    plain = float(per_token(None, speculative.autoregressive(at), 1.0))
    drafted = float(per_token(drafter, at, advancement))
    needed = float(break_even(at))
    share = float(parts["verify"] / (parts["verify"] + parts["draft"]))
    pays = {
      "concurrency": speculative.where_it_pays(
        lambda x, f=break_even: f(operation(x, context)), advancement, 1, 4096
      ),
      "context_tokens": speculative.where_it_pays(
        lambda x, f=break_even: f(operation(_CONCURRENCY.value, x)),
        advancement,
        16,
        1e6,
      ),
    }
    maps[name] = np.asarray(
      break_even(operation(_CONCURRENCIES[None, :], _CONTEXTS[:, None]))
    )
    plan[name] = {
      "autoregressive_per_token": plain,
      "speculative_per_token": drafted,
      "gain": plain / drafted,
      "break_even_advancement": needed,
      "verify_share_of_a_round": share,
      "pays": {key: one._asdict() for key, one in pays.items()},
    }
    rows.append(
      [
        name,
        plain,
        drafted,
        plain / drafted,
        needed,
        f"{100 * share:.0f} %",
        *(
          crossing_text(pays[key]) for key in ("concurrency", "context_tokens")
        ),
      ]
    )
  assumptions = speculative.__doc__.partition("What it assumes:")[2].strip()
  run_io.write_json(
    work_dir.path / "plan.json",
    {
      "model": model.name,
      "coefficients": fitted.source,
      "drafter": jax.tree.map(float, drafter),
      "operation": at,
      "advancement": advancement,
      "hardware": hardware._asdict(),
      "assumptions": assumptions,
      "notes": notes,
      "plan": plan,
      "map": {
        "concurrency": _CONCURRENCIES,
        "context_tokens": _CONTEXTS,
        "break_even_advancement": maps,
      },
    },
  )
  energy_plots.break_even(
    work_dir.path / "break_even.png",
    maps,
    _CONCURRENCIES,
    _CONTEXTS,
    advancement,
    f"{model.name}, {_LAYERS.value} draft layers, block {_BLOCK.value}, verify"
    f" width {width}; red: advancement {advancement:g} (a model, not measured)",
  )
  print(
    f"{model.name}, concurrency {_CONCURRENCY.value:g}, context {context:g},"
    f" advancement {advancement:g}\n"
  )
  print(
    run_io.table(
      rows,
      [
        "per emitted token",
        "plain",
        "drafted",
        "gain",
        "break-even advancement",
        "verification of a round",
        "pays at concurrency",
        "pays at context",
      ],
    )
  )
  print(
    f"\ndrafter: {drafter.architecture.parameters / 1e9:.2f} B parameters read"
    f" a pass, the head's among them; prices: {fitted.source}"
  )
  for note in notes:
    print("note:", note)
  print(f"\nIt is a model. It assumes:\n  {assumptions}")
  print(f"\nplan.json and break_even.png are in {work_dir.path}")


def crossing_text(crossing: speculative.Crossing) -> str:
  """Where it pays, among what was looked at."""
  if crossing.at is None:
    return crossing.pays
  return f"{crossing.pays} {crossing.at:,.0f}"


if __name__ == "__main__":
  run_io.run_app(main)
