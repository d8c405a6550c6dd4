"""DFlash2 against z-lab's and SpecForge's model, and SpecForge's objective."""

import functools

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import candidates as candidates_lib
from dspine_jax.drafters import dflash as dflash_lib
from dspine_jax.drafters import dflash2
from experiments.parity import drafter, report

# No weight on the anchor's slot, which the reference lists too.
_ANCHOR_SLOT = [(0, 0), (0, 0), (1, 0)]


def compare(folder: report.Folder) -> list[report.Record]:
  """Compares every output array of a DFlash2 folder."""
  check = report.Comparison(folder)
  case = drafter.load(folder)
  drafter.compare_inputs(case, check)
  drafter.compare_layout(case, check)
  for layout, params in drafter.layouts(case.params).items():
    _compare_pass(case, check, params, layout)
  block = drafter.single_block(case, check)
  if block is not None:
    output, logits = drafter.forward(
      case.params, case.buffers, case.tables, block, cfg=case.cfg
    )
    check.value("infer_hidden", np.asarray(output.hidden)[0])
    check.value("infer_logits", np.asarray(logits)[0])
  if "transform_in" in check.outputs:
    _compare_transform(check)
  _compare_loss(case, check)
  drafter.compare_decoding(case, check)
  return check.finish()


def _compare_pass(case, check, params, layout):
  """The training layout: states, candidates, pair scores, walk, terms."""
  output, logits = drafter.forward(
    params, case.buffers, case.tables, case.blocks, cfg=case.cfg
  )
  options = {"rows": case.keep, "layout": layout}
  check.value("hidden", output.hidden, **options)
  check.value("logits", logits, **options)
  found = _select(output, logits, params["selector"], case.blocks, cfg=case.cfg)
  check.value("unary_topk", found["unary"], **options)
  check.exact("candidate_ids", found["ids"], **options)
  check.value("pair_scores", found["scores"], **options)
  check.exact("greedy_path", found["walk"], **options)
  proposed = drafter.propose(
    output, case.buffers, case.tables, params, case.blocks, cfg=case.cfg
  )
  options["layout"] = f"{layout}, proposal"
  check.exact("greedy_path", proposed, **options)
  if layout == "unrolled":
    _compare_tokens(case, check, output, logits)


@functools.partial(jax.jit, static_argnames="cfg")
def _select(output, logits, selector, blocks, *, cfg):
  first = cfg.first_slot
  unary = dflash2.unary_logits(logits[:, :, first:], cfg.dflash2)
  top, ids = candidates_lib.top_candidates(unary, cfg.dflash2.selector_top_k)
  predecessors = candidates_lib.predecessor_ids(blocks.tokens[:, :, 0], ids)
  scores = dflash2.pair_scores(
    selector, output.hidden[:, :, first:], top, predecessors, ids
  )
  walk = candidates_lib.greedy_walk(scores, ids)
  return {"unary": top, "ids": ids, "scores": scores, "walk": walk}


def _compare_tokens(case, check, output, logits):
  """Every term of the loss slot by slot, and the selector's sums."""
  labels = drafter.labels_of_all_slots(case)
  unary = dflash2.unary_logits(logits, case.cfg.dflash2)
  check.value("token_ce", drafter.token_ce(unary, labels), rows=case.keep)
  found = jax.device_get(
    _token_terms(
      output,
      case.params["selector"],
      case.tables,
      case.supervision,
      cfg=case.cfg,
    )
  )
  check.value("teacher_forced_scores", found["scores"], rows=case.keep)
  covered = np.pad(found["covered"], _ANCHOR_SLOT)
  check.exact("covered", covered, rows=case.keep)
  selector_ce = np.pad(found["selector"], _ANCHOR_SLOT)
  kept = case.keep[..., None] & covered
  check.value("selector_token_ce", selector_ce, rows=kept)
  weights = np.asarray(case.supervision.weights)
  weighted = weights * found["covered"]
  check.value("selector_weight_denominator", np.sum(weighted))
  hits = np.sum(weights * found["hit"])
  check.value("selector_correct_numerator", hits)


@functools.partial(jax.jit, static_argnames="cfg")
def _token_terms(output, selector, tables, supervision, *, cfg):
  rows = {
    "hidden": output.hidden[:, :, cfg.first_slot :],
    "before": selector["predecessor_codebook"][supervision.predecessors],
  }
  constants = {"labels": supervision.labels}
  rows, constants = jax.tree.map(dflash_lib.flatten_blocks, (rows, constants))
  terms = dflash2.token_terms(
    selector, rows, tables.head, constants, cfg.dflash2
  )
  shape = supervision.labels.shape
  return {
    name: term.reshape(*shape, *term.shape[2:]) for name, term in terms.items()
  }


def _compare_transform(check):
  """Multiplier and soft cap on the recorded example."""
  outputs = check.outputs
  multiplier = float(outputs["transform_multiplier"])
  bound = float(outputs["transform_softcap"])
  for name, value in (
    ("transform_multiplier", multiplier),
    ("transform_softcap", bound),
  ):
    check.given(name, value > 0, "setting of the example")
  example = outputs["transform_in"]
  is_finite = bool(np.isfinite(example).all())
  check.given("transform_in", is_finite, "logits of the example")
  options = configs.DFlash2Options(
    output_multiplier=multiplier, final_logit_softcapping=bound
  )
  ours = dflash2.unary_logits(jnp.asarray(example), options)
  check.value("transform_out", ours)


def _compare_loss(case, check):
  supervision, options = case.supervision, case.cfg.dflash2
  valid, weights = np.asarray(supervision.valid), supervision.weights
  check.value("weight_mask", np.pad(valid, _ANCHOR_SLOT))
  check.value("loss_weights", np.pad(np.asarray(weights), _ANCHOR_SLOT))
  (loss, found), grads = drafter.gradient(
    case.params,
    case.buffers,
    case.tables,
    case.blocks,
    supervision,
    np.float32(0),
    cfg=case.cfg,
  )
  ce, selector = found.sums["ce"], found.sums["selector"]
  check.value("loss_total", loss)
  check.value("loss_numerator", ce + options.selector_loss_alpha * selector)
  check.value("loss_denominator", found.weight)
  check.value("ce_numerator", ce)
  check.value("selector_ce_numerator", selector)
  alpha = options.selector_loss_alpha
  check.given("selector_loss_alpha", alpha >= 0, "setting of the run")
  check.value("accuracy", drafter.accuracy(found.base_hits, found.supervised))
  drafter.compare_gradients(case, check, grads)
