"""Settings of every test: the CPU, exact matmuls, checked shapes.

The environment is set before JAX is imported, so this file imports it late.
"""

import gc
import importlib.util
import os
import pathlib

os.environ.setdefault("JAX_PLATFORMS", "cpu")
if "PYTEST_XDIST_WORKER" in os.environ:
  # Several workers share the cores. BLAS threads that spin for each other would
  # take them from JAX; XLA's own pool is left alone, as it sleeps when idle.
  for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
    os.environ.setdefault(name, "1")
  os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

# A program that another test, suite or run has compiled is read from disk, in
# other workers and in processes that tests start, too. An entry is not written
# in one go: who reads half of one compiles anew, and warns (pyproject.toml).
os.environ.setdefault(
  "JAX_COMPILATION_CACHE_DIR",
  os.path.join(os.path.dirname(__file__), "..", ".pytest_cache", "xla"),
)
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0.05")
os.environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")

import jax
import jaxtyping
import pytest

# An accidental (B,) + (B, T) must fail instead of broadcasting, and float32
# must mean float32 wherever the tests run.
jax.config.update("jax_numpy_rank_promotion", "raise")
jax.config.update("jax_default_matmul_precision", "float32")

# Nearly all of the time goes into compiling programs that then run once, for
# milliseconds. Scripts started as processes of their own are compiled fully.
jax.config.update("jax_disable_most_optimizations", True)

ROOT = pathlib.Path(__file__).resolve().parent.parent

pytest_plugins = ("tests.small_disk",)


def _modules_of_kernels() -> list[str]:
  """All but the Triton kernels, which Triton reads as text, names and all."""
  return [
    ".".join(path.relative_to(ROOT).with_suffix("").parts)
    for path in sorted((ROOT / "kernels").rglob("*.py"))
    if path.stem != "__init__" and not path.stem.startswith("triton")
  ]


# Must precede the first import of these packages. It stays for the session.
jaxtyping.install_import_hook(
  ["dspine_jax", "energy", *_modules_of_kernels()], "beartype.beartype"
)


# Linux lets a process map 65,530 pieces of memory, and XLA maps some for every
# program that is kept: a long session would end in a segmentation fault.
_MOST_MAPPINGS = 25_000


@pytest.fixture(autouse=True, scope="module")
def fixture_room_for_programs():
  """Forgets compiled programs, which are on disk too, before they are many."""
  yield
  mappings = pathlib.Path("/proc/self/maps")
  if mappings.exists():
    with mappings.open("rb") as lines:
      count = sum(1 for _ in lines)
    if count > _MOST_MAPPINGS:
      jax.clear_caches()
      gc.collect()


def pytest_collection_modifyitems(
  config: pytest.Config, items: list[pytest.Item]
) -> None:
  """Skips slow and Hopper tests unless -m speaks of them, GPU tests without."""
  if "slow" not in config.option.markexpr:
    _skip(items, "slow", "slow: select it with -m slow")
  if "hopper" not in config.option.markexpr:
    _skip(items, "hopper", "for Hopper: select it with make test-hopper")
  elif missing := _missing("triton", "jax_triton", "jax_plugins.xla_cuda13"):
    reason = f"needs {', '.join(missing)}: make test-hopper installs it"
    _skip(items, "hopper", reason)
  if any(item.get_closest_marker("gpu") for item in items):
    if jax.default_backend() != "gpu":
      _skip(items, "gpu", "needs a GPU, and JAX_PLATFORMS=cuda to use it")


def _missing(*modules: str) -> list[str]:
  """Those of `modules` that are not installed."""

  def is_there(name):
    try:
      return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:  # The package that it would be in.
      return False

  return [name for name in modules if not is_there(name)]


def _skip(items: list[pytest.Item], marker: str, reason: str) -> None:
  for item in items:
    if item.get_closest_marker(marker):
      item.add_marker(pytest.mark.skip(reason=reason))
