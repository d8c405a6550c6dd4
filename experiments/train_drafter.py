"""Trains one drafter on answers of its target.

  python -m experiments.train_drafter --method=dspine \\
      --answers=runs/answers --work_dir=runs/dspine

Answers come from `make_answers`, or, with --chats instead of --answers, from
JSONL files of conversations whose answers are the target's. These are tokenised
once, in its chat template, thinking off, and supervised where the assistant
speaks. Features of the target are computed once and kept below WORK_DIR, or for
each step anew where the disk does not suffice. The result, WORK_DIR/drafter, is
a folder in the released layout. Killed runs go on where they stopped when the
command is repeated, with the same parameters bit by bit on CPU. Metrics go to
metrics.jsonl and TensorBoard. Time: about 2 minutes on two CPU cores.

All devices that JAX sees are used (`--mesh`). On several hosts the same command
is started on each, under SLURM by `srun ... --distributed=auto`, elsewhere with
`--coordinator=HOST:PORT --num_processes=N --process_id=I`; WORK_DIR is one that
all of them see, and the first process writes it. SIGTERM saves the state and
ends with status 143.
"""

import pathlib
import sys
from collections.abc import Callable
from typing import Any, NamedTuple

from absl import flags

from dspine_jax import (
  attention_masks,
  configs,
  method_options,
  sharding,
  target_config,
)
from dspine_jax.data import feature_contents, feature_shards
from dspine_jax.data import rows as rows_lib
from dspine_jax.drafters import methods
from dspine_jax.training import loop
from experiments import run_io, targets
from experiments.stages import (
  chats,
  comparison,
  devices,
  feature_sources,
  stopping,
  training,
)

_SMALL = (
  "The default suits the embedded target; recipes hold those of large ones."
)
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
_CHATS = flags.DEFINE_list(
  "chats",
  None,
  "Instead of answers: JSONL files of conversations that the target answered.",
)
_MAX_LENGTH = flags.DEFINE_integer(
  "max_length", 2048, "With --chats: tokens of a document or packed row."
)
_PACKING = flags.DEFINE_enum(
  "packing",
  "pack",
  chats.PACKINGS,
  "With --chats: a document a row, or as many as fit.",
)
_SKIP = flags.DEFINE_bool(
  "skip_bad_lines", False, "With --chats: leave out and count lines at fault."
)
_METHOD = flags.DEFINE_enum(
  "method", "dspine", sorted(methods.DRAFTERS), "Which drafter."
)
_LAYERS = flags.DEFINE_integer(
  "num_layers", 2, f"Draft layers. {_SMALL}", lower_bound=1
)
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
_BETA_STEPS = flags.DEFINE_integer(
  "alignment_warmup_steps",
  None,
  "DSpine: optimiser steps in which that weight rises; default: 4 %.",
  lower_bound=1,
)
_MASK = flags.DEFINE_integer(
  "mask_token_id", None, "Token of empty slots; default: the target's own."
)
_STEPS = flags.DEFINE_integer(
  "steps", 800, f"Optimiser steps. {_SMALL}", lower_bound=1
)
_BATCH = flags.DEFINE_integer(
  "batch_size", 8, "Sequences a micro-batch, of all devices together."
)
_ACCUMULATION = flags.DEFINE_integer(
  "accumulation", 1, "Micro-batches a step, one after the other."
)
_ANCHORS = flags.DEFINE_integer("num_anchors", 16, "Blocks per sequence.")
_CHUNK = flags.DEFINE_integer(
  "chunk_blocks",
  16,
  "Blocks whose vocabulary rows exist together, on each device.",
)
_OPTIMIZER = flags.DEFINE_enum(
  "optimizer", "muon", configs.OPTIMIZERS, "Which optimiser."
)
_LR = flags.DEFINE_float("learning_rate", 0.02, f"Peak learning rate. {_SMALL}")
_DECAY = flags.DEFINE_float("weight_decay", 0.0, "Weight decay.")
_WARMUP = flags.DEFINE_float(
  "warmup_ratio", 0.04, "Share of the steps in which the rate rises, 0 to 1."
)
_SCHEDULE = flags.DEFINE_enum(
  "schedule",
  "cosine",
  configs.LR_SCHEDULES,
  "How the rate falls; wsd: constant, then linear over --decay_ratio.",
)
_DECAY_RATIO = flags.DEFINE_float(
  "decay_ratio", 0.4, "wsd: last share of the steps, 0 to 1."
)
_FINAL_LR = flags.DEFINE_float(
  "final_lr_ratio", 0.0, "Rate at the end as a share of the peak, 0 to 1."
)
_CLIP = flags.DEFINE_float(
  "clip_norm", 1.0, "Bound of the gradient's global norm."
)
_B1 = flags.DEFINE_float(
  "adam_b1", 0.9, "Decay a step of Adam's mean, also in muon's Adam part."
)
_B2 = flags.DEFINE_float(
  "adam_b2", 0.95, "Decay a step of Adam's square, also in muon's Adam part."
)
_FEATURES = flags.DEFINE_enum(
  "features",
  "auto",
  feature_sources.CHOICES,
  "Whether the target's features are kept on disk; auto: if they fit.",
)
_FEATURE_CACHE = flags.DEFINE_string(
  "feature_cache", None, "Folder of kept features; default: below WORK_DIR."
)
_FEATURE_DTYPE = flags.DEFINE_enum(
  "feature_dtype", "bfloat16", feature_shards.DTYPES, "Of kept features."
)
_CACHE_GB = flags.DEFINE_float(
  "cache_gb", None, "Most gigabytes that auto keeps.", lower_bound=0.0
)
_DTYPE = flags.DEFINE_enum(
  "dtype",
  "float32",
  target_config.DTYPES,
  "Of activations, products and the target; the drafter's own are float32.",
)
_MESH = flags.DEFINE_list(
  "mesh",
  None,
  "Sizes of the axes data,fsdp,tensor, such as 1,8,1; default: all fsdp.",
)
_DISTRIBUTED = flags.DEFINE_enum(
  "distributed",
  "off",
  devices.DISTRIBUTED,
  "auto: several processes, which JAX finds (SLURM, Open MPI, ...).",
)
_COORDINATOR = flags.DEFINE_string(
  "coordinator", None, "HOST:PORT of the first of several processes."
)
_PROCESSES = flags.DEFINE_integer(
  "num_processes", None, "With --coordinator: how many.", lower_bound=1
)
_PROCESS = flags.DEFINE_integer(
  "process_id", None, "With --coordinator: which one this is, from 0."
)
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
    alignment_warmup_steps=_BETA_STEPS.value,
    objective=_OBJECTIVE.value,
  )


def drafter_config(target: targets.NamedTarget) -> configs.DrafterConfig:
  """The drafter that the flags describe; the target's weights are not read."""
  is_causal = None
  if _ATTENTION.value is not None:
    is_causal = _ATTENTION.value == "causal"
  return comparison.drafter_config(
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


def train_config() -> configs.TrainConfig:
  """The run that the flags describe."""
  return configs.TrainConfig(
    optimizer=configs.OptimizerConfig(
      name=_OPTIMIZER.value,
      learning_rate=_LR.value,
      total_steps=_STEPS.value,
      schedule=_SCHEDULE.value,
      warmup_ratio=_WARMUP.value,
      decay_ratio=_DECAY_RATIO.value,
      final_lr_ratio=_FINAL_LR.value,
      weight_decay=_DECAY.value,
      clip_norm=_CLIP.value,
      adam_b1=_B1.value,
      adam_b2=_B2.value,
    ),
    batch_size=_BATCH.value,
    accumulation=_ACCUMULATION.value,
    num_anchors=_ANCHORS.value,
    chunk_blocks=_CHUNK.value,
    seed=_SEED.value,
  )


class Data(NamedTuple):
  """Training data that the flags name.

  Attributes:
    config: what a run that goes on must find unchanged.
    rows: work directory -> rows.
  """

  config: dict[str, Any]
  rows: Callable[[pathlib.Path], rows_lib.Rows]


def training_data(target: targets.NamedTarget) -> Data:
  """Answers of `make_answers`, or chats.

  Raises:
    ValueError: flags of both, or as `training.load_parts` and `chats.check`.
  """
  wrong = ("answers", "parts")
  if not _CHATS.value:
    wrong = ("max_length", "packing", "skip_bad_lines")
  for name in wrong:
    if flags.FLAGS[name].present:
      word = "not with" if _CHATS.value else "only with"
      raise ValueError(f"--{name}={flags.FLAGS[name].value}: {word} --chats")
  if not _CHATS.value:
    answers = training.load_parts(_ANSWERS.value, _PARTS.value, target)
    return Data(
      {"answers": _ANSWERS.value, "parts": _PARTS.value},
      lambda unused_folder: rows_lib.from_answers(answers),
    )
  order = chats.Order(
    tuple(_CHATS.value), _MAX_LENGTH.value, _PACKING.value, _SKIP.value
  )
  form = chats.check(target, order)
  digest = chats.origin(form, order)
  return Data(
    {"chats": order._asdict() | {"digest": digest}},
    lambda folder: chats.training_rows(form, order, folder / "rows" / digest),
  )


def main(unused_argv):
  if not _WORK_DIR.value:
    raise ValueError("--work_dir must name a directory")
  mesh = devices.start(
    mesh=_MESH.value,
    batch_size=_BATCH.value,
    distributed=_DISTRIBUTED.value,
    coordinator=_COORDINATOR.value,
    num_processes=_PROCESSES.value,
    process_id=_PROCESS.value,
  )
  target = devices.together(
    lambda: targets.load(
      _TARGET.value,
      dtype=_DTYPE.value,
      sharding=sharding.for_target(mesh),
    )
  )
  cfg, train_cfg = drafter_config(target), train_config()
  data = devices.together(lambda: training_data(target))
  digest = feature_contents.target_digest(target.model)
  work_dir = devices.together(
    lambda: run_io.open_work_dir(
      _WORK_DIR.value,
      config={
        "target": _TARGET.value,
        "target_digest": digest[:16],
        **data.config,
        # Features differ in their last bits.
        "features": {
          "choice": _FEATURES.value,
          "dtype": _FEATURE_DTYPE.value,
        },
        "drafter": cfg,
        "train": train_cfg,
      },
      argv=sys.argv,
      resume=True,
    )
  )
  folder = pathlib.Path(_FEATURE_CACHE.value or work_dir.path / "features")
  source = feature_sources.for_training(
    target,
    data.rows(work_dir.path),
    cfg.target_layer_ids,
    choice=_FEATURES.value,
    folder=folder,
    dtype=_FEATURE_DTYPE.value,
    most_gb=_CACHE_GB.value,
    mesh=mesh,
  )
  with stopping.StopRequest() as stop:
    try:
      training.train_drafter(
        target,
        source,
        cfg,
        train_cfg,
        work_dir,
        checkpoint_every=_EVERY.value,
        label=f"train {cfg.method}",
        mesh=mesh,
        stop=stop.requested,
      )
    except loop.Stopped as stopped:
      stop.end(stopped.step)
  if work_dir.writes:
    print(f"drafter written to {work_dir.path / 'drafter'}")


if __name__ == "__main__":
  run_io.run_app(main)
