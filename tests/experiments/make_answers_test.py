"""A killed decoding of answers goes on in the middle of a part."""

import json
import shutil

import pytest

from dspine_jax.data import answers as answers_lib
from dspine_jax.data import corpus, journal, prompts
from tests import script_runner

CHATML = (
  "{% for message in messages %}"
  "{{ '<' + message['role'] + '>' + message['content'] }}"
  "{% endfor %}<assistant>"
)


@pytest.fixture(name="values", scope="module")
def fixture_values(tiny, tmp_path_factory):
  """Flags of a run over conversations of one and two turns, 3 a batch."""
  root = tmp_path_factory.mktemp("chat")
  target = root / "target"
  target.mkdir()
  for path in tiny.target.iterdir():
    (target / path.name).write_bytes(path.read_bytes())
  (target / "chat_template.jinja").write_text(CHATML)
  talks = [[f"x = {i}"] + ["why?"] * (i % 2) for i in range(8)]
  lines = [json.dumps({"turns": turns}) + "\n" for turns in talks]
  (root / "prompts.jsonl").write_text("".join(lines))
  return {
    "target": target,
    "prompts": root / "prompts.jsonl",
    "train_prompts": 8,
    "prompt_tokens": 128,
    "longest_prompt": 128,
    "new_tokens": 8,
    "batch_size": 3,
    "temperatures": "1",
  }


def make(values, work_dir, **changes):
  return script_runner.run(
    "make_answers", work_dir=work_dir, **values | changes
  )


@pytest.fixture(name="whole", scope="module")
def fixture_whole(values, tmp_path_factory):
  work_dir = tmp_path_factory.mktemp("whole")
  done = make(values, work_dir)
  assert done.status == 0, done.stderr
  assert [path.name for path in work_dir.glob("*train*")] == ["train_t1.npz"]
  return answers_lib.load(work_dir / "train_t1.npz")


class Killed(Exception):
  pass


# In the first batch, behind one, and among the second turns.
@pytest.mark.parametrize(("count", "finished"), [(2, 0), (3, 3), (10, 8)])
def test_a_stopped_run_decodes_the_rest_and_gives_the_same_answers(
  values, whole, tmp_path, monkeypatch, count, finished
):
  append, appended = journal.Journal.append, []

  def counted(self, record):
    if len(appended) == count:
      raise Killed
    append(self, record)
    appended.append(record["id"])

  with monkeypatch.context() as patch:
    patch.setattr(journal.Journal, "append", counted)
    with pytest.raises(Killed):
      make(values, tmp_path)
  assert not (tmp_path / "train_t1.npz").exists()
  decoded = []

  def watched(self, record):
    decoded.append(record["id"])
    append(self, record)

  monkeypatch.setattr(journal.Journal, "append", watched)
  done = make(values, tmp_path)
  assert done.status == 0, done.stderr
  found = answers_lib.load(tmp_path / "train_t1.npz")
  for one, other in zip(found, whole, strict=True):
    assert one.tobytes() == other.tobytes()
  assert len(decoded) == 12 - finished
  assert not (tmp_path / "train_t1.journal").exists()


def test_a_journal_of_other_prompts_is_told(values, tmp_path):
  (tmp_path / "train_t1.journal").write_text('{"settings": {}}\n')
  error = make(values, tmp_path).error
  assert error.startswith(f"{tmp_path / 'train_t1.journal'}: line 1")
  assert "delete the file" in error


def test_text_ends_with_the_target_s_own_token_where_it_has_no_other(
  tiny, tmp_path, monkeypatch
):
  target = shutil.copytree(tiny.target, tmp_path / "target")
  path = target / "tokenizer.json"
  path.write_text(path.read_text().replace(corpus.END_OF_TEXT, "<|im_end|>"))
  config = json.loads((target / "config.json").read_text())

  def stop(streams, **unused_options):
    raise ValueError(f"ends: {sorted({int(ids[-1]) for ids in streams})}")

  monkeypatch.setattr(prompts, "cut_prompts", stop)
  for end, told in (
    (7, "ends: [7]"),
    (
      None,
      f"target {target}: the tokenizer has no <|endoftext|> token, and its"
      " config.json no eos_token_id",
    ),
  ):
    config["eos_token_id"] = end
    (target / "config.json").write_text(json.dumps(config))
    # A first try that made nothing does not claim the directory.
    done = script_runner.run(
      "make_answers",
      target=target,
      corpus=tiny.corpus,
      temperatures=int(end is None),
      work_dir=tmp_path / "run",
    )
    assert done.error == told
