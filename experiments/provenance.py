"""Which code, which versions and which device a run has used.

What explains a result later: `run_io.open_work_dir` writes it beside the
config, and scripts that measure put the device into their results.
"""

import datetime
import importlib.metadata
import os
import pathlib
import platform
import subprocess
from typing import Any

import jax

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "numpy")


def collect() -> dict[str, Any]:
  """Date, revision, versions, system and device of this process."""
  now = datetime.datetime.now(datetime.UTC)
  packages = {name: importlib.metadata.version(name) for name in _PACKAGES}
  return {
    "date": now.isoformat(timespec="seconds"),
    "git": git_state(pathlib.Path(__file__).resolve().parent.parent),
    "versions": {"python": platform.python_version(), **packages},
    "system": platform.platform(),
    **device_summary(),
  }


def git_state(root: pathlib.Path) -> dict[str, Any] | None:
  """Returns the revision of the checkout `root`; None if it is not one."""

  def git(*args: str) -> str:
    command = ["git", "-C", os.fspath(root), *args]
    return subprocess.check_output(
      command, text=True, timeout=60, stderr=subprocess.DEVNULL
    )

  try:
    top, revision = git("rev-parse", "--show-toplevel", "HEAD").splitlines()
    changes = git("status", "--porcelain")
  except (OSError, subprocess.SubprocessError):
    return None
  if pathlib.Path(top).resolve() != root.resolve():
    return None  # An installed copy inside the checkout of something else.
  return {"revision": revision, "dirty": bool(changes)}


def device_summary() -> dict[str, Any]:
  """Returns what JAX computes on; starts its backend if none has started."""
  devices = jax.devices()
  return {
    "platform": devices[0].platform,
    "device_kind": devices[0].device_kind,
    "device_count": len(devices),
    "cpu_count": os.cpu_count(),
  }
