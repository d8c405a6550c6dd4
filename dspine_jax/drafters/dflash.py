"""DFlash: the plain backbone and its objectives (arXiv 2602.06036).

Slot k predicts token anchor + k for k >= 1, each label is weighted by itself
(supervision continues after a hole in the loss mask), and tokens of one block
are drawn independently of each other. Published is a bidirectional block with
cross-entropy; other objectives that the field uses are in `OBJECTIVES`, which
DFlash2 applies to its unary logits.

A drafter that comes with tables of its own (`buffers`) computes with them; its
head may have rows for some tokens only, and then it proposes no others. Such
drafters are decoded, not trained.

The denominator is the same for all: the sum over the window of validity times
position decay. D-PACE puts its own weights in the place of the decay, but they
depend on the model. A denominator made of them would need a pass over all
micro-batches before the first gradient; so its loss is a sum in units of the
plain weights, and a window of micro-batches still equals one large batch.
"""

import dataclasses
from collections.abc import Callable

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float

from dspine_jax import configs
from dspine_jax.checkpoints import names
from dspine_jax.decoding import sampling
from dspine_jax.drafters import backbone, contract
from dspine_jax.target import model
from dspine_jax.training import losses
from dspine_jax.typing import Key, Params, PyTree


def options_of(cfg: configs.DrafterConfig) -> configs.DFlashOptions:
  """`cfg.dflash`; ValueError if the configuration has none."""
  if cfg.dflash is None:
    raise ValueError("dflash=None: method 'dflash' needs its DFlashOptions")
  return cfg.dflash


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
  tables = own_embedding(buffers, tables)
  core = params["backbone"]
  h, _ = backbone.run_blocks(
    core, tables, inputs, backbone.plain(core), cfg=cfg
  )
  return contract.DrafterOutput(hidden=backbone.final_norm(core, h, cfg))


def own_embedding(
  buffers: PyTree, tables: contract.TargetTables
) -> contract.TargetTables:
  """The target's tables with the drafter's embedding, if it has one."""
  own = buffers.get("embed_tokens", tables.embedding)
  return dataclasses.replace(tables, embedding=own)


def own_logits(
  buffers: PyTree,
  tables: contract.TargetTables,
  hidden: Float[Array, "b m d"],
  cfg: configs.DrafterConfig,
) -> Float[Array, "b m v"]:
  """Logits of the drafter's head if it has one, over the target's tokens.

  Tokens outside of a reduced vocabulary get -inf, hence no mass in any law.
  """
  logits = model.head_logits(buffers.get("lm_head", tables.head), hidden)
  if cfg.draft_vocab_size is None:
    return logits
  ids = jnp.arange(cfg.draft_vocab_size) + buffers["d2t"]
  everywhere = jnp.full((*hidden.shape[:2], cfg.vocab_size), -jnp.inf)
  return everywhere.at[..., ids].set(logits)


def refuse_own_head(buffers: PyTree) -> None:
  """ValueError in training: objectives score with the target's head."""
  if "lm_head" in buffers:
    raise ValueError(
      "lm_head: a drafter with a head of its own is decoded here, not trained"
    )


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
  """sum w objective / sum w (baselines, section 3.1)."""
  del params
  refuse_own_head(buffers)
  rows = jax.tree.map(flatten_blocks, output.hidden[:, :, cfg.first_slot :])
  constants = jax.tree.map(flatten_blocks, loss_constants(supervision))
  total, sums = losses.chunked_sum(
    _chunk_terms(options_of(cfg)), chunk_size, {}, rows, tables.head, constants
  )
  report = contract.loss_report(sums, supervision)
  return losses.safe_divide(total, window.denominator), report


def loss_constants(supervision: contract.Supervision) -> PyTree:
  """What objectives read beside the logits, [B, N, P, ...] each."""
  return {
    "labels": supervision.labels,
    "weights": supervision.weights,
    "valid": supervision.valid,
    "teacher": supervision.teacher,
  }


def flatten_blocks(x: jax.Array) -> jax.Array:
  """[B, N, ...] -> [B * N, ...]."""
  return x.reshape(-1, *x.shape[2:])


# Final-normed states -> logits, the draft's and the teacher's alike.
LogitsOf = Callable[[Float[Array, "n p d"]], Float[Array, "n p v"]]
# The loss of each slot, weighted, and what the report adds to `ce`.
SlotLoss = tuple[Float[Array, "n p"], dict[str, Float[Array, "n p"]]]


def cross_entropy(
  log_q: Float[Array, "n p v"],
  constants: PyTree,
  logits_of: LogitsOf,
  options: configs.DFlashOptions,
) -> SlotLoss:
  """w CE to the label."""
  del logits_of, options
  ce = losses.cross_entropy(log_q, constants["labels"])
  return constants["weights"] * ce, {}


def forward_kl(
  log_q: Float[Array, "n p v"],
  constants: PyTree,
  logits_of: LogitsOf,
  options: configs.DFlashOptions,
) -> SlotLoss:
  """w KL(p || q) to the teacher's softmax at temperature 1."""
  del options
  log_p = jax.nn.log_softmax(logits_of(constants["teacher"]))
  kl = constants["weights"] * losses.forward_kl(log_p, log_q)
  return kl, {"kl": kl}


def d_pace(
  log_q: Float[Array, "n p v"],
  constants: PyTree,
  logits_of: LogitsOf,
  options: configs.DFlashOptions,
) -> SlotLoss:
  """CE to the label, each slot by its share of the accepted length."""
  del logits_of
  ce = losses.cross_entropy(log_q, constants["labels"])
  pace = losses.d_pace_weights(ce, constants["valid"], options.d_pace_alpha)
  return pace * ce, {"d_pace": pace * ce}


def ce_l1(
  log_q: Float[Array, "n p v"],
  constants: PyTree,
  logits_of: LogitsOf,
  options: configs.DFlashOptions,
) -> SlotLoss:
  """w (c CE + (1 - c) L1), L1 to the teacher's softmax."""
  ce, _ = cross_entropy(log_q, constants, logits_of, options)
  teacher = jax.nn.softmax(logits_of(constants["teacher"]))
  l1 = constants["weights"] * losses.l1_distance(jnp.exp(log_q), teacher)
  share = options.ce_weight
  return share * ce + (1 - share) * l1, {"l1": l1}


# The names are `method_options.OBJECTIVES`.
OBJECTIVES = {
  "cross_entropy": cross_entropy,
  "forward_kl": forward_kl,
  "d_pace": d_pace,
  "ce_l1": ce_l1,
}


def _chunk_terms(options: configs.DFlashOptions):
  """The chunk loss of `losses.chunked_sum`."""
  objective = OBJECTIVES[options.objective]

  def chunk_loss(params, hidden, head, constants):
    del params

    def logits_of(states):
      return model.head_logits(head, states)

    logits, labels = logits_of(hidden), constants["labels"]
    log_q = jax.nn.log_softmax(logits)
    value, more = objective(log_q, constants, logits_of, options)
    ce = losses.cross_entropy(log_q, labels) * constants["weights"]
    sums = jax.tree.map(jnp.sum, more | {"ce": ce})
    hit = sampling.argmax(logits) == labels
    counts = contract.counts({"hit": hit}, constants["valid"])
    return jnp.sum(value), sums | counts

  return chunk_loss


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
  del params, anchor_tokens
  hidden = output.hidden[:, 0, cfg.first_slot :]
  logits = own_logits(buffers, tables, hidden, cfg)
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
