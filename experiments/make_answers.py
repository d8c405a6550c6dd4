"""Lets a target answer prompts, for training and evaluating its drafters.

  python -m experiments.make_answers --work_dir=runs/answers

Prompts are cut from text files (the standard library, or --corpus): training
prompts from training files, evaluation prompts from held-out files. Or, with
--prompts=DIR, they are what users say to a chat model: DIR/train.jsonl for
training, and every other file of DIR is a benchmark; a line has its `turns`, a
list of texts, which the target answers in order, in its chat template, thinking
off. Training answers are made at every given temperature, evaluation answers at
0. Finished parts are kept, so a killed run goes on. WORK_DIR gets one .npz a
part and results.json. Time on two CPU cores: about 4 minutes with the embedded
target; 467 answers of SmolLM2-135M took 8, beside other work.
"""

import functools
import sys
from typing import Any

from absl import flags

from experiments import run_io, targets
from experiments.stages import answers

_WORK_DIR = flags.DEFINE_string(
  "work_dir", "runs/answers", "Where the answers go."
)
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
_CORPUS = flags.DEFINE_string(
  "corpus", None, "Folder of *.py files; default: the standard library."
)
_PROMPTS = flags.DEFINE_string(
  "prompts", None, "Folder of *.jsonl files with `turns`, for a chat model."
)
_TRAIN = flags.DEFINE_integer(
  "train_prompts", 2200, "Training prompts per temperature.", lower_bound=1
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


def main(unused_argv):
  temperatures = answers.parse_temperatures(_TEMPERATURES.value)
  target = targets.load(_TARGET.value)
  if _PROMPTS.value and _CORPUS.value:
    raise ValueError(f"--prompts={_PROMPTS.value}: not with --corpus")
  prompt_tokens = _PROMPT.value or (256 if _PROMPTS.value else 64)
  answers.check_lengths(target, prompt_tokens, _NEW.value)
  options = {
    "train_prompts": _TRAIN.value,
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
