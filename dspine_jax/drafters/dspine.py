"""DSpine: draft in parallel, condition through depth (arXiv 2609.36173).

The causal backbone with an adjacent injection after every layer, a final
refinement with the actual predecessor token, the transition cache that scores
all adjacent pairs of candidates at once, and the walk that reads it off. The
objective is in `loss`; section numbers refer to the method's description. What
an ablation leaves out of it is in `DSpineOptions`.
"""

import dataclasses

import jax
from jax import numpy as jnp
from jaxtyping import Array, Float, Int

from dspine_jax import configs, layers
from dspine_jax.checkpoints import names
from dspine_jax.drafters import (
  backbone,
  contract,
  dflash,
  injection,
  layer_supervision,
  transfer_space,
)
from dspine_jax.drafters import candidates as candidates_lib
from dspine_jax.target import model
from dspine_jax.training import losses, schedules
from dspine_jax.typing import Key, Params, PyTree
from kernels.adjacent_injection import reference as injection_math
from kernels.transition_scores import api as scores_api


def options_of(cfg: configs.DrafterConfig) -> configs.DSpineOptions:
  """`cfg.dspine`; ValueError if the configuration has none."""
  if cfg.dspine is None:
    raise ValueError("dspine=None: method 'dspine' needs its DSpineOptions")
  return cfg.dspine


def init(
  key: Key, cfg: configs.DrafterConfig, tables: contract.TargetTables
) -> Params:
  """Backbone (equal to DFlash's for the same key) and zero-write injections.

  Parameters that the options leave unread are there all the same, with zero
  gradients: a checkpoint has the same tensors whatever they are.
  """
  options = options_of(cfg)
  space = transfer_space.transfer_space(tables.head, options.transfer_rank)
  directions = transfer_space.READOUTS[options.readout_init](space)
  return {
    "backbone": backbone.init(key, cfg),
    "injection": injection.init(
      jax.random.fold_in(key, 1),
      cfg.num_layers,
      jnp.asarray(directions),
      options.message_size,
    ),
  }


def make_buffers(
  cfg: configs.DrafterConfig, tables: contract.TargetTables
) -> PyTree:
  """The frozen token codes, {"transfer_codes": [V, R]} (section 3).

  In the dtype that the drafter computes in, as released files have them.
  """
  space = transfer_space.transfer_space(
    tables.head, options_of(cfg).transfer_rank
  )
  return {"transfer_codes": jnp.asarray(space.codes, cfg.dtype)}


def forward(
  params: Params,
  buffers: PyTree,
  tables: contract.TargetTables,
  inputs: contract.BlockInputs,
  *,
  cfg: configs.DrafterConfig,
) -> contract.DrafterOutput:
  """Backbone with an injection after every layer (section 4).

  Blocks in `inputs.replaced` read their true predecessors in the first
  `replacement_layers` layers (section 7).
  """
  core, inject = params["backbone"], params["injection"]
  options = options_of(cfg)
  codes = jax.lax.stop_gradient(buffers["transfer_codes"])
  replaced = inputs.replaced
  if replaced is None:
    replaced = jnp.zeros(inputs.keep.shape, bool)
  supervision = layer_supervision.of(options, inputs.for_loss)

  def after(layer, index, h):
    if options.injects:
      injected = injection.adjacent_injection(
        inject["shared"],
        layer,
        h,
        inputs.tokens,
        replaced & (index < options.replacement_layers),
        codes,
        with_feature=supervision.with_feature,
      )
    else:
      injected = injection_math.Injected(h, None)
      if supervision.with_feature:
        readout = layer["readout"]["kernel"]
        injected = injected._replace(feature=injection_math.feature(readout, h))
    return injected.h, (h, supervision.read(injected))

  variant = backbone.plain(core)._replace(
    layer_params=inject["layers"], after=after
  )
  h, extras = backbone.run_blocks(core, tables, inputs, variant, cfg=cfg)
  if isinstance(extras[0], tuple):
    pre_injection = extras[-1][0]
    layer_features = tuple(features for _, features in extras)
  else:
    pre_injection, layer_features = extras[0][-1], extras[1]
  return contract.DrafterOutput(
    hidden=backbone.final_norm(core, h, cfg),
    pre_injection=pre_injection,
    layer_features=layer_features,
  )


def supervised(mask: jax.Array) -> jax.Array:
  """A slot counts only if it and all earlier ones do (prefix product)."""
  return jnp.cumprod(mask.astype(jnp.int32), axis=-1).astype(bool)


def refine(
  last: Params,
  u: Float[Array, "*#rows d"],
  codes: Float[Array, "*#rows r"],
  eps: float,
) -> Float[Array, "*#rows d"]:
  """q(a): the last write redone with a token's code, final-normed (section 6).

  Args:
    last: `refinement_params`.
    u: last layer's states before its write.
    codes: codes of the actual predecessors; broadcast against `u`.
    eps: of the final norm.
  """
  weights = injection.weights(last["shared"], last["layer"])
  predecessor = injection_math.token_vector(codes).astype(u.dtype)
  receiver = injection_math.feature(weights.readout, u)
  z = injection_math.message(weights, receiver, predecessor)
  h = injection_math.write(weights.write, u, z)
  return layers.rms_norm(h, last["norm"]["scale"], eps)


def refinement_params(params: Params) -> Params:
  """What the refinement shares with the last injection and the final norm."""
  inject = params["injection"]
  layer = inject["layers"]
  last = (
    layer[-1]
    if isinstance(layer, tuple)
    else jax.tree.map(lambda leaf: leaf[-1], layer)
  )
  return {
    "layer": last,
    "shared": inject["shared"],
    "norm": params["backbone"]["norm"],
  }


def transition_scores(
  last: Params,
  u: Float[Array, "*b d"],
  predecessors: Int[Array, "*b p"],
  candidates: Int[Array, "*b c"],
  buffers: PyTree,
  tables: contract.TargetTables,
  eps: float,
) -> Float[Array, "*b p c"]:
  """s(a, b) = E_b . q(a) for all pairs of tokens, float32 (section 6).

  Args:
    last: `refinement_params`.
    u: [..., D], each slot's state before the last write.
    predecessors: [..., P], tokens that may come before it.
    candidates: [..., C], tokens that may take it.
    buffers: with the token codes.
    tables: with the head.
    eps: of the final norm.
  """
  return scores_api.transition_scores(
    u, predecessors, candidates, *_scoring(last, buffers, tables), eps=eps
  )


def _scoring(last, buffers, tables):
  """Tables and weights, as the ops on transition scores take them."""
  return (
    buffers["transfer_codes"],
    tables.head,
    injection.weights(last["shared"], last["layer"]),
    last["norm"]["scale"],
  )


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
  """L_base + L_ref + the supervision of layers (section 7).

  The denominator of the loss is at least 1; the scale of the alignment term
  divides by the plain sum of weights. Without refinement there is no L_ref.
  """
  assert output.pre_injection is not None
  codes = jax.lax.stop_gradient(buffers["transfer_codes"])
  options, first = options_of(cfg), cfg.first_slot
  rows = {
    "hidden": output.hidden[:, :, first:],
    "pre_injection": output.pre_injection[:, :, first:],
  }
  constants = {
    "labels": supervision.labels,
    "weights": supervision.weights,
    "valid": supervision.valid,
    "teacher": supervision.teacher,
    "predecessor_codes": codes[supervision.predecessors],
  }
  rows, constants = jax.tree.map(dflash.flatten_blocks, (rows, constants))
  terms = chunk_terms(options, cfg.rms_norm_eps)
  last = refinement_params(params)
  total, sums = losses.chunked_sum(
    terms, chunk_size, last, rows, tables.head, constants
  )
  if window.ce_scale is None:
    weight = window.total(jnp.sum(supervision.weights))
    ce = losses.safe_divide(window.total(sums["ce"]), weight)
    window = dataclasses.replace(window, ce_scale=ce)
  of_layers, more = layer_supervision.of(options, True).loss(
    params,
    buffers,
    tables,
    output,
    supervision,
    cfg=cfg,
    window=window,
    chunk_size=chunk_size,
  )
  value = (total + of_layers) / jnp.maximum(window.denominator, 1.0)
  return value, contract.loss_report(sums | more, supervision)


def token_terms(
  last: Params,
  rows: PyTree,
  head: Float[Array, "v d"],
  constants: PyTree,
  options: configs.DSpineOptions,
  eps: float,
) -> dict[str, jax.Array]:
  """Every per-slot term that needs vocabulary rows, each [blocks, P].

  Keys: ce, l1, covered, base_hit, hit; with refinement those of
  `refinement_terms`.
  """
  labels = constants["labels"]
  logits = model.head_logits(head, rows["hidden"])
  teacher = jax.nn.softmax(model.head_logits(head, constants["teacher"]))
  log_q = jax.nn.log_softmax(logits)
  ids = candidates_lib.top_candidates(
    jax.lax.stop_gradient(logits), options.top_k
  )[1]
  base_hit = ids[..., 0] == labels
  terms = {
    "ce": losses.cross_entropy(log_q, labels),
    "l1": losses.l1_distance(jnp.exp(log_q), teacher),
    "covered": jnp.any(ids == labels[..., None], axis=-1),
    "base_hit": base_hit,
    "hit": base_hit,
  }
  if not options.refines:
    return terms
  return terms | refinement_terms(
    last, rows, head, constants, teacher, ids, options, eps
  )


def refinement_terms(
  last: Params,
  rows: PyTree,
  head: Float[Array, "v d"],
  constants: PyTree,
  teacher: Float[Array, "n p v"],
  ids: Int[Array, "n p c"],
  options: configs.DSpineOptions,
  eps: float,
) -> dict[str, jax.Array]:
  """Teacher-forced refinement on the candidates `ids`, each [blocks, P].

  Keys: refinement, teacher_mass, hit.
  """
  refined = refine(
    last, rows["pre_injection"], constants["predecessor_codes"], eps
  )
  scores = jnp.einsum("npd,npcd->npc", refined, head[ids])
  log_r = jax.nn.log_softmax(scores)
  is_label = ids == constants["labels"][..., None]
  # An uncovered label has no cross-entropy over the candidates.
  refined_ce = -jnp.sum(jnp.where(is_label, log_r, 0.0), axis=-1)
  on_candidates = jnp.take_along_axis(teacher, ids, axis=-1)
  mass = jnp.sum(on_candidates, axis=-1)
  enough = mass > options.candidate_mass_threshold
  share = on_candidates / jnp.where(enough, mass, 1.0)[..., None]
  refined_l1 = losses.l1_distance(jnp.exp(log_r), share)
  refined_l1 = jnp.where(enough, refined_l1, 0.0)
  ce_share = options.ce_weight
  choice = jnp.argmax(scores, axis=-1)[..., None]
  return {
    "refinement": ce_share * refined_ce + (1 - ce_share) * refined_l1,
    "teacher_mass": mass,
    "hit": jnp.take_along_axis(is_label, choice, axis=-1)[..., 0],
  }


def chunk_terms(options: configs.DSpineOptions, eps: float):
  """The chunk loss of `losses.chunked_sum`: L_base + L_ref, weighted."""
  shares = {"ce": options.ce_weight, "l1": 1 - options.ce_weight}
  if options.refines:
    shares["refinement"] = 1.0

  def chunk_loss(last, rows, head, constants):
    terms = token_terms(last, rows, head, constants, options, eps)
    weights = constants["weights"]
    sums = {name: jnp.sum(terms[name] * weights) for name in shares}
    value = sum(share * sums[name] for name, share in shares.items())
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
  """Candidates, transition cache, walk; kinds as in `candidates.propose`.

  Without refinement there are no scores of pairs: the draft is DFlash's.
  """
  options, first = options_of(cfg), cfg.first_slot
  if not options.refines:
    return dflash.propose(
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
  with jax.named_scope("candidates"):
    logits = model.head_logits(tables.head, output.hidden[:, 0, first:])
  assert output.pre_injection is not None
  u, last = output.pre_injection[:, 0, first:], refinement_params(params)
  if kind == "greedy":
    with jax.named_scope("candidates"):
      _, ids = candidates_lib.top_candidates(logits, options.top_k)
    with jax.named_scope("cache"):  # The walk through it included.
      tokens = scores_api.greedy_draft(
        u,
        anchor_tokens,
        ids,
        *_scoring(last, buffers, tables),
        eps=cfg.rms_norm_eps,
      )
    return contract.Proposal(tokens=tokens.astype(jnp.int32))

  def scores_of(predecessors, ids):
    return transition_scores(
      last, u, predecessors, ids, buffers, tables, cfg.rms_norm_eps
    )

  return candidates_lib.propose(
    logits,
    options.top_k,
    scores_of,
    anchor_tokens,
    sampling_cfg=sampling_cfg,
    kind=kind,
    keys=keys,
    forced=forced,
  )


def schedule(
  step: jax.typing.ArrayLike, total_steps: int, cfg: configs.DrafterConfig
) -> contract.Schedule:
  """beta of the alignment and rho of the replacement (section 7)."""
  options = options_of(cfg)
  return contract.Schedule(
    weight=schedules.alignment_weight(step, options),
    replacement=schedules.replacement_probability(step, total_steps, options),
  )


def entries(cfg: configs.DrafterConfig) -> list[names.Entry]:
  """Released names: the backbone's, the injection's, and the codes."""
  options, width = options_of(cfg), cfg.hidden_size
  rank, size = options.transfer_rank, options.message_size
  root = ("params", "injection")
  shared = [
    names.Entry(
      f"injection.{name}.weight",
      (*root, "shared", name, "kernel"),
      (rank, size),
      True,
    )
    for name in ("message", "receiver_gate", "predecessor_gate")
  ]
  shared.append(
    names.Entry("injection.bias", (*root, "shared", "bias"), (size,))
  )
  per_layer = []
  for index in range(cfg.num_layers):
    at = (*root, "layers", index)
    per_layer += [
      names.Entry(
        f"injection.readouts.{index}.weight",
        (*at, "readout", "kernel"),
        (width, rank),
        True,
      ),
      names.Entry(
        f"injection.writes.{index}.weight",
        (*at, "write", "kernel"),
        (size, width),
        True,
      ),
    ]
  codes = names.Entry(
    "transfer_codes", ("buffers", "transfer_codes"), (cfg.vocab_size, rank)
  )
  return [*names.backbone_entries(cfg), *shared, *per_layer, codes]


DRAFTER = contract.Drafter(
  init=init,
  make_buffers=make_buffers,
  forward=forward,
  supervised=supervised,
  loss=loss,
  propose=propose,
  proposal_kinds=candidates_lib.KINDS,
  entries=entries,
  schedule=schedule,
  needs_ce_scale=True,
)
