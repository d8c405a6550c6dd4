"""Peak host memory of loading a target of published size, against its bound.

  python -m experiments.measure_loading --size=8B
  python -m experiments.measure_loading --size=8B --num_layers=4 --shard_gb=1
  python -m experiments.measure_loading --size=8B --num_layers=4 --devices=8

Writes a folder of random bfloat16 shards with the shapes of a Qwen3, reads it
in a process of its own by `target_folder.load_target` and samples what that
process has in memory. The bound for what is there beside the arrays is the
largest shard and one decoder layer. The folder is deleted at the end. Needs the
size of the model on disk (8B: 16.4 GB), and in memory again on a CPU; about
three minutes for 8B. Result: WORK_DIR/loading.json.

What is counted: RssAnon + RssShmem + RssFile of /proc/self/status, hence also
the pages of mapped shards, sampled every 2 ms, less what was there before
loading, less the arrays that are finished at that moment (the one being read
counts as memory beside the arrays until the next one begins). On a GPU no array
is in host memory, so that nothing is taken off. The page cache belongs to no
process and is not counted.
"""

import contextlib
import json
import math
import os
import pathlib
import shutil
import subprocess
import sys
import threading
import time

import jax
import ml_dtypes
import numpy as np
from absl import flags

from dspine_jax import sharding, target_config
from dspine_jax.checkpoints import hf_config, names, target_folder, tensors
from experiments import run_io

# Width, feed-forward width, layers, query heads, tied: of the public configs.
# The first is there to try the script.
_QWEN3 = {
  "tiny": (64, 128, 3, 8, True),
  "0.6B": (1024, 3072, 28, 16, True),
  "1.7B": (2048, 6144, 28, 16, True),
  "4B": (2560, 9728, 36, 32, True),
  "8B": (4096, 12288, 36, 32, False),
  "14B": (5120, 17408, 40, 40, False),
  "32B": (5120, 25600, 64, 64, False),
}
_SAMPLE_SECONDS = 0.002

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/measure_loading", "Where loading.json goes."
)
_SIZE = flags.DEFINE_enum(
  "size", "8B", list(_QWEN3), "Of the Qwen3 models, or tiny."
)
_NUM_LAYERS = flags.DEFINE_integer(
  "num_layers", None, "Fewer decoder layers than published.", lower_bound=1
)
_SHARD_GB = flags.DEFINE_float(
  "shard_gb", 5.0, "Largest shard, 10^9 bytes.", lower_bound=0.001
)
_FOLDER = flags.DEFINE_string(
  "folder", None, "Where the shards are written (default: below WORK_DIR)."
)
_DTYPE = flags.DEFINE_enum(
  "dtype", "bfloat16", target_config.DTYPES, "Of the loaded parameters."
)
_DEVICES = flags.DEFINE_integer(
  "devices", None, "CPU devices to simulate and to split over.", lower_bound=1
)
_READ = flags.DEFINE_string(
  "read", None, "Read this folder and print the result (the second process)."
)


def config_of(size: str, num_layers: int | None) -> target_config.TargetConfig:
  """A Qwen3 of that size, perhaps with fewer layers."""
  width, feed, layers, heads, tied = _QWEN3[size]
  return target_config.TargetConfig(
    vocab_size=151936,
    hidden_size=width,
    intermediate_size=feed,
    num_layers=num_layers or layers,
    num_heads=heads,
    num_kv_heads=8,
    head_dim=128,
    tie_embeddings=tied,
  )


def write_folder(
  folder: pathlib.Path, cfg: target_config.TargetConfig, shard_bytes: int
) -> None:
  """Random bfloat16 weights in the released names.

  Raises:
    ValueError: the disk has not the room.
  """
  entries = names.target_entries(cfg)
  need = 2 * sum(math.prod(entry.shape) for entry in entries)
  folder.mkdir(parents=True, exist_ok=True)
  free = shutil.disk_usage(folder).free
  if free < need * 1.01:
    raise ValueError(
      f"--folder={folder}: {need / 1e9:.1f} GB are needed, {free / 1e9:.1f} GB"
      " are free; take fewer with --num_layers or another disk"
    )
  rng = np.random.default_rng(0)
  # Values do not matter for memory, so a short row of them is repeated.
  some = (0.02 * rng.standard_normal(2**20)).astype(ml_dtypes.bfloat16)
  arrays = {
    entry.name: lambda entry=entry: np.resize(some, entry.stored_shape)
    for entry in entries
  }
  tensors.write_tensors(folder, arrays, dtype=None, max_shard_bytes=shard_bytes)
  hf_config.write_json(folder / "config.json", hf_config.target_json(cfg))


class Memory:
  """What this process has in memory beside finished arrays, sampled.

  Attributes:
    before: bytes when this was made.
    finished: bytes of arrays in host memory that are no longer counted.
    peak: most bytes beside them.
    at_peak: the parts of /proc/self/status then, in bytes.
  """

  def __init__(self):
    self.before = sum(_resident().values())
    self.finished = self.peak = 0
    self.at_peak: dict[str, int] = {}

  def sample(self) -> None:
    """Looks once."""
    finished = self.finished
    parts = _resident()
    beside = sum(parts.values()) - self.before - finished
    if beside > self.peak:
      self.peak, self.at_peak = beside, parts

  @contextlib.contextmanager
  def sampled(self):
    """Looks every few milliseconds, from another thread."""
    stop = threading.Event()

    def run():
      while not stop.wait(_SAMPLE_SECONDS):
        self.sample()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    try:
      yield
    finally:
      stop.set()
      thread.join()


def _resident() -> dict[str, int]:
  """Resident bytes of this process by kind."""
  status = _status()
  return {name: status[name] for name in ("RssAnon", "RssFile", "RssShmem")}


def _status() -> dict[str, int]:
  """The sizes of /proc/self/status in bytes."""
  text = pathlib.Path("/proc/self/status").read_text(encoding="ascii")
  fields = (line.split(":", 1) for line in text.splitlines())
  return {
    name: 1024 * int(value.split()[0])
    for name, value in fields
    if value.endswith(" kB")
  }


def read_folder(folder: pathlib.Path, dtype: str) -> dict:
  """Loads the folder in this process; what was in memory meanwhile."""
  devices = jax.devices()
  on_host = devices[0].platform == "cpu"
  mesh = jax.make_mesh((1, len(devices), 1), sharding.AXES)
  place = sharding.for_target(mesh)
  assert place is not None
  # Starts what JAX starts late, so that it is not counted.
  jax.block_until_ready(
    jax.make_array_from_callback(
      (256, 256), sharding.whole(mesh), lambda _: np.zeros((256, 256))
    )
  )
  memory, pending = Memory(), 0

  def counted(path, shape):
    nonlocal pending
    memory.finished += pending
    where = place(path, shape)
    # Copies of one array on several devices are arrays, too.
    held = len(devices) * math.prod(where.shard_shape(tuple(shape)))
    pending = held * jax.numpy.dtype(dtype).itemsize if on_host else 0
    return where

  start = time.perf_counter()
  with memory.sampled():
    loaded = target_folder.load_target(folder, dtype=dtype, sharding=counted)
  seconds = time.perf_counter() - start
  leaves = jax.tree.leaves(loaded.params)
  layer = jax.tree.leaves(loaded.params["layers"][0])
  shard = max(path.stat().st_size for path in folder.glob("*.safetensors"))
  bound = shard + 2 * sum(leaf.size for leaf in layer)
  stored = sum(path.stat().st_size for path in folder.glob("*.safetensors"))
  return {
    "platform": devices[0].platform,
    "devices": len(devices),
    "dtype": dtype,
    "num_layers": loaded.cfg.num_layers,
    "parameters": sum(leaf.size for leaf in leaves),
    "stored_bytes": stored,
    "array_bytes_on_host": memory.finished + pending,
    "largest_shard_bytes": shard,
    "layer_bytes": bound - shard,
    "largest_tensor_bytes": 2 * max(leaf.size for leaf in leaves),
    "bound_bytes": bound,
    "beside_arrays_bytes": memory.peak,
    "within_bound": memory.peak <= bound,
    "at_peak": memory.at_peak,
    "resident_before_bytes": memory.before,
    "resident_after": _resident(),
    "vm_hwm_bytes": _status()["VmHWM"],
    "beside_all_arrays_bytes": _status()["VmHWM"]
    - memory.before
    - (memory.finished + pending),
    "seconds": seconds,
    "stored_gb_per_second": stored / 1e9 / seconds,
  }


def _read_in_own_process(folder: pathlib.Path) -> dict:
  command = [sys.executable, "-m", "experiments.measure_loading"]
  command += [f"--read={folder}", f"--dtype={_DTYPE.value}"]
  environment = dict(os.environ)
  if _DEVICES.value is not None:
    count = f"--xla_force_host_platform_device_count={_DEVICES.value}"
    environment |= {"XLA_FLAGS": count, "JAX_PLATFORMS": "cpu"}
  done = subprocess.run(
    command, env=environment, stdout=subprocess.PIPE, text=True
  )
  if done.returncode:
    raise ValueError(f"--read={folder}: the reader ended with an error")
  return json.loads(done.stdout.splitlines()[-1])


def main(unused_argv):
  if _READ.value is not None:
    result = read_folder(pathlib.Path(_READ.value), _DTYPE.value)
    print(json.dumps(run_io.to_json(result)))
    return
  cfg = config_of(_SIZE.value, _NUM_LAYERS.value)
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "size": _SIZE.value,
      "num_layers": cfg.num_layers,
      "shard_gb": _SHARD_GB.value,
      "dtype": _DTYPE.value,
      "devices": _DEVICES.value,
    },
    argv=sys.argv,
    resume=False,
  )
  folder = pathlib.Path(_FOLDER.value or work_dir.path / "model")
  if folder.exists():
    raise ValueError(f"--folder={folder}: exists already")
  try:
    write_folder(folder, cfg, int(_SHARD_GB.value * 1e9))
    result = _read_in_own_process(folder)
  finally:
    shutil.rmtree(folder, ignore_errors=True)
  run_io.write_json(work_dir.path / "loading.json", result)
  rows = [
    [name, f"{result[key] / 1e9:.3f}"]
    for name, key in (
      ("arrays in host memory", "array_bytes_on_host"),
      ("largest shard", "largest_shard_bytes"),
      ("one layer", "layer_bytes"),
      ("bound: shard and layer", "bound_bytes"),
      ("peak beside the arrays", "beside_arrays_bytes"),
    )
  ]
  print(run_io.table(rows, ("memory", "GB")))
  print(f"loaded at {result['stored_gb_per_second']:.2f} GB/s")
  if not result["within_bound"]:
    raise ValueError(
      f"{result['beside_arrays_bytes']} bytes beside the arrays: above the"
      f" bound of {result['bound_bytes']}"
    )


if __name__ == "__main__":
  run_io.run_app(main)
