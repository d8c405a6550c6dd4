"""Decodes held-out prompts with a drafter and checks what comes out."""

import math
import pathlib
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.checkpoints import drafter_folder
from dspine_jax.data import answers as answers_lib
from dspine_jax.decoding import generate, metrics
from dspine_jax.target import model
from experiments import run_io, targets
from experiments.stages import model_folders


class Decoded(NamedTuple):
  """What a drafter made of a set of prompts.

  Attributes:
    tokens: [n, max_new] int32, generated tokens.
    num_tokens: [n] int32.
    rounds: tokens committed in each round, per prompt.
    accepted: draft tokens that stood in each round, per prompt.
  """

  tokens: np.ndarray
  num_tokens: np.ndarray
  rounds: list[list[int]]
  accepted: list[list[int]]


def load_drafter(
  name: str | pathlib.Path, target: targets.NamedTarget
) -> generate.DrafterModel:
  """`embedded`, or a folder in any released form.

  Tables of its own that are the target's are dropped; others it decodes with.

  Raises:
    ValueError: a drafter of another target, one that cannot be read, or a run's
      work directory.
  """
  embedded = name == targets.EMBEDDED
  if not embedded:
    model_folders.refuse_work_dir(name)
  folder = targets.embedded_folder("drafter") if embedded else name
  loaded = drafter_folder.load_drafter(folder)
  try:
    cfg = drafter_folder.for_target(loaded.cfg, target.model.cfg)
  except ValueError as error:
    raise ValueError(
      f"--drafter={name} --target={target.name}: {error}"
    ) from None
  loaded = drafter_folder.without_copies(loaded, target.model.tables)
  return generate.DrafterModel(loaded.params, loaded.buffers, cfg)


def decode_prompts(
  target: generate.TargetModel,
  drafter: generate.DrafterModel,
  prompts: answers_lib.AnswerSet,
  decode: configs.DecodeConfig,
  *,
  batch_size: int,
  seed: int,
  label: str,
) -> Decoded:
  """Speculative decoding of the prompts of an answer set, with progress."""
  count = len(prompts.lengths)
  most = int(prompts.prompt_lengths.max())
  tokens = np.zeros((count, decode.max_new_tokens), np.int32)
  num_tokens = np.zeros((count,), np.int32)
  rounds: list[list[int]] = [[] for _ in range(count)]
  accepted: list[list[int]] = [[] for _ in range(count)]
  root = jax.random.key(seed)
  total = count * decode.max_new_tokens
  with run_io.Progress(total, label, "tokens") as progress:
    for rows, fresh, size in answers_lib.batches_by_length(
      prompts.prompt_lengths, batch_size, most
    ):
      keys = jax.vmap(lambda i: jax.random.fold_in(root, i))(jnp.asarray(rows))
      out = generate.generate(
        target,
        drafter,
        jnp.asarray(prompts.tokens[rows, :size]),
        jnp.asarray(prompts.prompt_lengths[rows]),
        decode=decode,
        keys=keys,
      )
      tokens[rows], num_tokens[rows] = out.tokens, out.num_tokens
      lists = metrics.round_lists(out.round_lengths, out.accepted)
      for row, lengths, stood in zip(rows, *lists, strict=True):
        rounds[row], accepted[row] = lengths, stood
      progress.update(fresh * decode.max_new_tokens)
  return Decoded(tokens, num_tokens, rounds, accepted)


def advancement_report(
  decoded: Decoded, looping: np.ndarray, num_proposals: int
) -> dict[str, Any]:
  """Means over all, looping and non-looping prompts, and raw rounds.

  Args:
    decoded: rounds of each prompt.
    looping: [n] bool, whether the target's own greedy answer loops.
    num_proposals: tokens proposed per round.
  """
  groups = {
    "all": np.ones(len(looping), bool),
    "looping": looping,
    "non_looping": ~looping,
  }
  report: dict[str, Any] = {}
  for name, rows in groups.items():
    picked = [decoded.rounds[i] for i in np.flatnonzero(rows)]
    stood = [decoded.accepted[i] for i in np.flatnonzero(rows)]
    report[name] = {
      "prompts": int(rows.sum()),
      "rounds": sum(len(lengths) for lengths in picked),
      "mean_advancement": metrics.mean_advancement(picked),
      "acceptance_by_position": metrics.acceptance_by_position(
        stood, num_proposals
      ),
    }
  report["round_lengths"] = decoded.rounds
  return report


def losslessness(
  target: generate.TargetModel,
  answers: answers_lib.AnswerSet,
  decoded: Decoded,
) -> dict[str, Any]:
  """Compares greedy speculative output with the target's own answers.

  Returns:
    Number of prompts and of equal outputs; for each that differs, the place of
    the first difference and the target's logit margin there between the two
    tokens, which tells a rounding tie from an error.
  """
  differing = []
  for row, (start, end) in enumerate(
    zip(answers.prompt_lengths, answers.lengths, strict=True)
  ):
    own = answers.tokens[row, start:end]
    out = decoded.tokens[row, : decoded.num_tokens[row]]
    if np.array_equal(own, out):
      continue
    shared = min(len(own), len(out))
    unequal = np.flatnonzero(own[:shared] != out[:shared])
    place = int(unequal[0]) if len(unequal) else shared
    margin = None
    if len(unequal):
      prefix = jnp.asarray(answers.tokens[row : row + 1, : start + place])
      hidden = model.forward(target.params, prefix, cfg=target.cfg).hidden
      logits = np.asarray(model.logits(target.params, hidden[0, -1:]))[0]
      margin = abs(float(logits[own[place]] - logits[out[place]]))
    differing.append({"prompt": row, "place": place, "margin": margin})
  return {
    "prompts": len(answers.lengths),
    "equal": len(answers.lengths) - len(differing),
    "differing": differing,
  }


def row_for_table(label: str, report: dict[str, Any]) -> list[str]:
  """One line a report: label, then pooled means of all and of both groups.

  A group without a round has a dash: its mean is NaN, and null in a file.
  """
  means = [
    report[group]["mean_advancement"]["pooled"]
    for group in ("all", "non_looping", "looping")
  ]
  cells = ["-" if x is None or math.isnan(x) else f"{x:.2f}" for x in means]
  return [label, *cells]
