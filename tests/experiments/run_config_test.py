"""Work directories of another config: who may have them, what is told."""

import json

import pytest

from experiments import run_io

OLD = {"method": "dspine", "model": {"size": 64, "layers": [0, 2]}}


def start(path, config, *words):
  return run_io.open_work_dir(
    str(path), config=config, argv=["train", *words], resume=True
  )


@pytest.fixture(name="refused")
def fixture_refused(tmp_path):
  """Tells a run of another config where one has made something."""

  def refuse(old, new):
    start(tmp_path, old)
    (tmp_path / "train_t0.journal").touch()
    before = {path: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(ValueError) as caught:
      start(tmp_path, new)
    assert {path: path.read_bytes() for path in tmp_path.iterdir()} == before
    return str(caught.value)

  return refuse


def test_another_config_is_refused_with_keys_both_values_and_what_to_do(
  tmp_path, refused
):
  new = {"method": "dspine", "model": {"size": 128}, "seed": 0}
  message = refused(OLD, new)
  assert f"--work_dir={tmp_path} holds a run with another config: " in message
  assert "model.size is 64 there and 128 now" in message
  assert "model.layers is [0, 2] there and absent now" in message
  assert "seed is absent there and 0 now" in message
  assert "method" not in message and "more" not in message
  assert message.endswith(
    "Name another --work_dir, or repeat the command in"
    f" {tmp_path / 'command.txt'}"
  )


def test_of_many_differences_a_few_are_told(refused):
  old = {f"key{number}": 0 for number in range(9)}
  message = refused(old, dict.fromkeys(old, 1))
  assert message.count(" is 0 there and 1 now; ") == 4
  assert "key3 is 0 there and 1 now; and 5 more. Name" in message


def test_a_digest_is_told_by_what_it_stands_for(refused):
  message = refused(
    {"chats": {"digest": "a1"}, "prompts_digest": "b1"},
    {"chats": {"digest": "a2"}, "prompts_digest": "b2", "own_digest": "c"},
  )
  assert "the content of chats has changed; " in message
  assert "the content of prompts has changed; " in message
  assert 'own_digest is absent there and "c" now' in message
  assert "a1" not in message and "b2" not in message


def test_a_first_try_that_made_nothing_does_not_claim_the_directory(tmp_path):
  start(tmp_path, OLD, "--seed=0")
  assert (tmp_path / ".lock").exists()
  work_dir = start(tmp_path, {"seed": 1}, "--seed=1")
  assert json.loads(work_dir.config.read_text()) == {"seed": 1}
  # What it says to repeat is of this config.
  assert work_dir.command.read_text() == "train --seed=1\n"
  (tmp_path / "rows").mkdir()
  with pytest.raises(ValueError, match="seed is 1 there and 2 now"):
    start(tmp_path, {"seed": 2})
