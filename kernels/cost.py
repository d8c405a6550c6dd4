"""What an op must compute and move, and the least time of that on a device.

A stage is a group of work that one kernel does; its least time is that of its
FLOPs at the peak or of its bytes at the bandwidth, whichever is longer. The
expected ratio of two implementations is that of the sums over their stages.
Launch gaps, caches and imperfect tiles are not counted.
"""

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple


@dataclasses.dataclass(frozen=True)
class Device:
  """Published peaks of a device.

  Attributes:
    name: as users call it.
    flops: dense bfloat16 FLOP/s.
    bandwidth: bytes/s of device memory.
  """

  name: str
  flops: float
  bandwidth: float


H100 = Device("H100", 989.4e12, 3.35e12)
H200 = Device("H200", 989.4e12, 4.8e12)


class Stage(NamedTuple):
  """Work of one kernel: its name, FLOPs, and bytes of device memory."""

  name: str
  flops: float
  bytes: float


class OpCost(NamedTuple):
  """Work of an op at one shape.

  Attributes:
    floor: all FLOPs that the method needs, and each input read and each output
      written once.
    triton: stages of the Triton implementation.
    xla: stages of XLA's own, each matrix product and each fusion by itself.
  """

  floor: Stage
  triton: Sequence[Stage]
  xla: Sequence[Stage]


def seconds(stages: Sequence[Stage], device: Device) -> float:
  """Least time of stages that run one after another."""
  times = (
    max(stage.flops / device.flops, stage.bytes / device.bandwidth)
    for stage in stages
  )
  return sum(times, start=0.0)


def gain(cost: OpCost, device: Device = H100) -> float:
  """Expected time of XLA over that of the Triton implementation."""
  return seconds(cost.xla, device) / seconds(cost.triton, device)


def matmul(name: str, m: int, k: int, n: int, itemsize: int = 2) -> Stage:
  """A product [m, k] x [k, n] that reads and writes each operand once."""
  return Stage(name, 2.0 * m * k * n, itemsize * (m * k + k * n + m * n))
