"""Plans a training run on paper: memory, work, time and disk, without weights.

  python -m experiments.plan_training --recipe=qwen3_8b_dspine --devices=8

A recipe is a file of `train_drafter`'s flags, from `experiments/recipes` or
elsewhere; the flags of `train_drafter` on this command line come after it. The
target's shapes are those of the folder that --target names, or published ones.
Writes OUT/RECIPE.json and OUT/RECIPE.png. --update puts the figures into the
recipe's own comment. Time: seconds.

  PYTHONPATH=.venv/hopper JAX_PLATFORMS=cpu \\
      python -m experiments.plan_training --recipe=qwen3_8b_dspine --check

compiles the training step with one device's rows for a described H100, without
a GPU, and compares its memory analysis with the plan. That takes a minute and
JAX's CUDA plugin (`make test-hopper` installs it). Nothing here is measured.
"""

import dataclasses
import math
import pathlib
import re
import shlex
import sys
import textwrap
from collections.abc import Sequence
from typing import Any

import matplotlib
import tokenizers
from absl import flags
from jax import numpy as jnp

from dspine_jax import sharding
from dspine_jax.checkpoints import hf_config
from dspine_jax.decoding import generate
from experiments import flag_parsing, run_io, targets, train_drafter
from experiments.stages import large_models, training_plan, training_work
from kernels import hopper

matplotlib.use("Agg")
from matplotlib import pyplot as plt

_RECIPE = flags.DEFINE_string(
  "recipe", None, "Name in experiments/recipes, or a flag file."
)
_DEVICES = flags.DEFINE_integer(
  "devices", 1, "GPUs of the run, or 1 CPU.", lower_bound=1
)
_DEVICE = flags.DEFINE_enum(
  "device", "h100", sorted(training_work.DEVICES), "Their kind."
)
_LENGTH = flags.DEFINE_integer(
  "length",
  None,
  "Tokens of a training row; default: --max_length. Answers of make_answers"
  " need it.",
  lower_bound=2,
)
_EPOCHS = flags.DEFINE_float(
  "epochs", 6.0, "Passes over the data, from which its rows follow.", 1e-6
)
_OUT = flags.DEFINE_string("out", "runs/plans", "Folder of the results.")
_CHECK = flags.DEFINE_bool(
  "check", False, "Compare with the program compiled for a described H100."
)
_UPDATE = flags.DEFINE_bool(
  "update", False, "Write the figures into the recipe's comment."
)

RECIPES = pathlib.Path(__file__).parent / "recipes"
TARGETS = RECIPES / "targets.json"
_BEGIN = "# Plan: plan_training "


def recipe_file(name: str | None) -> pathlib.Path:
  """The file that --recipe means.

  Raises:
    ValueError: there is none, or it is no file of flags.
  """
  known = ", ".join(sorted(path.stem for path in RECIPES.glob("*.flags")))
  if not name:
    raise ValueError(f"--recipe: needed, a flag file or one of {known}")
  for path in (RECIPES / f"{name}.flags", pathlib.Path(name)):
    if path.is_file():
      break
  else:
    raise ValueError(f"--recipe={name}: no such file, and none of {known}")
  try:
    lines = path.read_text(encoding="utf-8").splitlines()
  except (OSError, UnicodeDecodeError):
    raise ValueError(f"--recipe={name}: not a text file") from None
  if not any(line.lstrip().startswith("-") for line in lines):
    raise ValueError(f"--recipe={name}: no flag in it")
  return path


def parse(path: pathlib.Path, arguments: Sequence[str]) -> None:
  """Sets the flags: the recipe's, then those of a command line.

  Raises:
    ValueError: a flag that does not exist or a value that it cannot have.
  """
  own = flags.FLAGS.flags_by_module_dict()[train_drafter.__name__]
  for flag in own:
    flag.unparse()
  words = [sys.argv[0], f"--flagfile={path}", *arguments]
  try:
    rest = flag_parsing.parse(words)
  except ValueError as error:
    raise ValueError(f"--recipe={path}: {error}") from None
  if len(rest) > 1:
    raise ValueError(f"--recipe={path}: {rest[1][:40]!r} is no flag")


def target_of(name: str, dtype: str) -> targets.NamedTarget:
  """A target by folder or name, without weights and tokenizer.

  Raises:
    ValueError: no such folder, and no published shapes of that name.
  """
  folder = pathlib.Path(name)
  if name == targets.EMBEDDED:
    folder = targets.embedded_folder()
  if (folder / "config.json").is_file():
    config, path = hf_config.read_json(folder / "config.json"), folder
  else:
    known = hf_config.read_json(TARGETS)
    by_name = {key.lower(): key for key in known}
    key = by_name.get(folder.name.lower().removesuffix("-instruct"))
    if key is None:
      raise ValueError(
        f"--target={name}: no folder with a config.json, and none of the"
        f" published {', '.join(known)}"
      )
    config, path = known[key], TARGETS
  cfg = dataclasses.replace(hf_config.target_config(config, path), dtype=dtype)
  # The mask token, which no plan depends on, is then the first.
  empty = tokenizers.Tokenizer(tokenizers.models.BPE())
  return targets.NamedTarget(name, folder, generate.TargetModel({}, cfg), empty)


def planned_run() -> training_plan.Run:
  """The run that the parsed flags describe.

  Raises:
    ValueError: flags that do not fit each other.
  """
  values, count = flags.FLAGS, _DEVICES.value
  if _DEVICE.value == "cpu" and count > 1:
    raise ValueError(f"--devices={count}: --device=cpu is planned as one")
  target = target_of(values.target, values.dtype)
  train = train_drafter.train_config()
  if train.batch_size % count:
    raise ValueError(
      f"--batch_size={train.batch_size}: must be a multiple of"
      f" --devices={count}, each of which takes its rows"
    )
  length = _LENGTH.value or (values.chats and values.max_length)
  if not length:
    raise ValueError("--length: a row's tokens must be given without --chats")
  run = training_plan.Run(
    target=target.model.cfg,
    drafter=train_drafter.drafter_config(target),
    train=train,
    length=length,
    rows=0,
    on_the_fly=values.features != "cache",
    kept_itemsize=jnp.dtype(values.feature_dtype).itemsize,
    mesh=_mesh(values.mesh, count),
  )
  rows = train.optimizer.total_steps * run.sequences / _EPOCHS.value
  return dataclasses.replace(run, rows=max(1, round(rows)))


def _mesh(given: Sequence[str] | None, count: int) -> tuple[int, int, int]:
  if given is None:
    return 1, count, 1
  sizes = [int(size) if size.isdecimal() else 0 for size in given]
  if len(sizes) != len(sharding.AXES) or math.prod(sizes) != count:
    raise ValueError(
      f"--mesh={','.join(given)}: no split of --devices={count} over"
      f" {','.join(sharding.AXES)}"
    )
  return sizes[0], sizes[1], sizes[2]


def lines(run: training_plan.Run, kind: str) -> list[str]:
  """What a recipe's comment says about it."""
  device, train = training_work.DEVICES[kind], run.train
  sizes = training_plan.parameters(run)
  held = sum(training_plan.held(run).values())
  total = sum(training_plan.peak(run).values())
  work = training_work.work(run)
  flops = sum(work.values())
  shares = (f"{name} {x / flops:.0%}" for name, x in work.items())
  found = [
    "parameters: " + ", ".join(f"{k} {short(n)}" for k, n in sizes.items()),
    f"{train.optimizer.total_steps:,} steps of {run.sequences} rows of"
    f" {run.length:,} tokens with {train.num_anchors} blocks",
    f"which is {_EPOCHS.value:g} times {run.rows:,} rows",
    f"memory of each {kind}: {short(total)}B of {short(device.memory)}B at the"
    f" peak, {short(held)}B between steps",
    f"a step: {short(flops)}FLOP",
    *textwrap.wrap(f"of it {', '.join(shares)}", 74),
    f"{seconds(run, kind):.2f} s a step and {hours(run, kind):.3g} hours of"
    f" {kind} at {device.utilisation:.0%} of the peak",
    f"disk: {short(training_plan.checkpoint_bytes(run))}B a checkpoint,"
    f" {short(training_work.cache_bytes(run))}B if features are kept",
  ]
  room = device.memory - total
  chunk = training_plan.paying_chunk(run, room)
  if room < 0:
    found.append(f"does not fit: {-room / 1e9:.1f} GB too much")
  elif chunk > train.chunk_blocks and kind != "cpu":
    found.append(f"--chunk_blocks={chunk} fits and reads the head less often")
  if kind == "cpu":
    found.append("XLA on CPU needs about twice the memory beside the arguments")
  return found


def seconds(run: training_plan.Run, kind: str) -> float:
  """Of a step, expected."""
  return training_work.seconds_per_step(run, training_work.DEVICES[kind])


def hours(run: training_plan.Run, kind: str) -> float:
  """Of all devices, added up."""
  steps = run.train.optimizer.total_steps
  return seconds(run, kind) * steps * run.devices / 3600


def short(number: float) -> str:
  """Three digits, a space and a prefix, such as "1.08 G"."""
  for size, prefix in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
    if number >= size:
      return f"{number / size:.3g} {prefix}"
  return f"{number:.3g} "


def block(found: Sequence[str], arguments: str) -> str:
  """The comment of a recipe that holds its plan."""
  words = "".join(f"#   {line.strip()}\n" for line in found)
  return f"{_BEGIN}{arguments}\n{words}"


def written_block(path: pathlib.Path) -> tuple[str, str]:
  """The arguments of this script that a recipe names, and its whole comment.

  Raises:
    ValueError: the recipe has none.
  """
  text = path.read_text(encoding="utf-8")
  pattern = rf"^{re.escape(_BEGIN)}(.*)\n((?:#   .*\n)*)"
  found = re.search(pattern, text, re.MULTILINE)
  if found is None:
    raise ValueError(f"--recipe={path}: no line begins with {_BEGIN!r}")
  return found.group(1), found.group(0)


def as_json(run: training_plan.Run) -> dict[str, Any]:
  """Everything that is planned: bytes, FLOPs, seconds."""
  kinds = ["cpu"] if _DEVICE.value == "cpu" else ["h100", "h200", "a100"]
  return {
    "run": run,
    "parameters": training_plan.parameters(run),
    "held_bytes": training_plan.held(run),
    "step_bytes": training_plan.during_step(run),
    "target_pass_bytes": training_plan.target_pass(run),
    "step_flops": training_work.work(run),
    "cache_bytes": training_work.cache_bytes(run),
    "checkpoint_bytes": training_plan.checkpoint_bytes(run),
    "seconds_per_step": {kind: seconds(run, kind) for kind in kinds},
    "device_hours": {kind: hours(run, kind) for kind in kinds},
  }


def draw(path: pathlib.Path, run: training_plan.Run, title: str) -> None:
  """The fullest moment of a device, item by item, as one bar."""
  memory = training_work.DEVICES[_DEVICE.value].memory
  figure, axes = plt.subplots(figsize=(7.2, 3.2), layout="constrained")
  left, colors = 0.0, plt.colormaps["tab20"]
  items = training_plan.peak(run).items()
  for index, (name, size) in enumerate(items):
    axes.barh(0, size / 1e9, left=left, label=name, color=colors(index))
    left += size / 1e9
  axes.axvline(memory / 1e9, color="black", label="the device")
  axes.set_xlabel("GB of each device")
  axes.set_yticks([])
  axes.set_title(title)
  figure.legend(ncols=4, fontsize=7, loc="outside lower center")
  figure.savefig(path, dpi=120)
  plt.close(figure)


def check(run: training_plan.Run) -> dict[str, float]:
  """Bytes of arguments and temporaries, planned and compiled, one device.

  Raises:
    ValueError: nothing can be compiled for a described H100 here.
  """
  reason = hopper.unavailable()
  if reason is not None:
    raise ValueError(
      f"--check: {reason}; then run with PYTHONPATH=.venv/hopper"
      " JAX_PLATFORMS=cpu"
    )
  one = training_plan.one_device(run)
  sizes = large_models.Size(
    target=one.target,
    drafter=one.drafter,
    num_anchors=one.train.num_anchors,
    length=one.length,
  )
  compiled = large_models.compile_training(sizes, one.train)
  memory = compiled.memory_analysis()
  assert memory is not None
  return {
    "planned_arguments": training_plan.as_passed(one),
    "arguments": float(memory.argument_size_in_bytes),
    "planned_temporaries": sum(training_plan.during_step(one).values()),
    "temporaries": float(memory.temp_size_in_bytes),
  }


def print_check(found: dict[str, float]) -> None:
  rows = [
    [name, *(f"{x / 1e9:.2f}" for x in pair), f"{pair[0] / pair[1]:.3f}"]
    for name, pair in (
      ("arguments", (found["planned_arguments"], found["arguments"])),
      ("temporaries", (found["planned_temporaries"], found["temporaries"])),
      (
        "both",
        (
          found["planned_arguments"] + found["planned_temporaries"],
          found["arguments"] + found["temporaries"],
        ),
      ),
    )
  ]
  print("one device's rows on one device, features given:")
  print(run_io.table(rows, ["GB", "plan", "compiled for H100", "ratio"]))


def main(unused_argv):
  path, arguments = recipe_file(_RECIPE.value), sys.argv[1:]
  if _UPDATE.value:
    arguments = shlex.split(written_block(path)[0])
  parse(path, arguments)
  run, out = planned_run(), pathlib.Path(_OUT.value)
  run_io.require_writable("--out", out)
  found = lines(run, _DEVICE.value)
  if _UPDATE.value:
    text = path.read_text(encoding="utf-8")
    named, old = written_block(path)
    path.write_text(text.replace(old, block(found, named)), encoding="utf-8")
  items = training_plan.peak(run).items()
  rows = [[name, f"{short(x)}B"] for name, x in items]
  print(run_io.table(rows, [f"on each {_DEVICE.value}", "bytes"]))
  print("\n".join(found))
  results = as_json(run)
  if _CHECK.value:
    results["check"] = check(run)
    print_check(results["check"])
  run_io.write_json(out / f"{path.stem}.json", results)
  draw(out / f"{path.stem}.png", run, path.stem)


if __name__ == "__main__":
  run_io.run_app(main)
