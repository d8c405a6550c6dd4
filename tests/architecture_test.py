"""The rules of the code base that no single file can keep by itself."""

import ast
import os
import pathlib
import re
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parent.parent
MAX_LINES = 500

# Who may import whom. Dependencies point one way.
ALLOWED = {
  "kernels": set(),
  "energy": set(),
  "dspine_jax": {"kernels"},
  "experiments": {"dspine_jax", "kernels", "energy"},
}
PACKAGES = [name for name in ALLOWED if (ROOT / name / "__init__.py").exists()]
LIBRARIES = [name for name in PACKAGES if name != "experiments"]

# Library code is pure: the terminal and the command line are the experiments'.
TERMINAL_MODULES = {"absl.app", "absl.flags", "argparse", "click", "tqdm"}
TERMINAL_CALLS = {
  *("print", "input", "pprint.pprint", "jax.debug.print"),
  *("sys.stdout.write", "sys.stderr.write"),
}

# Optional: in an extra, or with an NVIDIA driver. A module that is nothing
# without them may import them, but only itself.
OPTIONAL = ("triton", "jax_triton", "pynvml", "gguf")

# Put together here so that this file does not break its own rule.
REGISTRIES = [
  *(".".join(host) for host in (("pypi", "org"), ("pythonhosted", "org"))),
  *(".".join(host) for host in (("npmjs", "org"), ("debian", "org"))),
]
MACHINE_PATH = re.compile(r"(?<![\w.~$}-])/(?:root|home|work|Users|opt)/\w")


def sources(package):
  return sorted((ROOT / package).rglob("*.py"))


def relative(path):
  return path.relative_to(ROOT).as_posix()


def imported_modules(tree):
  """Yields the dotted name of all that `tree` imports, at any depth."""
  for node in ast.walk(tree):
    if isinstance(node, ast.Import):
      yield from (alias.name for alias in node.names)
    elif isinstance(node, ast.ImportFrom):
      assert node.level == 0, f"line {node.lineno}: relative import"
      yield from (f"{node.module}.{alias.name}" for alias in node.names)


def forbidden_imports(source, package):
  """Returns the siblings that a file of `package` imports against the rule."""
  siblings = (set(ALLOWED) | {"tests"}) - ALLOWED[package] - {package}
  tops = {name.split(".")[0] for name in imported_modules(ast.parse(source))}
  return sorted(tops & siblings)


def terminal_uses(source):
  """Returns what a library file uses of the terminal or the command line."""
  tree = ast.parse(source)
  names = set(imported_modules(tree))
  uses = {m for m in TERMINAL_MODULES for n in names if f"{n}.".startswith(m)}
  calls = (node for node in ast.walk(tree) if isinstance(node, ast.Call))
  return sorted(uses | ({ast.unparse(c.func) for c in calls} & TERMINAL_CALLS))


def leaks(text):
  """Returns the lines that hold a registry's address or a machine's path."""
  return [
    f"{number}: {line.strip()[:80]}"
    for number, line in enumerate(text.splitlines(), start=1)
    if MACHINE_PATH.search(line) or any(host in line for host in REGISTRIES)
  ]


def project_files():
  """Returns all files that are in git or would be added, or skips the test."""
  command = ["git", "ls-files", "-z", "--cached", "--others"]
  try:
    names = subprocess.check_output(
      [*command, "--exclude-standard"],
      cwd=ROOT,
      text=True,
      stderr=subprocess.DEVNULL,
    )
  except (OSError, subprocess.CalledProcessError):
    pytest.skip("not a git checkout, so there is no list of files")
  files = [ROOT / name for name in sorted(set(names.split("\0")) - {""})]
  return [path for path in files if path.is_file()]


def test_the_checks_see_what_they_forbid():
  sample = "def f():\n  from dspine_jax.target import model\n  import kernels\n"
  assert forbidden_imports(sample, "energy") == ["dspine_jax", "kernels"]
  assert forbidden_imports(sample, "kernels") == ["dspine_jax"]
  assert forbidden_imports(sample, "dspine_jax") == []
  assert forbidden_imports("import tests.oracles", "experiments") == ["tests"]
  sample = "from absl import flags\nimport jax\njax.debug.print('')\nprint()\n"
  assert terminal_uses(sample) == ["absl.flags", "jax.debug.print", "print"]
  assert terminal_uses("from absl import logging\nfingerprint()\n") == []
  assert leaks(f"a\nsee https://{REGISTRIES[0]}/x\nb") != []
  assert leaks("cd /" + "home/me") != []
  assert leaks("#!/usr/bin/env bash\n--work_dir=/tmp/run\na/work/b") == []


@pytest.mark.parametrize("package", PACKAGES)
def test_imports_point_one_way(package):
  wrong = {
    relative(path): names
    for path in sources(package)
    if (names := forbidden_imports(path.read_text(), package))
  }
  assert not wrong


@pytest.mark.parametrize("package", LIBRARIES)
def test_library_code_leaves_the_terminal_alone(package):
  wrong = {
    relative(path): names
    for path in sources(package)
    if (names := terminal_uses(path.read_text()))
  }
  assert not wrong


@pytest.mark.parametrize("package", PACKAGES)
def test_every_folder_with_code_is_a_package(package):
  # A wheel leaves out a folder without __init__.py; a checkout does not show.
  folders = {path.parent for path in sources(package)}
  wrong = [relative(f) for f in folders if not (f / "__init__.py").exists()]
  assert not wrong


# Prints how many modules of a package it imported.
IMPORT_ALL = """
import importlib, pkgutil, sys
package, optional, whole = sys.argv[1], sys.argv[2].split(","), sys.argv[3]
def fail(name):
  raise
names = [package]
root = importlib.import_module(package)
if whole == "whole":
  walk = pkgutil.walk_packages(root.__path__, f"{package}.", fail)
  names += [info.name for info in walk]
def needs_optional(name):
  return name.split(".")[-1].startswith(("triton", "meter"))
for name in sorted(names, key=needs_optional):
  try:
    importlib.import_module(name)
  except ImportError:
    if not needs_optional(name):
      raise
  loaded = [top for top in optional if top in sys.modules]
  assert needs_optional(name) or not loaded, f"{name} loads {loaded}"
if "jax" in sys.modules:
  from jax._src import xla_bridge
  assert not xla_bridge._backends, f"started {list(xla_bridge._backends)}"
if "absl.flags" in sys.modules:
  by_module = sys.modules["absl.flags"].FLAGS.flags_by_module_dict()
  ours = [name for name in by_module if name.split(".")[0] == package]
  assert not ours, f"flags defined by {ours}"
print(len(names))
"""


@pytest.mark.parametrize("package", PACKAGES)
def test_import_is_silent_and_touches_no_accelerator(package):
  # The scripts of experiments define flags, as scripts do; their package not.
  whole = "package" if package == "experiments" else "whole"
  code = [sys.executable, "-W", "error", "-c", IMPORT_ALL]
  done = subprocess.run(
    [*code, package, ",".join(OPTIONAL), whole],
    cwd=ROOT,
    env=os.environ | {"PYTHONPATH": str(ROOT)},
    capture_output=True,
    text=True,
    timeout=300,
  )
  assert done.returncode == 0, done.stderr
  assert done.stderr == ""
  assert done.stdout.strip().isdigit(), done.stdout


def test_no_source_file_is_longer_than_one_can_hold_in_mind():
  lines = {
    relative(path): len(path.read_text().splitlines())
    for path in project_files()
    if path.suffix == ".py"
  }
  assert lines
  assert not {k: n for k, n in lines.items() if n > MAX_LINES}


def test_no_file_names_a_registry_or_a_path_of_a_machine():
  wrong = {}
  for path in project_files():
    if path.name == "tokenizer.json":  # Its pieces of words are learned.
      continue
    try:
      found = leaks(path.read_text(encoding="utf-8"))
    except UnicodeDecodeError:  # Weights and images.
      continue
    if found:
      wrong[relative(path)] = found
  assert not wrong
