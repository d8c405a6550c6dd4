"""Joules of a piece of work from NVIDIA's management library (NVML).

The energy counter of the GPU where it has one (Volta and later), else the
trapezoid of sampled power. The two disagree on short runs (the power that NVML
reports is itself an average), so a measurement says which one it is. Idle power
is measured by itself and subtracted only if asked for.

Needs an NVIDIA driver and the package nvidia-ml-py (`pynvml`); all other
modules of this package do without.
"""

import threading
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import pynvml

from energy.architecture import Number

SAMPLE_SECONDS = 0.1


class Reading(NamedTuple):
  """What a metered piece of work took.

  Attributes:
    joules: of the whole GPU, idle power included.
    seconds: wall clock.
    source: "energy counter" or "sampled power".
  """

  joules: float
  seconds: float
  source: str


def trapezoid(seconds: Sequence[Number], watts: Sequence[Number]) -> float:
  """Joules under the samples; at least two are needed."""
  if len(seconds) < 2:
    raise ValueError(f"{len(seconds)} samples of power: too short to integrate")
  return float(np.trapezoid(np.asarray(watts), np.asarray(seconds)))


class Gpu:
  """One GPU as NVML sees it."""

  def __init__(self, index: int = 0):
    """Starts NVML.

    Args:
      index: of the GPU, in NVML's order (by PCI bus).

    Raises:
      ValueError: no driver, or no such GPU.
    """
    try:
      pynvml.nvmlInit()
      self._handle: Any = pynvml.nvmlDeviceGetHandleByIndex(index)
      name = pynvml.nvmlDeviceGetName(self._handle)
    except pynvml.NVMLError as error:
      raise ValueError(f"no GPU {index} to measure: {error}") from None
    self.name = name.decode() if isinstance(name, bytes) else str(name)

  def watts(self) -> float:
    """The present power draw."""
    return pynvml.nvmlDeviceGetPowerUsage(self._handle) / 1e3

  def counted_joules(self) -> float | None:
    """The energy counter since the driver was loaded, None without one."""
    try:
      counted = pynvml.nvmlDeviceGetTotalEnergyConsumption(self._handle)
    except pynvml.NVMLError:
      return None
    return counted / 1e3

  def idle_watts(self, seconds: float) -> float:
    """Mean power while nothing runs."""
    meter = Meter(self)
    with meter:
      time.sleep(seconds)
    return meter.reading.joules / meter.reading.seconds


class Meter:
  """`with Meter(gpu) as meter: work()`, then `meter.reading`."""

  def __init__(self, gpu: Gpu, sample_seconds: float = SAMPLE_SECONDS):
    """Nothing is read yet.

    Args:
      gpu: whose energy is read.
      sample_seconds: between samples of power, where there is no counter.
    """
    self._gpu = gpu
    self._sample_seconds = sample_seconds
    self._samples: list[tuple[float, float]] = []
    self._stop = threading.Event()
    self._reading: Reading | None = None

  @property
  def reading(self) -> Reading:
    """Of the finished block; ValueError before its end."""
    if self._reading is None:
      raise ValueError("the metered block has not ended")
    return self._reading

  def __enter__(self) -> "Meter":
    self._counted = self._gpu.counted_joules()
    self._began = time.monotonic()
    if self._counted is None:
      self._sample()
      self._thread = threading.Thread(target=self._keep_sampling, daemon=True)
      self._thread.start()
    return self

  def __exit__(self, *exc_info: object) -> None:
    ended = self._gpu.counted_joules() if self._counted is not None else None
    seconds = time.monotonic() - self._began
    if self._counted is None:
      self._stop.set()
      self._thread.join()
      self._sample()
    if exc_info[0] is not None:
      return
    if self._counted is not None:
      if ended is None:
        raise ValueError(f"{self._gpu.name}: its energy counter went away")
      self._reading = Reading(ended - self._counted, seconds, "energy counter")
    else:
      times, watts = zip(*self._samples, strict=True)
      self._reading = Reading(trapezoid(times, watts), seconds, "sampled power")

  def _sample(self) -> None:
    self._samples.append((time.monotonic(), self._gpu.watts()))

  def _keep_sampling(self) -> None:
    while not self._stop.wait(self._sample_seconds):
      self._sample()
