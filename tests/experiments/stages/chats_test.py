import json
import shutil

import numpy as np
import pytest

from dspine_jax.data import chats as chats_lib
from experiments import targets
from experiments.stages import chats, training
from tests import chat_formats, script_runner

RUN = {
  "steps": 2,
  "method": "dflash",
  "num_layers": 1,
  "block_size": 5,
  "num_anchors": 3,
}


@pytest.fixture(name="folder", scope="module")
def fixture_folder(tiny, tmp_path_factory):
  """A target folder with a chat template."""
  folder = tmp_path_factory.mktemp("chat") / "target"
  shutil.copytree(tiny.target, folder)
  chat_formats.tokenizer().save(str(folder / "tokenizer.json"))
  (folder / "chat_template.jinja").write_text(chat_formats.CHATML)
  return folder


@pytest.fixture(name="target", scope="module")
def fixture_target(folder):
  return targets.load(str(folder))


def line(number, words):
  """A conversation as make_answers writes it."""
  said = ("user", f"what is {number}?"), ("assistant", "this " * words)
  messages = [{"role": role, "content": text} for role, text in said]
  return json.dumps({"id": number, "messages": messages}) + "\n"


@pytest.fixture(name="path", scope="module")
def fixture_path(tmp_path_factory):
  path = tmp_path_factory.mktemp("chats") / "chats.jsonl"
  path.write_text("".join(line(n, 1 + 5 * (n % 3)) for n in range(7)))
  return path


def order_of(path, **changes):
  return chats.Order((str(path),), 120, "pack")._replace(**changes)


def make(target, order, folder):
  form = chats.check(target, order)
  digest = chats.origin(form, order)
  return chats.training_rows(form, order, folder / digest)


def test_rows_are_made_once_and_told_every_time(
  target, path, tmp_path, monkeypatch, capsys
):
  rows = make(target, order_of(path), tmp_path)
  first = capsys.readouterr()
  assert "tokenise" in first.err and "100.0%" in first.err
  names, _, values = (line.split("  ") for line in first.out.splitlines()[:3])
  names, values = ([x.strip() for x in y if x] for y in (names, values))
  told = dict(zip(names, values, strict=True))
  assert told["conversations"] == told["documents"] == "7"
  assert told["rows"] == str(len(rows.tokens))
  assert float(told["fill"]) == pytest.approx(rows.fill, abs=1e-3)
  supervised = rows.loss_mask.sum() / rows.lengths.sum()
  assert float(told["supervised"]) == pytest.approx(supervised, abs=1e-3)
  monkeypatch.setattr(chats_lib, "tokenize", None)
  again = make(target, order_of(path), tmp_path)
  assert capsys.readouterr().out == first.out
  for a, b in zip(rows, again, strict=True):
    assert isinstance(b, np.memmap)
    np.testing.assert_array_equal(a, b)


def test_padded_and_packed_rows_hold_the_same_tokens(target, path, tmp_path):
  packed = make(target, order_of(path), tmp_path)
  padded = make(target, order_of(path, packing="pad"), tmp_path)
  assert padded.documents is None and packed.documents is not None
  assert len(packed.tokens) < len(padded.tokens) == 7
  ours, theirs = (
    np.sort(rows.tokens[rows.loss_mask]) for rows in (packed, padded)
  )
  np.testing.assert_array_equal(ours, theirs)


def test_a_run_killed_while_it_writes_leaves_nothing_half_made(
  target, path, tmp_path, monkeypatch
):
  written = []

  def write_one(file, array, save=np.save):
    if written:
      raise KeyboardInterrupt
    written.append(save(file, array))

  with monkeypatch.context() as patch:
    patch.setattr(np, "save", write_one)
    with pytest.raises(KeyboardInterrupt):
      make(target, order_of(path), tmp_path)
  assert not any(p.name[0] != "." for p in tmp_path.iterdir())
  assert len(make(target, order_of(path), tmp_path).tokens) > 0


@pytest.mark.parametrize("damage", ["cut", "gone", "other"])
def test_damaged_rows_are_told_by_their_folder(damage, target, path, tmp_path):
  make(target, order_of(path), tmp_path)
  (folder,) = tmp_path.iterdir()
  file = folder / "tokens.npy"
  if damage == "cut":
    file.write_bytes(file.read_bytes()[:-4])
  elif damage == "gone":
    file.unlink()
  else:
    np.save(file, np.zeros((1, 3), np.int32))
  with pytest.raises(
    ValueError, match=rf"{folder.name}: damaged rows .*remove"
  ):
    make(target, order_of(path), tmp_path)


def test_what_rows_depend_on_is_in_their_name(target, path, tmp_path):
  order = order_of(path)
  form = chats.check(target, order)
  moved = tmp_path / "elsewhere.jsonl"
  shutil.copy(path, moved)
  name = chats.origin(form, order)
  assert chats.origin(form, order_of(moved)) == name
  with moved.open("a") as file:
    file.write(line(7, 3))
  tokenizer = type(form.tokenizer).from_str(form.tokenizer.to_str())
  tokenizer.add_tokens(["this is"])
  names = {
    name,
    chats.origin(form, order_of(moved)),
    chats.origin(form._replace(tokenizer=tokenizer), order),
    chats.origin(form._replace(template=chat_formats.PLAIN), order),
    chats.origin(form._replace(stop_tokens=(3,)), order),
    chats.origin(form, order_of(path, max_length=100)),
    chats.origin(form, order_of(path, packing="pad")),
  }
  assert len(names) == 7


def test_bad_lines_are_left_out_and_told_if_one_says_so(
  target, path, tmp_path, capsys
):
  bad = tmp_path / "bad.jsonl"
  bad.write_text(line(0, 3) + '{"turns": ["a"]}\n' + "{\n" + line(1, 3))
  with pytest.raises(ValueError, match=r"bad\.jsonl: line 2: no answer"):
    make(target, order_of(bad), tmp_path)
  make(target, order_of(bad, skips_bad_lines=True), tmp_path)
  out = capsys.readouterr().out
  assert out.startswith(
    f"2 lines left out; the first: {bad}: line 2: no answer"
  )


@pytest.mark.parametrize("length", [1, 257])
def test_lengths_that_cannot_be_are_refused(length, target, path):
  with pytest.raises(
    ValueError, match=rf"max_length={length}: must be in 2\.\.256"
  ):
    chats.check(target, order_of(path, max_length=length))


def test_a_target_without_template_and_missing_files_are_told(
  tiny, target, path
):
  plain = target._replace(chat_template=None)
  with pytest.raises(ValueError, match=r"--chats=.*no chat template"):
    chats.check(plain, order_of(path))
  order = order_of(path.with_name("none.jsonl"))
  with pytest.raises(ValueError, match=r"none\.jsonl: cannot be read"):
    chats.origin(chats.check(target, order), order)


def train(folder, **changes):
  flags = RUN | {"target": folder, "max_length": 120} | changes
  flags = {name: value for name, value in flags.items() if value is not None}
  return script_runner.run("train_drafter", **flags)


@pytest.mark.slow
def test_a_drafter_is_trained_on_packed_chats_and_only_on_the_same(
  folder, path, tmp_path
):
  chosen = tmp_path / "chats.jsonl"
  shutil.copy(path, chosen)
  options = {"chats": chosen, "features": "on_the_fly", "batch_size": 2}
  run = tmp_path / "run"
  done = train(folder, work_dir=run, **options)
  assert done.status == 0, done.stderr
  assert (run / "drafter" / "model.safetensors").exists()
  rows = [json.loads(x) for x in (run / "metrics.jsonl").open()]
  assert all(0 < row["loss"] < 10 for row in rows) and len(rows) == 2
  with chosen.open("a") as file:
    file.write(line(7, 3))
  error = train(folder, work_dir=run, **options).error
  assert "the content of chats has changed" in error


@pytest.mark.parametrize(
  ("flags", "message"),
  [
    ({"answers": "runs/a"}, "--answers=runs/a: not with --chats"),
    ({"parts": "train_t0"}, "--parts=['train_t0']: not with --chats"),
    ({"chats": None}, "--max_length=120: only with --chats"),
  ],
)
def test_flags_of_the_other_kind_of_data_are_refused(
  flags, message, folder, path, tmp_path
):
  flags = {"chats": path, "work_dir": tmp_path / "run"} | flags
  assert train(folder, **flags).error == message


def test_the_trainer_gets_the_packed_rows_of_the_files(
  folder, path, tmp_path, monkeypatch
):
  got = []

  def train_drafter(unused_target, source, *unused, **unused_options):
    got.append(source.read(np.arange(len(source))))

  monkeypatch.setattr(training, "train_drafter", train_drafter)
  run = tmp_path / "run"
  done = train(folder, chats=path, work_dir=run, features="on_the_fly")
  assert done.status == 0, done.stderr
  target = targets.load(str(folder))
  rows = make(target, order_of(path), tmp_path / "again")
  for name in ("tokens", "loss_mask", "documents"):
    np.testing.assert_array_equal(got[0][name], getattr(rows, name))
  config = json.loads((run / "config.json").read_text())["chats"]
  assert (run / "rows" / config["digest"]).is_dir()
  assert config["paths"] == [str(path)] and config["packing"] == "pack"
