"""Work and time of a training run on paper, in matmul FLOPs.

Memory is `training_plan.py`'s. Time is work over an assumed share of the peak;
bytes, launches, the network and the disk are in that share, not counted.
"""

from typing import NamedTuple

from dspine_jax.drafters import methods
from experiments.stages import speed, training_plan
from kernels import cost


class Device(NamedTuple):
  """A kind of device.

  Attributes:
    flops: FLOP/s, the published dense bfloat16 peak; on CPU that of a large
      float32 product.
    memory: bytes.
    utilisation: share of the peak that a step is assumed to reach. On GPUs a
      guess: XLA's program for an H100 cannot exceed 0.58 (chunks of 16 blocks,
      bytes at full bandwidth, `results/kernels/counts_batch1.md`), and three
      fifths of that are taken. On CPU what the embedded recipe needed.
  """

  flops: float
  memory: float
  utilisation: float


DEVICES = {
  "h100": Device(cost.H100.flops, 80e9, 0.35),
  "h200": Device(cost.H200.flops, 141e9, 0.35),
  "a100": Device(312e12, 80e9, 0.35),
  # One core.
  "cpu": Device(85e9, 16e9, 0.35),
}


def work(run: training_plan.Run) -> dict[str, float]:
  """Matmul FLOPs of an optimiser step, of all devices together."""
  cfg, train = run.drafter, run.train
  blocks = run.sequences * train.num_anchors
  predictions = blocks * cfg.num_proposals
  # Anchors are uniform: a block sees half of the row on average.
  drafter = speed.draft_flops(
    cfg, blocks, run.length / 2, run.sequences * run.length
  )
  drafter += speed.selection_flops(cfg, predictions)
  head = speed.head_flops(cfg, predictions)
  flops = {
    "drafter, forward": drafter,
    "drafter, backward": 2 * drafter,
    # Logits, the gradient of the states, the teacher's logits.
    "head": (3 if training_plan.is_taught(cfg) else 2) * head,
  }
  if train.accumulation > 1 and methods.drafter(cfg).needs_ce_scale:
    flops["pass for the scale"] = drafter + head
  if run.on_the_fly:
    tokens = run.sequences * run.length
    flops["target"] = run.target.num_layers * speed.layer_flops(
      run.target, tokens, run.length / 2
    )
  return flops


def seconds_per_step(run: training_plan.Run, device: Device) -> float:
  """Expected, by FLOPs alone."""
  rate = device.flops * device.utilisation * run.devices
  return sum(work(run).values()) / rate


def cache_bytes(run: training_plan.Run) -> float:
  """A feature cache of all rows, with token ids and mask."""
  position = 5 + run.kept_itemsize * run.state_width
  return float(run.rows * run.length * position)
