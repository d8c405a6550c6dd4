"""Counts what a speculative round and a training step launch and move.

  PYTHONPATH=.venv/hopper JAX_PLATFORMS=cpu python -m experiments.count_round

Compiles both for a described H100, without a GPU and without weights: Qwen3-8B
with DSpine at its published sizes, once with what is the default on that device
and once with XLA alone. Prints kernels, bytes and FLOPs, their least time at
the published peaks, the share of each part, and XLA's memory analysis. It is
not a measurement, and XLA compiles here without trying kernels on the device
(matrix products go to cuBLAS, or to XLA's own with --gemm=triton). Writes
results.json and counts.md. Needs JAX's CUDA plugin (`make test-hopper` installs
it). Time: one to three minutes.
"""

import contextlib
import functools
import sys

import jax
from absl import flags

from dspine_jax import configs
from dspine_jax.decoding import round as round_lib
from experiments import run_io
from experiments.stages import hlo_count, large_models
from kernels import cost, dispatch, hopper

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/count_round", "Where results go."
)
_SIZE = flags.DEFINE_enum("size", "8B", large_models.SIZES, "Which models.")
_PROGRAMS = flags.DEFINE_list("programs", ["round", "train"], "What to count.")
_IMPLEMENTATIONS = flags.DEFINE_list(
  "implementations",
  ["xla", "default"],
  "`xla` takes XLA for every op, `default` what would run.",
)
_BATCH = flags.DEFINE_integer(
  "batch", 1, "Requests of the round.", lower_bound=1
)
_CACHE = flags.DEFINE_integer(
  "cache", 4096, "Positions that the caches hold.", lower_bound=64
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  "bfloat16",
  ("bfloat16", "float32"),
  "What both compute in; the step's parameters are float32.",
)
_LAYERS = flags.DEFINE_enum(
  "layers",
  "unroll",
  ("scan", "unroll"),
  "The target's layers; a scan copies each layer's cache for a kernel.",
)
_GEMM = flags.DEFINE_enum(
  "gemm",
  "library",
  ("library", "triton"),
  "Whose matrix products XLA takes; a device's autotuning mixes them.",
)
_CHUNK = flags.DEFINE_integer(
  "chunk_blocks",
  16,
  "Blocks of the step whose vocabulary rows exist together.",
  lower_bound=1,
)
_TOP = flags.DEFINE_integer(
  "top", 5, "Kernels that move most, to print.", lower_bound=0
)

# Scopes in `decoding.round`, `drafters.dspine` and `training.step`.
PARTS = {
  "round": ("draft", "candidates", "cache", "propose", "verify", "commit"),
  "train": ("supervise", "context", "draft", "loss", "update"),
}
_NEW_TOKENS = 256


def compile_round(sizes: large_models.Size):
  """One speculative round of greedy decoding."""
  stacked = _LAYERS.value == "scan"
  target = large_models.target_shapes(sizes.target, stacked=stacked)
  state = jax.eval_shape(
    lambda: large_models.decode_state(
      sizes.target,
      sizes.drafter,
      batch=_BATCH.value,
      context=_CACHE.value,
      new_tokens=_NEW_TOKENS,
      stacked=stacked,
    )
  )
  decode = configs.DecodeConfig(max_new_tokens=_NEW_TOKENS)
  return large_models.compile_for_h100(
    functools.partial(round_lib.speculative_round, decode=decode),
    target,
    large_models.drafter_shapes(sizes.drafter),
    state,
    triton_products=_GEMM.value == "triton",
    donate_argnums=2,
  )


def compile_training(sizes: large_models.Size):
  """One optimiser step: one sequence with its blocks, AdamW."""
  train = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=100_000),
    batch_size=1,
    num_anchors=sizes.num_anchors,
    chunk_blocks=_CHUNK.value,
  )
  return large_models.compile_training(
    sizes, train, triton_products=_GEMM.value == "triton"
  )


def gathered_bytes(name: str, sizes: large_models.Size) -> dict[str, float]:
  """What kernels that gather from a table read of it, see `hlo_count.count`.

  In training every slot may read the code of its predecessor.
  """
  cfg = sizes.drafter
  assert cfg.dspine is not None
  itemsize = 2 if _DTYPE.value == "bfloat16" else 4
  blocks = _BATCH.value if name == "round" else sizes.num_anchors
  codes = cfg.dspine.transfer_rank * itemsize
  of_slots = blocks * (1 if name == "round" else cfg.block_size) * codes
  candidates = blocks * cfg.num_proposals * cfg.dspine.top_k
  return {
    "injection_message": of_slots,
    "injection_message_backward": of_slots,
    "injection_read_backward": of_slots,
    "scores_message": candidates * codes,
    "scores_through": candidates * cfg.hidden_size * itemsize,
  }


COMPILERS = {"round": compile_round, "train": compile_training}


def count(name: str, implementation: str, sizes: large_models.Size) -> dict:
  """Compiles one program and counts it."""
  only = (
    dispatch.only_xla() if implementation == "xla" else contextlib.nullcontext()
  )
  with only:
    compiled = COMPILERS[name](sizes)
  text, memory = compiled.as_text(), compiled.memory_analysis()
  assert text is not None and memory is not None
  program = hlo_count.count(text, gathered_bytes(name, sizes))
  return {
    **_numbers(program.kernels),
    "parts": {
      part: _numbers(kernels)
      for part, kernels in hlo_count.by_part(
        program.kernels, PARTS[name]
      ).items()
    },
    "kinds": _kinds(program.kernels),
    "custom": _custom(program.kernels),
    "largest": _largest(program.kernels),
    "memory": {
      "arguments": memory.argument_size_in_bytes,
      "temporary": memory.temp_size_in_bytes,
    },
    "notes": program.notes,
  }


def _numbers(kernels) -> dict:
  total = hlo_count.total(kernels)
  least = sum(
    k.launches * max(k.bytes / cost.H100.bandwidth, k.flops / cost.H100.flops)
    for k in kernels
  )
  return {**total._asdict(), "least_seconds": least}


def _kinds(kernels) -> dict[str, int]:
  kinds: dict[str, int] = {}
  for kernel in kernels:
    kinds[kernel.kind] = kinds.get(kernel.kind, 0) + kernel.launches
  return dict(sorted(kinds.items(), key=lambda item: -item[1]))


def _custom(kernels) -> dict[str, int]:
  """Launches of the kernels of package `kernels`, by name."""
  launches: dict[str, int] = {}
  for kernel in kernels:
    if kernel.kind in ("triton_kernel_call", "mosaic_gpu_v2"):
      launches[kernel.name] = launches.get(kernel.name, 0) + kernel.launches
  return dict(sorted(launches.items()))


def _largest(kernels) -> list[dict]:
  ordered = sorted(kernels, key=lambda k: -k.launches * k.bytes)
  return [kernel._asdict() for kernel in ordered[: _TOP.value]]


HEADERS = ("ops", "part", "kernels", "GB", "GFLOP", "least ms", "share")


def table_rows(by_implementation: dict) -> list[list]:
  """A line for each part of the program, with kernels and without."""
  rows = []
  for implementation, counted in by_implementation.items():
    for part, numbers in [("all", counted), *counted["parts"].items()]:
      share = numbers["least_seconds"] / counted["least_seconds"]
      rows.append([implementation, part, *_cells(numbers), f"{share:.0%}"])
  return rows


def print_program(name: str, by_implementation: dict) -> None:
  print(f"{name}:")
  print(run_io.table(table_rows(by_implementation), HEADERS))
  for implementation, counted in by_implementation.items():
    memory = counted["memory"]
    print(
      f"{implementation}: {memory['arguments'] / 1e9:.2f} GB of arguments,"
      f" {memory['temporary'] / 1e9:.3f} GB temporary"
    )
    for kernel in counted["largest"]:
      moved = kernel["launches"] * kernel["bytes"] / 1e9
      print(f"  {moved:8.3f} GB  {kernel['launches']:4} x {kernel['name']}")
    for note in counted["notes"]:
      print(f"  note: {note}")


def _cells(numbers: dict) -> list:
  return [
    numbers["kernels"],
    f"{numbers['bytes'] / 1e9:.3f}",
    f"{numbers['flops'] / 1e9:.1f}",
    f"{1e3 * numbers['least_seconds']:.3f}",
  ]


def _check(given: list[str], known, flag: str) -> None:
  unknown = sorted(set(given) - set(known))
  if unknown or not given:
    raise ValueError(f"--{flag}={','.join(given)}: choose from {list(known)}")


def main(unused_argv):
  _check(_PROGRAMS.value, COMPILERS, "programs")
  _check(_IMPLEMENTATIONS.value, ("xla", "default"), "implementations")
  reason = hopper.unavailable()
  if reason is not None:
    raise ValueError(
      f"cannot compile for a described H100: {reason}; then run with"
      " PYTHONPATH=.venv/hopper JAX_PLATFORMS=cpu"
    )
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={name: flags.FLAGS[name].value for name in _RECORDED},
    argv=sys.argv,
    resume=False,
  )
  sizes = large_models.size(_SIZE.value, _DTYPE.value)
  results = {}
  for name in _PROGRAMS.value:
    results[name] = {
      implementation: count(name, implementation, sizes)
      for implementation in _IMPLEMENTATIONS.value
    }
    run_io.write_json(
      work_dir.path / "results.json",
      {"programs": results, "jax": jax.__version__, "device": cost.H100.name},
    )
    print_program(name, results[name])
  (work_dir.path / "counts.md").write_text(
    "\n".join(
      f"## {name}\n\n{run_io.markdown_table(table_rows(counted), HEADERS)}\n"
      for name, counted in results.items()
    )
  )


_RECORDED = (
  *("size", "programs", "implementations", "batch", "cache", "dtype"),
  *("layers", "gemm", "chunk_blocks"),
)

if __name__ == "__main__":
  run_io.run_app(main)
