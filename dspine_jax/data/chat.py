"""Conversations as the text a chat model was trained on.

`render` fills in a model's own chat template, a Jinja program, in the sandbox
and with the settings that Hugging Face uses, but for `strftime_now`: without it
a text does not depend on the day. `encode_chat` tokenises the result. What the
template adds, such as a default system prompt, stays. `transcripts` tells what
of a finished conversation the assistant said, by comparing texts that the
template makes: no markup is known here.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, NoReturn

import jinja2
import jinja2.ext
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import numpy as np
import tokenizers

Message = Mapping[str, str]


def render(
  template: str,
  messages: Sequence[Message],
  *,
  add_generation_prompt: bool = True,
  bos_token: str = "",
  eos_token: str = "",
) -> str:
  """The text of a conversation, thinking off.

  Args:
    template: the model's chat template.
    messages: {"role", "content"}, oldest first.
    add_generation_prompt: end with the opening of the assistant's turn.
    bos_token: text that the template may put in front.
    eos_token: text that the template may put behind turns.

  Raises:
    ValueError: the template is no valid one, or refuses these messages.
  """
  try:
    return _compile(template).render(
      messages=list(messages),
      add_generation_prompt=add_generation_prompt,
      enable_thinking=False,
      tools=None,
      documents=None,
      raise_exception=_refuse,
      bos_token=bos_token,
      eos_token=eos_token,
    )
  except (jinja2.TemplateError, TypeError) as error:
    raise ValueError(f"chat template: {error}") from None


class _Generation(jinja2.ext.Extension):
  """{% generation %}: marks for others what the assistant says."""

  tags: set[str] = {"generation"}  # noqa: RUF012

  def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
    next(parser.stream)
    return parser.parse_statements(("name:endgeneration",), drop_needle=True)


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True,
    lstrip_blocks=True,
    extensions=["jinja2.ext.loopcontrols", _Generation],
  )
  # Jinja's own escapes for HTML.
  environment.filters["tojson"] = functools.partial(
    json.dumps, ensure_ascii=False
  )
  return environment.from_string(template)


def _refuse(message: Any) -> NoReturn:
  raise jinja2.TemplateError(str(message))


def encode_chat(
  tokenizer: tokenizers.Tokenizer,
  template: str,
  messages: Sequence[Message],
  **options: Any,
) -> np.ndarray:
  """Token ids of a conversation: [T] int32.

  The template writes special tokens itself, so the tokenizer adds none.

  Args:
    tokenizer: of the model that the template belongs to.
    template: as in `render`.
    messages: as in `render`.
    **options: of `render`.

  Raises:
    ValueError: as `render`.
  """
  text = render(template, messages, **options)
  return np.asarray(
    tokenizer.encode(text, add_special_tokens=False).ids, np.int32
  )


class Transcript(NamedTuple):
  """A text as the target reads it while it answers.

  Attributes:
    text: all of it.
    said: (start, end) in the text for each answer: what follows the prompt,
      with whatever the template writes behind the answer's content.
  """

  text: str
  said: tuple[tuple[int, int], ...]


def transcripts(
  template: str, messages: Sequence[Message], **options: Any
) -> list[Transcript]:
  """A conversation as the texts in which its answers are given.

  Every answer follows the prompt that the template makes of the messages before
  it. Where that text goes on to the next answer's, one transcript holds both. A
  template may write an earlier answer otherwise (Qwen3 opens the last one with
  an empty thought, the ones before it not): then each answer has a transcript
  of its own, with the history that the target would meet.

  Args:
    template: as in `render`.
    messages: with at least one answer.
    **options: of `render`, less `add_generation_prompt`.

  Raises:
    ValueError: as `render`, or the text with an answer does not begin with the
      prompt of that answer.
  """
  found: list[Transcript] = []
  for index, message in enumerate(messages):
    if message["role"] != "assistant":
      continue
    prompt, whole = (
      render(template, messages[:end], add_generation_prompt=opens, **options)
      for end, opens in ((index, True), (index + 1, False))
    )
    if not whole.startswith(prompt):
      raise ValueError(
        f"chat template: message {index + 1}: with the answer the text does not"
        " begin as its prompt, thinking off (does the answer hold thoughts?)"
      )
    said = ((len(prompt), len(whole)),)
    if found and whole.startswith(found[-1].text):
      said = found.pop().said + said
    found.append(Transcript(whole, said))
  return found
