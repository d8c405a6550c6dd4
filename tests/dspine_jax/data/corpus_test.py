import numpy as np
import pytest
import tokenizers

from dspine_jax.data import corpus


@pytest.fixture(scope="module")
def root(tmp_path_factory):
  folder = tmp_path_factory.mktemp("lib")
  for number in range(60):
    (folder / f"file{number:02}.py").write_text(f"x = {number}\n" * 20)
  return folder


def test_files_are_split_by_a_hash_of_their_name_alone(root):
  found = corpus.read_corpus(root)
  assert len(found.train) + len(found.held_out) == 60
  assert all(corpus.is_held_out(file.name) for file in found.held_out)
  assert not any(corpus.is_held_out(file.name) for file in found.train)
  names = [file.name for file in found.train]
  assert names == sorted(names)


def test_the_held_out_files_of_every_published_number_are_pinned():
  held_out = ["ast.py", "enum.py", "getopt.py", "platform.py", "types.py"]
  assert all(map(corpus.is_held_out, held_out))
  assert not any(map(corpus.is_held_out, ["abc.py", "os.py", "json/tool.py"]))


def test_about_one_file_in_twenty_is_held_out():
  held = sum(corpus.is_held_out(f"package/{i}.py") for i in range(4000))
  assert 150 < held < 250


def test_the_split_does_not_move_when_files_come_and_go(root, tmp_path):
  before = corpus.read_corpus(root)
  (root / "another.py").write_text("y = 1\n")
  after = corpus.read_corpus(root)
  (root / "another.py").unlink()
  assert set(before.held_out) <= set(after.held_out)
  assert set(before.train) <= set(after.train)
  assert before.digest != after.digest
  assert before == corpus.read_corpus(root)


@pytest.mark.parametrize(
  "name",
  [
    "test/a.py",
    "pkg/tests/a.py",
    "site-packages/a.py",
    "__pycache__/a.py",
    "idlelib/b/a.py",
    "_sysconfigdata_x.py",
    "config-3.12/a.py",
    "blank.py",
    "latin.py",
    "note.txt",
  ],
)
def test_files_that_differ_between_installations_are_left_out(name, root):
  want = corpus.read_corpus(root)
  path = root / name
  path.parent.mkdir(parents=True, exist_ok=True)
  text = {"blank.py": b" \n", "latin.py": b"# \xe9\n"}
  path.write_bytes(text.get(name, b"z = 1\n"))
  got = corpus.read_corpus(root)
  path.unlink()
  assert got == want


@pytest.mark.parametrize("name", ["testing/a.py", "test.py", "x/test_tool.py"])
def test_names_that_only_look_like_tests_are_kept(name, root):
  path = root / name
  path.parent.mkdir(parents=True, exist_ok=True)
  path.write_text("z = 1\n")
  found = corpus.read_corpus(root)
  path.unlink()
  assert name in {file.name for file in found.train + found.held_out}


def test_the_digest_is_of_names_and_texts(root):
  before = corpus.read_corpus(root).digest
  path = root / "file07.py"
  text = path.read_text()
  path.write_text(text + "#")
  assert corpus.read_corpus(root).digest != before
  path.write_text(text)
  path.rename(root / "zzz.py")
  assert corpus.read_corpus(root).digest != before
  (root / "zzz.py").rename(path)
  assert corpus.read_corpus(root).digest == before


def test_the_standard_library_is_a_corpus_with_its_version():
  found = corpus.standard_library()
  assert found.origin.startswith("python 3.")
  names = {file.name for file in found.train}
  assert "json/decoder.py" in names
  assert "getopt.py" in {file.name for file in found.held_out}
  assert not [name for name in names if name.startswith("test/")]


def test_excluded_names_above_the_root_do_not_matter(root, tmp_path):
  nested = tmp_path / "site-packages" / "lib"
  nested.parent.mkdir()
  nested.symlink_to(root, target_is_directory=True)
  assert corpus.read_corpus(nested).digest == corpus.read_corpus(root).digest


def test_a_folder_that_cannot_be_split_is_refused(tmp_path):
  with pytest.raises(ValueError, match="nowhere does not exist"):
    corpus.read_corpus(tmp_path / "nowhere")
  (tmp_path / "only.py").write_text("x = 1\n")
  with pytest.raises(ValueError, match="both are needed"):
    corpus.read_corpus(tmp_path)


def test_the_tokenizer_has_exactly_the_size_asked_for_and_round_trips(root):
  texts = ["def f(x):\n  return x + 1\n", "é → ü\t\x00"]
  tokenizer = corpus.train_tokenizer(texts * 3, 262)
  assert tokenizer.get_vocab_size() == 262
  for text in texts:
    ids = tokenizer.encode(text).ids
    assert tokenizer.decode(ids) == text
  assert [tokenizer.token_to_id(t) for t in corpus.SPECIAL_TOKENS] == [0, 1]


# 258 are the bytes and the two special tokens.
@pytest.mark.parametrize("vocab_size", [100, 257, 5000])
def test_a_vocabulary_that_the_text_cannot_fill_is_refused(vocab_size):
  with pytest.raises(ValueError, match=f"vocab_size={vocab_size}: the text"):
    corpus.train_tokenizer(["ab"], vocab_size)


def test_every_file_ends_with_the_end_of_text():
  tokenizer = corpus.train_tokenizer(["abab"], 258)
  files = [corpus.TextFile("a", "ab"), corpus.TextFile("b", "")]
  streams = corpus.encode_files(tokenizer, files)
  assert [stream[-1] for stream in streams] == [0, 0]
  assert all(stream.dtype == np.int32 for stream in streams)
  assert tokenizer.decode(streams[0][:-1].tolist()) == "ab"
  assert len(streams[1]) == 1


def test_without_that_token_a_file_ends_with_another_or_not_at_all():
  text = corpus.train_tokenizer(["abab"], 258).to_str()
  tokenizer = tokenizers.Tokenizer.from_str(
    text.replace(corpus.END_OF_TEXT, "<|im_end|>")
  )
  files = [corpus.TextFile("a", "ab")]
  (stream,) = corpus.encode_files(tokenizer, files, otherwise=(7, 5))
  assert stream[-1] == 7 and stream.dtype == np.int32
  with pytest.raises(ValueError, match=r"no <\|endoftext\|> token"):
    corpus.encode_files(tokenizer, files)


def test_windows_are_the_joined_streams_cut_into_rows():
  streams = [np.arange(5, dtype=np.int32), np.arange(5, 12, dtype=np.int32)]
  got = corpus.windows(streams, 5)
  np.testing.assert_array_equal(got, np.arange(10).reshape(2, 5))
  with pytest.raises(ValueError, match="12 tokens, fewer than one row of 13"):
    corpus.windows(streams, 13)
