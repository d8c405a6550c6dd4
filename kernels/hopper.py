"""Compiling whole JAX functions for an H100 on a machine without one.

Needs the CUDA plugin of JAX (`jax-cuda13-plugin`, `jax-cuda13-pjrt`) and
JAX_PLATFORMS=cpu, but no GPU and no driver. What comes back is XLA's compiled
program: its text, its memory analysis, and an error if a kernel of XLA's or of
Mosaic's asks for more shared memory than the device has. Nothing can be run.
Triton kernels are loaded without such a check: see `triton_resources.py`.
"""

import contextlib
import functools
import importlib.util
from collections.abc import Generator

import jax
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

SHARED_MEMORY = 232_448  # bytes of a block on H100 and H200, opted in

# The device as XLA describes it (a GpuTargetConfig). Limits of the hardware;
# the clock, cores and bandwidth enter only XLA's cost model.
_H100 = """
platform_name: "CUDA"
device_description_str: "NVIDIA H100 80GB HBM3"
gpu_device_info {
  cuda_compute_capability { major: 9 minor: 0 }
  core_count: 132 fpus_per_core: 128 clock_rate_ghz: 1.98
  threads_per_warp: 32 threads_per_block_limit: 1024
  threads_per_core_limit: 2048
  shared_memory_per_block: 49152
  shared_memory_per_block_optin: 232448
  shared_memory_per_core: 233472
  registers_per_block_limit: 65536 registers_per_core_limit: 65536
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535
  block_dim_limit_z: 65535
  memory_bandwidth: 3352320000000 l2_cache_size: 52428800
  device_memory_size: 85899345920
}
dnn_version_info { major: 9 minor: 12 }
runtime_version { major: 13 minor: 0 patch: 0 }
"""


def unavailable() -> str | None:
  """Why nothing can be compiled for a described H100 here, or None."""
  try:
    found = importlib.util.find_spec("jax_plugins.xla_cuda13") is not None
  except ModuleNotFoundError:
    found = False
  if not found:
    return "jax-cuda13-plugin is not installed: make test-hopper installs it"
  return None


@functools.cache
def _mesh() -> Mesh:
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(
    platform="cuda",
    topology_name="h100",
    target_config=_H100,
    topology="1x1x1",
  )
  return Mesh(np.asarray(topology.devices[:1]), ("device",))


@contextlib.contextmanager
def described_h100() -> Generator[None]:
  """What is traced in this context is traced for an H100."""
  with jax.sharding.use_abstract_mesh(_mesh().abstract_mesh):
    yield


def compile_for_h100(function, *arguments, **jit_options):
  """`jax.jit(function)` compiled for an H100.

  Args:
    function: any function of arrays.
    *arguments: trees of arrays or `jax.ShapeDtypeStruct`.
    **jit_options: of `jax.jit`.

  Returns:
    The compiled program (`as_text()`, `memory_analysis()`); it cannot be run.
  """
  place = NamedSharding(_mesh(), PartitionSpec())

  def described(x):
    return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=place)

  arguments = jax.tree.map(described, arguments)
  with described_h100():
    return jax.jit(function, **jit_options).lower(*arguments).compile()
