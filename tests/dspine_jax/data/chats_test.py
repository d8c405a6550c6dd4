import json

import numpy as np
import pytest
from tokenizers import processors

from dspine_jax.data import chat, chats
from tests import chat_formats

ASKED = [
  {"role": "user", "content": "the answer?\n"},
  {"role": "assistant", "content": "this one, é → ü\n\nthen that"},
  {"role": "user", "content": "no?"},
  {"role": "assistant", "content": "\U0001f600 <no>"},
]
FORMS = sorted(chat_formats.TEMPLATES)


def write(path, *records):
  lines = [r if isinstance(r, str) else json.dumps(r) for r in records]
  path.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
  return path


def split(documents):
  """(tokens, mask) of each document."""
  ends = np.cumsum(documents.lengths)[:-1]
  parts = np.split(documents.tokens, ends), np.split(documents.loss_mask, ends)
  return list(zip(*parts, strict=True))


def tokenize(messages, name, *, max_length=1000, on_bad=None):
  return chats.tokenize(
    [chats.Chat("here", messages)],
    chat_formats.form(name),
    max_length=max_length,
    on_bad=on_bad,
  )


def runs(tokens, mask):
  """The supervised tokens, a list for each unbroken run of them."""
  edges = np.flatnonzero(np.diff(np.pad(mask.astype(int), 1)))
  pairs = zip(edges[::2], edges[1::2], strict=True)
  return [tokens[start:end].tolist() for start, end in pairs]


# Reading.


SAME = [{"role": m["role"], "content": m["content"]} for m in ASKED]
GPT = {"user": "human", "assistant": "gpt"}
FORMATS = [
  {"id": 3, "messages": ASKED},
  {"conversations": ASKED, "source": "x"},
  {
    "conversations": [
      {"from": GPT[m["role"]], "value": m["content"], "weight": None}
      for m in ASKED
    ]
  },
]


def test_three_ways_to_write_a_conversation_are_read_alike(tmp_path):
  path = write(tmp_path / "a.jsonl", FORMATS[0], "", *FORMATS[1:])
  sizes = []
  found = list(chats.read(path, progress=sizes.append))
  assert [one.messages for one in found] == [SAME] * 3
  assert [one.place for one in found] == [
    f"{path}: line {number}" for number in (1, 3, 4)
  ]
  assert sum(sizes) == path.stat().st_size
  assert all(one.is_answered for one in found)


def test_turns_are_read_as_questions_and_refused_for_training(tmp_path):
  path = write(tmp_path / "a.jsonl", {"turns": ["a", "b"]})
  (found,) = chats.read(path)
  assert found.messages == [{"role": "user", "content": x} for x in "ab"]
  with pytest.raises(ValueError, match=r"line 1: no answer .*make_answers"):
    chats.tokenize([found], chat_formats.form("chatml"), max_length=9)


def test_line_separators_of_unicode_do_not_end_a_line(tmp_path):
  record = {"messages": [{"role": "user", "content": "a\u2028b\x85c"}]}
  path = write(tmp_path / "a.jsonl", json.dumps(record, ensure_ascii=False))
  (found,) = chats.read(path)
  assert found.messages == record["messages"]


BAD = {
  "{": "no JSON",
  "[]": "no JSON object with `messages`",
  '{"text": "a"}': "no JSON object with `messages`",
  '{"messages": []}': r"messages=\[\] are no texts",
  '{"messages": "a"}': "messages='a' are no texts",
  '{"turns": ["a", 1]}': r"turns=\['a', 1\] are no texts",
  '{"messages": ["a"]}': "message 1: 'a' is no object",
  '{"messages": [{"role": "bot", "content": "a"}]}': "message 1: role 'bot' is",
  '{"messages": [{"content": "a"}]}': "message 1: role None is none of system",
  '{"conversations": [{"from": "human", "value": " "}]}': (
    "message 1: content ' ' of human is no text"
  ),
  '{"messages": [{"role": "user", "content": null}]}': "content None of user",
  '{"messages": [{"role": "user", "content": "a\\ud83d"}]}': "user is no text",
  '{"turns": ["a", ""]}': "are no texts",
  '{"messages": [{"role": ["user"], "content": "a"}]}': "role .'user'. is none",
  '{"messages": [{"role": "assistant", "content": "a"}]}': (
    "message 1: an answer before anything was asked"
  ),
}


@pytest.mark.parametrize("line", BAD)
def test_a_bad_line_is_named_or_left_out(line, tmp_path):
  path = write(tmp_path / "a.jsonl", FORMATS[0], line, FORMATS[1])
  with pytest.raises(ValueError, match=rf"a\.jsonl: line 2: .*{BAD[line]}"):
    list(chats.read(path))
  told = []
  assert len(list(chats.read(path, on_bad=told.append))) == 2
  assert len(told) == 1 and "line 2" in str(told[0])


def test_bytes_that_are_no_text_are_named(tmp_path):
  path = tmp_path / "a.jsonl"
  path.write_bytes(b'{"turns": ["\xff"]}\n')
  with pytest.raises(ValueError, match="line 1: no JSON"):
    list(chats.read(path))


def test_files_without_conversations_are_refused(tmp_path):
  with pytest.raises(ValueError, match=r"a\.jsonl: cannot be read"):
    list(chats.read(tmp_path / "a.jsonl"))
  with pytest.raises(ValueError, match=r"a\.jsonl: no conversation in it"):
    list(chats.read(write(tmp_path / "a.jsonl", "", " ")))


# The loss mask.


@pytest.mark.parametrize("name", FORMS)
def test_the_supervised_text_is_what_the_assistant_says_and_its_end(name):
  documents, _ = tokenize(ASKED, name)
  said = [run for one in split(documents) for run in runs(*one)]
  stop = chat_formats.TEMPLATES[name][1] or ""
  space = " " if name in ("mistral", "plain") else ""
  decode = chat_formats.tokenizer().decode
  assert [decode(run, skip_special_tokens=False) for run in said] == [
    space + ASKED[1]["content"] + stop,
    space + ASKED[3]["content"] + stop,
  ]


@pytest.mark.parametrize("name", FORMS)
def test_what_comes_before_an_answer_is_its_prompt_at_inference(name):
  documents, _ = tokenize(ASKED, name)
  form = chat_formats.form(name)
  prompts = [
    chat.encode_chat(
      form.tokenizer,
      form.template,
      ASKED[:turn],
      bos_token=form.bos_token,
      eos_token=form.eos_token,
    ).tolist()
    for turn in (1, 3)
  ]
  before = []
  for tokens, mask in split(documents):
    starts = np.flatnonzero(np.diff(mask.astype(int)) == 1) + 1
    before += [tokens[:start].tolist() for start in starts]
  assert before == prompts


@pytest.mark.parametrize("name", FORMS)
def test_a_document_is_its_text_tokenised_as_a_whole(name):
  form = chat_formats.form(name)
  documents, _ = tokenize(ASKED, name)
  text = chat.render(
    form.template,
    ASKED,
    add_generation_prompt=False,
    bos_token="<s>",
    eos_token="</s>",
  )
  whole = form.tokenizer.encode(text, add_special_tokens=False).ids
  assert split(documents)[-1][0].tolist() == whole


def test_turns_share_a_document_unless_the_template_rewrites_them():
  counts = {name: tokenize(ASKED, name)[1].documents for name in FORMS}
  assert counts == {
    "chatml": 1, "llama3": 1, "mistral": 1, "plain": 1, "qwen3": 2
  }  # fmt: skip
  documents, _ = tokenize(ASKED, "qwen3")
  decode = chat_formats.tokenizer().decode
  texts = [decode(tokens, skip_special_tokens=False) for tokens, _ in
           split(documents)]  # fmt: skip
  empty = "<think>\n\n</think>\n\n"
  # As at inference: the earlier answer has lost its empty thought.
  assert texts[0].count(empty) == texts[1].count(empty) == 1
  assert f"{empty}{ASKED[1]['content']}" in texts[0]
  assert f"assistant\n{ASKED[1]['content']}" in texts[1]
  assert [len(runs(*one)) for one in split(documents)] == [1, 1]


def test_answers_with_thoughts_are_refused_where_they_would_be_learnt():
  thought = {"role": "assistant", "content": "<think>\nso\n</think>\n\nno"}
  with pytest.raises(ValueError, match=r"here: .*message 4: .*hold thoughts"):
    tokenize([*ASKED[:3], thought], "qwen3")
  told = []
  with pytest.raises(ValueError, match="nothing to train on"):
    tokenize([*ASKED[:3], thought], "qwen3", on_bad=told.append)
  assert len(told) == 1


def test_questions_behind_the_last_answer_are_not_in_the_document():
  (short,), (long,) = (
    split(tokenize(ASKED[:count], "chatml")[0]) for count in (2, 3)
  )
  np.testing.assert_array_equal(short, long)


def test_an_answer_ends_with_the_targets_own_stop_token_not_with_any():
  # The content holds the text of another special token.
  messages = [ASKED[0], {"role": "assistant", "content": "a <|eot_id|> b"}]
  (one,) = split(tokenize(messages, "chatml")[0])
  (said,) = runs(*one)
  decode = chat_formats.tokenizer().decode
  assert decode(said, skip_special_tokens=False) == "a <|eot_id|> b<|im_end|>"
  # Of a target that names no stop token, a special token is taken for one.
  form = chat_formats.form("chatml")._replace(stop_tokens=())
  found, _ = chats.tokenize([chats.Chat("", ASKED)], form, max_length=99)
  (one,) = split(found)
  assert [run[-1] for run in runs(*one)] == [
    form.tokenizer.token_to_id("<|im_end|>")
  ] * 2


@pytest.mark.parametrize("name", FORMS)
def test_the_end_of_an_answer_that_was_cut_off_is_not_supervised(
  tmp_path, name
):
  def masks(reasons):
    record = {"messages": ASKED, "finish_reasons": reasons}
    chat = chats.read(write(tmp_path / "a.jsonl", record))
    form = chat_formats.form(name)
    documents, _ = chats.tokenize(chat, form, max_length=1000)
    return [
      run for one in split(documents) for run in runs(*one)
    ], form.stop_tokens

  whole, stops = masks(["stop", "stop"])
  cut, _ = masks(["stop", "length"])
  assert whole[0] == cut[0]
  if stops:
    assert whole[1][:-1] == cut[1] and whole[1][-1] in stops
  first_cut, _ = masks(["length", "stop"])
  assert first_cut[1] == whole[1]


def test_finish_reasons_that_fit_no_answers_are_refused(tmp_path):
  record = {"messages": ASKED, "finish_reasons": ["stop"]}
  with pytest.raises(ValueError, match="one for each of 2 answers is needed"):
    list(chats.read(write(tmp_path / "a.jsonl", record)))


def test_a_token_that_begins_in_the_prompt_is_not_supervised():
  # " this" is one token, with a space that the prompt ends in.
  template = chat_formats.PLAIN.replace("'assistant:'", "'assistant: '")
  form = chat_formats.form("plain")._replace(template=template)
  found, _ = chats.tokenize([chats.Chat("", ASKED)], form, max_length=99)
  (one,) = split(found)
  texts = [form.tokenizer.decode(run) for run in runs(*one)]
  assert texts == [" one, é → ü\n\nthen that", "\U0001f600 <no>"]


def test_offsets_that_leave_out_spaces_supervise_the_same_tokens(monkeypatch):
  expected = [tokenize(ASKED, name)[0] for name in FORMS]
  tokenizer = chat_formats.tokenizer()
  trimmed = type(tokenizer).from_str(tokenizer.to_str())
  trimmed.post_processor = processors.ByteLevel(trim_offsets=True)
  offsets = trimmed.encode("a \n\n b").offsets
  assert any(start == end for start, end in offsets)
  monkeypatch.setattr(chat_formats, "tokenizer", lambda: trimmed)
  for name, (tokens, mask, _) in zip(FORMS, expected, strict=True):
    found, _ = tokenize(ASKED, name)
    np.testing.assert_array_equal(found.tokens, tokens)
    np.testing.assert_array_equal(found.loss_mask, mask)


def test_a_space_that_ends_the_prompt_is_not_supervised():
  template = chat_formats.PLAIN.replace("'assistant:'", "'assistant: '")
  one = chats.Chat("", [ASKED[0], {"role": "assistant", "content": " no no"}])
  trimmed = chat_formats.tokenizer().from_str(chat_formats.tokenizer().to_str())
  trimmed.post_processor = processors.ByteLevel(trim_offsets=True)
  for tokenizer in (chat_formats.tokenizer(), trimmed):
    form = chats.Format(tokenizer, template)
    (found,) = split(chats.tokenize([one], form, max_length=99)[0])
    assert [tokenizer.decode(run) for run in runs(*found)] == [" no no"]


# Lengths.


def test_long_documents_are_cut_with_their_mask_or_left_out():
  (whole,) = split(tokenize(ASKED, "chatml")[0])
  tokens, mask = whole
  first = int(np.argmax(mask))
  for length in (first + 2, len(tokens) - 1, len(tokens)):
    documents, counts = tokenize(ASKED, "chatml", max_length=length)
    np.testing.assert_array_equal(documents.tokens, tokens[:length])
    np.testing.assert_array_equal(documents.loss_mask, mask[:length])
    assert counts == (1, 1, int(length < len(tokens)), 0)
  two = [chats.Chat("", ASKED), chats.Chat("", [ASKED[2], ASKED[3]])]
  documents, counts = chats.tokenize(
    two, chat_formats.form("chatml"), max_length=first + 1
  )
  # The first has one supervised token left, which no anchor can predict.
  assert counts == (2, 2, 2, 1) and len(documents.lengths) == 1
  with pytest.raises(ValueError, match="1 of 1 documents have no two answered"):
    tokenize(ASKED, "chatml", max_length=first + 1)


def test_batches_of_tokenisation_do_not_show(monkeypatch):
  many = [
    chats.Chat("", [ASKED[0], {"role": "assistant", "content": "no " * n}])
    for n in range(1, 8)
  ]
  expected = chats.tokenize(many, chat_formats.form("qwen3"), max_length=60)
  monkeypatch.setattr(chats, "_BATCH", 3)
  found = chats.tokenize(many, chat_formats.form("qwen3"), max_length=60)
  for a, b in zip(found[0], expected[0], strict=True):
    np.testing.assert_array_equal(a, b)
  assert found[1] == expected[1] == (7, 7, 0, 0)
