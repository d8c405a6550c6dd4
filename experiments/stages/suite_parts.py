"""The parts of `gpu_suite`: each measures one thing within its time.

A part is a function of a `Context` and a deadline that returns what goes into
results.json. It looks at the clock before each unit of work and lists what it
left out; what cannot run on this device it skips with the reason. It may raise:
the suite records that and goes on.
"""

import dataclasses
import itertools
import pathlib
import shutil
import tempfile
from collections.abc import Callable
from typing import Any

import jax

from experiments.stages import (
  kernel_bench,
  kernel_cases,
  kernel_ops,
  kernel_runs,
  kernel_tuning,
)
from kernels import block_sizes, cost, dispatch, shapes
from kernels.block_sizes import BlockSizes

Deadline = kernel_bench.Deadline


@dataclasses.dataclass
class Context:
  """What parts share.

  Attributes:
    folder: of the run; parts may write files there.
    tuned: folder of the tuned files that kernels read.
    is_tiny: everything shrunk, to try the suite on a CPU.
    device: measured ceilings, once a part has needed them.
  """

  folder: pathlib.Path
  tuned: pathlib.Path
  is_tiny: bool
  device: cost.Device | None = None

  @property
  def sizes(self) -> kernel_ops.Sizes:
    """Shapes that kernels are timed and tuned at."""
    if self.is_tiny:
      return dataclasses.replace(kernel_ops.SIZES["tiny"], batches=(2,))
    return kernel_ops.Sizes(model=shapes.QWEN3_8B, batches=(1, 16))

  def ceilings(self) -> cost.Device:
    if self.device is None:
      self.device = kernel_bench.ceilings(tiny=self.is_tiny)
    return self.device


Part = Callable[[Context, Deadline], dict[str, Any]]


def target_config(context: Context, deadline: Deadline) -> dict:
  """XLA's own description of this GPU, for compiling without it."""
  if jax.default_backend() != "gpu":
    return {"skipped": "there is no GPU to describe"}
  with tempfile.TemporaryDirectory() as folder:
    lowered = jax.jit(lambda x: x + 1).lower(1.0)
    lowered.compile(compiler_options={"xla_dump_to": folder})
    found = sorted(pathlib.Path(folder).glob("*.gpu_target_config.pbtxt"))
    if not found:
      return {"skipped": "XLA wrote no gpu_target_config.pbtxt"}
    path = context.folder / "gpu_target_config.pbtxt"
    shutil.copyfile(found[0], path)
  return {"file": path.name}


def parity_sizes(context: Context) -> kernel_ops.Sizes:
  """Real widths, but few rows, and numbers that fill no tile."""
  if context.is_tiny:
    return context.sizes
  model = dataclasses.replace(shapes.QWEN3_8B, name="8B parity", vocab=10007)
  return kernel_ops.Sizes(
    model=model,
    anchors=21,
    context=700,
    decode_context=1000,
    batches=(3,),
  )


def parity(context: Context, deadline: Deadline) -> dict:
  """Values and gradients of all kernels; a wrong one fails the suite."""
  rows, left_out = [], []
  sizes = parity_sizes(context)
  for op, dtype in itertools.product(kernel_ops.OPS, ("float32", "bfloat16")):
    if deadline.left() <= 0:
      left_out.append(f"{op} {dtype}")
      continue
    cases = kernel_ops.cases(sizes, (op,), dtype)
    rows += kernel_runs.check(cases, ("triton", "pallas"))
  wrong = [row for row in rows if row["passed"] is False]
  return {
    "tolerances": kernel_runs.TOLERANCES,
    "token_tolerances": kernel_runs.TOKEN_TOLERANCES,
    "rows": rows,
    "left_out": left_out,
    "failed": [
      f"{row['case']} {row['dtype']} {row['implementation']}" for row in wrong
    ],
  }


def tuning(context: Context, deadline: Deadline) -> dict:
  """Searches block sizes and writes the tuned file of this kind of device."""
  reason = dispatch.needs_hopper()
  if reason is not None:
    return {"skipped": reason}
  kind = block_sizes.device_kind()
  assert kind is not None
  found: dict[block_sizes.Choice, BlockSizes] = {}
  reports, left_out = {}, []
  for case, choice in _choices(context.sizes):
    name = f"{choice.op} {choice.kernel} {choice.bucket}"
    if name in reports:
      continue
    if deadline.left() <= 0:
      left_out.append(name)
      continue
    best, report = kernel_tuning.tune(
      choice.sizes, _trial(case, choice, context.ceilings()), deadline
    )
    reports[name] = report | {"sizes": dataclasses.asdict(best)}
    if best != choice.sizes:
      found[choice] = best
      kernel_tuning.write(context.tuned, kind, {choice: best}, {})
  return {"kernels": reports, "changed": len(found), "left_out": left_out}


def _choices(sizes: kernel_ops.Sizes):
  """(case, choice) of every launch, ops taking turns, as time may run out."""
  by_op = []
  for op in kernel_ops.OPS:
    found = []
    for case in kernel_ops.cases(sizes, (op,)):
      function = kernel_cases.function_of(case, "triton")
      arguments = kernel_cases.structs(kernel_cases.arguments_of(case))
      with block_sizes.recording() as choices:
        jax.eval_shape(function, *arguments)
      found += [(case, choice) for choice in dict.fromkeys(choices)]
    by_op.append(found)
  turns = itertools.chain.from_iterable(itertools.zip_longest(*by_op))
  return [pair for pair in turns if pair is not None]


def _trial(case, choice, device) -> kernel_tuning.Trial:
  """Times a case with some sizes of one of its kernels."""

  def trial(options):
    programs = [
      kernel_runs.program_of(case, "triton", device, {choice.kernel: sizes})
      for sizes in options
    ]
    copies = kernel_runs.argument_copies(case, programs[0].copies)
    compiled = kernel_bench.compile_all(
      {i: (x.function, (copies,)) for i, x in enumerate(programs)}
    )
    runnable = {
      str(i): lambda run=run: run(copies)
      for i, run in compiled.items()
      if not isinstance(run, Exception)
    }
    runnable, _ = kernel_bench.that_run(runnable)
    times = kernel_bench.compare(runnable, calls=1, samples=5, seconds=0.5)
    taken = {int(i): x.seconds for i, x in times.items()}
    return [taken.get(i) for i in range(len(options))]

  return trial


def kernels(context: Context, deadline: Deadline) -> dict:
  """Times all ops, and writes which implementation is the default."""
  rows, left_out = [], []
  for group in kernel_cases.groups(kernel_ops.cases(context.sizes)):
    if deadline.left() <= 0:
      left_out += [case.name for case in group]
      continue
    rows += kernel_runs.measure(
      group,
      dispatch.IMPLEMENTATIONS,
      context.ceilings(),
      seconds=0.0 if context.is_tiny else 1.0,
      samples=3 if context.is_tiny else 11,
    )
  device = context.ceilings()
  result: dict[str, Any] = {
    "ceilings": {"flops": device.flops, "bandwidth": device.bandwidth},
    "rows": rows,
    "left_out": left_out,
  }
  kind = block_sizes.device_kind()
  if dispatch.needs_hopper() is None and kind is not None:
    chosen = kernel_tuning.defaults(rows)
    path = kernel_tuning.write(context.tuned, kind, {}, chosen)
    shutil.copyfile(path, context.folder / path.name)
    result["defaults"] = chosen
  return result
