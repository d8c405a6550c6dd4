"""Conversations as the text a chat model was trained on.

`render` fills in a model's own chat template, a Jinja program, in the sandbox
and with the settings that Hugging Face uses; `encode_chat` tokenises the
result. What the template adds, such as a default system prompt, stays.
"""

import functools
import json
from collections.abc import Mapping, Sequence
from typing import Any, NoReturn

import jinja2
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
      raise_exception=_refuse,
      bos_token=bos_token,
      eos_token=eos_token,
    )
  except (jinja2.TemplateError, TypeError) as error:
    raise ValueError(f"chat template: {error}") from None


@functools.lru_cache(maxsize=8)
def _compile(template: str) -> jinja2.Template:
  environment = jinja2.sandbox.ImmutableSandboxedEnvironment(
    trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
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
