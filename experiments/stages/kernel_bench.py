"""Device time of functions of arrays, without that of launching from Python.

A timed program is one `lax.fori_loop` on the device that calls the function
many times, so that Python, dispatch and the transfer of the result are paid
once per program. Barriers tie each call to the one before it and keep all of
its outputs: no call is hoisted, merged or cut down to what is looked at. Calls
take turns over several copies of their arguments, which together exceed the L2
cache, since weights come from device memory in a real model. What the device
itself needs between kernels is in the time, as it is in a real program; so is
one small kernel a call, which looks at the outputs.

Programs that are compared are called turn and turn about, and medians are
taken: a clock that changes meets all of them.
"""

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent import futures
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import lax
from jax import numpy as jnp

from kernels import cost

# Bytes of arguments between two calls with the same ones; twice the L2 cache.
COLD_BYTES = 100e6
MAX_COPIES = 8
MAX_ROUNDS = 256
# Of one call of a program; beside it the tens of microseconds of a launch and a
# wait are nothing.
PROGRAM_SECONDS = 0.02


class Deadline:
  """A point in time that work is measured against."""

  def __init__(self, seconds: float, clock: Callable[[], float] = time.time):
    self._clock = clock
    self._end = clock() + seconds

  def left(self) -> float:
    """Seconds until then, negative behind it."""
    return self._end - self._clock()


class Times(NamedTuple):
  """Seconds of one call: the median and the middle half."""

  seconds: float
  lower: float
  upper: float
  samples: int


def num_copies(touched_bytes: float) -> int:
  """Copies of the arguments that together leave nothing in the L2 cache.

  One on a CPU, where a program is only tried.
  """
  if jax.default_backend() == "cpu":
    return 1
  wanted = -(-COLD_BYTES // max(touched_bytes, 1))
  return int(min(max(wanted, 1), MAX_COPIES))


def num_rounds(call_seconds: float, copies: int) -> int:
  """Turns over all copies that make a program long enough."""
  wanted = PROGRAM_SECONDS / (copies * max(call_seconds, 1e-9))
  return int(min(max(round(wanted), 1), MAX_ROUNDS))


def repeated(function: Callable, rounds: int) -> Callable:
  """A program of a list of argument tuples that calls `function` with each of
  them `rounds` times, one call after the other; it returns a number."""

  def program(copies):
    def turn(_, used):
      for arguments in copies:
        arguments, used = lax.optimization_barrier((arguments, used))
        out = lax.optimization_barrier(function(*arguments))
        used = used + _looked_at(out)
      return used

    return lax.fori_loop(0, rounds, turn, jnp.zeros((), jnp.float32))

  return jax.jit(program)


def _looked_at(out: Any) -> jax.Array:
  """A number that needs every output."""
  firsts = [leaf[(0,) * leaf.ndim] for leaf in jax.tree.leaves(out)]
  return sum((x.astype(jnp.float32) for x in firsts), jnp.zeros(()))


def compile_all(
  programs: Mapping[Any, tuple[Callable, tuple]], *, workers: int = 8
) -> dict[Any, Any]:
  """Compiles jitted functions for given arguments, several at a time.

  XLA compiles outside of Python's lock. Nothing should be timed meanwhile.

  Args:
    programs: key -> (jitted function, its arguments or their shapes).
    workers: threads.

  Returns:
    key -> the compiled function, or what it raised.
  """

  def compiled(item):
    function, arguments = item
    try:
      return function.lower(*arguments).compile()
    except Exception as error:  # A kernel that does not fit, told by its case.
      return error

  with futures.ThreadPoolExecutor(workers) as pool:
    results = pool.map(compiled, programs.values())
    return dict(zip(programs, results, strict=True))


def that_run(
  programs: Mapping[str, Callable[[], Any]],
) -> tuple[dict[str, Callable[[], Any]], dict[str, Exception]]:
  """Runs each program once: those that can, and why the others cannot.

  What a compiler lets pass may still be refused by the device, such as a Triton
  kernel with too much shared memory.
  """
  ran, refused = {}, {}
  for name, program in programs.items():
    try:
      jax.block_until_ready(program())
      ran[name] = program
    except jax.errors.JaxRuntimeError as error:
      refused[name] = error
  return ran, refused


def compare(
  programs: Mapping[str, Callable[[], Any]],
  *,
  calls: int,
  samples: int = 15,
  seconds: float = 2.0,
) -> dict[str, Times]:
  """Times programs turn and turn about.

  Args:
    programs: name -> a program without arguments, which has run before.
    calls: calls of the timed function in a program.
    samples: turns at most; three at least are taken.
    seconds: of all turns together, about.
  """
  taken: dict[str, list[float]] = {name: [] for name in programs}
  deadline = Deadline(seconds)
  for turn in range(samples):
    if turn >= 3 and deadline.left() <= 0:
      break
    for name, program in programs.items():
      start = time.perf_counter()
      jax.block_until_ready(program())
      taken[name].append((time.perf_counter() - start) / calls)
  return {name: _times(values) for name, values in taken.items()}


def _times(values: Sequence[float]) -> Times:
  lower, middle, upper = np.quantile(values, [0.25, 0.5, 0.75])
  return Times(float(middle), float(lower), float(upper), len(values))


def time_one(function: Callable, arguments: tuple, rounds: int) -> float:
  """Seconds of one call of a function, of the same arguments each time."""
  program = repeated(function, rounds)
  copies = [arguments]
  jax.block_until_ready(program(copies))
  return compare({"it": lambda: program(copies)}, calls=rounds)["it"].seconds


def ceilings(*, tiny: bool = False) -> cost.Device:
  """What a plain copy and a large matrix product reach on this device.

  They bound what any kernel can reach, and differ from the published peaks.
  """
  dtype = jnp.float32 if jax.default_backend() == "cpu" else jnp.bfloat16
  size, side, rounds = (2**16, 128, 2) if tiny else (2**29, 8192, 10)
  x = jnp.ones((size,), dtype)
  copied = time_one(lambda x: x + 1, (x,), rounds)
  a = jnp.ones((side, side), dtype)
  product = time_one(lambda a, b: a @ b, (a, a), rounds)
  device = jax.devices()[0].device_kind
  return cost.Device(
    name=f"{device}, measured",
    flops=2 * side**3 / product,
    bandwidth=2 * x.nbytes / copied,
  )
