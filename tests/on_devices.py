"""Calls a function of a test file where there are several CPU devices.

JAX's number of devices is fixed when it starts, so that takes another process,
or several that are connected by `jax.distributed`. All of them call the
function; what the first one returns comes back as JSON.

  on_devices.call("tests.some_test", "function", devices=8, argument=1)
"""

import importlib
import json
import os
import pathlib
import socket
import subprocess
import sys
from typing import Any

ROOT = pathlib.Path(__file__).resolve().parent.parent

# As in conftest.py. Types are checked where tests run themselves.
_SETTINGS = {
  "JAX_PLATFORMS": "cpu",
  "JAX_NUMPY_RANK_PROMOTION": "raise",
  "JAX_DEFAULT_MATMUL_PRECISION": "float32",
  "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
}


def call(
  module: str,
  function: str,
  *,
  devices: int,
  processes: int = 1,
  timeout_s: float = 300,
  **arguments: Any,
) -> Any:
  """Calls `module.function(**arguments)` with `devices` of each process."""
  started = [
    subprocess.Popen(
      [sys.executable, "-m", "tests.on_devices", module, function]
      + [json.dumps(arguments), *connection],
      cwd=ROOT,
      env=os.environ | _SETTINGS | {"JAX_NUM_CPU_DEVICES": str(devices)},
      stdout=subprocess.PIPE,
      stderr=subprocess.PIPE,
      text=True,
    )
    for connection in connections(processes)
  ]
  try:
    ended = [one.communicate(timeout=timeout_s) for one in started]
  finally:
    for one in started:
      one.kill()
  for one, (_, errors) in zip(started, ended, strict=True):
    assert one.returncode == 0, errors
  return json.loads(ended[0][0].splitlines()[-1])


def connections(processes: int) -> list[list[str]]:
  """Coordinator's address, number and index of each process as words."""
  if processes == 1:
    return [[]]
  with socket.socket() as probe:
    probe.bind(("localhost", 0))
    address = f"localhost:{probe.getsockname()[1]}"
  return [[address, str(processes), str(i)] for i in range(processes)]


def _main(module: str, function: str, arguments: str, *connection: str) -> None:
  if connection:
    import jax

    address, count, index = connection
    jax.distributed.initialize(address, int(count), int(index))
  called = getattr(importlib.import_module(module), function)
  print(json.dumps(called(**json.loads(arguments))))


if __name__ == "__main__":
  _main(*sys.argv[1:])
