"""Files of conversations, as token ids with a loss mask.

A line of a JSONL file is one conversation: `messages` (role and content),
`conversations` (the same, or ShareGPT's from and value) or `turns` (what a user
says, in order, with nothing yet that a drafter could learn). `finish_reasons`
may tell of each answer whether "length" cut it off, as `make_answers` writes
them; other keys are ignored. Files are read line by line and texts are dropped
once they are tokens; what a template makes of a conversation is `chat.py`'s,
what rows are made of the documents `rows.py`'s.
"""

import array
import itertools
import json
import pathlib
from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import numpy as np
import tokenizers

from dspine_jax.data import chat
from dspine_jax.data import rows as rows_lib

# Names of speakers in files, and the roles that chat templates know.
ROLES = {
  "system": "system",
  "user": "user",
  "human": "user",
  "assistant": "assistant",
  "gpt": "assistant",
  "tool": "tool",
}
_KEYS = ("messages", "conversations", "turns")
# Texts that are tokenised together, in threads.
_BATCH = 256

OnBad = Callable[[ValueError], None]


class Chat(NamedTuple):
  """One conversation.

  Attributes:
    place: file and line, for messages.
    messages: {"role", "content"}, oldest first.
    cut_off: which answers, counted from 0, a limit ended: the target did not
      say the stop token that a template writes behind them.
  """

  place: str
  messages: list[dict[str, str]]
  cut_off: frozenset[int] = frozenset()

  @property
  def is_answered(self) -> bool:
    """Whether the assistant says something in it."""
    return any(message["role"] == "assistant" for message in self.messages)


class Format(NamedTuple):
  """How a target reads conversations.

  Attributes:
    tokenizer: its tokenizer.
    template: its chat template.
    bos_token: text that the template may put in front.
    eos_token: text that the template may put behind turns.
    stop_tokens: ids at which the target ends an answer.
  """

  tokenizer: tokenizers.Tokenizer
  template: str
  bos_token: str = ""
  eos_token: str = ""
  stop_tokens: tuple[int, ...] = ()


class Counts(NamedTuple):
  """What became of the conversations of some files.

  Attributes:
    conversations: that were used.
    documents: token sequences that were made; as many as conversations unless
      the template writes earlier turns otherwise than the last.
    cut: documents whose end was cut off.
    dropped: documents left out since nothing in them can be learnt.
  """

  conversations: int
  documents: int
  cut: int
  dropped: int


def read(
  path: pathlib.Path | str,
  *,
  on_bad: OnBad | None = None,
  progress: Callable[[int], None] = lambda read_bytes: None,
) -> Iterator[Chat]:
  """The conversations of a file, one at a time.

  Args:
    path: a JSONL file; blank lines are skipped.
    on_bad: called for each line that is at fault, which is then left out; None
      raises.
    progress: called with the bytes of each line.

  Raises:
    ValueError: naming the file, and the line that is at fault: no such file, no
      JSON, none of the three keys, an unknown role, no text, an answer before
      anything was asked; or a file without a conversation.
  """
  try:
    file = open(path, "rb")
  except OSError as error:
    raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
  count = 0
  with file:
    # Bytes end lines at "\n" only: texts may hold Unicode's other separators.
    for number, line in enumerate(file, start=1):
      progress(len(line))
      if not line.strip():
        continue
      count += 1
      place = f"{path}: line {number}"
      try:
        found = Chat(place, *_parse(line))
      except ValueError as error:
        _tell(on_bad, f"{place}: {error}")
      else:
        yield found
  if not count:
    raise ValueError(f"{path}: no conversation in it")


def _tell(on_bad: OnBad | None, message: str) -> None:
  if on_bad is None:
    raise ValueError(message) from None
  on_bad(ValueError(message))


def _parse(line: bytes) -> tuple[list[dict[str, str]], frozenset[int]]:
  """The messages of a line, and which answers were cut off."""
  try:
    record = json.loads(line)
  except ValueError as error:  # Of bytes that are no UTF-8, too.
    raise ValueError(f"no JSON ({error})") from None
  keys = [key for key in _KEYS if isinstance(record, dict) and key in record]
  if not keys:
    raise ValueError(
      "no JSON object with " + ", ".join(f"`{key}`" for key in _KEYS)
    )
  key = keys[0]
  said = record[key]
  if not isinstance(said, list) or not said:
    raise ValueError(f"{key}={_short(said)} are no texts")
  if key == "turns":
    if not all(_is_text(turn) for turn in said):
      raise ValueError(f"turns={_short(said)} are no texts")
    said = [{"role": "user", "content": turn} for turn in said]
  messages = [_message(one, place) for place, one in enumerate(said, start=1)]
  if messages[0]["role"] == "assistant":
    raise ValueError("message 1: an answer before anything was asked")
  return messages, _cut_off(record.get("finish_reasons"), messages)


def _cut_off(reasons: Any, messages: list[dict[str, str]]) -> frozenset[int]:
  if reasons is None:
    return frozenset()
  answers = sum(message["role"] == "assistant" for message in messages)
  if not isinstance(reasons, list) or len(reasons) != answers:
    raise ValueError(
      f"finish_reasons={_short(reasons)}: one for each of {answers} answers is"
      " needed"
    )
  return frozenset(i for i, reason in enumerate(reasons) if reason == "length")


def _message(said: Any, place: int) -> dict[str, str]:
  if not isinstance(said, dict):
    raise ValueError(f"message {place}: {_short(said)} is no object")
  speaker = said.get("role", said.get("from"))
  content = said.get("content", said.get("value"))
  role = ROLES.get(speaker) if isinstance(speaker, str) else None
  if role is None:
    raise ValueError(
      f"message {place}: role {_short(speaker)} is none of {', '.join(ROLES)}"
    )
  if not _is_text(content):
    raise ValueError(
      f"message {place}: content {_short(content)} of {speaker} is no text"
    )
  return {"role": role, "content": content}


def _is_text(content: Any) -> bool:
  if not isinstance(content, str) or not content.strip():
    return False
  try:
    content.encode()
  except UnicodeEncodeError:  # Half of a surrogate pair: no tokenizer takes it.
    return False
  return True


def _short(value: Any) -> str:
  text = repr(value)
  return text if len(text) <= 80 else f"{text[:77]}..."


def tokenize(
  chats: Iterable[Chat],
  form: Format,
  *,
  max_length: int,
  on_bad: OnBad | None = None,
) -> tuple[rows_lib.Documents, Counts]:
  """Conversations as documents that are supervised where the assistant speaks.

  True in the mask are the tokens that the target would generate behind its
  prompts: an answer's content and, unless it was cut off, the stop token behind
  it. A text is tokenised
  as a whole; a token that begins in the prompt is not supervised. Documents are
  cut after `max_length` tokens, and left out if no two tokens that follow each
  other are then supervised, since every anchor needs two.

  Args:
    chats: of `read`.
    form: of the target.
    max_length: most tokens of a document.
    on_bad: as in `read`.

  Raises:
    ValueError: naming file and line: a conversation without answers, or one
      that the template refuses; or nothing is left.
  """
  tokens, mask, lengths = array.array("i"), bytearray(), array.array("i")
  ends = _ends(form)
  conversations = documents = cut = dropped = 0

  def transcripts() -> Iterator[_Answered]:
    nonlocal conversations
    for one in chats:
      try:
        made = _transcripts(one, form)
      except ValueError as error:
        _tell(on_bad, str(error))
      else:
        conversations += 1
        yield from made

  for batch in itertools.batched(transcripts(), _BATCH):
    encodings = form.tokenizer.encode_batch(
      [one.transcript.text for one in batch], add_special_tokens=False
    )
    documents += len(batch)
    for one, encoding in zip(batch, encodings, strict=True):
      ids = np.asarray(encoding.ids, np.int32)[:max_length]
      supervised = _supervised(one, encoding, ends)[:max_length]
      cut += len(encoding.ids) > max_length
      if not (supervised[:-1] & supervised[1:]).any():
        dropped += 1
        continue
      tokens.frombytes(ids.tobytes())
      mask += supervised.tobytes()
      lengths.append(len(ids))
  if not lengths:
    raise ValueError(
      f"nothing to train on: {dropped} of {documents} documents have no two"
      f" answered tokens among their first {max_length}"
    )
  found = rows_lib.Documents(
    np.frombuffer(tokens, np.int32),
    np.frombuffer(mask, bool),
    np.frombuffer(lengths, np.int32),
  )
  return found, Counts(conversations, documents, cut, dropped)


class _Answered(NamedTuple):
  """A transcript, and of each answer in it whether the target ended it."""

  transcript: chat.Transcript
  is_ended: tuple[bool, ...]


def _transcripts(one: Chat, form: Format) -> list[_Answered]:
  if not one.is_answered:
    raise ValueError(
      f"{one.place}: no answer to train on (make_answers writes the target's)"
    )
  try:
    made = chat.transcripts(
      form.template,
      one.messages,
      bos_token=form.bos_token,
      eos_token=form.eos_token,
    )
  except ValueError as error:
    raise ValueError(f"{one.place}: {error}") from None
  # Every answer is in one transcript, and they keep their order.
  number = itertools.count()
  return [
    _Answered(text, tuple(next(number) not in one.cut_off for _ in text.said))
    for text in made
  ]


class _Ends(NamedTuple):
  """Ids that end an answer, sorted: of the target, and all special ones."""

  stops: np.ndarray
  special: np.ndarray


def _ends(form: Format) -> _Ends:
  added = form.tokenizer.get_added_tokens_decoder()
  special = sorted(index for index, token in added.items() if token.special)
  return _Ends(np.asarray(sorted(form.stop_tokens)), np.asarray(special))


def _supervised(
  one: _Answered, encoding: tokenizers.Encoding, ends: _Ends
) -> np.ndarray:
  """[T] bool, True on the tokens of answers.

  An answer ends with the first stop token behind the prompt; if the target has
  none there, with the first special token; else with its last visible
  character. Of an answer that was cut off, the token that ends it is left out.
  """
  text = one.transcript
  ids = np.asarray(encoding.ids)
  starts, stops = np.asarray(encoding.offsets).reshape(-1, 2).T
  found = np.zeros(len(ids), bool)
  for (begin, end), is_ended in zip(text.said, one.is_ended, strict=True):
    first = int(np.searchsorted(stops, begin, "right"))
    while first < len(ids) and starts[first] < begin:
      first += 1
    last = int(np.searchsorted(stops, end, "right"))
    for known in ends:
      places = np.flatnonzero(np.isin(ids[first:last], known))
      if len(places):
        last = first + int(places[0]) + is_ended
        break
    else:
      visible = begin + len(text.text[begin:end].rstrip())
      last = int(np.searchsorted(stops, visible, "right"))
    found[first:last] = True
  return found
