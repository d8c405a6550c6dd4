import errno
import json

import pytest

from dspine_jax.data import journal
from tests import small_disk as disk

SETTINGS = {"model": "a", "sizes": (1, 2)}


def write(path, keys=(3, 1)):
  made = journal.Journal(path, SETTINGS)
  for key in keys:
    made.append({"id": key, "text": f"über {key}"})
  return made


def test_records_come_back_by_key_in_another_process_s_eyes(tmp_path):
  path = tmp_path / "j"
  made = write(path)
  # Before it is closed: a killed process closes nothing.
  again = journal.Journal(path, SETTINGS)
  assert len(again) == 2 and 3 in again and 2 not in again
  assert [record["text"] for record in again.records()] == ["über 1", "über 3"]
  again.append({"id": 2, "text": "two"})
  again.close()
  again.close()
  made.close()
  last = journal.Journal(path, SETTINGS)
  assert [record["id"] for record in last.records()] == [1, 2, 3]
  last.remove()
  assert not path.exists()


def test_keys_may_be_several_numbers_and_the_last_record_counts(tmp_path):
  made = journal.Journal(tmp_path / "j", {})
  for key, value in (((1, 0), "a"), ((0, 5), "b"), ((1, 0), "c")):
    made.append({"id": key, "value": value})
  made.close()
  again = journal.Journal(tmp_path / "j", {})
  assert (1, 0) in again
  assert [record["value"] for record in again.records()] == ["b", "c"]
  again.close()


def test_whatever_is_torn_off_costs_only_the_torn_record(tmp_path):
  path = tmp_path / "j"
  write(path).close()
  whole = path.read_bytes()
  first = whole.index(b"\n") + 1
  second = whole.index(b"\n", first) + 1
  for size in (*range(0, len(whole), 5), first, first + 1, second - 1):
    path.write_bytes(whole[:size])
    again = journal.Journal(path, SETTINGS)
    assert len(again) == (size >= second)
    again.append({"id": 7, "text": "new"})
    again.close()
    lines = path.read_bytes().splitlines()
    assert json.loads(lines[-1])["id"] == 7
    assert len(lines) == 2 + (size >= second)


def test_other_settings_and_damage_inside_are_told_and_nothing_is_lost(
  tmp_path,
):
  path = tmp_path / "j"
  write(path).close()
  with pytest.raises(ValueError, match="line 1: it was begun with other"):
    journal.Journal(path, {"model": "b"})
  lines = path.read_bytes().splitlines(keepends=True)
  for damage in (b'{"id": 3, "te\n', b"{}\n", b"[]\n", b"\xff\n"):
    damaged = b"".join([lines[0], damage, lines[2]])
    path.write_bytes(damaged)
    with pytest.raises(ValueError, match=r"j: line 2: .*delete the file"):
      journal.Journal(path, SETTINGS)
    assert path.read_bytes() == damaged


def test_half_a_character_does_not_stop_a_record(tmp_path):
  made = journal.Journal(tmp_path / "j", {})
  made.append({"id": 0, "text": "\ud83d"})
  assert made.read(0)["text"] == "?"
  made.close()


def test_a_full_disk_keeps_whole_records_and_appending_may_go_on(small_disk):
  path = small_disk(0.25) / "j"
  made = write(path)
  ballast = disk.fill(path.parent, leave_kb=16)
  size = 0
  with pytest.raises(OSError) as caught:
    while True:
      made.append({"id": 10 + size, "text": "x" * 3000})
      size += 1
  assert caught.value.errno == errno.ENOSPC
  assert caught.value.filename == str(path)
  assert size >= 4 and 10 + size not in made
  assert path.read_bytes().endswith(b"\n")
  ballast.unlink()
  made.append({"id": 10 + size, "text": "y"})
  made.close()
  again = journal.Journal(path, SETTINGS)
  assert len(again) == 2 + size + 1
  assert again.read(10 + size)["text"] == "y"
  again.close()
