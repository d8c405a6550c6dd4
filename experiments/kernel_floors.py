"""The least time of every op, and what kernels promise over XLA: no device.

  python -m experiments.kernel_floors --work_dir=runs/kernel_floors

For each op at the shapes of drafters for an 8B and a 27B target: FLOPs and
bytes that the method needs (each input read and each output written once), the
least time of that at the published peaks of H100 and H200, what our kernels and
XLA's version need by the counts of `kernels/*/cost.py`, the expected gain, and
which of them is the default. Nothing is measured. Writes floors.md and
floors.json. Time: seconds.
"""

import sys

import jax
from absl import flags
from jax import numpy as jnp

from experiments import run_io
from experiments.stages import kernel_cases, kernel_ops
from kernels import cost, triton_call

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/kernel_floors", "Where the tables go."
)
_SHAPES = flags.DEFINE_list(
  "shapes", ["8B", "27B"], f"Which of {', '.join(kernel_ops.SIZES)}."
)
_OPS = flags.DEFINE_list("ops", list(kernel_ops.OPS), "Which ops.")

DEVICES = (cost.H100, cost.H200)

HEADERS = (
  *("op, shape, requests", "GFLOP", "MB", "least us, H100", "H200"),
  *("ours GFLOP", "MB", "us, H100", "XLA GFLOP", "MB", "us, H100"),
  *("gain, H100", "H200", "default"),
)


def default_of(case: kernel_cases.Case) -> str:
  """What runs on an H100 if no implementation is named."""
  launched = []

  def launcher(launch, arrays, out_shape):
    launched.append(launch)
    return tuple(jnp.zeros(x.shape, x.dtype) for x in out_shape)

  device = jax.sharding.AbstractDevice(
    device_kind="NVIDIA H100 80GB HBM3", num_cores=132, platform="gpu"
  )
  mesh = jax.sharding.AbstractMesh((), (), abstract_device=device)
  function = kernel_cases.function_of(case, None)
  arguments = kernel_cases.structs(kernel_cases.arguments_of(case))
  try:
    with (
      jax.sharding.use_abstract_mesh(mesh),
      triton_call.launching_with(launcher),
    ):
      jax.eval_shape(function, *arguments)
  except ModuleNotFoundError as error:
    if error.name != "triton":
      raise
    return "triton"  # Its kernels were to be loaded.
  return "triton" if launched else "xla"


def row_of(case: kernel_cases.Case) -> dict:
  """The counts of one case."""

  def of(stages):
    return {
      "flops": sum(stage.flops for stage in stages),
      "bytes": sum(stage.bytes for stage in stages),
      "seconds": {
        device.name: cost.seconds(stages, device) for device in DEVICES
      },
    }

  counted = case.cost
  return {
    "op": case.op,
    "case": case.name,
    "floor": of([counted.floor]),
    "triton": of(counted.triton),
    "xla": of(counted.xla),
    "gain": {device.name: cost.gain(counted, device) for device in DEVICES},
    "default": default_of(case),
  }


def cells(row: dict) -> list:
  """The row of the table."""

  def work(of):
    return [round(of["flops"] / 1e9, 2), round(of["bytes"] / 1e6, 2)]

  def us(of, device):
    return round(1e6 * of["seconds"][device.name], 1)

  return [
    row["case"],
    *work(row["floor"]),
    *(us(row["floor"], device) for device in DEVICES),
    *work(row["triton"]),
    us(row["triton"], cost.H100),
    *work(row["xla"]),
    us(row["xla"], cost.H100),
    *(round(row["gain"][device.name], 2) for device in DEVICES),
    row["default"],
  ]


def main(unused_argv):
  cases = kernel_ops.chosen(_SHAPES.value, _OPS.value)
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={"shapes": _SHAPES.value, "ops": list(_OPS.value)},
    argv=sys.argv,
    resume=False,
  )
  rows = [row_of(case) for case in cases]
  run_io.write_json(
    work_dir.path / "floors.json",
    {
      "devices": {
        device.name: {"flops": device.flops, "bandwidth": device.bandwidth}
        for device in DEVICES
      },
      "dtype": "bfloat16",
      "rows": rows,
    },
  )
  table = [cells(row) for row in rows]
  markdown = run_io.markdown_table(table, HEADERS)
  (work_dir.path / "floors.md").write_text(f"{_CAPTION}\n{markdown}\n")
  print(run_io.table(table, HEADERS))


_CAPTION = """# Floors of the ops, counted

bfloat16; "training" is 512 blocks of 16 slots over 3,072 positions, forward and
gradient, "decode" one block for each of so many requests with 4,096 cached
positions. Least time is the longer of FLOPs at the peak and bytes at the
bandwidth: of the whole op for the floor, summed over the kernels for ours and
XLA's. Launch gaps and caches are not counted; nothing here is measured.
"""


if __name__ == "__main__":
  run_io.run_app(main)
