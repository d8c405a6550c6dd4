"""A small search for block sizes, and the file that the kernels read.

From the sizes that a kernel would take (`block_sizes.recording` tells), all
sizes that differ in one number are tried at once, and the fastest is the next
start; two such turns, or until time is up. Sizes that do not compile are passed
over. What is found is written to `kernels/tuned/<kind of device>.json`, with
the implementation that was fastest.
"""

import dataclasses
import json
import math
import pathlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from experiments.stages import kernel_bench
from kernels import block_sizes
from kernels.block_sizes import BlockSizes

# Least and most of each number.
_RANGES = {
  "rows": (4, 256),
  "cols": (16, 256),
  "inner": (1, 256),
  "num_warps": (4, 8),
}
_STAGES = (1, 5)
# A change must gain this much: less is noise, and the heuristic is as good.
WORTHWHILE = 1.02
TURNS = 2

# Sizes to try -> seconds of each; None for those that cannot run.
Trial = Callable[[Sequence[BlockSizes]], Sequence[float | None]]


def neighbours(sizes: BlockSizes) -> list[BlockSizes]:
  """Sizes that differ in one number by a factor of two, or by one stage."""
  found = []
  for name, (least, most) in _RANGES.items():
    value = getattr(sizes, name)
    for other in (value // 2, 2 * value):
      if least <= other <= most:
        found.append(dataclasses.replace(sizes, **{name: other}))
  for other in (sizes.num_stages - 1, sizes.num_stages + 1):
    if _STAGES[0] <= other <= _STAGES[1]:
      found.append(dataclasses.replace(sizes, num_stages=other))
  return found


def tune(
  start: BlockSizes, trial: Trial, deadline: kernel_bench.Deadline
) -> tuple[BlockSizes, dict[str, Any]]:
  """The fastest sizes found from `start`, and what the search did."""
  best, (first,) = start, trial([start])
  if first is None:
    return start, {"error": "the first sizes cannot run"}
  seconds, tried = first, 1
  for _ in range(TURNS):
    if deadline.left() <= 0:
      break
    options = neighbours(best)
    times = trial(options)
    tried += len(options)
    ran = [(time, i) for i, time in enumerate(times) if time is not None]
    if not ran or min(ran)[0] * WORTHWHILE > seconds:
      break
    seconds, index = min(ran)
    best = options[index]
  return best, {
    "tried": tried,
    "seconds_before": first,
    "seconds": seconds,
    "gain": first / seconds,
  }


def defaults(rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[str, str]]:
  """For each op and dtype the implementation that was fastest over its cases.

  Ratios are those of `kernel_runs.measure`; their geometric mean decides, and a
  kernel must be at least as fast as XLA.
  """
  ratios: dict[tuple[str, str], dict[str, list[float]]] = {}
  for row in rows:
    for name, timed in row["implementations"].items():
      of_op = ratios.setdefault((row["op"], row["dtype"]), {})
      if timed["ratio_to_xla"] is not None:
        of_op.setdefault(name, []).append(timed["ratio_to_xla"])
  chosen: dict[str, dict[str, str]] = {}
  for (op, dtype), of_op in ratios.items():
    # One that could not run everywhere is no default.
    count = max(map(len, of_op.values()), default=0)
    means = {
      name: math.exp(sum(map(math.log, values)) / count)
      for name, values in of_op.items()
      if len(values) == count and count
    }
    best = max(means, key=lambda name: means[name], default="xla")
    is_faster = means.get(best, 0.0) >= 1.0
    chosen.setdefault(op, {})[dtype] = best if is_faster else "xla"
  return chosen


def write(
  folder: pathlib.Path,
  kind: str,
  found: Mapping[block_sizes.Choice, BlockSizes],
  chosen: Mapping[str, Mapping[str, str]],
) -> pathlib.Path:
  """Adds to the tuned file of a kind of device; returns its path."""
  path = folder / f"{kind}.json"
  content = json.loads(path.read_text()) if path.exists() else {}
  of_ops = content.setdefault("defaults", {})
  for op, by_dtype in chosen.items():
    of_ops[op] = of_ops.get(op, {}) | dict(by_dtype)
  sizes = content.setdefault("block_sizes", {})
  for choice, best in found.items():
    of_kernel = sizes.setdefault(choice.op, {}).setdefault(choice.kernel, {})
    of_kernel[choice.bucket] = dataclasses.asdict(best)
  folder.mkdir(parents=True, exist_ok=True)
  path.write_text(json.dumps(content, indent=2, sort_keys=True) + "\n")
  block_sizes.tuned.cache_clear()
  return path
