"""Joules of a request, from a model's config.json and its lengths.

  python -m experiments.predict_energy --model="Llama 3.1 8B" \\
      --input_tokens=68k --output_tokens=247 --cached_tokens=63k --law=simple
  python -m experiments.predict_energy --config=Qwen3-8B/config.json \\
      --input_tokens=2000 --output_tokens=500 --sweep=runs/qwen3_8b.png

Prints the parts of the work, per request, per output token, and per thousand
requests, with the band of a model that was not fitted and a note wherever the
request is outside of what was. --law is one of the shipped ones: capacity
(ours), simple (coefficients of its paper's example), simple_refit; or comes
with --coefficients=results.json of fit_energy. GPU energy of a saturated H100
under TensorRT-LLM: on another machine, fit your own.
"""

import json
import pathlib

from absl import flags

from energy import prediction
from experiments import run_io
from experiments.stages import energy_inputs, energy_plots

_MODEL = flags.DEFINE_string("model", None, "A shipped model, by name.")
_CONFIG = flags.DEFINE_string(
  "config", None, "A config.json of Hugging Face, or its folder."
)
_INPUT = flags.DEFINE_string(
  "input_tokens", None, "Tokens in, the cached ones included: 68000 or 68k."
)
_OUTPUT = flags.DEFINE_string("output_tokens", None, "Tokens out.")
_CACHED = flags.DEFINE_string(
  "cached_tokens", "0", "Tokens of the input whose prefix is cached."
)
_CONCURRENCY = flags.DEFINE_float(
  "concurrency",
  None,
  "Requests that share a decoding step (law capacity); default: as many as fit"
  " into the memory.",
)
_LAW = flags.DEFINE_string("law", "capacity", "Name of the fitted law.")
_COEFFICIENTS = flags.DEFINE_string(
  "coefficients", None, "A results.json of fit_energy; default: shipped."
)
_JSON = flags.DEFINE_bool("json", False, "Print JSON instead of tables.")
_SWEEP = flags.DEFINE_string(
  "sweep",
  None,
  "A PNG to write: joules per output token over output lengths and over input"
  " times output; the numbers go beside it as JSON.",
)

_TITLES = {
  "prefill": "prefill",
  "kv_reads": "KV reads",
  "next_token": "next token",
  "request": "request",
}


def main(unused_argv):
  for flag in (_INPUT, _OUTPUT):
    if flag.value is None:
      raise ValueError(f"--{flag.name} is needed")
  if _SWEEP.value is not None and not _SWEEP.value.endswith(".png"):
    raise ValueError(f"--sweep={_SWEEP.value}: must end in .png")
  fitted = energy_inputs.fitted_law(_COEFFICIENTS, _LAW)
  model = energy_inputs.model(_MODEL, _CONFIG)
  inputs, outputs, cached = map(
    energy_inputs.tokens, (_INPUT, _OUTPUT, _CACHED)
  )
  if cached > inputs:
    raise ValueError(
      f"--cached_tokens={_CACHED.value}: more than"
      f" --input_tokens={_INPUT.value}"
    )
  found = prediction_of(fitted, model, inputs, outputs, cached)
  if _JSON.value:
    print(json.dumps(run_io.to_json(found), indent=2))
  else:
    show(found)
  if _SWEEP.value is not None:
    path = pathlib.Path(_SWEEP.value)
    path.parent.mkdir(parents=True, exist_ok=True)
    swept = energy_plots.sweep(
      path, fitted, model, inputs, cached, _CONCURRENCY.value
    )
    run_io.write_json(path.with_suffix(".json"), swept)
    if not _JSON.value:
      print(f"\n{path} and {path.with_suffix('.json').name} are written")


def prediction_of(fitted, model, inputs, outputs, cached):
  """All that is shown, as one mapping."""
  found = prediction.predict(
    fitted, model, inputs, outputs, cached, _CONCURRENCY.value
  )
  return {
    "model": model.name,
    "parameters": model.architecture.parameters,
    "input_tokens": inputs,
    "output_tokens": outputs,
    "cached_tokens": cached,
    "law": fitted.law,
    "coefficients": fitted.source,
    "joules": found.joules,
    "low": found.low,
    "high": found.high,
    "level": None if fitted.band is None else fitted.band.level,
    "parts": found.parts,
    "joules_per_output_token": found.joules / outputs if outputs else None,
    "kwh_per_1000_requests": kwh_per_1000(found.joules),
    "notes": found.notes,
  }


def kwh_per_1000(joules: float) -> float:
  """Kilowatt-hours of a thousand such requests."""
  return 1000 * joules / 3.6e6


def show(found) -> None:
  """The tables and the notes."""
  outputs = found["output_tokens"]
  rows = [
    (
      _TITLES[name],
      f"{joules:,.1f}",
      f"{100 * joules / found['joules']:.0f} %",
      f"{joules / outputs:.4g}" if outputs else "-",
      f"{kwh_per_1000(joules):.4g}",
    )
    for name, joules in found["parts"].items()
    if joules
  ]
  whole = found["joules"]
  per_token = found["joules_per_output_token"]
  rows.append(
    (
      "total",
      f"{whole:,.1f}",
      "100 %",
      f"{per_token:.4g}" if outputs else "-",
      f"{kwh_per_1000(whole):.4g}",
    )
  )
  print(
    f"{found['model']} ({found['parameters'] / 1e9:.2f} B parameters):"
    f" {found['input_tokens']:,.0f} tokens in"
    f" ({found['cached_tokens']:,.0f} cached), {outputs:,.0f} out\n"
  )
  headers = ["part", "J", "share", "J/output token", "kWh/1000 requests"]
  print(run_io.table(rows, headers))
  if found["low"] is not None:
    print(
      f"\n{100 * found['level']:.0f} % interval for a model that was not"
      f" fitted: {found['low']:,.1f} to {found['high']:,.1f} J"
    )
  print(f"law: {found['law']}, {found['coefficients']}")
  for note in found["notes"]:
    print("note:", note)


if __name__ == "__main__":
  run_io.run_app(main)
