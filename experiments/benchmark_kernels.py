"""Times every op on the device at hand: kernels against XLA, and the floor.

  python -m experiments.benchmark_kernels --shapes=8B --work_dir=runs/kernels
  python -m experiments.benchmark_kernels --shapes=tiny   # any CPU, to try it

For each op and shape: the median time of a call on the device (loops of many
calls, see `stages/kernel_bench.py`), turn and turn about with XLA in the same
run; the ratio; FLOP/s and bytes/s of the work that the method needs; the
fraction of the floor at the copy bandwidth and matmul rate that were measured
just before; and the gain that the counts promised. An implementation that
cannot run is skipped with its reason. Repeating the command goes on where it
was killed. Writes results.json and kernels.md. Time: ten minutes for all shapes
on one GPU, most of it compilation.
"""

import json
import sys

from absl import flags

from experiments import provenance, run_io
from experiments.stages import (
  kernel_bench,
  kernel_cases,
  kernel_ops,
  kernel_runs,
)
from kernels import cost, dispatch

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/benchmark_kernels", "Where results go."
)
_SHAPES = flags.DEFINE_list(
  "shapes", ["8B", "27B"], f"Which of {', '.join(kernel_ops.SIZES)}."
)
_OPS = flags.DEFINE_list("ops", list(kernel_ops.OPS), "Which ops.")
_IMPLEMENTATIONS = flags.DEFINE_list(
  "implementations", list(dispatch.IMPLEMENTATIONS), "Which; `xla` is needed."
)
_DTYPE = flags.DEFINE_enum(
  "dtype", "bfloat16", ("bfloat16", "float32"), "Of states and weights."
)
_SAMPLES = flags.DEFINE_integer(
  "samples", 15, "Timed programs of each kind, at most.", lower_bound=3
)
_SECONDS = flags.DEFINE_float(
  "seconds", 2.0, "Timing of one shape of one op, about.", lower_bound=0.0
)


def table_rows(rows: list[dict]) -> list[list]:
  """A line for each implementation that ran."""
  lines = []
  for row in rows:
    for name, timed in row["implementations"].items():
      lines.append(
        [
          row["case"],
          name,
          f"{1e6 * timed['seconds']:.1f}",
          f"{1e6 * (timed['upper'] - timed['lower']):.1f}",
          f"{timed['ratio_to_xla']:.2f}" if timed["ratio_to_xla"] else "-",
          f"{row['predicted_gain']:.2f}" if name == "triton" else "-",
          f"{timed['flops_per_second'] / 1e12:.2f}",
          f"{timed['bytes_per_second'] / 1e9:.1f}",
          f"{timed['floor_fraction']:.0%}",
        ]
      )
  return lines


HEADERS = (
  *("op, shape, requests", "implementation", "us", "middle half, us"),
  *("x XLA", "counted", "TFLOP/s", "GB/s", "of the floor"),
)


def print_rows(rows: list[dict]) -> None:
  print(run_io.table(table_rows(rows), HEADERS))
  reasons: dict[str, list[str]] = {}
  for row in rows:
    for name, reason in row["skipped"].items():
      reasons.setdefault(f"{name}: {reason}", []).append(row["case"])
  for reason, names in reasons.items():
    print(f"skipped {reason} ({len(names)} of {len(rows)})")


def main(unused_argv):
  cases = kernel_ops.chosen(_SHAPES.value, _OPS.value, _DTYPE.value)
  kernel_ops.check_names(
    "implementations", _IMPLEMENTATIONS.value, dispatch.IMPLEMENTATIONS
  )
  if "xla" not in _IMPLEMENTATIONS.value:
    raise ValueError(
      f"--implementations={','.join(_IMPLEMENTATIONS.value)}: must have xla,"
      " which others are compared with"
    )
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={name: flags.FLAGS[name].value for name in _RECORDED},
    argv=sys.argv,
    resume=True,
  )
  path = work_dir.path / "results.json"
  found = json.loads(path.read_text()) if path.exists() else None
  done = [] if found is None else found["rows"]
  names = {row["case"] for row in done}
  todo = [case for case in cases if case.name not in names]
  if found is not None and not todo:  # The rows were compared with these.
    device = cost.Device("found", **found["ceilings"])
  else:
    device = kernel_bench.ceilings(tiny=_SHAPES.value == ["tiny"])
  with run_io.Progress(len(cases), "time", "cases", start=len(done)) as bar:
    for group in kernel_cases.groups(todo):
      done += kernel_runs.measure(
        group,
        _IMPLEMENTATIONS.value,
        device,
        seconds=_SECONDS.value,
        samples=_SAMPLES.value,
      )
      _write(path, device, done)
      bar.update(len(group), case=group[-1].name)
  _write(path, device, done)
  markdown = run_io.markdown_table(table_rows(done), HEADERS)
  (work_dir.path / "kernels.md").write_text(markdown + "\n")
  print_rows(done)
  print(
    f"ceilings: {device.flops / 1e12:.3g} TFLOP/s,"
    f" {device.bandwidth / 1e9:.4g} GB/s"
  )


def _write(path, device: cost.Device, rows: list[dict]) -> None:
  run_io.write_json(
    path,
    {
      "ceilings": {"flops": device.flops, "bandwidth": device.bandwidth},
      "device": provenance.device_summary(),
      "rows": rows,
    },
  )


_RECORDED = ("shapes", "ops", "implementations", "dtype", "samples", "seconds")

if __name__ == "__main__":
  run_io.run_app(main)
