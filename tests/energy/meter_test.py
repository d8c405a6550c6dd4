"""The meter against a GPU of known power."""

import importlib
import time

import pytest

from tests.energy import fake_nvml


def load(monkeypatch, **gpu):
  fake_nvml.FakeGpu(**gpu).install(monkeypatch)
  return importlib.import_module("energy.meter")


@pytest.mark.parametrize(
  ("counter", "source"), [(True, "energy counter"), (False, "sampled power")]
)
def test_joules_are_power_times_time(monkeypatch, counter, source):
  meter = load(monkeypatch, watts=250.0, counter=counter)
  gpu = meter.Gpu()
  assert gpu.name == "Fake GPU"
  metered = meter.Meter(gpu, sample_seconds=0.02)
  with pytest.raises(ValueError, match="has not ended"):
    _ = metered.reading
  with metered:
    time.sleep(0.2)
  reading = metered.reading
  assert reading.source == source
  assert reading.seconds >= 0.2
  assert reading.joules == pytest.approx(250 * reading.seconds, rel=0.05)
  assert gpu.idle_watts(0.1) == pytest.approx(250, rel=0.1)


def test_trapezoids_by_hand(monkeypatch):
  meter = load(monkeypatch)
  assert meter.trapezoid([0, 1, 3], [100, 200, 0]) == 150 + 200
  with pytest.raises(ValueError, match="too short to integrate"):
    meter.trapezoid([0], [100])


def test_a_machine_without_gpu_says_so(monkeypatch):
  meter = load(monkeypatch, present=False)
  with pytest.raises(ValueError, match="no GPU 0 to measure: NVML Shared"):
    meter.Gpu()
  meter = load(monkeypatch)
  with pytest.raises(ValueError, match="no GPU 3 to measure"):
    meter.Gpu(3)


def test_an_error_of_the_work_is_not_hidden(monkeypatch):
  meter = load(monkeypatch, counter=False)
  with pytest.raises(ZeroDivisionError), meter.Meter(meter.Gpu()):
    _ = 1 / 0
