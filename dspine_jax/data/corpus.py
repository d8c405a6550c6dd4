"""The standard library's source as a corpus: files, split, tokenizer, tokens.

Every machine with Python has this text. Files are held out by a hash of their
name, so that the split does not move when other files come or go; the
interpreter's version and a hash of the file list go into every result.
"""

import hashlib
import pathlib
import platform
import sysconfig
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import tokenizers
from tokenizers import decoders, models, pre_tokenizers, trainers

END_OF_TEXT = "<|endoftext|>"
MASK = "<|mask|>"
SPECIAL_TOKENS = (END_OF_TEXT, MASK)

# Not in every installation, generated at build time, or not prose-like code.
_EXCLUDED_PARTS = frozenset(
  {
    "__pycache__",
    "dist-packages",
    "encodings",
    "ensurepip",
    "idlelib",
    "lib-dynload",
    "lib2to3",
    "site-packages",
    "test",
    "tests",
    "tkinter",
    "turtledemo",
  }
)
_EXCLUDED_PREFIXES = ("_sysconfigdata", "config-", "sitecustomize")
_HELD_OUT_EVERY = 20


class TextFile(NamedTuple):
  """One source file: its name below the library's root, and its text."""

  name: str
  text: str


class Corpus(NamedTuple):
  """A corpus split by file name.

  Attributes:
    train: files to train on, sorted by name.
    held_out: files never trained on, sorted by name.
    origin: what it was read from, e.g. "python 3.12.1 standard library".
    digest: hash of all names and texts.
  """

  train: tuple[TextFile, ...]
  held_out: tuple[TextFile, ...]
  origin: str
  digest: str


def is_held_out(name: str) -> bool:
  """About one file in twenty, by a hash of its name alone."""
  digest = hashlib.sha256(name.encode()).digest()
  return int.from_bytes(digest[:4], "big") % _HELD_OUT_EVERY == 0


def read_corpus(root: pathlib.Path | str, *, pattern: str = "*.py") -> Corpus:
  """Reads every matching text file below `root`.

  Files that are not UTF-8 and files in folders that differ between
  installations (tests, generated data) are left out.

  Raises:
    ValueError: no such folder, or no file in one half of the split.
  """
  root = pathlib.Path(root)
  if not root.is_dir():
    raise ValueError(f"corpus folder {root} does not exist")
  files = []
  for path in sorted(root.rglob(pattern)):
    name = path.relative_to(root)
    if _EXCLUDED_PARTS & set(name.parts[:-1]) or any(
      part.startswith(_EXCLUDED_PREFIXES) for part in name.parts
    ):
      continue
    try:
      text = path.read_text(encoding="utf-8")
    except (UnicodeDecodeError, OSError):
      continue
    if text.strip():
      files.append(TextFile(name.as_posix(), text))
  train = tuple(file for file in files if not is_held_out(file.name))
  held_out = tuple(file for file in files if is_held_out(file.name))
  if not train or not held_out:
    raise ValueError(
      f"corpus folder {root} has {len(train)} training and {len(held_out)}"
      f" held-out files matching {pattern!r}; both are needed"
    )
  digest = hashlib.sha256()
  for file in files:
    digest.update(f"{file.name}\0{file.text}\0".encode())
  return Corpus(train, held_out, str(root.name), digest.hexdigest()[:16])


def standard_library() -> Corpus:
  """The running interpreter's standard library, without its tests."""
  corpus = read_corpus(sysconfig.get_path("stdlib"))
  origin = f"python {platform.python_version()} standard library"
  return corpus._replace(origin=origin)


def train_tokenizer(
  texts: Iterable[str], vocab_size: int
) -> tokenizers.Tokenizer:
  """Byte-level BPE of exactly `vocab_size` tokens, special tokens included."""
  tokenizer = tokenizers.Tokenizer(models.BPE())
  tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
  tokenizer.decoder = decoders.ByteLevel()
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size,
    special_tokens=list(SPECIAL_TOKENS),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  tokenizer.train_from_iterator(texts, trainer=trainer)
  if tokenizer.get_vocab_size() != vocab_size:
    raise ValueError(
      f"vocab_size={vocab_size}: the text gives a tokenizer of"
      f" {tokenizer.get_vocab_size()} tokens"
    )
  return tokenizer


def encode_files(
  tokenizer: tokenizers.Tokenizer,
  files: Sequence[TextFile],
  *,
  otherwise: Sequence[int] = (),
) -> list[np.ndarray]:
  """Token ids [n] int32 of each file, ended by the end-of-text token.

  Args:
    tokenizer: of the ids.
    files: the texts.
    otherwise: the first of these ends a file where the tokenizer has no token
      of that name.

  Raises:
    ValueError: there is neither.
  """
  end = tokenizer.token_to_id(END_OF_TEXT)
  if end is None:
    if not otherwise:
      raise ValueError(f"the tokenizer has no {END_OF_TEXT} token")
    end = otherwise[0]
  encodings = tokenizer.encode_batch([file.text for file in files])
  return [np.asarray(encoding.ids + [end], np.int32) for encoding in encodings]


def windows(streams: Sequence[np.ndarray], length: int) -> np.ndarray:
  """All streams end to end, cut into rows of `length`: [n, length] int32."""
  joined = np.concatenate(streams)
  count = len(joined) // length
  if count == 0:
    raise ValueError(
      f"the text has {len(joined)} tokens, fewer than one row of {length}"
    )
  return joined[: count * length].reshape(count, length)
