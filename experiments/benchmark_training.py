"""Times a drafter's training pass (forward and backward) on random data.

  python -m experiments.benchmark_training --preset=bench --work_dir=runs/bench

Gives seconds per step, block tokens per second, and the fraction of the matmul
peak that was measured in the same run. FLOPs are counted for matrix products
only, three times the forward pass, with the head's teacher pass added where the
method has one. Memory is what XLA allots to temporaries, and the most that the
process had so far: name one method to have its own. What the chunks of the loss
save:

  python -m experiments.benchmark_training --preset=vocabulary \\
      --methods=dspine --repeats=1 --chunk_blocks=128

against --chunk_blocks=16. Time: a minute or two on two CPU cores.
"""

import resource
import sys

import jax
import numpy as np
from absl import flags
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import methods
from dspine_jax.training import step as step_lib
from experiments import benchmark_presets, provenance, run_io
from experiments.stages import speed

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/benchmark_training", "Where results go."
)
_PRESET = flags.DEFINE_enum(
  "preset", "bench", sorted(benchmark_presets.PRESETS), "Which sizes."
)
_METHODS = flags.DEFINE_list(
  "methods", sorted(methods.DRAFTERS), "Which drafters."
)
_REPEATS = flags.DEFINE_integer(
  "repeats", 7, "Timed steps per method.", lower_bound=1
)
_CHUNK = flags.DEFINE_integer(
  "chunk_blocks", 16, "Blocks whose vocabulary rows exist together."
)


def counted_flops(cfg: configs.DrafterConfig, preset: dict) -> float:
  """Matmul FLOPs of a forward and backward pass."""
  blocks = preset["batch_size"] * preset["num_anchors"]
  context = preset["batch_size"] * preset["length"]
  # Anchors are uniform: a block sees half of the context on average.
  forward = speed.draft_flops(cfg, blocks, preset["length"] / 2, context)
  forward += speed.selection_flops(cfg, blocks * cfg.num_proposals)
  head = speed.head_flops(cfg, blocks * cfg.num_proposals)
  # The head is frozen: one product forward, one for the states' gradient, and
  # one for the teacher of methods that have one.
  passes = 3 if cfg.method in ("dspark", "dspine") else 2
  return 3 * forward + passes * head


def measure(method: str, preset: dict, *, repeats: int, chunk: int) -> dict:
  """Times value_and_grad of one method's window."""
  cfg = benchmark_presets.drafter_config(preset, method)
  train_cfg = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=100),
    batch_size=preset["batch_size"],
    num_anchors=preset["num_anchors"],
    chunk_blocks=chunk,
  )
  tables, batches = benchmark_presets.random_data(
    preset, len(cfg.target_layer_ids)
  )
  state, buffers = step_lib.init(cfg, train_cfg, tables)
  arguments = (state.params, buffers, tables, batches)
  # Lowering fills trees with descriptions, which checked records refuse.
  leaves, structure = jax.tree.flatten(arguments)
  traces = 0

  @jax.jit
  def gradient(step, *leaves):
    nonlocal traces
    traces += 1
    params, buffers, tables, batches = structure.unflatten(leaves)
    key = jax.random.fold_in(jax.random.key(0), step)
    return step_lib.window_gradient(
      params, buffers, tables, batches, key, step, cfg=cfg, train=train_cfg
    )

  steps = iter(range(10_000))
  compiled = gradient.lower(jnp.asarray(0), *leaves).compile()
  memory = compiled.memory_analysis()
  assert memory is not None
  times = speed.seconds(
    lambda: compiled(jnp.asarray(next(steps)), *leaves), repeats=repeats
  )
  if traces != 1:
    raise RuntimeError(f"{method}: the step was traced {traces} times")
  blocks = preset["batch_size"] * preset["num_anchors"]
  return {
    "method": method,
    "seconds": float(np.median(times)),
    "fastest": float(times.min()),
    "block_tokens_per_second": blocks
    * cfg.block_size
    / float(np.median(times)),
    "flops": counted_flops(cfg, preset),
    "parameters": sum(x.size for x in jax.tree.leaves(state.params)),
    "temporary_bytes": memory.temp_size_in_bytes,
    "peak_host_bytes": _peak_host_bytes(),
  }


def _peak_host_bytes() -> int:
  """The most memory that this process has had (VmHWM)."""
  peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
  return peak if sys.platform == "darwin" else 1024 * peak


def main(unused_argv):
  unknown = sorted(set(_METHODS.value) - set(methods.DRAFTERS))
  if unknown:
    raise ValueError(f"--methods={unknown}: not in {sorted(methods.DRAFTERS)}")
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={"preset": _PRESET.value, "methods": _METHODS.value},
    argv=sys.argv,
    resume=False,
  )
  preset = benchmark_presets.PRESETS[_PRESET.value]
  peak = speed.matmul_peak()
  results = []
  for method in _METHODS.value:
    one = measure(method, preset, repeats=_REPEATS.value, chunk=_CHUNK.value)
    peak = max(peak, speed.matmul_peak())
    results.append(one)
  for one in results:
    one["peak_fraction"] = one["flops"] / one["fastest"] / peak
  run_io.write_json(
    work_dir.path / "results.json",
    {
      "matmul_peak_flops": peak,
      "device": provenance.device_summary(),
      "methods": results,
    },
  )
  rows = [
    [
      one["method"],
      f"{one['seconds']:.3f}",
      f"{one['fastest']:.3f}",
      f"{one['block_tokens_per_second']:.0f}",
      f"{one['flops'] / 1e9:.1f}",
      f"{one['peak_fraction']:.0%}",
      f"{one['temporary_bytes'] / 1e6:.0f}",
      f"{one['peak_host_bytes'] / 1e6:.0f}",
    ]
    for one in results
  ]
  headers = [
    "method",
    "s/step",
    "fastest",
    "block tokens/s",
    "GFLOP",
    "of peak",
    "temporary MB",
    "process MB",
  ]
  print(run_io.table(rows, headers))
  print(f"matmul peak of this run: {peak / 1e9:.0f} GFLOP/s")


if __name__ == "__main__":
  run_io.run_app(main)
