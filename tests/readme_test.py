"""What the README says holds: its code runs, its commands and files exist."""

import importlib
import pathlib
import re
import subprocess

import pytest
from jax import numpy as jnp

ROOT = pathlib.Path(__file__).parents[1]
README = (ROOT / "README.md").read_text(encoding="utf-8")
BLOCKS = re.findall(r"```python\n(.*?)```", README, re.DOTALL)


def test_python_blocks_run_in_order():
  assert len(BLOCKS) >= 5
  namespace: dict = {}
  for block in BLOCKS:
    exec(compile(block, "README.md", "exec"), namespace)
  assert namespace["tokens"].shape == (2, 7)
  assert int(namespace["out"].num_tokens[0]) > 0
  assert namespace["verdict"].accepted.shape == (2,)
  assert abs(float(namespace["joules"]) - 668.7) < 0.1
  # What one more token costs.
  assert 0 < float(namespace["per_token"]) < 0.05
  # A fresh injection writes zeros: only the write itself has a gradient.
  for leaf in (namespace["gradient"]["write"]["kernel"], namespace["slope"]):
    assert bool(jnp.isfinite(leaf).all()) and bool((leaf != 0).any())


def commands() -> list[str]:
  rows = re.findall(r"^\| `([a-z_]+(?: --[^`]*)?)` \|", README, re.MULTILINE)
  whole = re.sub(r" \\\n\s+", " ", README)
  inline = re.findall(r"python -m experiments\.([^`\n#]+)", whole)
  return rows + [line for line in inline if not line.startswith("...")]


@pytest.mark.parametrize("command", commands())
def test_commands_name_scripts_and_flags_that_exist(command):
  script, *arguments = command.split(" --")
  source = ROOT / "experiments" / f"{script.strip()}.py"
  assert source.exists(), command
  text = source.read_text(encoding="utf-8")
  for argument in arguments:
    name = argument.split("=")[0].strip()
    if name == "flagfile":  # Of every script, by absl.
      continue
    assert re.search(rf'DEFINE_\w+\(\s*"{name}"', text), (command, name)


def test_make_targets_exist():
  makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
  for target in re.findall(r"(?:^    |`)make ([a-z-]+)", README, re.M):
    assert re.search(rf"^{target}:", makefile, re.MULTILINE), target


def test_file_map_names_every_source_file_and_nothing_else():
  listing = subprocess.run(
    [
      "git",
      "ls-files",
      "-co",
      "--exclude-standard",
      "dspine_jax",
      "energy",
      "experiments",
      "kernels",
    ],
    cwd=ROOT,
    capture_output=True,
    text=True,
    check=False,
  )
  if listing.returncode:
    pytest.skip("not a git checkout")
  sources = {
    pathlib.PurePath(line).name
    for line in listing.stdout.split()
    if line.endswith(".py") and not line.endswith("__init__.py")
  }
  section = README.split("## File map")[1].split("## ")[0]
  assert set(re.findall(r"\b\w+\.py\b", section)) == sources


def test_public_functions_exist():
  section = README.split("## Public functions")[1].split("## Experiments")[0]
  rows = re.findall(r"^\| (`[^|]+`) \|", section, re.MULTILINE)
  assert rows
  for row in rows:
    names = re.findall(r"`([\w.]+)`", row)
    module = names[0].rsplit(".", 1)[0]
    if not module.startswith("kernels."):
      module = f"dspine_jax.{module}"
    loaded = importlib.import_module(module)
    for name in names:
      assert hasattr(loaded, name.rsplit(".", 1)[-1]), (module, name)
