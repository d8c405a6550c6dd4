"""DSpine against SpecForge's model and objective."""

import functools

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax.drafters import candidates as candidates_lib
from dspine_jax.drafters import dflash as dflash_lib
from dspine_jax.drafters import (
  dspine,
  injection,
  layer_supervision,
  transfer_space,
)
from dspine_jax.target import model
from dspine_jax.training import schedules
from experiments.parity import drafter, report
from kernels.transition_scores import reference as transition_scores

# Index of each mode's step in inputs' objective_steps; 1 is the total.
_MODES = {"eval": 0, "train": 2}
_SCALED = "loss_with_alignment_ce_"


def compare(folder: report.Folder) -> list[report.Record]:
  """Compares every output array of a DSpine folder."""
  check = report.Comparison(folder)
  case = drafter.load(folder)
  drafter.compare_inputs(case, check)
  _compare_transfer_space(case, check)
  drafter.compare_layout(case, check)
  check.exact("block_token_ids", case.blocks.tokens, rows=case.keep)
  check.exact("supervised", case.supervision.valid)
  check.value("loss_weights", case.supervision.weights)
  for layout, params in drafter.layouts(case.params).items():
    output = _compare_forward(case, check, params, layout)
    if layout == "unrolled":
      _compare_tokens(case, check, output, "eval")
  block = drafter.single_block(case, check)
  if block is not None:
    _compare_pass(case, check, case.params, block, "unrolled", prefix="infer_")
  _compare_layer_states(case, check)
  for mode in _MODES:
    if any(name.startswith(f"{mode}/") for name in check.outputs):
      _compare_objective(case, check, mode)
  if "schedule" in check.outputs:
    _compare_schedule(case, check)
  drafter.compare_decoding(case, check)
  return check.finish()


def _compare_transfer_space(case, check):
  """A fresh space of the target's head; signs of its columns are matched."""
  outputs = check.outputs
  head = np.asarray(case.tables.head)
  space = transfer_space.transfer_space(head, case.cfg.dspine.transfer_rank)
  check.value("transfer_mean", space.mean)
  check.value("transfer_covariance", space.covariance)
  check.value("transfer_eigenvalues", space.eigenvalues)
  scatter = space.covariance.astype(np.float64)
  check.value("transfer_eigenvalues_all", np.linalg.eigvalsh(scatter))
  stored = np.asarray(case.buffers["transfer_codes"])
  check.value("transfer_codes", stored, layout="stored")
  # Codes follow the directions they are coordinates of, where these are given.
  signs = np.ones(stored.shape[-1])
  for name, ours in (
    ("transfer_codes", space.codes),
    ("transfer_directions", space.directions),
  ):
    if name in outputs and outputs[name].shape == ours.shape:
      signs = np.where(np.sum(ours * outputs[name], axis=0) < 0, -1.0, 1.0)
  check.code("transfer_directions", space.directions * signs)
  check.code("transfer_codes", space.codes * signs, layout="fresh")


def _compare_forward(case, check, params, layout):
  """The training layout, without and with replacement."""
  keep = case.keep
  output = _compare_pass(case, check, params, case.blocks, layout, rows=keep)
  if "replace_mask" in case.folder.inputs:
    replaced = case.folder.inputs["replace_mask"]
    blocks = case.blocks.replace(replaced=replaced)
    _compare_pass(
      case, check, params, blocks, layout, rows=keep, prefix="replaced/"
    )
  return output


def _compare_pass(case, check, params, blocks, layout, *, rows=..., prefix=""):
  """One pass, its candidates, both forms of the transition cache, the walk."""
  cfg, fixed = case.cfg, (case.buffers, case.tables)
  output, logits = drafter.forward(params, *fixed, blocks, cfg=cfg)
  by_layer = rows if rows is ... else (slice(None), rows)
  options = {"rows": rows, "layout": layout}
  check.value(f"{prefix}hidden", output.hidden, **options)
  check.value(f"{prefix}logits", logits, **options)
  check.value(f"{prefix}pre_injection", output.pre_injection, **options)
  features = np.stack(jax.device_get(output.layer_features))
  check.value(f"{prefix}layer_features", features, rows=by_layer, layout=layout)
  output = output.replace(layer_features=features)
  last = dspine.refinement_params(params)
  found = _select(output, logits, *fixed, case.params, last, blocks, cfg=cfg)
  check.exact(f"{prefix}candidate_ids", found["ids"], **options)
  check.value(f"{prefix}candidate_logits", found["logits"], **options)
  for form in ("direct", "factored"):
    options = {"rows": rows, "layout": f"{layout}, {form}"}
    check.value(f"{prefix}transition_scores", found[form], **options)
    check.exact(f"{prefix}selected", found[f"{form} walk"], **options)
  options = {"rows": rows, "layout": f"{layout}, proposal"}
  check.exact(f"{prefix}selected", found["proposal"], **options)
  return output


@functools.partial(jax.jit, static_argnames="cfg")
def _select(output, logits, buffers, tables, params, last, blocks, *, cfg):
  """Candidates, transition cache and walk, each [B, N, P, ...].

  `last` are the refinement's parameters, `params` those of the whole drafter,
  from which `propose` takes its own.
  """
  first = cfg.first_slot
  top, ids = candidates_lib.top_candidates(
    logits[:, :, first:], cfg.dspine.top_k
  )
  predecessors = candidates_lib.predecessor_ids(blocks.tokens[:, :, 0], ids)
  arguments = (
    output.pre_injection[:, :, first:],
    predecessors,
    ids,
    buffers["transfer_codes"],
    tables.head,
    injection.weights(last["shared"], last["layer"]),
    last["norm"]["scale"],
    cfg.rms_norm_eps,
  )
  direct = transition_scores.transition_scores(*arguments)
  factored = transition_scores.factored_transition_scores(*arguments)
  return {
    "logits": top,
    "ids": ids,
    "direct": direct,
    "factored": factored,
    "direct walk": candidates_lib.greedy_walk(direct, ids),
    "factored walk": candidates_lib.greedy_walk(factored, ids),
    "proposal": drafter.propose(
      output, buffers, tables, params, blocks, cfg=cfg
    ),
  }


def _compare_tokens(case, check, output, mode):
  """Teacher-forced refinement, and every term of the loss slot by slot."""
  found = _token_terms(
    output,
    case.buffers,
    case.tables,
    case.params,
    case.supervision,
    cfg=case.cfg,
  )
  rows, mass = case.keep, found["teacher_mass"]
  if mode == "eval":  # The pass without replacement.
    check.value("refined_hidden", found["refined"], rows=rows)
    check.value("teacher_forced_scores", found["scores"], rows=rows)
  for name in ("ce", "l1", "refinement", "alignment"):
    check.value(f"{mode}/token_{name}", found[name], rows=rows)
  check.value(f"{mode}/teacher_candidate_mass", mass, rows=rows)
  check.exact(f"{mode}/covered", found["covered"], rows=rows)


@functools.partial(jax.jit, static_argnames="cfg")
def _token_terms(output, buffers, tables, params, supervision, *, cfg):
  codes, first = buffers["transfer_codes"], cfg.first_slot
  rows = {
    "hidden": output.hidden[:, :, first:],
    "pre_injection": output.pre_injection[:, :, first:],
  }
  constants = {
    "labels": supervision.labels,
    "teacher": supervision.teacher,
    "predecessor_codes": codes[supervision.predecessors],
  }
  last = dspine.refinement_params(params)
  refined = dspine.refine(
    last,
    rows["pre_injection"],
    constants["predecessor_codes"],
    cfg.rms_norm_eps,
  )
  logits = model.head_logits(tables.head, rows["hidden"])
  _, ids = candidates_lib.top_candidates(logits, cfg.dspine.top_k)
  scores = jnp.take_along_axis(
    model.head_logits(tables.head, refined), ids, axis=-1
  )
  rows, constants = jax.tree.map(dflash_lib.flatten_blocks, (rows, constants))
  terms = dspine.token_terms(
    last, rows, tables.head, constants, cfg.dspine, cfg.rms_norm_eps
  )
  shape = supervision.labels.shape
  terms = {name: term.reshape(shape) for name, term in terms.items()}
  alignment = layer_supervision.token_alignment(
    output, supervision.labels, codes, first
  )
  return terms | {
    "alignment": alignment,
    "refined": refined,
    "scores": scores,
  }


def _compare_scaled_loss(case, check, output, mode, beta):
  """The loss for given scales of the alignment: the number is in the name."""
  start = f"{mode}/{_SCALED}"
  for name in check.outputs:
    if name.startswith(start):
      loss, _ = drafter.objective(
        case.params,
        case.buffers,
        case.tables,
        output,
        case.supervision,
        np.float32(beta),
        np.float32(name.removeprefix(start)),
        cfg=case.cfg,
      )
      check.value(name, loss)


def _compare_layer_states(case, check):
  """Row 0 before and after every write.

  A drafter returns the state before its last write only. For an earlier layer
  all later ones are made to add nothing to the residual stream.
  """
  wanted = ("layer_pre_write_row0", "layer_post_write_row0")
  if not any(name in check.outputs for name in wanted):
    return
  inject = case.params["injection"]
  tokens, codes = case.blocks.tokens[0], case.buffers["transfer_codes"]
  before, after = [], []
  for index, layer in enumerate(inject["layers"]):
    output, _ = drafter.forward(
      _silent_after(case.params, index),
      case.buffers,
      case.tables,
      case.blocks,
      cfg=case.cfg,
    )
    state = np.asarray(output.pre_injection)[0]
    before.append(state)
    after.append(_write(inject["shared"], layer, state, tokens, codes))
  rows = (slice(None), case.keep[0])
  check.value("layer_pre_write_row0", np.stack(before), rows=rows)
  check.value("layer_post_write_row0", np.stack(after), rows=rows)


def _silent_after(params, index):
  """Parameters with which nothing is added behind the layer's own sublayers."""

  def without(tree, name):
    return tree | {name: jax.tree.map(np.zeros_like, tree[name])}

  def silent(layer):
    attention = without(layer["self_attn"], "o_proj")
    mlp = without(layer["mlp"], "down_proj")
    return layer | {"self_attn": attention, "mlp": mlp}

  core, inject = params["backbone"], params["injection"]
  kept, cut = core["layers"][: index + 1], core["layers"][index + 1 :]
  writing, mute = inject["layers"][:index], inject["layers"][index:]
  return {
    "backbone": core | {"layers": (*kept, *map(silent, cut))},
    "injection": inject
    | {"layers": (*writing, *(without(layer, "write") for layer in mute))},
  }


@jax.jit
def _write(shared, layer, states, tokens, codes):
  unreplaced = jnp.zeros(states.shape[:1], bool)
  return injection.adjacent_injection(
    shared, layer, states, tokens, unreplaced, codes
  ).h


def _beta_and_rho(case, mode):
  """Both schedules at the mode's step."""
  steps = case.folder.inputs["objective_steps"].tolist()
  step, options = steps[_MODES[mode]], case.cfg.dspine
  return (
    float(schedules.alignment_weight(step, options)),
    float(schedules.replacement_probability(step, steps[1], options)),
  )


def _compare_objective(case, check, mode):
  """Loss, its terms, its schedules and its gradients in one mode."""
  beta, rho = _beta_and_rho(case, mode)
  steps = case.folder.inputs["objective_steps"]
  check.exact(f"{mode}/global_step", steps[_MODES[mode]])
  check.exact(f"{mode}/total_steps", steps[1])
  check.value(f"{mode}/alignment_beta", beta)
  check.value(f"{mode}/replacement_probability", rho)
  blocks = _compare_replacement(case, check, mode, rho)
  (loss, found), grads = drafter.gradient(
    case.params,
    case.buffers,
    case.tables,
    blocks,
    case.supervision,
    np.float32(beta),
    cfg=case.cfg,
  )
  terms: dict[str, float] = jax.tree.map(float, found.sums)
  weight, share = float(found.weight), case.cfg.dspine.ce_weight
  mean_ce = terms["ce"] / weight if weight else 0.0
  numerator = share * terms["ce"] + (1 - share) * terms["l1"]
  numerator += terms["refinement"] + beta * mean_ce * terms["alignment"]
  check.value(f"{mode}/loss_total", loss)
  check.value(f"{mode}/loss_numerator", numerator)
  check.value(f"{mode}/loss_denominator", weight)
  for name, value in terms.items():
    check.value(f"{mode}/{name}_numerator", value)
  check.value(f"{mode}/ce_only_loss", mean_ce)
  check.value(f"{mode}/coverage_count", np.sum(found.covered))
  check.value(f"{mode}/supervised_count", np.sum(found.supervised))
  accuracy = drafter.accuracy(found.base_hits, found.supervised)
  check.value(f"{mode}/accuracy", accuracy)
  drafter.compare_gradients(case, check, grads, f"{mode}/")
  output, _ = drafter.forward(
    case.params, case.buffers, case.tables, blocks, cfg=case.cfg
  )
  output = output.replace(layer_features=np.stack(output.layer_features))
  _compare_scaled_loss(case, check, output, mode, beta)
  if mode != "eval":
    _compare_tokens(case, check, output, mode)


def _compare_replacement(case, check, mode, rho):
  """The blocks of a mode: none replaced in eval mode, else as drawn."""
  name = f"{mode}/replace_mask"
  replaced = case.blocks.replaced
  if mode == "eval":
    check.exact(name, replaced)
  else:
    drawn = check.outputs[name]
    possible = drawn.shape == replaced.shape and (rho > 0 or not drawn.any())
    check.given(name, possible, "recorded draw")
    replaced = drawn if possible else replaced
  return case.blocks.replace(replaced=replaced)


def _compare_schedule(case, check):
  """Rows (step, total, beta, rho) for every pair of the recorded inputs."""
  options, inputs = case.cfg.dspine, case.folder.inputs
  rows = []
  for total in inputs["schedule_totals"].tolist():
    for step in inputs["schedule_steps"].tolist():
      beta = schedules.alignment_weight(step, options)
      rho = schedules.replacement_probability(step, total, options)
      rows.append((step, total, float(beta), float(rho)))
  ours = np.asarray(rows)
  # Steps are exact and large: apart, they do not loosen the others' bound.
  columns = ("step", "total", "beta", "rho")
  for index, name in enumerate(columns):
    compare_column = check.exact if index < 2 else check.value
    compare_column("schedule", ours, rows=(slice(None), index), layout=name)
