"""Registers, stack and shared memory of every kernel at every real shape.

  export PYTHONPATH=.venv/hopper JAX_PLATFORMS=cpu
  python -m experiments.kernel_resources

Compiles each distinct launch of the Triton kernels (forward and gradient, at
the shapes of drafters for an 8B and a 27B target) for sm_90 with Triton alone:
no GPU is needed, nothing runs. A stack means spilled registers; a Hopper
program has 255 registers a thread and 232,448 bytes of shared memory. Where
JAX's CUDA plugin is installed, the Pallas kernels follow, compiled for a
described H100. Writes resources.md and resources.json. Needs Triton (`make
test-hopper` installs both in .venv/hopper; on a GPU machine they come with the
extra `cuda13`). Time: some seconds a kernel the first time; Triton keeps what
it compiled.
"""

import importlib.util
import sys

from absl import flags

from experiments import run_io
from experiments.stages import kernel_cases, kernel_ops
from kernels import hopper, mosaic_resources, triton_resources

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/kernel_resources", "Where the tables go."
)
_SHAPES = flags.DEFINE_list(
  "shapes", ["8B", "27B"], f"Which of {', '.join(kernel_ops.SIZES)}."
)
_OPS = flags.DEFINE_list("ops", list(kernel_ops.OPS), "Which ops.")


MOSAIC_HEADERS = (
  *("kernel", "first at", "shapes", "registers", "spilled", "shared"),
  *("matrix unit", "serialised"),
)
HEADERS = (
  *("kernel", "first at", "shapes", "programs", "warps", "stages"),
  *("registers", "stack", "shared", "matrix unit"),
)


def row_of(recorded, names: list[str]) -> dict:
  """Compiles one launch."""
  resources = triton_resources.compile_launch(recorded)
  launch = recorded.launch
  return {
    **resources._asdict(),
    "cases": names,
    "grid": list(launch.grid),
    "num_warps": launch.num_warps,
    "num_stages": launch.num_stages,
    "constants": {name: str(x) for name, x in launch.constants.items()},
    "problems": resources.problems(),
  }


def mosaic_rows(cases) -> list[dict]:
  """Pallas kernels of the forward passes; those of equal resources once."""
  found: dict = {}
  for case in cases:
    function = kernel_cases.function_of(
      case._replace(differentiable=()), "pallas"
    )
    arguments = kernel_cases.structs(case.arguments)
    try:
      compiled = mosaic_resources.compile_for_h100(function, *arguments)
    except NotImplementedError:
      continue  # There is no such kernel, or not for this shape.
    for resources in compiled.kernels:
      names = found.setdefault(resources, [])
      if case.name not in names:
        names.append(case.name)
  return [
    {**resources._asdict(), "cases": names}
    for resources, names in found.items()
  ]


def mosaic_cells(row: dict) -> list:
  """The row of the table of Pallas kernels."""
  return [
    row["kernel"],
    row["cases"][0],
    len(row["cases"]),
    row["registers"],
    row["spilled"],
    row["shared"],
    "wgmma" if row["wgmma"] else "none",
    "yes" if row["serialised"] else "no",
  ]


def cells(row: dict) -> list:
  """The row of the table."""
  unit = "wgmma" if row["wgmma"] else "mma" if row["mma"] else "none"
  return [
    row["kernel"],
    row["cases"][0],
    len(row["cases"]),
    "x".join(map(str, row["grid"])),
    row["num_warps"],
    row["num_stages"],
    row["registers"],
    row["stack"],
    row["shared"],
    unit,
  ]


def main(unused_argv):
  cases = kernel_ops.chosen(_SHAPES.value, _OPS.value)
  if importlib.util.find_spec("triton") is None:
    raise ValueError(
      "Triton is not installed: make test-hopper puts it into .venv/hopper,"
      " to be run with PYTHONPATH=.venv/hopper JAX_PLATFORMS=cpu; on a GPU"
      " machine pip install 'dspine-jax[cuda13]'"
    )
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={"shapes": _SHAPES.value, "ops": _OPS.value},
    argv=sys.argv,
    resume=False,
  )
  launches = kernel_cases.distinct_launches(cases).values()
  rows = []
  with run_io.Progress(len(launches), "compile", "kernels") as progress:
    for recorded, names in launches:
      rows.append(row_of(recorded, names))
      progress.update(kernel=rows[-1]["kernel"])
  mosaic = mosaic_rows(cases) if hopper.unavailable() is None else []
  run_io.write_json(
    work_dir.path / "resources.json",
    {"target": "sm_90", "kernels": rows, "mosaic": mosaic},
  )
  tables: list[tuple[list[list], tuple[str, ...]]] = [
    ([cells(row) for row in rows], HEADERS)
  ]
  if mosaic:
    tables.append(([mosaic_cells(row) for row in mosaic], MOSAIC_HEADERS))
  text = "\n\n".join(run_io.markdown_table(*table) for table in tables)
  (work_dir.path / "resources.md").write_text(f"{_CAPTION}\n{text}\n")
  for table in tables:
    print(run_io.table(*table), end="\n\n")
  wrong = [problem for row in rows for problem in row["problems"]]
  print(f"kernels that do not fit or spill: {'; '.join(wrong) or 'none'}")


_CAPTION = """# Resources of the kernels on sm_90, compiled

Triton: each distinct launch once, the first shape that has it and how many do.
Registers are of a thread, shared memory (bytes) of a program; no stack means
that no register was spilled. Pallas, if there is a second table: registers at
launch, and whether ptxas made its matrix products wait for each other.
"""

if __name__ == "__main__":
  run_io.run_app(main)
