"""DSpark: a Markov head and a confidence head (arXiv 2607.05147; baselines, 6).

DFlash's bidirectional backbone, in which the anchor's slot predicts too: slot k
is for token anchor + 1 + k. Its logits get a bias by the token before
(`markov.py`), so proposals are chosen one after the other, without running the
backbone again. The confidence head estimates whether a slot's token will be
accepted, from what is known before it is drawn; ending a proposal by it
therefore does not bias the output.

The released drafters hold frozen copies of the target's embedding and head. A
drafter computes its own logits with its copies, if it has them.
"""

import dataclasses

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from dspine_jax import configs, layers
from dspine_jax.checkpoints import names
from dspine_jax.decoding import sampling
from dspine_jax.drafters import (
  backbone,
  contract,
  dflash,
  dspine,
  markov,
  token_walk,
)
from dspine_jax.target import model
from dspine_jax.training import losses
from dspine_jax.typing import Key, Params, PyTree

# The reference adds it to the denominator.
_EPS = 1e-6


def options_of(cfg: configs.DrafterConfig) -> configs.DSparkOptions:
  """`cfg.dspark`; ValueError if the configuration has none."""
  if cfg.dspark is None:
    raise ValueError("dspark=None: method 'dspark' needs its DSparkOptions")
  return cfg.dspark


def init(
  key: Key, cfg: configs.DrafterConfig, tables: contract.TargetTables
) -> Params:
  """DFlash's backbone, heads without effect yet."""
  del tables
  options = options_of(cfg)
  params = {
    "backbone": backbone.init(key, cfg),
    "markov": markov.init(jax.random.fold_in(key, 1), cfg, options),
  }
  if options.enable_confidence_head:
    width = _confidence_width(cfg, options)
    params["confidence"] = {
      "kernel": jnp.zeros((width, 1)),
      "bias": jnp.zeros((1,)),
    }
  return params


def _confidence_width(cfg, options) -> int:
  rank = options.markov_rank if options.confidence_head_with_markov else 0
  return cfg.hidden_size + rank


def make_buffers(
  cfg: configs.DrafterConfig, tables: contract.TargetTables
) -> PyTree:
  """The copies that the released format stores (the same arrays, no copy)."""
  del cfg
  return {"embed_tokens": tables.embedding, "lm_head": tables.head}


def own_tables(
  buffers: PyTree, tables: contract.TargetTables
) -> contract.TargetTables:
  """The drafter's copies; the target's where a file does not have them."""
  own = contract.TargetTables(
    embedding=buffers.get("embed_tokens", tables.embedding),
    head=buffers.get("lm_head", tables.head),
  )
  return jax.lax.stop_gradient(own)


def forward(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  inputs: contract.BlockInputs,
  *,
  cfg: configs.DrafterConfig,
) -> contract.DrafterOutput:
  """The parallel pass; see `contract.Drafter.forward`."""
  own = own_tables(buffers, tables)
  return dflash.forward(params, {}, own, inputs, cfg=cfg)


def confidence_logits(
  params: Params,
  hidden: Float[Array, "*b d"],
  before: Float[Array, "*b r"],
  options: configs.DSparkOptions,
) -> Float[Array, "*b"]:
  """w [h; W1[predecessor]] + b, before the sigmoid (section 6.1)."""
  head = params["confidence"]
  seen = hidden
  if options.confidence_head_with_markov:
    seen = jnp.concatenate([hidden, before], axis=-1)
  logits = layers.matmul(seen, head["kernel"])[..., 0]
  return logits.astype(jnp.float32) + head["bias"].reshape((1,) * logits.ndim)


def gate_lengths(
  confidence: Float[Array, "*b m"], threshold: float
) -> Int[Array, "*b"]:
  """Proposals before the first whose confidence is below the threshold.

  Confidences [.9, .3, .8] and threshold .5 -> 1; threshold 0 keeps all.
  """
  stands = (confidence >= threshold) | (threshold == 0)
  kept = jnp.cumprod(stands.astype(jnp.int32), axis=-1)
  return jnp.sum(kept, axis=-1)


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
  """0.1 CE + 0.9 L1 + confidence, weighted means (section 6.2)."""
  options = options_of(cfg)
  rows = teacher_forced(params, output, supervision, cfg)
  constants = {
    "labels": supervision.labels,
    "weights": supervision.weights,
    "valid": supervision.valid,
    "teacher": supervision.teacher,
  }
  rows, constants = jax.tree.map(dflash.flatten_blocks, (rows, constants))
  heads = {"own": own_tables(buffers, tables).head, "target": tables.head}
  total, sums = losses.chunked_sum(
    chunk_terms(options),
    chunk_size,
    params["markov"]["w2"],
    rows,
    heads,
    constants,
  )
  report = contract.loss_report(sums, supervision)
  return total / (window.denominator + _EPS), report


def teacher_forced(
  params: Params,
  output: contract.DrafterOutput,
  supervision: contract.Supervision,
  cfg: configs.DrafterConfig,
) -> PyTree:
  """What the heads make of the true predecessors, without vocabulary rows.

  Returns:
    `hidden` [B, N, P, D], `bias` [B, N, P, R] (W2's input) and, with a
    confidence head, `confidence` [B, N, P].
  """
  options, head = options_of(cfg), params["markov"]
  hidden = output.hidden[:, :, cfg.first_slot :]
  before = head["w1"][supervision.predecessors]
  kind = options.markov_head_type
  rows = {
    "hidden": hidden,
    "bias": markov.teacher_forced(head, kind, before, hidden),
  }
  if options.enable_confidence_head:
    rows["confidence"] = confidence_logits(params, hidden, before, options)
  return rows


def token_terms(
  w2: Float[Array, "v r"], rows: PyTree, heads: PyTree, constants: PyTree
) -> dict[str, jax.Array]:
  """Every per-slot term that needs vocabulary rows, each [blocks, P].

  Args:
    w2: of the Markov head.
    rows: of `teacher_forced`, flattened to blocks.
    heads: `own`, the drafter's, and `target`, the teacher's; [V, D] each.
    constants: `labels` and `teacher`.

  Returns:
    ce, l1, accept (1 - L1 / 2, what the confidence head is to estimate), hit,
    base_hit, and confidence (its binary cross-entropy) if there is such a head.
  """
  labels = constants["labels"]
  base = model.head_logits(heads["own"], rows["hidden"])
  logits = base + model.head_logits(w2, rows["bias"])
  teacher = jax.nn.softmax(
    model.head_logits(heads["target"], constants["teacher"])
  )
  log_q = jax.nn.log_softmax(logits)
  l1 = losses.l1_distance(jnp.exp(log_q), teacher)
  accept = jax.lax.stop_gradient(1 - 0.5 * l1)
  terms = {
    "ce": losses.cross_entropy(log_q, labels),
    "l1": l1,
    "accept": accept,
    "hit": sampling.argmax(logits) == labels,
    "base_hit": sampling.argmax(base) == labels,
  }
  if "confidence" in rows:
    # -a log c - (1 - a) log(1 - c) from the logit of c.
    logit = rows["confidence"]
    terms["confidence"] = jax.nn.softplus(logit) - accept * logit
  return terms


def chunk_terms(options: configs.DSparkOptions):
  """The chunk loss of `losses.chunked_sum`."""
  alphas = {"ce": options.ce_loss_alpha, "l1": options.l1_loss_alpha}
  if options.enable_confidence_head:
    alphas["confidence"] = options.confidence_head_alpha

  def chunk_loss(w2, rows, heads, constants):
    terms = token_terms(w2, rows, heads, constants)
    weights = constants["weights"]
    sums = {name: jnp.sum(terms[name] * weights) for name in alphas}
    value = sum(alpha * sums[name] for name, alpha in alphas.items())
    return value, sums | contract.counts(terms, constants["valid"])

  return chunk_loss


def propose(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  output: contract.DrafterOutput,
  anchor_tokens: Int[Array, "b"],
  *,
  cfg: configs.DrafterConfig,
  sampling_cfg: configs.SamplingConfig,
  kind: str,
  keys: jax.Array,
  forced: jax.Array | None = None,
) -> contract.Proposal:
  """One token after the other, up to the confidence threshold if there is one.

  Kinds: "greedy", or "sampled" from the biased logits, which are the true law.
  """
  proposal, confidence = walk(
    params,
    buffers,
    tables,
    output,
    anchor_tokens,
    cfg=cfg,
    sampling_cfg=sampling_cfg,
    kind=kind,
    keys=keys,
    forced=forced,
  )
  threshold = options_of(cfg).confidence_threshold
  if threshold > 0:
    lengths = gate_lengths(jax.nn.sigmoid(confidence), threshold)
    proposal = dataclasses.replace(proposal, lengths=lengths)
  return proposal


def walk(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  output: contract.DrafterOutput,
  anchor_tokens: Int[Array, "b"],
  *,
  cfg: configs.DrafterConfig,
  sampling_cfg: configs.SamplingConfig,
  kind: str,
  keys: jax.Array,
  forced: jax.Array | None = None,
) -> tuple[contract.Proposal, PyTree]:
  """All proposals, and their confidence logits [B, M] (None without a head)."""
  options, head = options_of(cfg), params["markov"]
  hidden = output.hidden[:, 0, cfg.first_slot :]
  own = own_tables(buffers, tables)
  inputs = {"hidden": hidden, "base": model.head_logits(own.head, hidden)}

  def step(state, tokens, at_slot):
    before = head["w1"][tokens].astype(hidden.dtype)
    state, bias = markov.step(
      head, options.markov_head_type, state, before, at_slot["hidden"]
    )
    confidence = None
    if options.enable_confidence_head:
      confidence = confidence_logits(params, at_slot["hidden"], before, options)
    logits = at_slot["base"] + model.head_logits(head["w2"], bias)
    return state, logits, confidence

  start = jnp.zeros((hidden.shape[0], options.markov_rank), hidden.dtype)
  return token_walk.walk(
    step,
    start,
    inputs,
    anchor_tokens,
    sampling_cfg=sampling_cfg,
    kind=kind,
    keys=keys,
    forced=forced,
  )


def entries(cfg: configs.DrafterConfig) -> list[names.Entry]:
  """Released names: the backbone's, the two tables, the two heads."""
  options = options_of(cfg)
  table = (cfg.vocab_size, cfg.hidden_size)
  tables = [
    names.Entry(f"{name}.weight", ("buffers", name), table, optional=True)
    for name in ("embed_tokens", "lm_head")
  ]
  found = [
    *names.backbone_entries(cfg),
    *tables,
    *markov.entries(cfg, options),
  ]
  if options.enable_confidence_head:
    root = ("params", "confidence")
    shape = (_confidence_width(cfg, options), 1)
    found += [
      names.Entry(
        "confidence_head.proj.weight", (*root, "kernel"), shape, True
      ),
      names.Entry("confidence_head.proj.bias", (*root, "bias"), (1,)),
    ]
  return found


DRAFTER = contract.Drafter(
  init=init,
  make_buffers=make_buffers,
  forward=forward,
  supervised=dspine.supervised,
  loss=loss,
  propose=propose,
  proposal_kinds=("sampled",),
  entries=entries,
)
