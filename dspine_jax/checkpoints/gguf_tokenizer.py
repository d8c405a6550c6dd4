"""The tokenizer and the chat template that a GGUF file carries.

Byte-level BPE only (`tokenizer.ggml.model` = gpt2), with the pre-tokenizers
listed in `PRE_TOKENIZERS`. The ids of text are those of the Hugging Face
tokenizer that the file was made from.
"""

from collections.abc import Callable

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from dspine_jax.checkpoints import gguf

# Token types of the format.
_CONTROL, _USER_DEFINED = 3, 4


def _smollm() -> pre_tokenizers.PreTokenizer:
  return pre_tokenizers.Sequence(
    [
      pre_tokenizers.Digits(individual_digits=True),
      pre_tokenizers.ByteLevel(add_prefix_space=False),
    ]
  )


PRE_TOKENIZERS: dict[str, Callable[[], pre_tokenizers.PreTokenizer]] = {
  "smollm": _smollm,
}


def tokenizer(file: gguf.File) -> tokenizers.Tokenizer:
  """The tokenizer in a file's metadata.

  Control tokens of the file are special tokens: found in text before BPE, and
  left out when decoding skips them. Bytes that the vocabulary lacks are
  dropped, as in the original. No token is added in front of a text.

  Raises:
    ValueError: naming the file and the key, if a key is missing, the kind of
      tokenizer is another, or the vocabulary is damaged.
  """
  kind = gguf.field(file, "tokenizer.ggml.model", str)
  if kind != "gpt2":
    raise ValueError(
      f"{file.path}: tokenizer.ggml.model={kind!r} is not implemented (gpt2)"
    )
  split = gguf.field(file, "tokenizer.ggml.pre", str)
  if split not in PRE_TOKENIZERS:
    raise ValueError(
      f"{file.path}: tokenizer.ggml.pre={split!r} is not implemented"
      f" ({', '.join(PRE_TOKENIZERS)})"
    )
  tokens = gguf.field(file, "tokenizer.ggml.tokens", list)
  types = gguf.field(file, "tokenizer.ggml.token_type", list)
  merges = gguf.field(file, "tokenizer.ggml.merges", list)
  vocab = {token: index for index, token in enumerate(tokens)}
  if len(vocab) != len(tokens) or len(types) != len(tokens):
    raise ValueError(
      f"{file.path}: tokenizer.ggml.tokens holds {len(tokens)} tokens,"
      f" {len(vocab)} of them distinct, token_type {len(types)}"
    )
  try:
    bpe = models.BPE(
      vocab=vocab, merges=[tuple(merge.split(" ", 1)) for merge in merges]
    )
  except Exception as error:
    # The library raises plain Exception for a merge outside the vocabulary.
    raise ValueError(f"{file.path}: tokenizer.ggml.merges: {error}") from None
  result = tokenizers.Tokenizer(bpe)
  result.pre_tokenizer = PRE_TOKENIZERS[split]()
  result.decoder = decoders.ByteLevel()
  added = zip(tokens, types, strict=True)
  result.add_tokens(
    [
      tokenizers.AddedToken(
        token, special=token_type == _CONTROL, normalized=False
      )
      for token, token_type in added
      if token_type in (_CONTROL, _USER_DEFINED)
    ]
  )
  return result


def chat_template(file: gguf.File) -> str | None:
  """The Jinja template of a conversation, if the file has one."""
  return file.metadata.get("tokenizer.chat_template")
