import jax
import pytest

from dspine_jax import sharding
from experiments.stages import devices


def start(**changes):
  return devices.start(**({"mesh": None, "batch_size": 4} | changes))


def test_one_device_needs_no_mesh_and_may_have_one():
  assert start() is None
  mesh = start(mesh=["1", "1", "1"])
  assert mesh.shape == dict.fromkeys(sharding.AXES, 1)
  assert mesh.devices.item() == jax.devices()[0]


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"mesh": ["1", "2"]}, "--mesh=1,2: must be three positive sizes"),
    ({"mesh": ["1", "x", "1"]}, "--mesh=1,x,1: must be three positive sizes"),
    ({"mesh": ["1", "0", "1"]}, "--mesh=1,0,1: must be three positive sizes"),
    ({"mesh": ["1", "4", "2"]}, "--mesh=1,4,2: 8 devices, but there are 1"),
    ({"coordinator": "localhost:1"}, "--num_processes and --process_id: all"),
    (
      {"coordinator": "localhost:1", "num_processes": 2, "process_id": 2},
      r"--process_id=2: not in 0\.\.1",
    ),
  ],
)
def test_flags_that_do_not_fit_are_named(changes, message):
  with pytest.raises(ValueError, match=message):
    start(**changes)


def test_a_batch_that_the_devices_do_not_divide_is_named(monkeypatch):
  monkeypatch.setattr(jax, "device_count", lambda: 3)
  with pytest.raises(ValueError, match=r"--batch_size=4: .* the 3 devices"):
    start()


def test_no_cluster_around_is_told(monkeypatch):
  def none_found(*unused):
    raise ValueError("coordinator_address should be defined.\nmore")

  monkeypatch.setattr(jax.distributed, "initialize", none_found)
  message = r"--distributed=auto: .*\(coordinator_address should be defined.\)"
  with pytest.raises(ValueError, match=message):
    start(distributed="auto")


def test_an_action_of_one_process_is_just_called():
  assert devices.together(lambda: 3) == 3

  def fail():
    raise ValueError("own")

  with pytest.raises(ValueError, match="own"):
    devices.together(fail)
