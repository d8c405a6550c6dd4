"""The package works when installed, from another folder, in foreign modules."""

import os
import pathlib
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).parents[1]
SCRIPT = ROOT / "tests" / "foreign_use.py"


def run(arguments, *, cwd, path):
  environment = {k: v for k, v in os.environ.items() if k != "PYTHONPATH"}
  environment |= {
    "PYTHONPATH": str(path),
    "JAX_PLATFORMS": "cpu",
    # As in the other tests: what runs once is compiled quickly.
    "JAX_DISABLE_MOST_OPTIMIZATIONS": "1",
  }
  return subprocess.run(
    [sys.executable, *arguments],
    cwd=cwd,
    env=environment,
    capture_output=True,
    text=True,
    check=False,
  )


@pytest.mark.slow
def test_wheel_has_code_and_assets_and_works_in_foreign_modules(tmp_path):
  """The wheel's own files come first on the path, before the checkout's."""
  site = tmp_path / "site"
  built = run(
    [
      *(
        "-m",
        "pip",
        "install",
        "-qq",
        "--no-deps",
        "--disable-pip-version-check",
      ),
      *("--target", str(site), str(ROOT)),
    ],
    cwd=tmp_path,
    path="",
  )
  assert built.returncode == 0, built.stderr
  script = tmp_path / "foreign_use.py"
  script.write_text(SCRIPT.read_text(encoding="utf-8"), encoding="utf-8")
  done = run(["-W", "error", str(script)], cwd=tmp_path, path=site)
  assert done.returncode == 0, done.stderr
  lines = done.stdout.splitlines()
  assert lines[0].startswith(f"package: {site}")
  assert len(lines) == 10 and all(line.endswith(": ok") for line in lines[1:])
