"""Every turn of a conversation is asked after the target's own answers."""

import numpy as np
import pytest

from dspine_jax.data import answers as answers_lib
from experiments import targets
from experiments.stages import answers

TEMPLATE = (
  "{% for m in messages %}{{ m.role[0] }}:{{ m.content }};{% endfor %}a:"
)


@pytest.fixture(name="target", scope="module")
def fixture_target(tiny):
  return targets.load(str(tiny.target))._replace(chat_template=TEMPLATE)


class Echo:
  """Answers every prompt with its number of tokens, as text."""

  def __init__(self, tokenizer):
    self.tokenizer, self.asked = tokenizer, []

  def __call__(self, encoded):
    self.asked.append([self.tokenizer.decode(x.tolist()) for x in encoded])
    prompts = answers_lib.pad_prompts(encoded)
    tokens = np.pad(prompts.tokens, ((0, 0), (0, 8)))
    lengths = prompts.lengths.copy()
    for row, start in enumerate(prompts.prompt_lengths):
      reply = self.tokenizer.encode(str(start)).ids
      tokens[row, start : start + len(reply)] = reply
      lengths[row] += len(reply)
    return prompts._replace(tokens=tokens, lengths=lengths)


def test_turns_are_asked_in_order_with_the_answers_before_them(target):
  echo = Echo(target.tokenizer)
  turns = [["one", "two", "three"], ["four"], ["five", "six"]]
  made = answers.answer_turns(target, turns, echo, longest=200)
  first, second, third = echo.asked
  assert first == ["u:one;a:", "u:four;a:", "u:five;a:"]
  counts = [len(target.tokenizer.encode(text).ids) for text in first]
  assert second[0] == f"u:one;a:{counts[0]};u:two;a:"
  assert second[1] == f"u:five;a:{counts[2]};u:six;a:"
  assert len(third) == 1 and third[0].startswith(f"u:one;a:{counts[0]};u:two;")
  assert third[0].endswith("u:three;a:")
  assert len(made.lengths) == 6
  assert (made.prompt_lengths < made.lengths).all()


def test_a_conversation_ends_before_a_prompt_that_is_too_long(target):
  echo = Echo(target.tokenizer)
  turns = [["x" * 100, "never asked"], ["y", "z" * 100, "never asked"], ["w"]]
  made = answers.answer_turns(target, turns, echo, longest=40)
  assert echo.asked == [["u:y;a:", "u:w;a:"]]
  assert len(made.lengths) == 2
  with pytest.raises(ValueError, match="longer than 3 tokens"):
    answers.answer_turns(target, turns, echo, longest=3)
