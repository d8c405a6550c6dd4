"""Lets a target answer prompts cut from text files; finished parts are kept."""

import pathlib
from collections.abc import Sequence

from dspine_jax import configs
from dspine_jax.data import answers as answers_lib
from dspine_jax.data import corpus, prompts
from experiments import run_io, targets


def read_text(folder: str | None) -> corpus.Corpus:
  """The named corpus, or the standard library."""
  return corpus.read_corpus(folder) if folder else corpus.standard_library()


def parse_temperatures(values: Sequence[str]) -> list[float]:
  """The numbers of --temperatures; ValueError if one is not possible."""
  try:
    temperatures = [float(value) for value in values]
    for temperature in temperatures:
      configs.SamplingConfig(temperature=temperature)
  except ValueError as error:
    raise ValueError(f"--temperatures={','.join(values)}: {error}") from None
  return temperatures


def check_lengths(
  target: targets.NamedTarget, prompt_tokens: int, new_tokens: int
) -> None:
  """ValueError if the target has too few positions for prompt and answer."""
  most = target.model.cfg.max_positions
  if prompt_tokens + new_tokens > most:
    raise ValueError(
      f"--new_tokens={new_tokens}: with prompts of {prompt_tokens} tokens more"
      f" than max_positions={most} of --target={target.name}"
    )


def answer_parts(
  target: targets.NamedTarget,
  text: corpus.Corpus,
  folder: pathlib.Path,
  *,
  train_prompts: int,
  eval_prompts: int,
  prompt_tokens: int,
  new_tokens: int,
  temperatures: list[float],
  batch_size: int,
  seed: int,
) -> dict[str, answers_lib.AnswerSet]:
  """Answers of all parts, read back where they are already there.

  Returns:
    "train_t<T>" for each temperature and "held_out" (temperature 0, whose
    answers also are the autoregressive reference of the evaluation).
  """
  parts = {}
  for index, temperature in enumerate(temperatures):
    parts[f"train_t{temperature:g}"] = (
      text.train,
      train_prompts,
      temperature,
      seed + 100 * (index + 1),
    )
  parts["held_out"] = (text.held_out, eval_prompts, 0.0, seed)
  sets = {}
  for name, (files, count, temperature, part_seed) in parts.items():
    path = folder / f"{name}.npz"
    if path.exists():
      sets[name] = answers_lib.load(path)
      continue
    streams = corpus.encode_files(target.tokenizer, files)
    cut = prompts.cut_prompts(
      streams, length=prompt_tokens, count=count, seed=part_seed
    )
    decode = configs.DecodeConfig(
      max_new_tokens=new_tokens,
      stop_tokens=target.model.cfg.eos_token_ids,
      sampling=configs.SamplingConfig(temperature=temperature),
      rule="greedy" if temperature == 0 else "rejection",
    )
    with run_io.Progress(count * new_tokens, name, "tokens") as progress:
      sets[name] = answers_lib.regenerate(
        target.model,
        cut,
        decode=decode,
        seed=part_seed,
        batch_size=batch_size,
        progress=progress.update,
      )
    answers_lib.save(path, sets[name])
  return sets


def describe(answers: answers_lib.AnswerSet) -> dict[str, float]:
  """Counts of a part, for results.json and the terminal."""
  return {
    "answers": len(answers.lengths),
    "answer_tokens": int((answers.lengths - answers.prompt_lengths).sum()),
    "looping": float(answers.loops.mean()),
  }
