"""Lets a target answer prompts, for training and evaluating its drafters.

  python -m experiments.make_answers --work_dir=runs/answers
  python -m experiments.make_answers --server=http://localhost:30000
      --prompts=prompts.jsonl --temperatures=0 --work_dir=runs/served

Prompts are cut from text files (the standard library, or --corpus): training
prompts from training files, evaluation prompts from held-out files. Or, with
--prompts, they are what users say to a chat model, one conversation a line
(`turns`, `messages` or `conversations`; answers in it are not used), which the
target answers turn by turn, in its chat template, thinking off. PROMPTS is one
file of training prompts, or a folder with train.jsonl where every other file is
a benchmark. Training answers are made at every given temperature, evaluation
answers at 0.

Without --server the target decodes here; WORK_DIR gets one .npz a part. With
--server a model served by SGLang, vLLM or another OpenAI-compatible server
answers the training prompts, all of them unless --train_prompts says how many;
WORK_DIR gets one train_t<T>.jsonl of `messages` for each temperature, in the
order of the prompts, for `train_drafter --chats`, and train_t<T>.left_out.jsonl
with what was refused or empty. A server that goes away is waited for.

A killed run goes on where it was: everything finished is kept. WORK_DIR gets
results.json. Time on two CPU cores: about 4 minutes with the embedded target;
467 answers of SmolLM2-135M took 8, beside other work.
"""

import functools
import os
import sys
from typing import Any

from absl import flags

from experiments import run_io, targets
from experiments.stages import answers, server_answers

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/answers", "Where the answers go."
)
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
_CORPUS = flags.DEFINE_string(
  "corpus", None, "Folder of *.py files; default: the standard library."
)
_PROMPTS = flags.DEFINE_string(
  "prompts", None, "JSONL file of conversations, or folder of such files."
)
_TRAIN = flags.DEFINE_integer(
  "train_prompts",
  None,
  "Training prompts per temperature (default 2200; with --server all).",
  lower_bound=1,
)
_EVAL = flags.DEFINE_integer(
  "eval_prompts",
  200,
  "Held-out prompts, or conversations of each benchmark.",
  lower_bound=1,
)
_PROMPT = flags.DEFINE_integer(
  "prompt_tokens",
  None,
  "Tokens of a prompt cut from text (default 64), or of the longest training"
  " prompt from --prompts (default 256).",
  lower_bound=1,
)
_LONGEST = flags.DEFINE_integer(
  "longest_prompt",
  1024,
  "With --prompts: tokens of the longest prompt of a benchmark; longer ones are"
  " left out and counted.",
  lower_bound=1,
)
_NEW = flags.DEFINE_integer(
  "new_tokens", 144, "Tokens of an answer.", lower_bound=2
)
_TEMPERATURES = flags.DEFINE_list(
  "temperatures", ["0", "1"], "Temperatures of the training answers."
)
_BATCH = flags.DEFINE_integer(
  "batch_size", 64, "Prompts decoded together.", lower_bound=1
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of prompts and draws.", lower_bound=0
)
_SERVER = flags.DEFINE_string(
  "server", None, "URL of an OpenAI-compatible server, http://HOST:PORT."
)
_MODEL = flags.DEFINE_string(
  "served_model", None, "With --server: name of the model; default: the first."
)
_TOP_K = flags.DEFINE_integer(
  "top_k", 0, "With --server: most likely tokens kept; 0: all.", lower_bound=0
)
_TOP_P = flags.DEFINE_float(
  "top_p", 1.0, "With --server: mass of tokens kept.", 0.0, 1.0
)
_CONCURRENCY = flags.DEFINE_integer(
  "concurrency", 64, "With --server: requests at a time.", 1, 4096
)
_PATIENCE = flags.DEFINE_float(
  "server_patience",
  900.0,
  "With --server: seconds to wait for one that answers nothing.",
  lower_bound=0.1,
)
_TIMEOUT = flags.DEFINE_float(
  "request_timeout", 1200.0, "With --server: seconds for one answer.", 0.1
)
_KEY_ENV = flags.DEFINE_string(
  "api_key_env", None, "With --server: environment variable with the key."
)

_OF_SERVER = (_MODEL, _TOP_K, _TOP_P, _CONCURRENCY, _PATIENCE, _TIMEOUT)
_OF_SERVER += (_KEY_ENV,)
_OF_TARGET = (_TARGET, _CORPUS, _EVAL, _PROMPT, _LONGEST, _BATCH)


def main(unused_argv):
  temperatures = answers.parse_temperatures(_TEMPERATURES.value)
  if _SERVER.value:
    ask_server(_SERVER.value, temperatures)
  else:
    decode_here(temperatures)


def refuse(holders: tuple[flags.FlagHolder, ...], why: str) -> None:
  """ValueError if a flag of the other way to answer is given."""
  for holder in holders:
    if flags.FLAGS[holder.name].present:
      raise ValueError(f"--{holder.name}={holder.value}: {why}")


def ask_server(url: str, temperatures: list[float]) -> None:
  """Answers of a served model."""
  refuse(_OF_TARGET, "not with --server, whose model answers")
  if not _PROMPTS.value:
    raise ValueError(f"--server={url}: needs --prompts")
  server = server_answers.server(
    url,
    concurrency=_CONCURRENCY.value,
    patience_s=_PATIENCE.value,
    timeout_s=_TIMEOUT.value,
    api_key=_api_key(),
  )
  conversations = server_answers.choose(
    server_answers.read_prompts(_PROMPTS.value), _TRAIN.value, _SEED.value
  )
  options: dict[str, Any] = {
    "new_tokens": _NEW.value,
    "temperatures": temperatures,
    "top_k": _TOP_K.value,
    "top_p": _TOP_P.value,
    "seed": _SEED.value,
  }
  model = server_answers.model_name(server, _MODEL.value)
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "served_model": model,
      "prompts": _PROMPTS.value,
      "prompts_digest": answers.digest(conversations),
      **options,
    },
    argv=sys.argv,
    resume=True,
  )
  results = server_answers.ask_parts(
    server, model, conversations, work_dir.path, **options
  )
  run_io.write_json(work_dir.path / "results.json", results)
  rows = [[name, *row.values()] for name, row in results.items()]
  print(run_io.table(rows, ["part", *next(iter(results.values()))]))


def _api_key() -> str | None:
  if not _KEY_ENV.value:
    return None
  key = os.environ.get(_KEY_ENV.value)
  if not key:
    raise ValueError(f"--api_key_env={_KEY_ENV.value}: not set, or empty")
  return key


def decode_here(temperatures: list[float]) -> None:
  """Answers of our own target."""
  refuse(_OF_SERVER, "only with --server")
  target = targets.load(_TARGET.value)
  if _PROMPTS.value and _CORPUS.value:
    raise ValueError(f"--prompts={_PROMPTS.value}: not with --corpus")
  prompt_tokens = _PROMPT.value or (256 if _PROMPTS.value else 64)
  answers.check_lengths(target, prompt_tokens, _NEW.value)
  options = {
    "train_prompts": _TRAIN.value or 2200,
    "eval_prompts": _EVAL.value,
    "prompt_tokens": prompt_tokens,
    "new_tokens": _NEW.value,
    "temperatures": temperatures,
    "batch_size": _BATCH.value,
    "seed": _SEED.value,
  }
  if _PROMPTS.value:
    turns = answers.read_conversations(_PROMPTS.value)
    origin: dict[str, Any] = {"prompts": _PROMPTS.value}
    answers.check_lengths(target, _LONGEST.value, _NEW.value)
    origin["longest_prompt"] = _LONGEST.value
    make = functools.partial(
      answers.chat_parts, target, turns, longest_prompt=_LONGEST.value
    )
  else:
    text = answers.read_text(_CORPUS.value)
    origin = {"corpus_digest": text.digest}
    make = functools.partial(answers.answer_parts, target, text)
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={"target": _TARGET.value, **origin, **options},
    argv=sys.argv,
    resume=True,
  )
  sets = make(work_dir.path, **options)
  results = {name: answers.describe(part) for name, part in sets.items()}
  run_io.write_json(work_dir.path / "results.json", results)
  rows = [[name, *row.values()] for name, row in results.items()]
  print(run_io.table(rows, ["part", "answers", "answer tokens", "looping"]))


if __name__ == "__main__":
  run_io.run_app(main)
