"""Prompts: token windows cut from text files, and files of user turns.

Of text, training prompts come from training files, evaluation prompts from
held-out ones; a prompt never crosses the end of a file. Turns are what users
say, in order, in a file of conversations (`data.chats`); what the target reads
of them is the matter of its chat template (`data.chat`).
"""

import pathlib
from collections.abc import Sequence

import numpy as np

from dspine_jax.data import chats


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
  """The user turns of each conversation of a JSONL file.

  Of files that hold answers, too (`chats.read`), these are left out: they are
  to be the target's own.

  Raises:
    ValueError: naming file and line, as `chats.read`, or a message that neither
      a user nor the assistant said, since turns alone do not hold it.
  """
  conversations = []
  for found in chats.read(path):
    others = {m["role"] for m in found.messages} - {"user", "assistant"}
    if others:
      raise ValueError(
        f"{found.place}: a message of role {min(others)}; only what users say"
        " is asked"
      )
    conversations.append(
      [m["content"] for m in found.messages if m["role"] == "user"]
    )
  return conversations
