"""make_answers against a server: whatever fails, the file is the same."""

import contextlib
import json
import os
import pathlib
import signal
import socket
import subprocess
import sys
import time
from concurrent import futures

import pytest

from dspine_jax.data import chats, completions
from dspine_jax.data import journal as journal_lib
from tests import openai_server, script_runner, small_disk, tiny_folder

ROOT = pathlib.Path(__file__).resolve().parents[2]
PROMPTS = [
  [f"one two {number} three", *([f"again {number}"] * (number % 3 == 0))]
  for number in range(40)
]
CHATML = (
  "{% for message in messages %}"
  "{{ '<' + message['role'] + '>' + message['content'] }}"
  "{% endfor %}<assistant>"
)


def write_prompts(path, conversations):
  lines = [json.dumps({"turns": turns}) for turns in conversations]
  path.write_text("\n".join(lines) + "\n")
  return path


@pytest.fixture(name="prompts", scope="module")
def fixture_prompts(tmp_path_factory):
  return write_prompts(tmp_path_factory.mktemp("prompts") / "p.jsonl", PROMPTS)


def values(url, prompts, work_dir, **changes):
  common = {"new_tokens": 3, "temperatures": 0, "concurrency": 8}
  own = {"server": url, "prompts": prompts, "work_dir": work_dir}
  return common | own | changes


def ask(*args, **changes):
  return script_runner.run("make_answers", **values(*args, **changes))


def ask_well(url, prompts, work_dir, **changes):
  done = ask(url, prompts, work_dir, **changes)
  assert done.status == 0, done.stderr
  assert not (work_dir / "train_t0.journal").exists()
  return (work_dir / "train_t0.jsonl").read_bytes()


@pytest.fixture(name="undisturbed", scope="module")
def fixture_undisturbed(prompts, tmp_path_factory):
  """What a run gives that nothing disturbs, asked one by one."""
  with openai_server.here() as url:
    return ask_well(url, prompts, tmp_path_factory.mktemp("a"), concurrency=1)


def test_answers_are_in_the_order_of_the_prompts_and_counted(
  undisturbed, prompts, tmp_path
):
  with openai_server.here() as url:
    assert ask_well(url + "/v1/", prompts, tmp_path) == undisturbed
  lines = [json.loads(line) for line in undisturbed.splitlines()]
  assert [line["id"] for line in lines] == list(range(40))
  first = lines[0]["messages"]
  assert [message["role"] for message in first] == ["user", "assistant"] * 2
  assert [message["content"] for message in first] == [
    *("one two 0 three", "three 0 two", "again 0", "0 again")
  ]
  assert lines[0]["finish_reasons"] == ["length", "stop"]
  # What the training of a drafter reads.
  read = list(chats.read(tmp_path / "train_t0.jsonl"))
  assert [one.messages for one in read] == [line["messages"] for line in lines]
  results = json.loads((tmp_path / "results.json").read_text())
  assert results == {
    "train_t0": {
      "conversations": 40,
      "answers": 54,
      "prompt_tokens": 40 * 4 + 14 * 9,
      "answer_tokens": 40 * 4 + 14 * 2,
      "cut_by_length": 40,
      "empty": 0,
      "refused": 0,
    }
  }


def test_a_busy_failing_server_that_drops_and_aborts_changes_nothing(
  undisturbed, prompts, tmp_path
):
  faults = {"busy": 2, "unavailable": 3, "dropped": 3, "aborted": 2}
  with openai_server.here(**faults) as url:
    assert ask_well(url, prompts, tmp_path, concurrency=40) == undisturbed


def test_what_is_refused_or_empty_is_listed_and_left_out(
  undisturbed, prompts, tmp_path
):
  more = [["so long", "REFUSE"], ["SILENCE"], ["REFUSE"], ["the end"]]
  own = write_prompts(tmp_path / "own.jsonl", [*PROMPTS, *more])
  run = tmp_path / "run"
  with openai_server.here() as url:
    made = ask_well(url, own, run)
  assert made.startswith(undisturbed)
  lines = [json.loads(line) for line in made.splitlines()[40:]]
  assert [(line["id"], len(line["messages"])) for line in lines] == [
    *((40, 2), (43, 2))
  ]
  results = json.loads((run / "results.json").read_text())["train_t0"]
  assert (results["refused"], results["empty"]) == (2, 1)
  left_out = (run / "train_t0.left_out.jsonl").read_text().splitlines()
  assert [
    (line["id"], line["turn"], line["why"], line["prompt"])
    for line in map(json.loads, left_out)
  ] == [
    (40, 1, "refused", "REFUSE"),
    (41, 0, "empty", "SILENCE"),
    (42, 0, "refused", "REFUSE"),
  ]
  assert "context length" in left_out[0]


def wait_for_lines(journal, count):
  """Waits until the journal has that many lines."""
  end_s = time.monotonic() + 120
  while not journal.exists() or journal.read_bytes().count(b"\n") < count:
    assert time.monotonic() < end_s, "the run is over, or never began"
    time.sleep(0.01)


@contextlib.contextmanager
def killed(server, journal, lines, away_s=None):
  """Kills the server when the journal has that many lines; it comes back."""

  def act():
    wait_for_lines(journal, lines)
    server.kill()
    if away_s is not None:
      time.sleep(away_s)
      server.start()

  with futures.ThreadPoolExecutor() as pool:
    done = pool.submit(act)
    yield
    done.result()


def test_a_server_killed_and_started_again_changes_nothing(
  undisturbed, prompts, tmp_path
):
  with openai_server.process(tmp_path / "s", slow_s=0.05) as server:
    journal = tmp_path / "run" / "train_t0.journal"
    with killed(server, journal, lines=10, away_s=0.3):
      assert ask_well(server.url, prompts, tmp_path / "run") == undisturbed


class Killed(Exception):
  pass


def kill_after(count, monkeypatch, *args, **changes):
  """Ends a run, without a word, when it has journalled so much."""
  append = journal_lib.Journal.append

  def append_or_die(self, record):
    if len(self) == count:
      raise Killed
    append(self, record)

  with monkeypatch.context() as patch:
    patch.setattr(journal_lib.Journal, "append", append_or_die)
    with pytest.raises(Killed):
      ask(*args, **changes)


def test_a_stopped_client_goes_on_behind_a_torn_line(
  undisturbed, prompts, tmp_path, monkeypatch
):
  with openai_server.here() as url:
    kill_after(12, monkeypatch, url, prompts, tmp_path)
    journal = tmp_path / "train_t0.journal"
    journal.write_bytes(journal.read_bytes()[:-20])
    asked = []
    converse = completions.converse

    def watched(server, request, conversations, waiting):
      conversations = list(conversations)
      asked.extend(number for number, _ in conversations)
      return converse(server, request, conversations, waiting)

    monkeypatch.setattr(completions, "converse", watched)
    assert ask_well(url, prompts, tmp_path) == undisturbed
  assert len(asked) == 40 - 11
  # And a part that is finished needs no answer.
  asked.clear()
  with openai_server.here() as url:
    assert ask_well(url, prompts, tmp_path) == undisturbed
  assert not asked


def free_port():
  with socket.socket() as own:
    own.bind(("127.0.0.1", 0))
    return own.getsockname()[1]


def test_a_server_that_stays_away_ends_the_run_and_keeps_what_is_there(
  undisturbed, prompts, tmp_path
):
  run = tmp_path / "run"
  journal = run / "train_t0.journal"
  with openai_server.process(tmp_path / "s", slow_s=0.02) as server:
    with killed(server, journal, lines=9):
      done = ask(server.url, prompts, run, server_patience=0.5)
  assert done.status == 1
  assert done.error.startswith(f"--server={server.url}: no answer for ")
  assert "repeat the command" in done.error and str(run) in done.error
  assert journal.exists() and not (run / "train_t0.jsonl").exists()
  with openai_server.here() as url:  # At another place, too.
    assert ask_well(url, prompts, run) == undisturbed


def test_what_cannot_be_asked_is_told_in_one_line(prompts, tmp_path):
  def fail(url, **changes):
    done = ask(url, prompts, tmp_path / "run", **changes)
    assert done.status == 1
    return done.error

  url = f"http://127.0.0.1:{free_port()}"
  error = fail(url, server_patience=0.3)
  assert error.startswith(f"--server={url}: no answer for ")
  assert error.endswith("(Connection refused); start it and repeat the command")
  assert fail(url, temperatures="") == "--temperatures: at least one is needed"
  for name in ("server_patience", "request_timeout"):
    assert f"--{name}=nan: must be a finite" in fail(url, **{name: "nan"})
  assert "--server=nowhere: url=nowhere: not like" in fail("nowhere")
  with openai_server.here() as url:
    error = fail(url + "/x")
    assert f"{url}/x/v1/models: 404 Not Found" in error
    assert error.endswith("; check the URL")
    error = fail(url, served_model="other")
    assert error == f"--served_model=other: {url} serves served"
    error = fail(url, api_key_env="NO_SUCH_KEY")
    assert error == "--api_key_env=NO_SUCH_KEY: not set, or empty"
    error = fail(url, corpus=tmp_path)
    assert error.startswith(f"--corpus={tmp_path}: not with --server")
    assert (
      "needs --prompts"
      in script_runner.run(
        "make_answers", work_dir=tmp_path / "run", server=url
      ).error
    )
  error = script_runner.run("make_answers", concurrency=3).error
  assert error == "--concurrency=3: only with --server"
  assert not (tmp_path / "run").exists()


def test_other_prompts_in_the_same_directory_are_refused(
  prompts, tmp_path, monkeypatch
):
  with openai_server.here() as url:
    kill_after(5, monkeypatch, url, prompts, tmp_path)
    before = (tmp_path / "train_t0.journal").read_bytes()
    own = write_prompts(tmp_path / "own.jsonl", PROMPTS[::-1])
    assert "content of prompts has changed" in ask(url, own, tmp_path).error
    assert "new_tokens is 3 there" in (
      ask(url, prompts, tmp_path, new_tokens=4).error
    )
    (tmp_path / "config.json").unlink()  # Not even then.
    error = ask(url, own, tmp_path).error
    assert "line 1: it was begun with other settings" in error
    assert (tmp_path / "train_t0.journal").read_bytes() == before


def test_a_full_disk_names_the_file_and_the_run_goes_on_later(
  undisturbed, prompts, tmp_path, small_disk
):
  work_dir = small_disk(1)
  with openai_server.here() as url:
    ballast = fill_disk(work_dir)
    done = ask(url, prompts, work_dir)
    assert done.status == 1
    assert "No space left on device: free space there" in done.error
    assert done.error.startswith(str(work_dir / "train_t0."))
    assert not (work_dir / "train_t0.jsonl").exists()
    ballast.unlink()
    assert ask_well(url, prompts, work_dir) == undisturbed


def fill_disk(work_dir):
  # Room for the first files of a run, and a part of the journal.
  return small_disk.fill(work_dir, leave_kb=24)


@pytest.mark.slow  # 5 s: a start of JAX for the client.
def test_a_killed_client_process_goes_on(undisturbed, prompts, tmp_path):
  journal = tmp_path / "run" / "train_t0.journal"
  with openai_server.process(tmp_path / "s", slow_s=0.1) as server:
    flags = values(server.url, prompts, tmp_path / "run")
    client = subprocess.Popen(
      [sys.executable, "-m", "experiments.make_answers"]
      + script_runner.arguments(**flags),
      cwd=ROOT,
      env=os.environ | {"JAX_PLATFORMS": "cpu"},
      stderr=subprocess.PIPE,
    )
    wait_for_lines(journal, 10)
    done = ask(server.url, prompts, tmp_path / "run")
    assert f"process {client.pid} on {socket.gethostname()}" in done.error
    client.send_signal(signal.SIGKILL)
    client.communicate()
    assert journal.exists()
  with openai_server.here() as url:
    assert ask_well(url, prompts, tmp_path / "run") == undisturbed


@pytest.mark.slow  # 15 s: the server decodes 450 answers, and starts twice.
def test_200_concurrent_requests_outlive_a_server_that_decodes(tiny, tmp_path):
  target = tmp_path / "target"
  target.mkdir()
  for path in tiny.target.iterdir():
    (target / path.name).write_bytes(path.read_bytes())
  (target / "chat_template.jinja").write_text(CHATML)
  texts = [f"def f{number}(x):" for number in range(220)]
  own = write_prompts(tmp_path / "own.jsonl", [[text] for text in texts])
  flags = {"new_tokens": tiny_folder.NEW, "concurrency": 200}
  with openai_server.process(tmp_path / "s", target=target) as server:
    whole = ask_well(server.url, own, tmp_path / "whole", **flags)
    journal = tmp_path / "killed" / "train_t0.journal"
    with killed(server, journal, lines=20, away_s=0.0):
      assert ask_well(server.url, own, tmp_path / "killed", **flags) == whole
  answers = [json.loads(line)["messages"][1] for line in whole.splitlines()]
  assert len({answer["content"] for answer in answers}) > 20
