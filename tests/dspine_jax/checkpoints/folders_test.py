import pathlib
import random
import signal
import subprocess
import sys
import time

import pytest

from dspine_jax.checkpoints import folders
from tests import small_disk as small_disk_lib

FILES = ("config.json", "model-1.safetensors", "model-2.safetensors")


def export(folder, text):
  with folders.replacing(folder) as fresh:
    for name in FILES:
      (fresh / name).write_text(text)


def content(folder):
  """What all files of an export say; fails if they differ."""
  (text,) = {(folder / name).read_text() for name in FILES}
  return text


def test_a_folder_and_its_parents_are_made(tmp_path):
  export(tmp_path / "a" / "b", "new")
  assert content(tmp_path / "a" / "b") == "new"
  assert [x.name for x in (tmp_path / "a").iterdir()] == ["b"]


@pytest.mark.parametrize("exchanges", [True, False])
def test_weights_are_replaced_and_other_files_carried_over(
  exchanges, tmp_path, monkeypatch
):
  if not exchanges:
    monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
  folder = tmp_path / "model"
  export(folder, "old")
  for name in ("model-3.safetensors", "model.safetensors.index.json"):
    (folder / name).write_text("old")
  (folder / "tokenizer.json").write_text("kept")
  (folder / "more").mkdir()
  (folder / "more" / "x.safetensors").write_text("kept")
  (folder / "link").symlink_to("nowhere")
  export(folder, "new")
  assert content(folder) == "new"
  names = {str(path.relative_to(folder)) for path in folder.rglob("*")}
  assert names == {
    *FILES,
    "tokenizer.json",
    "more",
    "more/x.safetensors",
    "link",
  }
  assert (folder / "tokenizer.json").read_text() == "kept"
  assert [x.name for x in tmp_path.iterdir()] == ["model"]


def test_an_error_leaves_the_old_folder_and_nothing_else(tmp_path):
  folder = tmp_path / "model"
  export(folder, "old")
  with pytest.raises(KeyError), folders.replacing(folder) as fresh:
    (fresh / FILES[0]).write_text("new")
    raise KeyError
  assert content(folder) == "old"
  assert [x.name for x in tmp_path.iterdir()] == ["model"]


def test_the_folder_behind_a_link_is_replaced(tmp_path):
  export(tmp_path / "real", "old")
  (tmp_path / "link").symlink_to("real")
  export(tmp_path / "link", "new")
  assert (tmp_path / "link").is_symlink()
  assert content(tmp_path / "real") == "new"


def test_a_second_export_at_the_same_time_is_refused(tmp_path):
  folder = tmp_path / "model"
  with folders.replacing(folder) as fresh:
    with pytest.raises(ValueError, match="model: another process is exporting"):
      export(folder, "second")
    for name in FILES:
      (fresh / name).write_text("first")
  assert content(folder) == "first"


def test_a_file_in_the_way_is_named(tmp_path):
  (tmp_path / "model").write_text("")
  with pytest.raises(ValueError, match="model: is a file"):
    export(tmp_path / "model", "new")


def test_a_swap_killed_between_its_renames_is_explained_and_undone(
  tmp_path, monkeypatch
):
  folder = tmp_path / "model"
  export(folder, "old")
  monkeypatch.setattr(folders, "_exchange", lambda first, second: False)
  rename = pathlib.Path.rename

  def killed(self, to):
    if self.name == ".model.partial":
      raise KeyboardInterrupt
    return rename(self, to)

  with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
    patch.setattr(pathlib.Path, "rename", killed)
    export(folder, "new")
  assert ".model.old is the one before" in folders.missing(folder)
  with pytest.raises(KeyError), folders.replacing(folder):
    raise KeyError
  assert content(folder) == "old"
  assert folders.missing(tmp_path / "other").endswith("other: no such folder")
  export(folder, "newer")
  assert [x.name for x in tmp_path.iterdir()] == ["model"]


# Without pytest and JAX such a process starts at once.
EXPORTS = """
import sys, itertools
from dspine_jax.checkpoints import folders
for number in itertools.count():
  with folders.replacing(sys.argv[1]) as fresh:
    for name in sys.argv[2:]:
      (fresh / name).write_text(f"{number} " * 1000)
  print(number, flush=True)
"""


def test_a_killed_export_leaves_one_whole_folder_and_the_next_cleans_up(
  tmp_path,
):
  folder, rng = tmp_path / "model", random.Random(0)
  command = [sys.executable, "-c", EXPORTS, str(folder), *FILES]
  left = set()
  for _ in range(8):
    with subprocess.Popen(command, stdout=subprocess.PIPE) as process:
      assert process.stdout is not None and process.stdout.readline()
      time.sleep(rng.uniform(0, 0.02))
      process.send_signal(signal.SIGKILL)
    assert len(content(folder)) >= 2000
    left |= {path.name for path in tmp_path.iterdir()}
  # Some were killed in the middle.
  assert left == {"model", ".model.partial"}
  (tmp_path / ".model.partial").mkdir(exist_ok=True)
  (tmp_path / ".model.partial" / "stray.json").write_text("")
  export(folder, "new")
  assert content(folder) == "new"
  assert not (folder / "stray.json").exists()
  assert [x.name for x in tmp_path.iterdir()] == ["model"]


def test_a_full_disk_leaves_the_old_folder_and_says_so(small_disk):
  folder = small_disk(1) / "model"
  export(folder, "old")
  small_disk_lib.fill(folder.parent, leave_kb=20)
  with pytest.raises(ValueError, match="model: cannot be written .*unchanged"):
    export(folder, "new" * 10_000)
  assert content(folder) == "old"


def test_the_next_export_s_folder_is_left_alone(tmp_path, monkeypatch):
  # Between the end of one export and its tidying up another one may begin.
  swap, other = folders._swap, tmp_path / ".model.partial"

  def swap_and_be_overtaken(fresh, folder):
    swap(fresh, folder)
    other.mkdir()

  monkeypatch.setattr(folders, "_swap", swap_and_be_overtaken)
  export(tmp_path / "model", "first")
  assert content(tmp_path / "model") == "first" and other.is_dir()
