"""Trains one drafter on answers of its target.

  python -m experiments.train_drafter --method=dspine \\
      --answers=runs/answers --work_dir=runs/dspine

Answers come from `make_answers`; features of the target are computed once and
memory-mapped below WORK_DIR. The result, WORK_DIR/drafter, is a folder in the
released layout. Killed runs go on where they stopped when the command is
repeated, with the same parameters bit by bit on CPU. Metrics go to
metrics.jsonl and TensorBoard. Time: about 2 minutes on two CPU cores.
"""

import sys

from absl import flags

from dspine_jax import attention_masks, configs, method_options
from dspine_jax.drafters import methods
from experiments import run_io, targets
from experiments.stages import comparison, training

_WORK_DIR = flags.DEFINE_string(
  "work_dir", None, "Where checkpoints, metrics and the drafter go."
)
_TARGET = flags.DEFINE_string("target", targets.EMBEDDED, targets.HELP)
_ANSWERS = flags.DEFINE_string(
  "answers", "runs/answers", "Work directory of make_answers."
)
_PARTS = flags.DEFINE_list(
  "parts", ["train_t0", "train_t1"], "Which of its training parts to use."
)
_METHOD = flags.DEFINE_enum(
  "method", "dspine", sorted(methods.DRAFTERS), "Which drafter."
)
_LAYERS = flags.DEFINE_integer("num_layers", 2, "Draft layers.", lower_bound=1)
_BLOCK = flags.DEFINE_integer("block_size", 16, "Slots of a block.")
_ATTENTION = flags.DEFINE_enum(
  "block_attention",
  None,
  ["causal", "bidirectional"],
  "What slots see of their block; default: the method's.",
)
_WINDOW = flags.DEFINE_integer(
  "sliding_window", None, "Context that all layers see; default: everything."
)
_CONVENTION = flags.DEFINE_enum(
  "sliding_window_convention",
  attention_masks.DEFAULT_CONVENTION,
  list(attention_masks.WINDOW_CONVENTIONS),
  "Whose rule for the window's start and inside the block.",
)
_OBJECTIVE = flags.DEFINE_enum(
  "objective",
  None,
  method_options.OBJECTIVES,
  "DFlash, DFlash2: what is minimised; default: cross_entropy.",
)
_RANK = flags.DEFINE_integer("transfer_rank", 128, "DSpine: code width.")
_MESSAGE = flags.DEFINE_integer("message_size", 64, "DSpine: message width.")
_TOP_K = flags.DEFINE_integer(
  "top_k", 16, "DSpine, DFlash2: candidates per slot."
)
_HEAD_RANK = flags.DEFINE_integer(
  "head_rank", 64, "DFlash2, Domino, DSpark: rank of the head."
)
_GRU = flags.DEFINE_integer("gru_hidden_dim", 128, "Domino: width of the GRU.")
_MARKOV = flags.DEFINE_enum(
  "markov_head_type",
  "vanilla",
  method_options.MARKOV_HEADS,
  "DSpark: its head.",
)
_BETA = flags.DEFINE_float(
  "alignment_weight", 0.1, "DSpine: weight of the alignment term."
)
_MASK = flags.DEFINE_integer(
  "mask_token_id", None, "Token of empty slots; default: the target's own."
)
_STEPS = flags.DEFINE_integer("steps", 800, "Optimiser steps.", lower_bound=1)
_BATCH = flags.DEFINE_integer("batch_size", 8, "Sequences a micro-batch.")
_ACCUMULATION = flags.DEFINE_integer("accumulation", 1, "Micro-batches a step.")
_ANCHORS = flags.DEFINE_integer("num_anchors", 16, "Blocks per sequence.")
_CHUNK = flags.DEFINE_integer(
  "chunk_blocks", 16, "Blocks whose vocabulary rows exist together."
)
_OPTIMIZER = flags.DEFINE_enum(
  "optimizer", "muon", configs.OPTIMIZERS, "Which optimiser."
)
_LR = flags.DEFINE_float("learning_rate", 0.02, "Peak learning rate.")
_DECAY = flags.DEFINE_float("weight_decay", 0.0, "Weight decay.")
_EVERY = flags.DEFINE_integer(
  "checkpoint_every", 100, "Steps between checkpoints.", lower_bound=1
)
_SEED = flags.DEFINE_integer(
  "seed", 0, "Seed of weights, anchors and order.", lower_bound=0
)


def sizes() -> comparison.Sizes:
  """What the flags say about the methods' own parts."""
  return comparison.Sizes(
    transfer_rank=_RANK.value,
    message_size=_MESSAGE.value,
    top_k=_TOP_K.value,
    head_rank=_HEAD_RANK.value,
    gru_hidden_dim=_GRU.value,
    markov_head_type=_MARKOV.value,
    alignment_weight=_BETA.value,
    objective=_OBJECTIVE.value,
  )


def main(unused_argv):
  if not _WORK_DIR.value:
    raise ValueError("--work_dir must name a directory")
  target = targets.load(_TARGET.value)
  is_causal = None
  if _ATTENTION.value is not None:
    is_causal = _ATTENTION.value == "causal"
  cfg = comparison.drafter_config(
    target,
    _METHOD.value,
    num_layers=_LAYERS.value,
    block_size=_BLOCK.value,
    steps=_STEPS.value,
    sizes=sizes(),
    mask_token_id=_MASK.value,
    is_causal=is_causal,
    sliding_window=_WINDOW.value,
    sliding_window_convention=_CONVENTION.value,
  )
  train_cfg = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(
      name=_OPTIMIZER.value,
      learning_rate=_LR.value,
      total_steps=_STEPS.value,
      weight_decay=_DECAY.value,
    ),
    batch_size=_BATCH.value,
    accumulation=_ACCUMULATION.value,
    num_anchors=_ANCHORS.value,
    chunk_blocks=_CHUNK.value,
    seed=_SEED.value,
  )
  answers = training.load_parts(_ANSWERS.value, _PARTS.value, target)
  work_dir = run_io.open_work_dir(
    _WORK_DIR.value,
    config={
      "target": _TARGET.value,
      "answers": _ANSWERS.value,
      "parts": _PARTS.value,
      "drafter": cfg,
      "train": train_cfg,
    },
    argv=sys.argv,
    resume=True,
  )
  data = training.compute_features(
    target, answers, cfg.target_layer_ids, work_dir.path / "features"
  )
  training.train_drafter(
    target,
    data,
    cfg,
    train_cfg,
    work_dir,
    checkpoint_every=_EVERY.value,
    label=f"train {cfg.method}",
  )
  print(f"drafter written to {work_dir.path / 'drafter'}")


if __name__ == "__main__":
  run_io.run_app(main)
