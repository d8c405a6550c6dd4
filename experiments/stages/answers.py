"""Lets a target answer prompts of text files or of users; parts are kept.

Inside a part, every decoded batch is in a journal beside the part's file until
that is written, so that a killed run goes on in the middle of a part.
"""

import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np

from dspine_jax import configs
from dspine_jax.data import answers as answers_lib
from dspine_jax.data import corpus, prompts
from dspine_jax.data import journal as journal_lib
from experiments import run_io, targets


def read_text(folder: str | None) -> corpus.Corpus:
  """The named corpus, or the standard library."""
  return corpus.read_corpus(folder) if folder else corpus.standard_library()


def parse_temperatures(values: Sequence[str]) -> list[float]:
  """The numbers of --temperatures; ValueError if none or one not possible."""
  if not values:
    raise ValueError("--temperatures: at least one is needed")
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
  """Continuations of text, read back where they are already there.

  Returns:
    "train_t<T>" for each temperature and "held_out" (temperature 0, whose
    answers also are the autoregressive reference of the evaluation).

  Raises:
    ValueError: the target knows no end of a text, or the text is too short.
  """

  def windows(files, count, part_seed):
    try:
      streams = corpus.encode_files(
        target.tokenizer, files, otherwise=target.model.cfg.eos_token_ids
      )
    except ValueError as error:
      raise ValueError(
        f"target {target.name}: {error}, and its config.json no eos_token_id"
      ) from None
    return prompts.cut_prompts(
      streams, length=prompt_tokens, count=count, seed=part_seed
    )

  def part(name, files, count, temperature, part_seed):
    def make(path):
      sampling = configs.SamplingConfig(temperature=temperature)
      encoded = windows(files, count, part_seed)
      with _Answerer(
        target, sampling, new_tokens, batch_size, part_seed, name, count
      ) as answer:
        answer.keep_in(path, encoded.tolist())
        return answer(encoded)

    return kept(folder / f"{name}.npz", make)

  sets = {}
  for index, temperature in enumerate(temperatures):
    name, own = f"train_t{temperature:g}", seed + 100 * (index + 1)
    sets[name] = part(name, text.train, train_prompts, temperature, own)
  sets["held_out"] = part("held_out", text.held_out, eval_prompts, 0.0, seed)
  return sets


TRAIN_FILE = "train.jsonl"


def read_conversations(
  folder: str,
) -> tuple[list[list[str]], dict[str, list[list[str]]]]:
  """User turns of a folder: train.jsonl, and every other file by its name.

  A path of one file is training prompts alone.

  Raises:
    ValueError: no such folder, no train.jsonl or no other file in it, or what
      `prompts.read_turns` refuses.
  """
  if pathlib.Path(folder).is_file():
    return prompts.read_turns(folder), {}
  paths = sorted(pathlib.Path(folder).glob("*.jsonl"))
  by_name = {path.name: path for path in paths}
  if TRAIN_FILE not in by_name or len(paths) < 2:
    raise ValueError(
      f"--prompts={folder}: {TRAIN_FILE} and a file to evaluate on are needed"
    )
  train = prompts.read_turns(by_name.pop(TRAIN_FILE))
  return train, {
    path.stem: prompts.read_turns(path) for path in by_name.values()
  }


def chat_parts(
  target: targets.NamedTarget,
  conversations: tuple[list[list[str]], dict[str, list[list[str]]]],
  folder: pathlib.Path,
  *,
  longest_prompt: int,
  train_prompts: int,
  eval_prompts: int,
  prompt_tokens: int,
  new_tokens: int,
  temperatures: list[float],
  batch_size: int,
  seed: int,
) -> dict[str, answers_lib.AnswerSet]:
  """Answers to users, every turn in order, read back where they are there.

  Training conversations come in an order drawn with the seed, and end before a
  prompt of more than `prompt_tokens`. Benchmarks are answered at temperature 0,
  and end before one of more than `longest_prompt`.

  Returns:
    "train_t<T>" for each temperature, and one set for each benchmark.
  """
  train, benchmarks = conversations
  order = np.random.default_rng(seed).permutation(len(train))
  chosen = [train[i] for i in order[:train_prompts]]

  def part(name, turns, temperature, longest, part_seed):
    def make(path):
      total = sum(map(len, turns))
      sampling = configs.SamplingConfig(temperature=temperature)
      with _Answerer(
        target, sampling, new_tokens, batch_size, part_seed, name, total
      ) as answer:
        answer.keep_in(path, [longest, *turns])
        return answer_turns(target, turns, answer, longest)

    return kept(folder / f"{name}.npz", make)

  sets = {}
  for index, temperature in enumerate(temperatures):
    name, own = f"train_t{temperature:g}", seed + 100 * (index + 1)
    sets[name] = part(name, chosen, temperature, prompt_tokens, own)
  for name, turns in benchmarks.items():
    sets[name] = part(name, turns[:eval_prompts], 0.0, longest_prompt, seed)
  return sets


def answer_turns(
  target: targets.NamedTarget,
  conversations: Sequence[Sequence[str]],
  answer: Callable[[list[np.ndarray]], answers_lib.AnswerSet],
  longest: int,
) -> answers_lib.AnswerSet:
  """Every turn of every conversation, after the target's answers before it.

  Args:
    target: whose chat template and tokenizer are used.
    conversations: user turns.
    answer: prompts -> answers.
    longest: tokens of a prompt; a conversation ends before a longer one.

  Raises:
    ValueError: the target has no chat template, or every prompt is too long.
  """
  histories: list[list[dict[str, str]]] = [[] for _ in conversations]
  going = list(range(len(conversations)))
  rounds, left_out = [], 0
  for turn in range(max(map(len, conversations))):
    asked, encoded = [], []
    for index in going:
      if turn >= len(conversations[index]):
        continue
      said = {"role": "user", "content": conversations[index][turn]}
      histories[index].append(said)
      tokens = targets.encode_chat(target, histories[index])
      if len(tokens) <= longest:
        asked.append(index)
        encoded.append(tokens)
      else:
        left_out += 1
    going = asked
    if not encoded:
      break
    made = answer(encoded)
    rounds.append(made)
    spans = zip(made.tokens, made.prompt_lengths, made.lengths, strict=True)
    for index, (row, start, end) in zip(asked, spans, strict=True):
      reply = target.tokenizer.decode(row[start:end].tolist())
      histories[index].append({"role": "assistant", "content": reply})
  if not rounds:
    raise ValueError(f"every prompt is longer than {longest} tokens")
  if left_out:
    print(
      f"{left_out} of {len(conversations)} conversations end before a prompt of"
      f" more than {longest} tokens"
    )
  return answers_lib.join(rounds)


def sampled(
  target: targets.NamedTarget,
  prompts: answers_lib.AnswerSet,
  sampling: configs.SamplingConfig,
  path: pathlib.Path | None,
  *,
  seed: int,
) -> answers_lib.AnswerSet:
  """The same prompts, answered with other sampling; kept at `path` if given.

  At temperature 0 the set itself, whose answers are greedy.
  """
  if sampling.temperature == 0:
    return prompts
  rows = zip(prompts.tokens, prompts.prompt_lengths, strict=True)

  def make(path):
    encoded = [row[:length] for row, length in rows]
    with _Answerer(
      target,
      sampling,
      prompts.new_tokens,
      64,
      seed,
      f"answers T={sampling.temperature:g}",
      len(prompts.lengths),
    ) as answer:
      if path is not None:
        answer.keep_in(path, [row.tolist() for row in encoded])
      return answer(encoded)

  if path is None:
    return make(None)
  path.parent.mkdir(parents=True, exist_ok=True)
  return kept(path, make)


class _Answerer:
  """Answers prompts in one way, with progress over several calls.

  As a `with` block, at whose end progress and journal are closed.
  """

  def __init__(
    self,
    target: targets.NamedTarget,
    sampling: configs.SamplingConfig,
    new_tokens: int,
    batch_size: int,
    seed: int,
    label: str,
    count: int,
  ):
    self._target, self._batch_size, self._seed = target, batch_size, seed
    self._progress = run_io.Progress(count * new_tokens, label, "tokens")
    self._journal: journal_lib.Journal | None = None
    self._calls = 0
    self._decode = configs.DecodeConfig(
      max_new_tokens=new_tokens,
      stop_tokens=target.model.cfg.eos_token_ids,
      sampling=sampling,
      rule="greedy" if sampling.temperature == 0 else "rejection",
    )

  def keep_in(self, path: pathlib.Path, asked: Iterable[Any]) -> None:
    """Journals answers beside `path`; `asked` is what they depend on, as JSON.

    Raises:
      ValueError: a journal is there that was begun in another way.
    """
    self._journal = journal_lib.Journal(
      path.with_suffix(".journal"),
      {
        "target": self._target.name,
        "decode": dataclasses.asdict(self._decode),
        "seed": self._seed,
        "batch_size": self._batch_size,
        "asked": digest(asked),
      },
    )

  def __enter__(self) -> "_Answerer":
    return self

  def __exit__(self, *exc_info: object) -> None:
    self._progress.close()
    if self._journal is not None:
      self._journal.close()

  def __call__(self, encoded) -> answers_lib.AnswerSet:
    call, journal = self._calls, self._journal
    known: dict[int, list[int]] = {}
    if journal is not None:
      for record in journal.records():
        if record["id"][0] == call:
          known[record["id"][1]] = record["tokens"]

    def finished(row: int, tokens: list[int]) -> None:
      if journal is not None:
        journal.append({"id": [call, row], "tokens": tokens})

    made = answers_lib.regenerate(
      self._target.model,
      encoded,
      decode=self._decode,
      seed=self._seed,
      batch_size=self._batch_size,
      progress=self._progress.update,
      known=known,
      finished=finished,
    )
    # Every call has its own draws.
    self._calls, self._seed = self._calls + 1, self._seed + 1
    return made


def digest(asked: Iterable[Any]) -> str:
  """A short name of what is asked, so that other prompts are noticed."""
  lines = hashlib.sha256()
  for one in asked:
    lines.update(json.dumps(one).encode() + b"\n")
  return lines.hexdigest()[:16]


def kept(
  path: pathlib.Path,
  make: Callable[[pathlib.Path], answers_lib.AnswerSet],
) -> answers_lib.AnswerSet:
  """The set at `path`, made and saved if it is not there.

  `make` is given the path and may keep a journal beside it, which goes then.
  """
  if path.exists():
    answers = answers_lib.load(path)
  else:
    answers = make(path)
    answers_lib.save(path, answers)
  path.with_suffix(".journal").unlink(missing_ok=True)
  return answers


def describe(answers: answers_lib.AnswerSet) -> dict[str, float]:
  """Counts of a part, for results.json and the terminal."""
  return {
    "answers": len(answers.lengths),
    "answer_tokens": int((answers.lengths - answers.prompt_lengths).sum()),
    "looping": float(answers.loops.mean()),
  }
