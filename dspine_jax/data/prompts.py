"""Prompts: token windows cut from text files, and files of user turns.

Of text, training prompts come from training files, evaluation prompts from
held-out ones; a prompt never crosses the end of a file. A file of turns has one
JSON object a line, whose `turns` are a user's, in order; what the target reads
of them is the matter of its chat template (`data.chat`).
"""

import json
import pathlib
from collections.abc import Sequence

import numpy as np


def cut_prompts(
  streams: Sequence[np.ndarray], *, length: int, count: int, seed: int
) -> np.ndarray:
  """Distinct windows of `length` tokens at random places: [count, length].

  Args:
    streams: token ids of each file.
    length: tokens of a prompt.
    count: how many prompts.
    seed: of the choice.

  Raises:
    ValueError: the files do not hold that many distinct windows.
  """
  places = np.asarray(
    [
      (index, start)
      for index, stream in enumerate(streams)
      for start in range(len(stream) - length)
    ],
    np.int64,
  ).reshape(-1, 2)
  if len(places) < count:
    raise ValueError(
      f"the files hold {len(places)} windows of {length} tokens, {count}"
      " prompts were asked for"
    )
  picks = np.random.default_rng(seed).choice(len(places), count, replace=False)
  return np.stack(
    [streams[i][start : start + length] for i, start in places[picks]]
  ).astype(np.int32)


def read_turns(path: pathlib.Path | str) -> list[list[str]]:
  """The user turns of each line of a JSONL file.

  Raises:
    ValueError: naming file and line: no such file, no JSON, no `turns`, or an
      empty file.
  """
  try:
    # Not splitlines: texts may hold the other separators of Unicode.
    lines = pathlib.Path(path).read_text(encoding="utf-8").split("\n")
  except (OSError, UnicodeDecodeError) as error:
    raise ValueError(f"{path}: cannot be read ({error})") from None
  conversations = []
  for number, line in enumerate(lines, start=1):
    if not line.strip():
      continue
    try:
      turns = json.loads(line)["turns"]
    except (ValueError, KeyError, TypeError) as error:
      raise ValueError(
        f"{path}: line {number}: no JSON object with `turns` ({error!r})"
      ) from None
    is_list = isinstance(turns, list) and bool(turns)
    if not is_list or not all(isinstance(turn, str) for turn in turns):
      raise ValueError(f"{path}: line {number}: turns={turns!r} are no texts")
    conversations.append(turns)
  if not conversations:
    raise ValueError(f"{path}: no prompt in it")
  return conversations
