import numpy as np
import pytest
import tokenizers
from tokenizers import models

from dspine_jax.data import chat

CHATML = (
  "{% for message in messages %}"
  "{% if loop.first and messages[0]['role'] != 'system' %}"
  "{{ '<s>system\nBe kind<e>\n' }}"
  "{% endif %}"
  "{{ '<s>' + message['role'] + '\n' + message['content'] + '<e>' + '\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<s>assistant\n' }}{% endif %}"
)
TURNS = [
  {"role": "user", "content": "Hi"},
  {"role": "assistant", "content": "Yes?"},
  {"role": "user", "content": "2 < 3 & 'a'"},
]


def test_turns_follow_each_other_and_the_answer_is_opened():
  assert chat.render(CHATML, TURNS) == (
    "<s>system\nBe kind<e>\n<s>user\nHi<e>\n<s>assistant\nYes?<e>\n"
    "<s>user\n2 < 3 & 'a'<e>\n<s>assistant\n"
  )


def test_a_system_prompt_of_ones_own_replaces_the_templates():
  messages = [{"role": "system", "content": "Be brief"}, *TURNS[:1]]
  assert chat.render(CHATML, messages) == (
    "<s>system\nBe brief<e>\n<s>user\nHi<e>\n<s>assistant\n"
  )


def test_a_finished_conversation_ends_with_its_last_turn():
  text = chat.render(CHATML, TURNS[:2], add_generation_prompt=False)
  assert text.endswith("<s>assistant\nYes?<e>\n")


def test_thinking_is_off():
  template = (
    "{%- if enable_thinking is defined and enable_thinking is false %}"
    "{{- '<think>\n\n</think>\n\n' }}{%- endif %}"
  )
  assert chat.render(template, []) == "<think>\n\n</think>\n\n"


def test_lines_of_blocks_leave_no_space():
  template = "a\n  {% if true %}\nb\n  {% endif %}\nc"
  assert chat.render(template, []) == "a\nb\nc"


def test_loops_may_be_left_and_json_is_not_escaped_for_html():
  template = "{% for m in messages %}{{ m | tojson }}{% break %}{% endfor %}"
  messages = [{"role": "é<"}, *TURNS]
  assert chat.render(template, messages) == '{"role": "é<"}'


def test_special_tokens_are_the_callers():
  template = "{{ bos_token }}{{ messages[0].content }}{{ eos_token }}"
  text = chat.render(template, TURNS, bos_token="<b>", eos_token="<e>")
  assert text == "<b>Hi<e>"
  assert chat.render(template, TURNS) == "Hi"


@pytest.mark.parametrize(
  ("template", "message"),
  [
    ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
    ("{% if %}", "chat template: "),
    ("{{ messages[0].content + 1 }}", "chat template: "),
    ("{{ messages.append(1) }}", "chat template: "),
    ("{{ messages.__class__.__mro__ }}", "chat template: "),
    ("{{ nothing.at_all }}", "chat template: 'nothing' is undefined"),
  ],
)
def test_templates_that_refuse_or_are_broken_or_reach_out_are_told(
  template, message
):
  with pytest.raises(ValueError, match=message):
    chat.render(template, TURNS)


def test_the_tokenizer_adds_no_special_tokens_of_its_own():
  words = {"<b>": 0, "Hi": 1, "?": 2}
  tokenizer = tokenizers.Tokenizer(models.WordLevel(words, unk_token="?"))
  tokenizer.add_special_tokens(["<b>"])
  tokenizer.post_processor = tokenizers.processors.TemplateProcessing(
    single="<b> $A", special_tokens=[("<b>", 0)]
  )
  assert tokenizer.encode("Hi").ids == [0, 1]
  template = "{{ bos_token }}{{ messages[0].content }}"
  ids = chat.encode_chat(tokenizer, template, TURNS, bos_token="<b>")
  assert ids.tolist() == [0, 1] and ids.dtype == np.int32


def test_templates_find_what_hugging_face_gives_them():
  template = (
    "{% if tools is not none or documents is not none %}x{% endif %}"
    "{% generation %}{{ messages[0].content }}{% endgeneration %}"
    "{{ strftime_now is defined }}"
  )
  said = [{"role": "user", "content": "a"}]
  assert chat.render(template, said) == "aFalse"
