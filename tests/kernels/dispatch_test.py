import pytest

from kernels import block_sizes, dispatch

LIMITS = {"triton": lambda: None}
UNABLE = {"triton": lambda: "too odd"}


def resolve(name, limits=LIMITS, gain=2.0):
  return dispatch.resolve("op", name, "bfloat16", limits, lambda: gain)


def test_a_named_implementation_runs_or_says_why_not():
  assert resolve("xla", UNABLE) == "xla"
  assert resolve("triton") == "triton"
  with pytest.raises(NotImplementedError, match="op: .*'triton': too odd"):
    resolve("triton", UNABLE)
  with pytest.raises(NotImplementedError, match="'pallas': there is no such"):
    resolve("pallas")
  with pytest.raises(ValueError, match="implementation='cuda' is none of xla"):
    resolve("cuda")


def test_without_a_name_the_kernel_runs_where_it_can_and_promises_enough():
  assert resolve(None, gain=dispatch.WORTHWHILE) == "triton"
  assert resolve(None, gain=dispatch.WORTHWHILE - 0.01) == "xla"
  assert resolve(None, UNABLE) == "xla"


@pytest.mark.parametrize("measured", ["xla", "triton"])
def test_a_measurement_comes_before_the_prediction(measured, monkeypatch):
  monkeypatch.setattr(block_sizes, "measured_default", lambda *_: measured)
  assert resolve(None, gain=0.1) == resolve(None, gain=9.0) == measured
  assert resolve(None, UNABLE) == "xla"


def test_a_measured_kernel_that_the_op_has_not_is_not_taken(monkeypatch):
  monkeypatch.setattr(block_sizes, "measured_default", lambda *_: "pallas")
  assert resolve(None) == "xla"


def test_kernels_can_be_left_out_for_a_comparison():
  with dispatch.only_xla():
    assert resolve(None) == "xla"
    assert resolve("triton") == "triton"
  assert resolve(None) == "triton"


def test_the_reason_names_the_device():
  assert dispatch.platform() == "cpu"
  assert "traced for 'cpu'" in dispatch.needs_hopper()
