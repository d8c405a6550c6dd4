"""Prompts cut from text files, as token windows.

Training prompts come from training files, evaluation prompts from held-out
ones; a prompt never crosses the end of a file.
"""

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
