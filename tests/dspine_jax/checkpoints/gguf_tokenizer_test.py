import pytest

from dspine_jax.checkpoints import gguf, gguf_tokenizer
from tests import tiny_gguf

CFG = tiny_gguf.target_config(tie_embeddings=True, num_layers=1)


def read(folder, **changes):
  changes = {f"tokenizer.ggml.{key}": value for key, value in changes.items()}
  return gguf.read(tiny_gguf.write(folder / "t.gguf", CFG, **changes))


@pytest.fixture(name="tokenizer", scope="module")
def fixture_tokenizer(tmp_path_factory):
  return gguf_tokenizer.tokenizer(read(tmp_path_factory.mktemp("gguf")))


def test_ids_are_those_of_the_file(tokenizer):
  assert tokenizer.get_vocab_size() == len(tiny_gguf.TOKENS)
  for index, token in enumerate(tiny_gguf.TOKENS):
    assert tokenizer.token_to_id(token) == index


def test_merges_apply_in_order_and_words_keep_their_space(tokenizer):
  assert tokenizer.encode("the the").tokens == ["the", "Ġthe"]
  assert tokenizer.encode("this").tokens == ["th", "i", "s"]


def test_every_digit_stands_alone_whatever_the_merges(tokenizer):
  assert "12" in tiny_gguf.TOKENS
  assert tokenizer.encode("x 12").tokens == ["x", "Ġ", "1", "2"]


@pytest.mark.parametrize("text", ["naïve  日本 🙂\n\tx = 12", "", "  the "])
def test_text_comes_back(tokenizer, text):
  assert tokenizer.decode(tokenizer.encode(text).ids) == text


def test_control_tokens_are_found_in_text_and_can_be_left_out(tokenizer):
  text = "<|im_start|>the<|im_end|>"
  ids = tokenizer.encode(text).ids
  assert ids[0] == 1 and ids[-1] == 2 and len(ids) == 3
  assert tokenizer.decode(ids) == "the"
  assert tokenizer.decode(ids, skip_special_tokens=False) == text


def test_no_token_is_added_in_front_or_behind(tokenizer):
  assert tokenizer.encode("the").ids == [tokenizer.token_to_id("the")]


def test_user_defined_tokens_are_found_but_not_left_out(tmp_path):
  types = list(tiny_gguf.TYPES)
  types[3] = 4
  tokenizer = gguf_tokenizer.tokenizer(read(tmp_path, token_type=types))
  ids = tokenizer.encode("<empty_output>").ids
  assert ids == [3] and tokenizer.decode(ids) == "<empty_output>"


def test_bytes_that_the_vocabulary_lacks_are_dropped(tmp_path):
  tokens = ["<none>" if x == "x" else x for x in tiny_gguf.TOKENS]
  tokenizer = gguf_tokenizer.tokenizer(read(tmp_path, tokens=tokens))
  assert tokenizer.encode("axe").tokens == ["a", "e"]


def test_the_chat_template_is_the_files_or_none(tmp_path):
  file = read(tmp_path)
  assert gguf_tokenizer.chat_template(file) == tiny_gguf.TEMPLATE
  metadata = {"general.architecture": "llama"}
  assert gguf_tokenizer.chat_template(file._replace(metadata=metadata)) is None


@pytest.mark.parametrize(
  ("changes", "message"),
  [
    ({"model": "llama"}, "model='llama' is not implemented"),
    ({"pre": "llama-bpe"}, "pre='llama-bpe' is not implemented .smollm"),
    ({"pre": None}, "key 'tokenizer.ggml.pre' is missing"),
    ({"merges": None}, "key 'tokenizer.ggml.merges' is missing"),
    ({"merges": ["th", "th e"]}, "tokenizer.ggml.merges: "),
    ({"merges": ["q z"]}, "tokenizer.ggml.merges: "),
    ({"token_type": [3, 3]}, "token_type 2"),
    ({"tokens": ["a"] * len(tiny_gguf.TOKENS)}, ", 1 of them distinct"),
  ],
)
def test_metadata_that_cannot_be_is_named(tmp_path, changes, message):
  file = read(tmp_path, **changes)
  with pytest.raises(ValueError, match=message) as info:
    gguf_tokenizer.tokenizer(file)
  assert str(info.value).startswith(f"{file.path}: ")
