"""Runs a script of `experiments` inside the test's process.

A start of Python with JAX costs seconds and compiled programs die with it, so
`python -m experiments.NAME` is played by `runpy`, with its own command line,
captured output, and its flags forgotten afterwards.
"""

import contextlib
import importlib.util
import io
import runpy
import sys
import types
from typing import NamedTuple

from absl import flags

import experiments


class Done(NamedTuple):
  """How a script ended.

  Attributes:
    status: exit status.
    stdout: what it printed.
    stderr: progress lines and error.
  """

  status: int
  stdout: str
  stderr: str

  @property
  def error(self) -> str:
    """The one line after `error: `; fails if there is not exactly one."""
    lines = [
      line for line in self.stderr.splitlines() if line.startswith("error: ")
    ]
    assert len(lines) == 1, self.stderr
    assert self.stderr.splitlines()[-1] == lines[0], self.stderr
    return lines[0].removeprefix("error: ")


def arguments(**values) -> list[str]:
  """--name=value of each; True is a bare flag, lists are joined by commas."""
  words = []
  for name, value in values.items():
    if isinstance(value, list | tuple):
      value = ",".join(map(str, value))
    words.append(f"--{name}" if value is True else f"--{name}={value}")
  return words


def run(script: str, **values) -> Done:
  """Runs `python -m experiments.SCRIPT --NAME=VALUE ...`."""
  module = f"experiments.{script}"
  spec = importlib.util.find_spec(module)
  assert spec is not None and spec.origin is not None
  out, err, status = io.StringIO(), io.StringIO(), 0
  old = sys.argv
  imported = _flags_of_imported_scripts()
  modules = _forget(imported)
  sys.argv = [spec.origin, *arguments(**values)]
  try:
    with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
      runpy.run_module(module, run_name="__main__", alter_sys=True)
  except SystemExit as end:
    status = end.code if isinstance(end.code, int) else int(bool(end.code))
  finally:
    sys.argv = old
    own = flags.FLAGS.flags_by_module_dict().get(spec.origin, ())
    for flag in list(own):
      delattr(flags.FLAGS, flag.name)
    _forget(_flags_of_imported_scripts())
    for name, imported_script in modules.items():
      sys.modules[name] = imported_script
      setattr(experiments, name.split(".")[1], imported_script)
    for module, flag in imported:
      flags.FLAGS[flag.name] = flag
      # Without its module a flag would be nobody's, and never be found here.
      flags.FLAGS.register_flag_by_module(module, flag)
    flags.FLAGS.unparse_flags()
  return Done(status, out.getvalue(), err.getvalue())


def _forget(
  imported: list[tuple[str, flags.Flag]],
) -> dict[str, types.ModuleType]:
  """Takes back flags and the imports that defined them; gives the modules.

  A script is not run while it is imported, and one that imports another needs
  the flags of that one.
  """
  for _, flag in imported:
    delattr(flags.FLAGS, flag.name)
  return {name: sys.modules.pop(name) for name in dict(imported)}


def _flags_of_imported_scripts() -> list[tuple[str, flags.Flag]]:
  """(module, flag) of what was defined by importing a script."""
  return [
    (module, flag)
    for module, own in flags.FLAGS.flags_by_module_dict().items()
    if module.startswith("experiments.")
    for flag in own
  ]


def run_well(script: str, **values) -> Done:
  """`run` of what must succeed."""
  done = run(script, **values)
  assert done.status == 0, done.stderr
  return done
