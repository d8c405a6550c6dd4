"""Memory of a training run on paper, from its configuration.

What lies on a device is named item by item, as XLA's buffer assignment for an
H100 showed it (`plan_training --check` compares again). Shapes of parameters,
moments and buffers come from the functions that make them, their split over
devices from `sharding.py`'s rules. Activations are counted for the default
kernels (`kernels/`), which keep no scores of attention; XLA on CPU has about
twice the temporaries. Not modelled: holes between buffers, workspaces of
products, what other programs leave behind. Work and time: `training_work.py`.
"""

import dataclasses
import functools
import math

import jax
from jax import numpy as jnp
from jax import sharding as jax_sharding

from dspine_jax import configs, sharding
from dspine_jax.decoding import generate
from dspine_jax.training import optimizer
from dspine_jax.typing import Params
from experiments.stages import large_models

# Rows of the vocabulary in float32 that a chunk of the loss has in memory
# together: logits or probabilities of draft and teacher, and their gradients.
VOCABULARY_ROWS = {
  "dflash": 1,
  "dflash2": 2,
  "domino": 5,
  "dspark": 3,
  "dspine": 2,
}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Run:
  """A training run.

  Attributes:
    target: the target.
    drafter: the drafter.
    train: the run; its batch is that of all devices.
    length: positions of a training row.
    rows: training rows.
    on_the_fly: whether the target runs in every step.
    kept_itemsize: bytes of a number in a feature cache.
    mesh: sizes of `sharding.AXES`.
  """

  target: configs.TargetConfig
  drafter: configs.DrafterConfig
  train: configs.TrainConfig
  length: int
  rows: int
  on_the_fly: bool
  kept_itemsize: int = 2
  mesh: tuple[int, int, int] = (1, 1, 1)

  @property
  def devices(self) -> int:
    return math.prod(self.mesh)

  @property
  def sequences(self) -> int:
    """Rows of an optimiser step."""
    return self.train.batch_size * self.train.accumulation

  @property
  def itemsize(self) -> int:
    """Bytes of a number that is computed with."""
    return jnp.dtype(self.drafter.dtype).itemsize

  @property
  def state_width(self) -> int:
    """Numbers that the target gives for a position: taps, last state."""
    taps = len(self.drafter.target_layer_ids)
    return (taps + 1) * self.target.hidden_size


def parameters(run: Run) -> dict[str, int]:
  """Numbers in the target, trained in the drafter, and in its buffers."""
  drafter = _drafter(run.drafter)
  return {
    "target": _count(_target(run.target)),
    "drafter": _count(drafter.params),
    "frozen": _count(drafter.buffers),
  }


@functools.cache
def _target(cfg: configs.TargetConfig) -> Params:
  return large_models.target_shapes(cfg, stacked=False).params


@functools.cache
def _drafter(cfg: configs.DrafterConfig) -> generate.DrafterModel:
  return large_models.drafter_shapes(cfg, "float32")


def _count(tree) -> int:
  return sum(leaf.size for leaf in jax.tree.leaves(tree))


def held(run: Run) -> dict[str, float]:
  """Bytes on each device that stay there between steps."""
  drafter = _drafter(run.drafter)
  tx = optimizer.make_optimizer(run.train.optimizer)
  moments = jax.eval_shape(tx.init, drafter.params)
  cfg = run.target
  if run.drafter.dspark is not None:
    # Fresh ones are the target's tables.
    drafter = dataclasses.replace(drafter, buffers={})
  # Token ids, mask, and the target's states.
  position = 5 + run.state_width * run.itemsize
  window = run.sequences * run.length * position / run.devices
  items = {
    "float32 parameters": _split(run, sharding.DRAFTER_RULES, drafter.params),
    "moments": _split(run, sharding.DRAFTER_RULES, moments),
    "frozen buffers": _bytes(drafter.buffers),
    "embedding and head": _table_bytes(cfg) * (2 - cfg.tie_embeddings),
    "window of a step": window,
    # Made while the step still runs.
    "next window": window,
  }
  if run.on_the_fly:
    params = _target(cfg)
    if run.devices == 1:
      # The tables above are the target's own.
      params = {name: params[name] for name in ("layers", "norm")}
    items["target"] = _split(run, sharding.TARGET_RULES, params)
  return items


def _table_bytes(cfg: configs.TargetConfig) -> float:
  itemsize = jnp.dtype(cfg.dtype).itemsize
  return float(cfg.vocab_size * cfg.hidden_size * itemsize)


def _bytes(tree) -> float:
  return float(sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(tree)))


def _split(run: Run, rules: sharding.Rules, tree) -> float:
  """Bytes of a device's part."""
  mesh = jax_sharding.AbstractMesh(run.mesh, sharding.AXES)
  parts = jax.tree.map(
    lambda spec: math.prod(
      mesh.shape[axis]
      for axes in spec
      if axes is not None
      for axis in ((axes,) if isinstance(axes, str) else axes)
    ),
    sharding.specs(rules, tree, mesh),
    is_leaf=lambda leaf: isinstance(leaf, sharding.Spec),
  )
  each = jax.tree.map(lambda x, n: x.size * x.dtype.itemsize / n, tree, parts)
  return float(sum(jax.tree.leaves(each)))


def during_step(run: Run) -> dict[str, float]:
  """Bytes on each device that a step needs at its peak.

  The peak is in the chunks of the loss, when all activations wait for the
  backward pass; or, with few tokens, at the end of the backward pass, when all
  gradients exist.
  """
  params = _drafter(run.drafter).params
  trained, always = _count(params), {}
  if run.mesh[sharding.AXES.index("fsdp")] > 1:
    always["gathered parameters"] = 4.0 * trained
  if run.train.accumulation > 1:
    always["summed gradients"] = 4.0 * trained
    # A loop over micro-batches takes a copy of its own of each.
    tokens = _micro_rows(run) * run.length
    always["micro-batch"] = float(tokens * run.state_width * run.itemsize)
  activations = {
    "cast kernels": _cast_kernels(run, params),
    "activations": _activations(run),
    "context": _context(run),
    "states in the loss": _loss_states(run),
    "vocabulary rows": _vocabulary_rows(run),
    "gradients in the loss": _loss_gradients(run, params),
  }
  gradients = {"gradients": float(run.itemsize * trained)}
  largest = max(activations, gradients, key=lambda items: sum(items.values()))
  return always | largest


def _micro_rows(run: Run) -> float:
  """Rows of a micro-batch on one device."""
  return run.train.batch_size / run.devices


def _slots(run: Run) -> float:
  return _micro_rows(run) * run.train.num_anchors * run.drafter.block_size


def _predictions(run: Run) -> float:
  return _micro_rows(run) * run.train.num_anchors * run.drafter.num_proposals


def _cast_kernels(run: Run, params) -> float:
  """Kernels in the compute dtype, kept for the gradients of their inputs.

  The context's features need none, so `fc` is not kept.
  """
  if run.drafter.dtype == "float32":
    return 0.0
  kernels = [
    leaf.size
    for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    if getattr(path[-1], "key", None) == "kernel"
    and getattr(path[1], "key", None) != "fc"
  ]
  return float(run.itemsize * sum(kernels))


def _activations(run: Run) -> float:
  """What each slot keeps for the backward pass, all layers."""
  cfg = run.drafter
  width, groups = cfg.hidden_size, cfg.num_kv_heads * cfg.head_dim
  layer = (
    # Two norms' outputs, two sublayers' outputs.
    4 * width
    # Queries as projected and rotated, the heads' outputs.
    + 3 * cfg.num_heads * cfg.head_dim
    # Keys and values of one product, values again, rotated keys.
    + 4 * groups
    # Gate, up, and what the down projection reads.
    + 3 * cfg.intermediate_size
  )
  if cfg.dspine is not None:
    # States after the write; the read; gate, message and their product.
    layer += width + cfg.dspine.transfer_rank + 3 * cfg.dspine.message_size
  if cfg.dflash2 is not None:
    options = cfg.dflash2
    kernels = 2 * options.conv_kernel_size * width // options.conv_group_size
    # Of two sublayers: the output of each side, and the dynamic kernels.
    layer += 2 * (2 * width + kernels)
  once = width + (0 if run.itemsize == 4 else 2 * width)
  if cfg.domino is not None:
    # The GRU's gates and states, its inputs, and what E1 reads.
    once += 11 * cfg.domino.gru_hidden_dim + 2 * width
  if cfg.dspark is not None:
    # What the confidence head reads, twice.
    once += 2 * (width + cfg.dspark.markov_rank)
  return _slots(run) * run.itemsize * (cfg.num_layers * layer + once)


def _context(run: Run) -> float:
  """Fused states of the context, and each layer's keys and values of it."""
  cfg = run.drafter
  groups = cfg.num_kv_heads * cfg.head_dim
  # Keys as projected and rotated, values, and one of them transposed.
  numbers = 2 * cfg.hidden_size + 4 * cfg.num_layers * groups
  return _micro_rows(run) * run.length * run.itemsize * numbers


def is_taught(cfg: configs.DrafterConfig) -> bool:
  """Whether the loss looks at the teacher's logits, too."""
  options = cfg.dflash or cfg.dflash2
  if options is not None:
    return options.objective in ("forward_kl", "ce_l1")
  return cfg.method in ("dspark", "dspine")


def _loss_states(run: Run) -> float:
  """Predicting slots' states, their gradients, and the teacher's states."""
  cfg = run.drafter
  kinds = 2 if cfg.dspine is not None else 1
  numbers = 2.0 * kinds * cfg.hidden_size
  if is_taught(cfg):
    numbers += cfg.hidden_size
  if cfg.dspine is not None:
    numbers += cfg.dspine.transfer_rank
  for options, name in (
    (cfg.dflash2, "selector_rank"),
    (cfg.domino, "emb_dim"),
    (cfg.dspark, "markov_rank"),
  ):
    if options is not None:
      numbers += 2 * getattr(options, name)
  return _predictions(run) * run.itemsize * numbers


def _vocabulary_rows(run: Run) -> float:
  cfg = run.drafter
  blocks = min(run.train.chunk_blocks, _micro_rows(run) * run.train.num_anchors)
  numbers = blocks * cfg.num_proposals * cfg.vocab_size
  return 4.0 * VOCABULARY_ROWS[cfg.method] * numbers


def _loss_gradients(run: Run, params) -> float:
  """Float32 gradients that the chunks of the loss sum up."""
  if run.drafter.dspine is not None:
    inject = params["injection"]
    return 4.0 * _count((inject["shared"], inject["layers"][-1]))
  tables = {
    "dflash2": ("selector", ("predecessor_codebook", "successor_codebook")),
    "domino": ("correction", ("up",)),
    "dspark": ("markov", ("w1", "w2")),
  }
  part, names = tables.get(run.drafter.method, (None, ()))
  return 4.0 * sum(params[part][name].size for name in names)


def target_pass(run: Run) -> dict[str, float]:
  """Bytes on each device that the target's pass needs at its peak.

  An estimate: two layers' whole kernels, and what one layer makes of a
  micro-batch. Its results are the window.
  """
  if not run.on_the_fly:
    return {}
  cfg, size = run.target, run.itemsize
  layer = _bytes(_target(cfg)["layers"][0]) if run.devices > 1 else 0.0
  numbers = 4 * cfg.hidden_size + 3 * cfg.intermediate_size
  numbers += (3 * cfg.num_heads + 4 * cfg.num_kv_heads) * cfg.head_dim
  tokens = _micro_rows(run) * run.length
  return {
    "target: gathered layers": 2 * layer,
    "target: activations": tokens * size * numbers,
  }


def peak(run: Run) -> dict[str, float]:
  """All items of the fullest moment on a device."""
  programs = (during_step(run), target_pass(run))
  return held(run) | max(programs, key=lambda items: sum(items.values()))


def paying_chunk(run: Run, room: float) -> int:
  """Blocks of a chunk that pay: the most within `room` bytes, 64 at most.

  Every chunk reads the head once for each product. At 64 blocks that is little
  beside the products themselves, since a chunk has about a thousand rows.
  """
  chunk = run.train.chunk_blocks
  while chunk < 64:
    larger = dataclasses.replace(
      run, train=dataclasses.replace(run.train, chunk_blocks=2 * chunk)
    )
    if _vocabulary_rows(larger) - _vocabulary_rows(run) > room:
      break
    chunk *= 2
  return chunk


def one_device(run: Run) -> Run:
  """The same with one device's rows on one device, features given."""
  train = dataclasses.replace(run.train, batch_size=int(_micro_rows(run)))
  return dataclasses.replace(run, train=train, mesh=(1, 1, 1), on_the_fly=False)


def checkpoint_bytes(run: Run) -> float:
  """Parameters and moments of one checkpoint."""
  items = held(one_device(run))
  return items["float32 parameters"] + items["moments"]


def as_passed(run: Run) -> float:
  """`held` as XLA counts the arguments of a step.

  A table that is passed twice counts twice: a tied one, and the head that
  DSpark holds as its own. What a loss never reads is not passed.
  """
  cfg, items = run.drafter, held(run)
  twice = run.target.tie_embeddings + (cfg.dspark is not None)
  counted = sum(items.values()) - items["next window"]
  counted += twice * _table_bytes(run.target)
  if not is_taught(cfg):
    states = run.sequences * run.length * cfg.hidden_size
    counted -= states * run.itemsize
  return counted
