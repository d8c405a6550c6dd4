"""Lets a target answer prompts, for training and evaluating its drafters.

  python -m experiments.make_answers --work_dir=runs/answers

Prompts are cut from text files (the standard library, or --corpus): training
prompts from training files, evaluation prompts from held-out files. The target
continues each of them by itself at every given temperature; finished parts are
kept, so a killed run goes on. WORK_DIR gets one .npz a part and results.json.
Time: about 4 minutes on two CPU cores with the embedded target.
"""

import sys

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
_TRAIN = flags.DEFINE_integer(
  "train_prompts", 2200, "Training prompts per temperature.", lower_bound=1
)
_EVAL = flags.DEFINE_integer(
  "eval_prompts", 200, "Held-out prompts.", lower_bound=1
)
_PROMPT = flags.DEFINE_integer(
  "prompt_tokens", 64, "Tokens of a prompt.", lower_bound=1
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
  answers.check_lengths(target, _PROMPT.value, _NEW.value)
  text = answers.read_text(_CORPUS.value)
  options = {
    "train_prompts": _TRAIN.value,
    "eval_prompts": _EVAL.value,
    "prompt_tokens": _PROMPT.value,
    "new_tokens": _NEW.value,
    "temperatures": temperatures,
    "batch_size": _BATCH.value,
    "seed": _SEED.value,
  }
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={"target": _TARGET.value, "corpus_digest": text.digest, **options},
    argv=sys.argv,
    resume=True,
  )
  sets = answers.answer_parts(target, text, work_dir.path, **options)
  results = {name: answers.describe(part) for name, part in sets.items()}
  run_io.write_json(work_dir.path / "results.json", results)
  rows = [[name, *row.values()] for name, row in results.items()]
  print(run_io.table(rows, ["part", "answers", "answer tokens", "looping"]))


if __name__ == "__main__":
  run_io.run_app(main)
