import gc
import pathlib
import shutil
import time

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.checkpoints import orbax
from tests import small_disk as small_disk_lib

# A read that fails leaves the other reads of Orbax unfinished, which Python
# reports whenever it collects them: `collected` does that within the test.
pytestmark = pytest.mark.filterwarnings(
  "ignore:Exception ignored in. <coroutine object"
  ":pytest.PytestUnraisableExceptionWarning"
)
META = {"seed": 3, "data": {"epoch": 1, "name": "corpus"}}


@pytest.fixture(autouse=True)
def collected():
  yield
  gc.collect()


def state(seed=0, width=40):
  """Parameters, a tuple of layers, a counter, and keys of both kinds."""
  rng = np.random.default_rng(seed)
  return {
    "params": {
      "w": jnp.asarray(rng.standard_normal((width, 30)), jnp.float32),
      "layers": tuple(
        {"b": jnp.asarray(rng.standard_normal(5), jnp.bfloat16)}
        for _ in range(2)
      ),
    },
    "step": jnp.asarray(seed, jnp.int32),
    "key": jax.random.key(seed),
    "keys": jax.random.split(jax.random.key(seed + 1), 3),
  }


def data(tree):
  return jax.tree.map(
    lambda x: np.asarray(
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ),
    tree,
  )


def assert_same(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    assert a.dtype == b.dtype and a.shape == b.shape
  jax.tree.map(np.testing.assert_array_equal, data(got), data(want))


def save(folder, step=5, tree=None):
  with orbax.TrainingCheckpoints(folder) as checkpoints:
    checkpoints.save(step, state() if tree is None else tree, META)


def restore(folder, like=None, step=None):
  with orbax.TrainingCheckpoints(folder) as checkpoints:
    return checkpoints.restore(state(9) if like is None else like, step)


def test_a_saved_state_comes_back_with_its_keys(tmp_path):
  save(tmp_path)
  got, meta = restore(tmp_path)
  assert_same(got, state())
  assert meta == META
  np.testing.assert_array_equal(
    jax.random.uniform(got["key"]), jax.random.uniform(state()["key"])
  )


def test_keys_of_another_generator_come_back_as_such(tmp_path):
  tree = {"key": jax.random.key(1, impl="rbg")}
  save(tmp_path, tree=tree)
  got, _ = restore(tmp_path, like={"key": jax.random.key(2, impl="rbg")})
  assert got["key"].dtype == tree["key"].dtype
  np.testing.assert_array_equal(
    jax.random.key_data(got["key"]), jax.random.key_data(tree["key"])
  )


def test_the_newest_step_is_restored_and_old_ones_are_deleted(tmp_path):
  with orbax.TrainingCheckpoints(tmp_path, max_to_keep=2) as checkpoints:
    assert checkpoints.latest_step() is None
    for step in (1, 2, 10):
      checkpoints.save(step, state(step), META)
    assert checkpoints.latest_step() == 10
    got, _ = checkpoints.restore(state())
    assert int(got["step"]) == 10
    got, _ = checkpoints.restore(state(), 2)
    assert int(got["step"]) == 2
    with pytest.raises(ValueError, match=f"{tmp_path}/1"):
      checkpoints.restore(state(), 1)


def test_a_save_has_copied_the_state_when_it_returns(tmp_path):
  donate = jax.jit(
    lambda tree: jax.tree.map(lambda x: x + 1, tree), donate_argnums=0
  )
  tree = {"w": jnp.zeros((500, 1000)), "b": jnp.zeros(3)}
  with orbax.TrainingCheckpoints(tmp_path) as checkpoints:
    checkpoints.save(1, tree, META)
    for _ in range(5):
      tree = donate(tree)
    got, _ = checkpoints.restore(tree)
  assert not any(np.asarray(leaf).any() for leaf in got.values())


def test_what_a_killed_save_has_left_is_removed(tmp_path):
  save(tmp_path)
  left = tmp_path / "6.orbax-checkpoint-tmp"
  shutil.copytree(tmp_path / "5", left)
  got, _ = restore(tmp_path)
  assert_same(got, state())
  ends = time.monotonic() + 20  # Orbax removes it in the background.
  while left.exists() and time.monotonic() < ends:
    time.sleep(0.01)
  assert not left.exists()


@pytest.mark.filterwarnings("ignore")  # Threads of Orbax end with an error.
def test_a_full_disk_is_told_and_older_checkpoints_are_whole(small_disk):
  folder = small_disk(3) / "checkpoints"
  save(folder)
  small_disk_lib.fill(folder.parent, leave_kb=64)
  big = state() | {"w": jnp.asarray(np.random.default_rng(0).normal(size=9**5))}
  message = f"{folder}: the newest .* was not written .no space left.*make room"
  with pytest.raises(ValueError, match=message):
    save(folder, 6, big)
  got, _ = restore(folder)
  assert_same(got, state())


def test_a_damaged_checkpoint_names_the_one_before(tmp_path):
  save(tmp_path, 3)
  save(tmp_path, 5)
  for file in (tmp_path / "5" / "state").rglob("*"):
    if file.is_file():
      file.unlink()
  with pytest.raises(ValueError, match=r"/5: .* to go on from step 3"):
    restore(tmp_path)
  got, _ = restore(tmp_path, step=3)
  assert_same(got, state())
  shutil.rmtree(tmp_path / "3")
  with pytest.raises(ValueError, match=r"/5: .* to start anew"):
    restore(tmp_path)


def test_a_relative_folder_is_taken_from_where_one_is(tmp_path, monkeypatch):
  monkeypatch.chdir(tmp_path)
  save(pathlib.Path("run"))
  got, _ = restore("run")
  assert_same(got, state())


def test_nothing_to_restore_is_said_with_the_folder(tmp_path):
  with pytest.raises(ValueError, match=f"{tmp_path}: no checkpoint"):
    restore(tmp_path)


# Orbax's event loop is collected after a failed restore, with a complaint.
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
@pytest.mark.parametrize(
  "change",
  [
    lambda tree: tree | {"params": state(width=41)["params"]},
    lambda tree: tree | {"more": jnp.zeros(3)},
    lambda tree: {k: v for k, v in tree.items() if k != "keys"},
  ],
  ids=["shape", "more", "fewer"],
)
def test_a_state_of_another_shape_is_refused(change, tmp_path):
  save(tmp_path)
  with pytest.raises(ValueError, match=f"{tmp_path}/5: .*another shape"):
    restore(tmp_path, like=change(state()))


def damaged_copies(tmp_path):
  """A copy of one checkpoint for every file and way to damage it."""
  whole = tmp_path / "whole"
  save(whole)
  files = [path for path in whole.rglob("*") if path.is_file()]
  assert files
  for file in files:
    for way in ("delete", "halve", "empty"):
      copy = tmp_path / "copy"
      shutil.rmtree(copy, ignore_errors=True)
      shutil.copytree(whole, copy)
      victim = copy / file.relative_to(whole)
      content = victim.read_bytes()
      if way == "delete":
        victim.unlink()
      else:
        half = len(content) // 2 if way == "halve" else 0
        victim.write_bytes(content[:half])
      yield f"{way} {file.relative_to(whole)}", copy


@pytest.mark.filterwarnings("ignore")  # Orbax warns of what it finds.
def test_a_damaged_checkpoint_is_refused_or_whole_never_wrong(tmp_path):
  refused, wrong = 0, []
  for name, folder in damaged_copies(tmp_path):
    try:
      got, meta = restore(folder, step=5)
    except ValueError as error:
      refused += 1
      if f"{folder}/5" not in str(error):
        wrong.append(f"{name}: not named: {error}")
    except Exception as error:
      wrong.append(f"{name}: {type(error).__name__}: {error}")
    else:
      # Some files (sharding, timings) are not needed for the state.
      assert meta == META, name
      assert_same(got, state())
  assert not wrong
  assert refused > 5
