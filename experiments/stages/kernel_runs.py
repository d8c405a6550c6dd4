"""Kernel cases on the device at hand: how long each takes, and whether it is
right.

An implementation that cannot run here is no failure of a timing: its row says
why it was skipped. Not here: how a function is timed (`kernel_bench.py`), what
is timed (`kernel_cases.py`), the search for block sizes (`kernel_tuning.py`).
"""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from experiments.stages import kernel_bench, kernel_cases
from kernels import cost
from kernels.block_sizes import BlockSizes

# Arrays of at least this size are shared by all copies of the arguments: the
# tables, of which a call reads a few rows, or which fill the cache themselves.
_SHARED_BYTES = 64e6

# Relative error (L2 norm) that a result may have by its dtype, and the share of
# chosen tokens that may differ. bfloat16 may also be off by twice of what XLA
# is with the same arguments.
TOLERANCES = {"float32": 1e-4, "bfloat16": 2e-2}
TOKEN_TOLERANCES = {"float32": 0.01, "bfloat16": 0.05}


class Program(NamedTuple):
  """A program to time, and how its arguments are made."""

  function: Callable
  rounds: int
  copies: int


def program_of(
  case: kernel_cases.Case,
  implementation: str | None,
  device: cost.Device,
  block_sizes: Mapping[str, BlockSizes] | None = None,
) -> Program:
  """The timed program of a case; all of a case have the same length."""
  copies = kernel_bench.num_copies(case.cost.floor.bytes)
  guess = 2 * max(
    cost.seconds(case.cost.xla, device), cost.seconds(case.cost.triton, device)
  )
  rounds = kernel_bench.num_rounds(guess, copies)
  function = kernel_cases.function_of(case, implementation, block_sizes)
  return Program(kernel_bench.repeated(function, rounds), rounds, copies)


def argument_copies(case: kernel_cases.Case, copies: int) -> list[tuple]:
  """Random arguments, different in each copy but for what is large."""
  specs = kernel_cases.arguments_of(case)
  first = kernel_cases.values(specs)

  def fresh(seed):
    return jax.tree.map(
      lambda old, new: old if old.nbytes >= _SHARED_BYTES else new,
      first,
      kernel_cases.values(specs, seed),
    )

  return [first, *(fresh(seed) for seed in range(1, copies))]


def measure(
  cases: Sequence[kernel_cases.Case],
  implementations: Sequence[str],
  device: cost.Device,
  *,
  seconds: float,
  samples: int = 15,
  workers: int = 8,
) -> list[dict]:
  """One row a case; compiles all of them first, so give a few at a time.

  Args:
    cases: what to time.
    implementations: which of them; "xla" is what others are compared with.
    device: ceilings of this run, from `kernel_bench.ceilings`.
    seconds: of the timed calls of one case, about.
    samples: calls of each program at most.
    workers: programs compiled at the same time.
  """
  programs = {
    (case.name, name): program_of(case, name, device)
    for case in cases
    for name in implementations
  }
  shapes = {
    case.name: kernel_cases.structs(kernel_cases.arguments_of(case))
    for case in cases
  }
  compiled = kernel_bench.compile_all(
    {
      key: (program.function, ([shapes[key[0]]] * program.copies,))
      for key, program in programs.items()
    },
    workers=workers,
  )
  rows = []
  for case in cases:
    runnable = {name: compiled[case.name, name] for name in implementations}
    program = programs[case.name, implementations[0]]
    rows.append(
      _measure_case(case, runnable, program, device, seconds, samples)
    )
  return rows


def _measure_case(case, compiled, program, device, seconds, samples) -> dict:
  skipped = {
    name: _reason(error)
    for name, error in compiled.items()
    if isinstance(error, Exception)
  }
  copies = argument_copies(case, program.copies)
  runnable, refused = kernel_bench.that_run(
    {
      name: lambda run=run: run(copies)
      for name, run in compiled.items()
      if name not in skipped
    }
  )
  skipped |= {name: _reason(error) for name, error in refused.items()}
  times = kernel_bench.compare(
    runnable,
    calls=program.rounds * program.copies,
    samples=samples,
    seconds=seconds,
  )
  floor = case.cost.floor
  least = cost.seconds([floor], device)
  return {
    "op": case.op,
    "case": case.name,
    "dtype": kernel_cases.dtype_of(case),
    "calls": program.rounds * program.copies,
    "copies": program.copies,
    "floor_flops": floor.flops,
    "floor_bytes": floor.bytes,
    "floor_seconds": least,
    "predicted_gain": cost.gain(case.cost, device),
    "implementations": {
      name: {
        **taken._asdict(),
        "flops_per_second": floor.flops / taken.seconds,
        "bytes_per_second": floor.bytes / taken.seconds,
        "floor_fraction": least / taken.seconds,
        "ratio_to_xla": (
          times["xla"].seconds / taken.seconds if "xla" in times else None
        ),
      }
      for name, taken in times.items()
    },
    "skipped": skipped,
  }


def _reason(error: Exception) -> str:
  """One line of at most 300 characters; of an op's refusal only the reason."""
  text = f"{type(error).__name__}: {error}"
  if isinstance(error, NotImplementedError):
    text = str(error).split("': ", 1)[-1]
  return " ".join(text.split())[:300]


def check(
  cases: Sequence[kernel_cases.Case],
  implementations: Sequence[str],
  *,
  seed: int = 0,
  workers: int = 8,
) -> list[dict]:
  """Values and gradients of implementations against XLA in float32.

  The reference has the same arguments, widened to float32, with exact products;
  beside the error of an implementation stands that of XLA in the dtype of the
  arguments. A row's `passed` is None if the implementation cannot run here.
  """
  rows = []
  for case in cases:
    # Whole: what is compared is one call.
    functions = {
      name: _exact(kernel_cases.function_of(case._replace(chunks=1), name))
      for name in dict.fromkeys(("xla", *implementations))
    }
    arguments = kernel_cases.values(kernel_cases.arguments_of(case), seed)
    wide = jax.tree.map(_widened, arguments)
    given = dict.fromkeys(functions, arguments) | {"exact": wide}
    functions["exact"] = functions["xla"]
    compiled = _compile_needed(functions, given, implementations, workers)
    results = {
      name: _run(program, given[name]) for name, program in compiled.items()
    }
    rows += [
      _compared(case, name, results, arguments)
      for name in implementations
      if name != "xla"
    ]
  return rows


def _compile_needed(functions, given, implementations, workers):
  """All programs, or only the refusals if no implementation can run here."""

  def compiled(names):
    programs = {name: (functions[name], given[name]) for name in names}
    return kernel_bench.compile_all(programs, workers=workers)

  found = compiled(implementations)
  if all(isinstance(x, NotImplementedError) for x in found.values()):
    return found
  return found | compiled(["exact", "xla"])


def _exact(function: Callable) -> Callable:
  """Jitted with float32 products that are float32, as those of kernels are."""

  def exact(*arguments):
    with jax.default_matmul_precision("highest"):
      return function(*arguments)

  return jax.jit(exact)


def _widened(x: jax.Array) -> jax.Array:
  return x.astype(jnp.float32) if jnp.issubdtype(x.dtype, jnp.floating) else x


def _run(program, arguments):
  """The result on the host, or what was raised instead of it."""
  if isinstance(program, Exception):
    return program
  try:
    return jax.device_get(program(*arguments))
  except Exception as error:  # A kernel may fail when it runs; others go on.
    return error


def _compared(case, name, results, arguments) -> dict:
  dtype = jnp.dtype(jax.tree.leaves(arguments)[0].dtype).name
  row = {"op": case.op, "case": case.name, "dtype": dtype}
  row |= {"implementation": name}
  got = results[name]
  if isinstance(got, Exception):
    cannot = isinstance(got, NotImplementedError)
    return row | {"passed": None if cannot else False, "reason": _reason(got)}
  errors = _errors(got, results["exact"])
  allowed = _allowed(got, _errors(results["xla"], results["exact"]), dtype)
  return row | {
    "errors": errors,
    "allowed": allowed,
    "passed": all(errors[leaf] <= allowed[leaf] for leaf in errors),
  }


def _allowed(got: Any, of_xla: dict[str, float], dtype: str) -> dict:
  leaves = dict(_named_leaves(got))
  return {
    name: max(
      2 * error,
      (
        TOLERANCES
        if jnp.issubdtype(leaves[name].dtype, jnp.floating)
        else TOKEN_TOLERANCES
      )[dtype],
    )
    for name, error in of_xla.items()
  }


def _errors(got: Any, expected: Any) -> dict[str, float]:
  """By leaf: relative L2 error, or the share of integers that differ."""
  wanted = dict(_named_leaves(expected))
  return {
    name: _error(np.asarray(leaf), np.asarray(wanted[name]))
    for name, leaf in _named_leaves(got)
  }


def _named_leaves(tree: Any) -> list[tuple[str, jax.Array]]:
  leaves = jax.tree_util.tree_flatten_with_path(tree)[0]
  return [(jax.tree_util.keystr(path), leaf) for path, leaf in leaves]


def _error(got: np.ndarray, expected: np.ndarray) -> float:
  if not np.issubdtype(expected.dtype, np.floating):
    return float(np.mean(got != expected))
  got, expected = got.astype(np.float64), expected.astype(np.float64)
  norm = np.linalg.norm(expected)
  error = np.linalg.norm(got - expected) / (norm if norm else 1.0)
  return float(error) if np.isfinite(error) else float("inf")
