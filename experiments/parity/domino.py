"""Domino against SpecForge's model and objective, with and without shift."""

import functools

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import contract, domino
from dspine_jax.drafters import dflash as dflash_lib
from dspine_jax.target import model
from dspine_jax.training import schedules
from experiments.parity import drafter, report

_NO_SHIFT = "noshift/"


def compare(folder: report.Folder) -> list[report.Record]:
  """Compares every output array of a Domino folder."""
  check = report.Comparison(folder)
  case = drafter.load(folder)
  drafter.compare_inputs(case, check)
  drafter.compare_layout(case, check)
  predecessors = case.supervision.predecessors
  check.exact("previous_ids", predecessors, rows=case.keep)
  for layout, params in drafter.layouts(case.params).items():
    output, logits = _forward(case, params, case.blocks)
    options = {"rows": case.keep, "layout": layout}
    check.value("hidden", output.hidden, **options)
    check.value("logits", logits, **options)
    if layout == "unrolled":
      states = _gru_states(case.params, case.tables, predecessors)
      check.value("gru_states", states, rows=case.keep)
      _compare_tokens(case, check, output, logits)
  grads = _compare_loss(case, check)
  drafter.compare_gradients(case, check, grads)
  if any(name.startswith(_NO_SHIFT) for name in check.outputs):
    other = drafter.reconfigured(case, sample_from_anchor=False)
    output, logits = _forward(other, other.params, other.blocks)
    labels = drafter.labels_of_all_slots(other)
    check.exact(f"{_NO_SHIFT}labels", labels, rows=other.keep)
    _compare_tokens(other, check, output, logits, _NO_SHIFT)
    _compare_loss(other, check, _NO_SHIFT)
  block = drafter.single_block(case, check)
  if block is not None:
    _compare_single(case, check, block)
  if "lambda_schedule" in check.outputs:
    _compare_schedule(check)
  return check.finish()


def _forward(case, params, blocks):
  return drafter.forward(
    params, case.buffers, case.tables, blocks, cfg=case.cfg
  )


_gru_states = jax.jit(domino.gru_states)


@functools.partial(jax.jit, static_argnames="cfg")
def _teacher_forced(output, params, tables, supervision, *, cfg):
  """Corrected logits of predicting slots, and every term slot by slot."""
  rows = domino.teacher_forced(params, tables, output, supervision, cfg)
  up = params["correction"]["up"]
  logits = model.head_logits(tables.head, rows["hidden"])
  logits = logits + model.head_logits(up, rows["low_rank"])
  flat = jax.tree.map(dflash_lib.flatten_blocks, (rows, supervision.labels))
  terms = domino.token_terms(up, flat[0], tables.head, flat[1])
  shape = supervision.labels.shape
  return logits, {name: term.reshape(shape) for name, term in terms.items()}


def _compare_tokens(case, check, output, logits, prefix=""):
  """Corrected logits, the walk, terms, and accepted lengths."""
  first, keep = case.cfg.first_slot, case.keep
  corrected, terms = _teacher_forced(
    output, case.params, case.tables, case.supervision, cfg=case.cfg
  )
  # Slots that predict nothing have their base logits.
  corrected = np.concatenate([logits[:, :, :first], corrected], axis=2)
  check.value(f"{prefix}corrected_logits", corrected, rows=keep)
  row = {"rows": keep[0]}
  check.value(f"{prefix}corrected_logits_row0", corrected[0], **row)
  check.value(f"{prefix}token_final_ce", terms["final"], rows=keep)
  check.value(f"{prefix}token_base_ce", terms["ce"], rows=keep)
  proposed = drafter.propose(
    output, case.buffers, case.tables, case.params, case.blocks, cfg=case.cfg
  )
  check.exact(f"{prefix}greedy_tokens", proposed, rows=keep)
  valid = np.asarray(case.supervision.valid)
  for name, hit in (("accept_len", "hit"), ("base_accept_len", "base_hit")):
    lengths = np.cumprod(np.asarray(terms[hit]) & valid, axis=-1).sum(axis=-1)
    check.value(f"{prefix}{name}", 1 + lengths[keep].mean())


def _compare_loss(case, check, prefix=""):
  """Loss, terms and weights; returns the gradient."""
  supervision = case.supervision
  weights = np.asarray(supervision.weights)
  weights = np.pad(weights, [(0, 0), (0, 0), (case.cfg.first_slot, 0)])
  check.value(f"{prefix}loss_weights", weights)
  share = check.outputs["lambda_base"]
  if not prefix:
    check.given("lambda_base", 0 <= float(share) <= 1, "chosen share")
  (loss, found), grads = drafter.gradient(
    case.params,
    case.buffers,
    case.tables,
    case.blocks,
    supervision,
    share,
    cfg=case.cfg,
  )
  check.value(f"{prefix}loss_total", loss)
  for ours, theirs in (("final", "final"), ("ce", "base")):
    total = found.sums[ours]
    check.value(f"{prefix}{theirs}_numerator", total)
    check.value(f"{prefix}{theirs}_loss", total / (found.weight + 1e-6))
  check.value(f"{prefix}weight_denominator", found.weight)
  for name, hits in (
    ("accuracy", found.hits),
    ("base_accuracy", found.base_hits),
  ):
    right = drafter.accuracy(hits, found.supervised)
    check.value(f"{prefix}{name}", right)
  return grads


def _compare_single(case, check, block):
  """The block alone: states, walk, and the logits met along it."""
  output, logits = _forward(case, case.params, block)
  check.value("infer_hidden", np.asarray(output.hidden)[0])
  check.value("infer_logits", np.asarray(logits)[0])
  tokens = drafter.propose(
    output, case.buffers, case.tables, case.params, block, cfg=case.cfg
  )
  check.exact("infer_greedy_tokens", tokens[0])
  before = jnp.concatenate(
    [block.tokens[:, :, :1], np.asarray(tokens)[:, :, :-1]], axis=-1
  )
  nothing = jnp.zeros(before.shape)
  supervision = contract.Supervision(
    labels=before,
    predecessors=before,
    valid=nothing > 0,
    weights=nothing,
    teacher=nothing[..., None],
  )
  met, _ = _teacher_forced(
    output, case.params, case.tables, supervision, cfg=case.cfg
  )
  check.value("infer_walk_logits", met[0])


def _compare_schedule(check):
  """lambda for every recorded (step, total, start, decay ratio)."""
  ours = check.outputs["lambda_schedule"].copy()
  for row in ours:
    step, total, start, ratio, _ = row.tolist()
    row[-1] = np.nan
    if 0 <= start <= 1 and 0 <= ratio <= 1:
      options = configs.DominoOptions(
        lambda_start=start, lambda_decay_ratio=ratio
      )
      row[-1] = float(schedules.base_share(step, int(total), options))
  # The other columns are what it is a function of.
  rows = (slice(None), -1)
  check.value("lambda_schedule", ours, rows=rows, layout="lambda")
