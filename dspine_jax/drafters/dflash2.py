"""DFlash2: convolutions in the block, a selector behind it (baselines, 4).

DFlash's bidirectional backbone and labels, a two-tap convolution around every
sublayer (`block_convolution.py`), and a selector that scores pairs of
neighbouring candidates; the walk over its scores is `candidates.py`'s. The
official objective is unpublished: this is DFlash's, usually cross-entropy, on
the unary logits, plus the cross-entropy of the selector over its candidates,
given the true predecessor, as in the public ports. Labels outside the
candidates drop out of the selector's sum but not of the common denominator, so
that its weight grows with coverage.
"""

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from dspine_jax import configs, layers
from dspine_jax.checkpoints import names
from dspine_jax.drafters import backbone, block_convolution, contract, dflash
from dspine_jax.drafters import candidates as candidates_lib
from dspine_jax.target import model
from dspine_jax.training import losses
from dspine_jax.typing import Key, Params, PyTree

_INIT_STD = 0.02


def options_of(cfg: configs.DrafterConfig) -> configs.DFlash2Options:
  """`cfg.dflash2`; ValueError if the configuration has none."""
  if cfg.dflash2 is None:
    raise ValueError("dflash2=None: method 'dflash2' needs its DFlash2Options")
  return cfg.dflash2


def init(
  key: Key, cfg: configs.DrafterConfig, tables: contract.TargetTables
) -> Params:
  """DFlash's backbone; convolutions and selector that change nothing yet."""
  del tables
  options = options_of(cfg)
  hidden_key, codebook_key = jax.random.split(jax.random.fold_in(key, 1))
  rank, codebook = (
    options.selector_rank,
    (cfg.vocab_size, options.selector_rank),
  )
  projection = jax.random.normal(hidden_key, (cfg.hidden_size, rank))
  return {
    "backbone": backbone.init(key, cfg),
    "convolutions": block_convolution.init(cfg, options),
    "selector": {
      "hidden_projection": {"kernel": _INIT_STD * projection},
      "predecessor_codebook": _INIT_STD
      * jax.random.normal(codebook_key, codebook),
      # Zero pair scores: the walk starts as the argmax of every slot.
      "successor_codebook": jnp.zeros(codebook),
    },
  }


def forward(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  inputs: contract.BlockInputs,
  *,
  cfg: configs.DrafterConfig,
) -> contract.DrafterOutput:
  """The parallel pass; the context does not pass the convolutions."""
  tables = dflash.own_embedding(buffers, tables)
  core = params["backbone"]
  variant = backbone.plain(core)._replace(
    layer_params=params["convolutions"]["layers"],
    around=block_convolution.around,
  )
  h, _ = backbone.run_blocks(core, tables, inputs, variant, cfg=cfg)
  return contract.DrafterOutput(hidden=backbone.final_norm(core, h, cfg))


def unary_logits(
  logits: Float[Array, "*bm v"], options: configs.DFlash2Options
) -> Float[Array, "*bm v"]:
  """The head's logits, scaled and bounded as the target's own are."""
  logits = logits.astype(jnp.float32) * options.output_multiplier
  bound = options.final_logit_softcapping
  return logits if bound is None else bound * jnp.tanh(logits / bound)


def pair_term(
  query: Float[Array, "*b p r"], successors: Float[Array, "*b c r"]
) -> Float[Array, "*b p c"]:
  """<A[a] * (H h), B[b]> from its two factors."""
  return jnp.einsum(
    "...pr,...cr->...pc",
    query,
    successors,
    preferred_element_type=jnp.float32,
  )


def pair_scores(
  selector: Params,
  hidden: Float[Array, "*b d"],
  unary: Float[Array, "*b c"],
  predecessors: Int[Array, "*b p"],
  candidates: Int[Array, "*b c"],
) -> Float[Array, "*b p c"]:
  """S(a, b) = U(b) + <A[a] * (H h), B[b]> for all pairs (section 4.2).

  Args:
    selector: hidden projection and codebooks.
    hidden: [..., D], final-normed states of the slots.
    unary: [..., C], unary logits of the candidates.
    predecessors: [..., P], possible tokens of the slot before.
    candidates: [..., C], their ids.
  """
  projected = layers.matmul(hidden, selector["hidden_projection"]["kernel"])
  query = selector["predecessor_codebook"][predecessors]
  query = query * projected[..., None, :]
  successors = selector["successor_codebook"][candidates]
  return unary[..., None, :] + pair_term(query, successors)


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
  """(sum w objective + alpha sum w covered CE_selector) / sum w (4.4)."""
  dflash.refuse_own_head(buffers)
  selector = params["selector"]
  # Looked up here, so that a chunk's gradient is no [V, R] array for it.
  before = selector["predecessor_codebook"][supervision.predecessors]
  rows = {"hidden": output.hidden[:, :, cfg.first_slot :], "before": before}
  constants = dflash.loss_constants(supervision)
  rows, constants = jax.tree.map(dflash.flatten_blocks, (rows, constants))
  chunk_params = {
    name: selector[name] for name in ("hidden_projection", "successor_codebook")
  }
  total, sums = losses.chunked_sum(
    chunk_terms(options_of(cfg)),
    chunk_size,
    chunk_params,
    rows,
    tables.head,
    constants,
  )
  report = contract.loss_report(sums, supervision)
  return losses.safe_divide(total, window.denominator), report


def token_terms(
  selector: Params,
  rows: PyTree,
  head: Float[Array, "v d"],
  constants: PyTree,
  options: configs.DFlash2Options,
) -> dict[str, jax.Array]:
  """Every per-slot term that needs vocabulary rows.

  Args:
    selector: `hidden_projection` and `successor_codebook`.
    rows: `hidden` [blocks, P, D], and `before` [blocks, P, R]: the codebook
      rows of the true predecessors.
    head: [V, D].
    constants: `labels` [blocks, P].
    options: of the method.

  Returns:
    ce, selector, covered, hit, base_hit, each [blocks, P]; scores [blocks, P,
    C] given the true predecessors; log_q [blocks, P, V] of the unary logits.
  """
  labels = constants["labels"]
  logits = unary_logits(model.head_logits(head, rows["hidden"]), options)
  _, ids = candidates_lib.top_candidates(
    jax.lax.stop_gradient(logits), options.selector_top_k
  )
  unary = jnp.take_along_axis(logits, ids, axis=-1)
  kernel = selector["hidden_projection"]["kernel"]
  query = rows["before"] * layers.matmul(rows["hidden"], kernel)
  successors = selector["successor_codebook"][ids]
  scores = unary + pair_term(query[..., None, :], successors)[..., 0, :]
  is_label = ids == labels[..., None]
  log_q, log_r = jax.nn.log_softmax(logits), jax.nn.log_softmax(scores)
  choice = jnp.argmax(scores, axis=-1)[..., None]
  return {
    "ce": losses.cross_entropy(log_q, labels),
    # An uncovered label has no cross-entropy over the candidates.
    "selector": -jnp.sum(jnp.where(is_label, log_r, 0.0), axis=-1),
    "scores": scores,
    "log_q": log_q,
    "covered": jnp.any(is_label, axis=-1),
    "hit": jnp.take_along_axis(is_label, choice, axis=-1)[..., 0],
    "base_hit": ids[..., 0] == labels,
  }


def chunk_terms(options: configs.DFlash2Options):
  """The chunk loss of `losses.chunked_sum`."""

  objective = dflash.OBJECTIVES[options.objective]

  def chunk_loss(selector, rows, head, constants):
    def logits_of(states):
      return unary_logits(model.head_logits(head, states), options)

    terms = token_terms(selector, rows, head, constants, options)
    weights = constants["weights"]
    sums = {name: jnp.sum(terms[name] * weights) for name in ("ce", "selector")}
    value, more = objective(terms["log_q"], constants, logits_of, options)
    sums |= jax.tree.map(jnp.sum, more)
    value = jnp.sum(value) + options.selector_loss_alpha * sums["selector"]
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
  """Candidates, pair scores, walk; kinds as in `candidates.propose`."""
  options = options_of(cfg)
  hidden = output.hidden[:, 0, cfg.first_slot :]
  logits = unary_logits(
    dflash.own_logits(buffers, tables, hidden, cfg), options
  )

  def scores_of(predecessors, ids):
    unary = jnp.take_along_axis(logits, ids, axis=-1)
    return pair_scores(params["selector"], hidden, unary, predecessors, ids)

  return candidates_lib.propose(
    logits,
    options.selector_top_k,
    scores_of,
    anchor_tokens,
    sampling_cfg=sampling_cfg,
    kind=kind,
    keys=keys,
    forced=forced,
  )


def entries(cfg: configs.DrafterConfig) -> list[names.Entry]:
  """Released names: the backbone's, four a layer, and the selector's three.

  The codebooks are plain parameters, without `.weight`.
  """
  options, root = options_of(cfg), ("params", "selector")
  codebook = (cfg.vocab_size, options.selector_rank)
  selector = [
    names.Entry(
      "candidate_selector.hidden_projection.weight",
      (*root, "hidden_projection", "kernel"),
      (cfg.hidden_size, options.selector_rank),
      True,
    ),
    *(
      names.Entry(f"candidate_selector.{name}", (*root, name), codebook)
      for name in ("predecessor_codebook", "successor_codebook")
    ),
  ]
  convolutions = block_convolution.entries(cfg, options)
  return [*names.backbone_entries(cfg), *convolutions, *selector]


DRAFTER = contract.Drafter(
  init=init,
  make_buffers=dflash.make_buffers,
  forward=forward,
  supervised=dflash.supervised,
  loss=loss,
  propose=propose,
  proposal_kinds=candidates_lib.KINDS,
  entries=entries,
)
