"""Domino: a GRU over drafted tokens corrects the logits (arXiv 2605.29707).

DFlash's backbone; behind it a GRU (`gru.py`) reads the tokens before a slot and
a low-rank residual is added to the slot's logits (baselines, 5). Usually the
anchor's slot predicts too (`sample_from_anchor`, or `shift_label` in files);
without the shift the same head starts at slot 1. Either way the first
`pure_draft_prefix_len` proposals keep their base logits, though the GRU has
read the anchor. Training starts from the base logits' loss and moves to that of
the corrected ones, lest the head, which sees true predecessors, take over.
"""

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from dspine_jax import configs, layers
from dspine_jax.checkpoints import names
from dspine_jax.decoding import sampling
from dspine_jax.drafters import backbone, contract, dflash, gru, token_walk
from dspine_jax.target import model
from dspine_jax.training import losses, schedules
from dspine_jax.typing import Key, Params, PyTree

_INIT_STD = 0.02
# The reference adds it to the denominator.
_EPS = 1e-6


def options_of(cfg: configs.DrafterConfig) -> configs.DominoOptions:
  """`cfg.domino`; ValueError if the configuration has none."""
  if cfg.domino is None:
    raise ValueError("domino=None: method 'domino' needs its DominoOptions")
  return cfg.domino


def init(
  key: Key, cfg: configs.DrafterConfig, tables: contract.TargetTables
) -> Params:
  """DFlash's backbone, a random GRU, and a correction that is zero yet."""
  del tables
  options, width = options_of(cfg), cfg.hidden_size
  gru_key, down_key = jax.random.split(jax.random.fold_in(key, 1))
  down = (width + options.gru_hidden_dim, options.emb_dim)
  return {
    "backbone": backbone.init(key, cfg),
    "prefix_gru": gru.init(gru_key, width, options.gru_hidden_dim),
    "correction": {
      "down": {"kernel": _INIT_STD * jax.random.normal(down_key, down)},
      "up": jnp.zeros((cfg.vocab_size, options.emb_dim)),
    },
  }


def schedule(
  step: jax.typing.ArrayLike, total_steps: int, cfg: configs.DrafterConfig
) -> contract.Schedule:
  """lambda, the share of the base cross-entropy (section 5.2)."""
  return contract.Schedule(
    weight=schedules.base_share(step, total_steps, options_of(cfg))
  )


def low_rank(
  correction: Params,
  hidden: Float[Array, "*b d"],
  states: Float[Array, "*b h"],
) -> Float[Array, "*b e"]:
  """SiLU(E1 [h; s]), what E2 takes to the vocabulary."""
  joint = jnp.concatenate([hidden, states], axis=-1)
  return jax.nn.silu(layers.matmul(joint, correction["down"]["kernel"]))


def gru_states(
  params: Params,
  tables: contract.TargetTables,
  predecessors: Int[Array, "b n p"],
) -> Float[Array, "b n p h"]:
  """Teacher-forced states: the p-th has read the block's first p + 1 tokens."""
  embedded = jax.lax.stop_gradient(tables.embedding)[predecessors]
  return gru.run(params["prefix_gru"], embedded)


def is_corrected(
  num_proposals: int, options: configs.DominoOptions
) -> Float[Array, "p"]:
  """1 for proposals with a correction, 0 for the first ones."""
  slots = jnp.arange(num_proposals)
  return (slots >= options.pure_draft_prefix_len).astype(jnp.float32)


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
  """(1 - lambda) CE(final) + lambda CE(base), weighted means (section 5.2)."""
  del buffers
  rows = teacher_forced(params, tables, output, supervision, cfg)
  constants = {
    "labels": supervision.labels,
    "weights": supervision.weights,
    "valid": supervision.valid,
  }
  rows, constants = jax.tree.map(dflash.flatten_blocks, (rows, constants))
  shared = {"head": tables.head, "base_share": window.scheduled_weight}
  total, sums = losses.chunked_sum(
    _chunk_loss,
    chunk_size,
    params["correction"]["up"],
    rows,
    shared,
    constants,
  )
  report = contract.loss_report(sums, supervision)
  return total / (window.denominator + _EPS), report


def teacher_forced(
  params: Params,
  tables: contract.TargetTables,
  output: contract.DrafterOutput,
  supervision: contract.Supervision,
  cfg: configs.DrafterConfig,
) -> PyTree:
  """What the head makes of the true predecessors, without vocabulary rows.

  Returns:
    `hidden` [B, N, P, D] and `low_rank` [B, N, P, E], zero for proposals
    without a correction (E2 has no bias).
  """
  hidden = output.hidden[:, :, cfg.first_slot :]
  states = gru_states(params, tables, supervision.predecessors)
  found = low_rank(params["correction"], hidden, states.astype(hidden.dtype))
  has = is_corrected(cfg.num_proposals, options_of(cfg))
  return {"hidden": hidden, "low_rank": found * has[None, None, :, None]}


def token_terms(
  up: Float[Array, "v e"],
  rows: PyTree,
  head: Float[Array, "v d"],
  labels: Int[Array, "n p"],
) -> dict[str, jax.Array]:
  """Every per-slot term that needs vocabulary rows.

  Args:
    up: E2.
    rows: of `teacher_forced`, flattened to blocks.
    head: [V, D].
    labels: [blocks, P].

  Returns:
    ce (of the base logits), final, hit, base_hit, each [blocks, P].
  """
  base = model.head_logits(head, rows["hidden"])
  final = base + model.head_logits(up, rows["low_rank"])
  return {
    "ce": losses.cross_entropy(jax.nn.log_softmax(base), labels),
    "final": losses.cross_entropy(jax.nn.log_softmax(final), labels),
    "hit": sampling.argmax(final) == labels,
    "base_hit": sampling.argmax(base) == labels,
  }


def _chunk_loss(up, rows, shared, constants):
  terms = token_terms(up, rows, shared["head"], constants["labels"])
  weights, share = constants["weights"], shared["base_share"]
  sums = {name: jnp.sum(terms[name] * weights) for name in ("ce", "final")}
  value = (1 - share) * sums["final"] + share * sums["ce"]
  return value, sums | contract.counts(terms, constants["valid"])


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
  """One token after the other: GRU step, low-rank correction, choice.

  Kinds: "greedy", or "sampled" from the corrected logits, the true law.
  """
  del buffers
  hidden = output.hidden[:, 0, cfg.first_slot :]
  correction, options = params["correction"], options_of(cfg)
  count = (hidden.shape[0], cfg.num_proposals)
  inputs = {
    "hidden": hidden,
    "base": model.head_logits(tables.head, hidden),
    "has": jnp.broadcast_to(is_corrected(count[1], options)[None], count),
  }

  def step(state, tokens, at_slot):
    embedded = tables.embedding[tokens].astype(hidden.dtype)
    state = gru.step(
      params["prefix_gru"], state, gru.project(params["prefix_gru"], embedded)
    )
    found = low_rank(correction, at_slot["hidden"], state)
    residual = model.head_logits(correction["up"], found)
    return state, at_slot["base"] + at_slot["has"][:, None] * residual, None

  start = jnp.zeros((hidden.shape[0], options.gru_hidden_dim), hidden.dtype)
  proposal, _ = token_walk.walk(
    step,
    start,
    inputs,
    anchor_tokens,
    sampling_cfg=sampling_cfg,
    kind=kind,
    keys=keys,
    forced=forced,
  )
  return proposal


def entries(cfg: configs.DrafterConfig) -> list[names.Entry]:
  """Released names: the backbone's, two of the GRU, two of the correction."""
  options, width = options_of(cfg), cfg.hidden_size
  size, rank = options.gru_hidden_dim, options.emb_dim
  recurrent, correction = ("params", "prefix_gru"), ("params", "correction")
  return [
    *names.backbone_entries(cfg),
    names.Entry(
      "prefix_gru.weight_ih_l0",
      (*recurrent, "input", "kernel"),
      (width, 3 * size),
      True,
    ),
    names.Entry(
      "prefix_gru.weight_hh_l0",
      (*recurrent, "state", "kernel"),
      (size, 3 * size),
      True,
    ),
    names.Entry(
      "embed_proj.0.weight",
      (*correction, "down", "kernel"),
      (width + size, rank),
      True,
    ),
    names.Entry(
      "embed_proj.2.weight", (*correction, "up"), (cfg.vocab_size, rank)
    ),
  ]


DRAFTER = contract.Drafter(
  init=init,
  make_buffers=dflash.make_buffers,
  forward=dflash.forward,
  supervised=dflash.supervised,
  loss=loss,
  propose=propose,
  proposal_kinds=("sampled",),
  entries=entries,
  schedule=schedule,
)
