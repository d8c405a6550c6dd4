"""Lets a served model answer users; finished conversations are kept at once.

A part is one JSONL file of `messages`, in the order of the prompts, for
`train_drafter --chats`. Until it is written, its conversations are in a journal
beside it, so that neither a killed client nor a server that went away costs
more than what was under way.
"""

import contextlib
import json
import os
import pathlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from dspine_jax import configs
from dspine_jax.data import chat_client, completions, prompts
from dspine_jax.data import journal as journal_lib
from experiments import disk_errors, run_io
from experiments.stages import answers

# Of a kept conversation, all turns together, as the server counts them.
_TOKENS = ("prompt_tokens", "answer_tokens")


def server(url: str, **options: Any) -> chat_client.Server:
  """The server of --server; ValueError naming the flag if it cannot be."""
  try:
    return chat_client.Server(url=url, **options)
  except ValueError as error:
    raise ValueError(f"--server={url}: {error}") from None


def read_prompts(path: str) -> list[list[str]]:
  """User turns of a file, or of train.jsonl in a folder.

  Raises:
    ValueError: as `prompts.read_turns`.
  """
  folder = pathlib.Path(path)
  return prompts.read_turns(
    folder / answers.TRAIN_FILE if folder.is_dir() else folder
  )


def choose(
  conversations: list[list[str]], count: int | None, seed: int
) -> list[list[str]]:
  """All in the order of the file, or so many in an order drawn with the seed.

  The same choice as of `answers.chat_parts`.
  """
  if count is None:
    return conversations
  order = np.random.default_rng(seed).permutation(len(conversations))
  return [conversations[i] for i in order[:count]]


def model_name(server: chat_client.Server, wanted: str | None) -> str:
  """The wanted model, or the first that is served.

  Raises:
    ValueError: it is not served, or there is no such server.
  """
  with run_io.Progress(1, "server", "answers") as progress:
    try:
      models = completions.served_models(
        server, lambda why: progress.update(0, waiting=why)
      )
    except chat_client.AwayError as error:
      raise ValueError(
        f"--server={error}; start it and repeat the command"
      ) from None
  if wanted is None and models:
    return models[0]
  if wanted not in models:
    raise ValueError(
      f"--served_model={wanted}: {server.url} serves {', '.join(models) or '-'}"
    )
  return wanted


def ask_parts(
  server: chat_client.Server,
  model: str,
  conversations: Sequence[Sequence[str]],
  folder: pathlib.Path,
  *,
  new_tokens: int,
  temperatures: Sequence[float],
  top_k: int,
  top_p: float,
  seed: int,
) -> dict[str, dict[str, int]]:
  """Answers at every temperature, `train_t<T>.jsonl`, and their counts.

  Raises:
    ValueError: the server stays away or refuses everything; what is finished
      is kept.
  """
  results = {}
  for index, temperature in enumerate(temperatures):
    sampling = configs.SamplingConfig(
      temperature=temperature, top_k=top_k, top_p=top_p
    )
    request = chat_client.Request(
      model=model,
      new_tokens=new_tokens,
      sampling=sampling,
      seed=seed + 100 * (index + 1),
    )
    path = folder / f"train_t{temperature:g}.jsonl"
    try:
      results[path.stem] = _ask_part(server, request, conversations, path)
    except chat_client.ServerError as error:
      raise ValueError(
        f"--server={error}; finished answers are kept in {folder}: repeat the"
        " command when the server is well"
      ) from None
  return results


def _ask_part(
  server: chat_client.Server,
  request: chat_client.Request,
  conversations: Sequence[Sequence[str]],
  path: pathlib.Path,
) -> dict[str, int]:
  journal_path = path.with_suffix(".journal")
  left_out = path.with_suffix(".left_out.jsonl")
  if not path.exists() or journal_path.exists():
    settings = json.loads(request.body([], 0, 0))
    settings["asked"] = answers.digest(conversations)
    journal = journal_lib.Journal(journal_path, settings)
    with contextlib.closing(journal):
      _ask_missing(server, request, conversations, journal, path.stem)
      _write_lines(left_out, _left_out(journal, conversations))
      _write_lines(path, _kept(journal))
    journal.remove()
  return _count(path, left_out)


def _ask_missing(server, request, conversations, journal, label) -> None:
  missing = [i for i in range(len(conversations)) if i not in journal]
  if not missing:
    return
  turns = [len(conversation) for conversation in conversations]
  done = sum(turns) - sum(turns[i] for i in missing)
  with run_io.Progress(sum(turns), label, "requests", start=done) as progress:

    def waiting(why: str) -> None:
      if why:
        progress.update(0, waiting=why)

    completions.check(server, request, waiting)
    talks = completions.converse(
      server, request, ((i, conversations[i]) for i in missing), waiting
    )
    # Closed at once, so that no thread asks on while an error is told.
    with contextlib.closing(talks):
      for talk in talks:
        journal.append(talk._asdict())
        progress.update(turns[talk.id])


def _kept(journal: journal_lib.Journal) -> Iterator[dict[str, Any]]:
  for record in journal.records():
    if record["messages"]:
      names = ("id", "messages", "finish_reasons", *_TOKENS)
      yield {name: record[name] for name in names}


def _left_out(
  journal: journal_lib.Journal, conversations: Sequence[Sequence[str]]
) -> Iterator[dict[str, Any]]:
  """What was not answered, with the turn at which its conversation ends."""
  for record in journal.records():
    if record["ended"]:
      turn = len(record["finish_reasons"])
      yield {
        "id": record["id"],
        "turn": turn,
        "why": record["ended"],
        "note": record["note"],
        "prompt": conversations[record["id"]][turn],
      }


def _write_lines(
  path: pathlib.Path, records: Iterable[Mapping[str, Any]]
) -> None:
  """One record a line, so that a reader sees the old or the new file only."""
  partial = path.with_name(f".{path.name}.tmp")
  try:
    with disk_errors.naming(path), partial.open("wb") as file:
      for record in records:
        text = json.dumps(record, ensure_ascii=False)
        file.write(text.encode("utf-8", "replace") + b"\n")
      file.flush()
      os.fsync(file.fileno())
    os.replace(partial, path)
  finally:
    partial.unlink(missing_ok=True)


def _count(path: pathlib.Path, left_out: pathlib.Path) -> dict[str, int]:
  """Counts of a finished part; tokens are those of the conversations kept."""
  counts = dict.fromkeys(
    ("conversations", "answers", *_TOKENS, "cut_by_length", "empty", "refused"),
    0,
  )
  for record in _lines(path):
    counts["conversations"] += 1
    counts["answers"] += len(record["finish_reasons"])
    counts["cut_by_length"] += record["finish_reasons"].count("length")
    for name in _TOKENS:
      counts[name] += record[name]
  for record in _lines(left_out):
    counts[record["why"]] += 1
  return counts


def _lines(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  with path.open("rb") as lines:
    for number, line in enumerate(lines, start=1):
      try:
        yield json.loads(line)
      except ValueError as error:
        raise ValueError(
          f"{path}: line {number}: {error}; delete the file to ask again"
        ) from None
