"""DFlash: a bidirectional block with cross-entropy (arXiv 2602.06036).

The plain backbone. Slot k predicts token anchor + k for k >= 1, each label is
weighted by itself (supervision continues after a hole in the loss mask), and
tokens of one block are drawn independently of each other.
"""

import jax
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.checkpoints import names
from dspine_jax.decoding import sampling
from dspine_jax.drafters import backbone, contract
from dspine_jax.target import model
from dspine_jax.training import losses
from dspine_jax.typing import Key, Params, PyTree


def init(
  key: Key, cfg: configs.DrafterConfig, tables: contract.TargetTables
) -> Params:
  """Random parameters of the backbone."""
  del tables
  return {"backbone": backbone.init(key, cfg)}


def make_buffers(
  cfg: configs.DrafterConfig, tables: contract.TargetTables
) -> PyTree:
  """DFlash has no frozen arrays of its own."""
  del cfg, tables
  return {}


def forward(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  inputs: contract.BlockInputs,
  *,
  cfg: configs.DrafterConfig,
) -> contract.DrafterOutput:
  """The parallel pass; see `contract.Drafter.forward`."""
  del buffers
  core = params["backbone"]
  h, _ = backbone.run_blocks(
    core, tables, inputs, backbone.plain(core), cfg=cfg
  )
  return contract.DrafterOutput(hidden=backbone.final_norm(core, h, cfg))


def supervised(mask: jax.Array) -> jax.Array:
  """Each position counts by itself."""
  return mask


def loss(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  output: contract.DrafterOutput,
  supervision: contract.Supervision,
  *,
  cfg: configs.DrafterConfig,
  window: contract.LossWindow,
  chunk_size: int,
) -> tuple[jax.Array, contract.LossReport]:
  """sum w CE / sum w (baselines, section 3.1)."""
  del params, buffers
  rows = jax.tree.map(flatten_blocks, output.hidden[:, :, cfg.first_slot :])
  constants = {
    "labels": supervision.labels,
    "weights": supervision.weights,
    "valid": supervision.valid,
  }
  constants = jax.tree.map(flatten_blocks, constants)
  total, sums = losses.chunked_sum(
    _chunk_loss, chunk_size, {}, rows, tables.head, constants
  )
  report = contract.loss_report(sums | {"ce": total}, supervision)
  return losses.safe_divide(total, window.denominator), report


def flatten_blocks(x: jax.Array) -> jax.Array:
  """[B, N, ...] -> [B * N, ...]."""
  return x.reshape(-1, *x.shape[2:])


def _chunk_loss(params, hidden, head, constants):
  del params
  logits = model.head_logits(head, hidden)
  labels = constants["labels"]
  ce = losses.cross_entropy(jax.nn.log_softmax(logits), labels)
  hit = sampling.argmax(logits) == labels
  counts = contract.counts({"hit": hit}, constants["valid"])
  return jnp.sum(ce * constants["weights"]), counts


def propose(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  output: contract.DrafterOutput,
  anchor_tokens: jax.Array,
  *,
  cfg: configs.DrafterConfig,
  sampling_cfg: configs.SamplingConfig,
  kind: str,
  keys: jax.Array,
  forced: jax.Array | None = None,
) -> contract.Proposal:
  """Independent tokens from the block's logits: argmax, or sampled."""
  del params, buffers, anchor_tokens
  logits = model.head_logits(tables.head, output.hidden[:, 0, cfg.first_slot :])
  if kind == "greedy":
    return contract.Proposal(tokens=sampling.argmax(logits))
  q = sampling.probabilities(logits, sampling_cfg)
  tokens = sampling.draw(keys, q) if forced is None else forced
  return contract.Proposal(tokens=tokens, probs=q)


DRAFTER = contract.Drafter(
  init=init,
  make_buffers=make_buffers,
  forward=forward,
  supervised=supervised,
  loss=loss,
  propose=propose,
  proposal_kinds=("sampled",),
  entries=names.backbone_entries,
)
