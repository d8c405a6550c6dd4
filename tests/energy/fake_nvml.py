"""A stand-in for `pynvml`: a GPU that draws a known power on a real clock."""

import sys
import time
import types


class NVMLError(Exception):
  """As in pynvml."""


class FakeGpu:
  """Power in watts over seconds, and an energy counter that integrates it."""

  def __init__(self, watts=200.0, counter=True, present=True):
    self.watts, self.counter, self.present = watts, counter, present
    self.began = time.monotonic()

  def module(self) -> types.ModuleType:
    """What `import pynvml` gives."""
    fake = types.ModuleType("pynvml")
    fake.NVMLError = NVMLError
    fake.nvmlInit = self._init
    fake.nvmlDeviceGetHandleByIndex = self._handle
    fake.nvmlDeviceGetName = lambda handle: b"Fake GPU"
    fake.nvmlDeviceGetPowerUsage = lambda handle: int(1e3 * self.watts)
    fake.nvmlDeviceGetTotalEnergyConsumption = self._energy
    return fake

  def install(self, monkeypatch) -> None:
    """Makes `energy.meter` use it, until the test ends."""
    monkeypatch.setitem(sys.modules, "pynvml", self.module())
    monkeypatch.delitem(sys.modules, "energy.meter", raising=False)

  def _init(self):
    if not self.present:
      raise NVMLError("NVML Shared Library Not Found")

  def _handle(self, index):
    if index:
      raise NVMLError("Invalid Argument")
    return index

  def _energy(self, handle):
    if not self.counter:
      raise NVMLError("Not Supported")
    return int(1e3 * self.watts * (time.monotonic() - self.began))
