"""Chat templates that behave like the released ones, and a tokenizer for them.

Written for the tests: the same markup, default prompts and treatment of earlier
turns, without tools.
"""

import functools

import tokenizers
from tokenizers import (
  decoders,
  models,
  pre_tokenizers,
  processors,
  trainers,
)

from dspine_jax.data import chats

# SmolLM2's: a default system prompt, every turn alike.
CHATML = (
  "{% for m in messages %}"
  "{% if loop.first and m['role'] != 'system' %}"
  "{{ '<|im_start|>system\nYou are helpful<|im_end|>\n' }}"
  "{% endif %}"
  "{{ '<|im_start|>' + m['role'] + '\n' + m['content'] + '<|im_end|>\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"
)

# Llama 3's: contents are stripped, the text begins with its own token.
LLAMA3 = (
  "{{ bos_token }}"
  "{% for m in messages %}"
  "{{ '<|start_header_id|>' + m['role'] + '<|end_header_id|>\n\n' }}"
  "{{ m['content'] | trim + '<|eot_id|>' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}"
  "{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}"
  "{% endif %}"
)

# Qwen3's: answers before the last question lose their thoughts, the last one
# has them, if only empty ones; with thinking off, its prompt opens with these.
QWEN3 = (
  "{%- set ns = namespace(asked=messages|length - 1) %}"
  "{%- for m in messages %}"
  "{%- if m.role == 'user' %}{% set ns.asked = loop.index0 %}{% endif %}"
  "{%- endfor %}"
  "{%- for m in messages %}"
  "{%- set content = m.content %}{% set thought = '' %}"
  "{%- if m.role == 'assistant' and '</think>' in content %}"
  "{%- set thought = content.split('</think>')[0].split('<think>')[-1] %}"
  "{%- set content = content.split('</think>')[-1].lstrip('\n') %}"
  "{%- endif %}"
  "{{- '<|im_start|>' + m.role + '\n' }}"
  "{%- if m.role == 'assistant' and loop.index0 > ns.asked"
  " and (loop.last or thought) %}"
  "{{- '<think>\n' + thought.strip('\n') + '\n</think>\n\n' }}"
  "{%- set content = content.lstrip('\n') %}"
  "{%- endif %}"
  "{{- content + '<|im_end|>\n' }}"
  "{%- endfor %}"
  "{%- if add_generation_prompt %}"
  "{{- '<|im_start|>assistant\n' }}"
  "{%- if enable_thinking is defined and enable_thinking is false %}"
  "{{- '<think>\n\n</think>\n\n' }}"
  "{%- endif %}{%- endif %}"
)

# Mistral's: a space in front of what is said, the end of text behind it.
MISTRAL = (
  "{{ bos_token }}{% for m in messages %}"
  "{% if m['role'] == 'user' %}{{ '[INST] ' + m['content'] + ' [/INST]' }}"
  "{% else %}{{ ' ' + m['content'] + eos_token }}{% endif %}"
  "{% endfor %}"
)

# No token ends a turn.
PLAIN = (
  "{% for m in messages %}{{ m['role'] + ': ' + m['content'] + '\n\n' }}"
  "{% endfor %}"
  "{% if add_generation_prompt %}{{ 'assistant:' }}{% endif %}"
)

TEMPLATES = {
  "chatml": (CHATML, "<|im_end|>"),
  "llama3": (LLAMA3, "<|eot_id|>"),
  "qwen3": (QWEN3, "<|im_end|>"),
  "mistral": (MISTRAL, "</s>"),
  "plain": (PLAIN, None),
}

SPECIAL = (
  "</s>",
  "<s>",
  "<|im_start|>",
  "<|im_end|>",
  "<|start_header_id|>",
  "<|end_header_id|>",
  "<|eot_id|>",
)
_TEXT = "the answer is this one\n\nand then: that, no? assistant user system "


@functools.cache
def tokenizer() -> tokenizers.Tokenizer:
  """Byte-level BPE with merges over spaces and line ends, as Qwen has them."""
  made = tokenizers.Tokenizer(models.BPE())
  made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  made.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=299,
    special_tokens=list(SPECIAL),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  made.train_from_iterator([_TEXT * 3], trainer=trainer)
  # As Llama 3's: a begin of text in front, which a chat template writes itself.
  made.post_processor = processors.TemplateProcessing(
    single="<s> $A", special_tokens=[("<s>", made.token_to_id("<s>"))]
  )
  return made


def form(name: str) -> chats.Format:
  """A format by the name of its template."""
  template, stop = TEMPLATES[name]
  known = tokenizer()
  stop_id = None if stop is None else known.token_to_id(stop)
  return chats.Format(
    known,
    template,
    bos_token="<s>",
    eos_token="</s>",
    stop_tokens=() if stop_id is None else (stop_id,),
  )
