"""All checks and measurements of the kernels on one Hopper GPU, in 8 minutes.

  python -m experiments.gpu_suite --minutes=8 --work_dir=runs/gpu_suite

In this order: XLA's description of the GPU; values and gradients of every
kernel against XLA in float32; a small search for block sizes; the time of every
op; rounds of decoding (an 8B target with random weights, the embedded one,
SmolLM2 if it is installed) and an 8B training step, with kernels and with XLA
alone. Writes results.json, and tuned block sizes with measured defaults into
kernels/tuned and the work directory. Each part has a share of the time, lists
what it left out, and does not stop the rest if it fails; then, or if a kernel
is wrong, the exit status is 1. --tiny shrinks everything; on a CPU kernels are
skipped with the reason. Time: as given, and a unit of work more at most.
"""

import pathlib
import sys
import time
import traceback

from absl import flags

from experiments import provenance, run_io
from experiments.stages import kernel_bench, suite_models, suite_parts
from kernels import block_sizes, dispatch

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/gpu_suite", "Where results go."
)
_MINUTES = flags.DEFINE_float(
  "minutes", 8.0, "For everything.", lower_bound=0.1
)
_PARTS = flags.DEFINE_list(
  "parts", [name for name, _, _ in suite_models.PARTS], "What to run."
)
_TINY = flags.DEFINE_bool("tiny", False, "Everything shrunk, to try it.")
_TUNED = flags.DEFINE_string(
  "tuned_dir", str(block_sizes.FOLDER), "Folder of the tuned block sizes."
)


def run_part(part, context, deadline) -> dict:
  """The part's result, with its time and, if it failed, the reason."""
  start = time.time()
  try:
    result = part(context, deadline)
    failed = bool(result.get("failed"))
  except Exception as error:  # The rest of the suite shall still run.
    traceback.print_exc()
    text = " ".join(f"{type(error).__name__}: {error}".split())
    result, failed = {"error": text[:1000]}, True
  return result | {"seconds": time.time() - start, "ok": not failed}


def left_out(result) -> int:
  """How much a part, or a model of it, left out."""
  if not isinstance(result, dict):
    return 0
  own = result.get("left_out") or []
  count = 1 if isinstance(own, str) else len(own)
  return count + sum(left_out(value) for value in result.values())


def summary(name: str, result: dict) -> list:
  """A line of the table at the end."""
  if not result["ok"]:
    said = result.get("error") or f"wrong: {', '.join(result['failed'])}"
  elif "skipped" in result:
    said = f"skipped: {result['skipped']}"
  else:
    left = left_out(result)
    said = f"left out for time: {left}" if left else "done"
  status = "ok" if result["ok"] else "FAILED"
  return [name, f"{result['seconds']:.0f}", status, said[:100]]


def main(unused_argv) -> int:
  if dispatch.platform() != "gpu" and not _TINY.value:
    raise ValueError(
      f"--tiny=false: an 8B model is too much for this {dispatch.platform()};"
      " add --tiny to try the suite without a GPU"
    )
  known = [name for name, _, _ in suite_models.PARTS]
  unknown = sorted(set(_PARTS.value) - set(known))
  if unknown or not _PARTS.value:
    raise ValueError(f"--parts={','.join(_PARTS.value)}: choose from {known}")
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={"minutes": _MINUTES.value, "tiny": _TINY.value},
    argv=sys.argv,
    resume=False,
  )
  context = suite_parts.Context(
    folder=work_dir.path,
    tuned=pathlib.Path(_TUNED.value),
    is_tiny=_TINY.value,
  )
  chosen = [part for part in suite_models.PARTS if part[0] in _PARTS.value]
  whole = kernel_bench.Deadline(60 * _MINUTES.value)
  results: dict = {}
  for index, (name, share, part) in enumerate(chosen):
    # What earlier parts left is shared among those to come.
    to_come = sum(share for _, share, _ in chosen[index:])
    seconds = max(0.0, whole.left()) * share / to_come
    print(f"{name}: up to {seconds:.0f} s", file=sys.stderr)
    results[name] = run_part(part, context, kernel_bench.Deadline(seconds))
    run_io.write_json(
      work_dir.path / "results.json",
      {"device": provenance.device_summary(), "parts": results},
    )
  rows = [summary(name, result) for name, result in results.items()]
  print(run_io.table(rows, ["part", "s", "status", "note"]))
  return 0 if all(result["ok"] for result in results.values()) else 1


if __name__ == "__main__":
  run_io.run_app(main)
