"""Measures joules per request over input and output lengths, on this GPU.

  python -m experiments.measure_energy --target=Qwen3-8B --batch_size=32 \\
      --input_tokens=128,1024 --output_tokens=64,512 --work_dir=runs/measured
  python -m experiments.fit_energy --data=runs/measured/measured.csv \\
      --configs=Qwen3-8B=Qwen3-8B/config.json --law=sweetspot --holdout=none \\
      --work_dir=runs/fit

Drives our own autoregressive decoding over the grid, with random prompts of
exact lengths, and reads the energy counter of the GPU (NVML), or integrates
sampled power where it has none. Joules are of the whole GPU; --subtract_idle
takes off what it draws when nothing runs. WORK_DIR/measured.csv grows by a row
a point and finished points are kept. Needs an NVIDIA GPU and `pynvml`.
"""

import csv
import importlib
import itertools
import math
import pathlib
import sys
import time

import jax
import numpy as np
from absl import flags
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.checkpoints import hf_config
from dspine_jax.decoding import generate
from experiments import run_io, targets
from experiments.stages import energy_inputs

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/measured", "For measured.csv."
)
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
_NAME = flags.DEFINE_string(
  "name", None, "Of the model in the file; default: --target's last part."
)
_INPUTS = flags.DEFINE_list(
  "input_tokens", ["64", "256", "1024"], "Lengths in."
)
_OUTPUTS = flags.DEFINE_list("output_tokens", ["64", "256"], "Lengths out.")
_BATCH = flags.DEFINE_integer(
  "batch_size", 8, "Requests decoded together.", lower_bound=1
)
_SECONDS = flags.DEFINE_float(
  "seconds", 10.0, "A point is repeated for at least so long.", lower_bound=0.0
)
_GPU = flags.DEFINE_integer(
  "gpu",
  0,
  "Index of the GPU in NVML, by PCI bus; CUDA_VISIBLE_DEVICES does not change"
  " it. JAX computes on its first one: let that be the same.",
  lower_bound=0,
)
_IDLE = flags.DEFINE_bool(
  "subtract_idle", False, "Take idle power off, measured for --seconds first."
)
_SEED = flags.DEFINE_integer("seed", 0, "Of the prompts.")

HEADER = (
  "model",
  "input_tokens",
  "output_tokens",
  "cached_tokens",
  "concurrency",
  "joules",
  "seconds",
  "requests",
  "source",
  "idle_watts_subtracted",
)


def main(unused_argv):
  meter = open_meter()
  gpu = meter.Gpu(_GPU.value)
  if jax.default_backend() != "gpu":
    raise ValueError(
      f"JAX computes on {jax.default_backend()}, not on the GPU that would be"
      " measured (install the cuda13 extra)"
    )
  grid = [lengths(flag) for flag in (_INPUTS, _OUTPUTS)]
  target = targets.load(_TARGET.value)
  longest = max(grid[0]) + max(grid[1])
  if longest > target.model.cfg.max_positions:
    raise ValueError(
      f"--input_tokens and --output_tokens: {longest} tokens together, the"
      f" target has {target.model.cfg.max_positions} positions"
    )
  name = _NAME.value or pathlib.Path(_TARGET.value).name
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "target": _TARGET.value,
      "name": name,
      "batch_size": _BATCH.value,
      "subtract_idle": _IDLE.value,
      "gpu": gpu.name,
    },
    argv=sys.argv,
    resume=True,
  )
  run_io.write_json(
    work_dir.path / "model_config.json", hf_config.target_json(target.model.cfg)
  )
  path = work_dir.path / "measured.csv"
  done = finished_points(path)
  idle = gpu.idle_watts(_SECONDS.value) if _IDLE.value else 0.0
  points = [p for p in itertools.product(*grid) if p not in done]
  with run_io.Progress(len(points), "measure", "points") as progress:
    for inputs, outputs in points:
      row = measure(meter, gpu, target, inputs, outputs, idle)
      append(path, {"model": name} | row)
      progress.update(joules=row["joules"])
  print(path.read_text(encoding="utf-8"), end="")
  print(f"measured.csv is in {work_dir.path}")


def lengths(flag: flags.FlagHolder) -> list[int]:
  """The different whole lengths of a flag; ValueError names it."""
  values = [energy_inputs.parse_tokens(text, flag.name) for text in flag.value]
  if not values or any(value < 1 or value % 1 for value in values):
    raise ValueError(
      f"--{flag.name}={','.join(flag.value)}: whole lengths >= 1 are needed"
    )
  return sorted({int(value) for value in values})


def open_meter():
  """The module of the meter; ValueError where NVML is missing."""
  try:
    return importlib.import_module("energy.meter")
  except ImportError:
    raise ValueError(
      "no GPU to measure: package pynvml (nvidia-ml-py) is not installed"
    ) from None


def measure(meter, gpu, target, inputs: int, outputs: int, idle_watts: float):
  """One point: a row of the file without the model."""
  vocab = target.model.cfg.vocab_size
  rng = np.random.default_rng(_SEED.value)
  prompts = jnp.asarray(
    rng.integers(0, vocab, (_BATCH.value, inputs), dtype=np.int32)
  )
  lengths = jnp.full((_BATCH.value,), inputs, jnp.int32)
  decode = configs.DecodeConfig(max_new_tokens=outputs)
  keys = jax.random.split(jax.random.key(_SEED.value), _BATCH.value)

  def run():
    out = generate.autoregressive(
      target.model, prompts, lengths, decode=decode, keys=keys
    )
    jax.block_until_ready(out.tokens)

  run()  # Compiles.
  batches = 0
  metered = meter.Meter(gpu)
  with metered:
    began = time.monotonic()
    while batches == 0 or time.monotonic() - began < _SECONDS.value:
      run()
      batches += 1
  reading = metered.reading
  requests = batches * _BATCH.value
  joules = (reading.joules - idle_watts * reading.seconds) / requests
  if not (math.isfinite(joules) and joules > 0):
    raise ValueError(
      f"{inputs} in, {outputs} out: {joules:g} J per request over"
      f" {reading.seconds:.1f} s ({reading.source}): repeat with more --seconds"
    )
  return {
    "input_tokens": inputs,
    "output_tokens": outputs,
    "cached_tokens": 0,
    "concurrency": _BATCH.value,
    "joules": joules,
    "seconds": reading.seconds,
    "requests": requests,
    "source": reading.source,
    "idle_watts_subtracted": idle_watts,
  }


def finished_points(path: pathlib.Path) -> set[tuple[int, int]]:
  """(input, output) of the rows that are there."""
  if not path.exists():
    return set()
  with path.open(encoding="utf-8", newline="") as file:
    return {
      (int(row["input_tokens"]), int(row["output_tokens"]))
      for row in csv.DictReader(file)
    }


def append(path: pathlib.Path, row) -> None:
  """Adds a row, after a header if it is the first."""
  new = not path.exists()
  with path.open("a", encoding="utf-8", newline="") as file:
    writer = csv.DictWriter(file, HEADER)
    if new:
      writer.writeheader()
    writer.writerow(row)


if __name__ == "__main__":
  run_io.run_app(main)
