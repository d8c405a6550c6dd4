"""DSpark against DeepSpec's model and objective."""

import dataclasses
import functools

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import contract, dspark
from dspine_jax.drafters import dflash as dflash_lib
from dspine_jax.target import model
from experiments.parity import drafter, report

# Head type -> (our name of what it adds, the recorded one).
_VARIANTS = {"gated": ("gate", "gate_proj"), "rnn": ("joint", "joint_proj")}
_SETTINGS = ("ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha")


def compare(folder: report.Folder) -> list[report.Record]:
  """Compares every output array of a DSpark folder."""
  check = report.Comparison(folder)
  case = drafter.load(folder)
  drafter.compare_inputs(case, check)
  drafter.compare_layout(case, check)
  supervision = case.supervision
  check.exact("previous_ids", supervision.predecessors, rows=case.keep)
  check.exact("eval_mask", supervision.valid)
  check.value("loss_weights", supervision.weights)
  for layout, params in drafter.layouts(case.params).items():
    output, logits = _forward(case, params, case.blocks)
    options = {"rows": case.keep, "layout": layout}
    check.value("hidden", output.hidden, **options)
    check.value("logits", logits, **options)
    if layout == "unrolled":
      _compare_tokens(case, check, output)
  _compare_loss(case, check)
  block = drafter.single_block(case, check)
  if block is not None:
    _compare_single(case, check, block)
  return check.finish()


def _forward(case, params, blocks):
  return drafter.forward(
    params, case.buffers, case.tables, blocks, cfg=case.cfg
  )


@functools.partial(jax.jit, static_argnames="cfg")
def _walk(output, params, buffers, tables, blocks, *, cfg):
  """Tokens, confidence logits, and the logits met along the greedy walk."""
  output, anchor_tokens = drafter.one_a_row(output, blocks)
  count = anchor_tokens.shape[0]
  proposal, confidence = dspark.walk(
    params,
    buffers,
    tables,
    output,
    anchor_tokens,
    cfg=cfg,
    sampling_cfg=configs.SamplingConfig(),
    kind="greedy",
    keys=jax.random.split(jax.random.key(0), count),
  )
  before = jnp.concatenate([anchor_tokens[:, None], proposal.tokens], axis=1)
  rows = _rows(params, output, before[:, None, :-1], cfg)
  met = _logits(rows, params, buffers, tables)

  def back(x):
    return x.reshape(*blocks.anchors.shape, *x.shape[1:])

  return jax.tree.map(back, (proposal.tokens, confidence, met[:, 0]))


def _rows(params, output, predecessors, cfg):
  """`dspark.teacher_forced` given the predecessors alone."""
  nothing = jnp.zeros(predecessors.shape)
  supervision = contract.Supervision(
    labels=predecessors,
    predecessors=predecessors,
    valid=nothing > 0,
    weights=nothing,
    teacher=nothing[..., None],
  )
  return dspark.teacher_forced(params, output, supervision, cfg)


def _logits(rows, params, buffers, tables):
  own = dspark.own_tables(buffers, tables)
  bias = model.head_logits(params["markov"]["w2"], rows["bias"])
  return model.head_logits(own.head, rows["hidden"]) + bias


@functools.partial(jax.jit, static_argnames="cfg")
def _token_terms(output, params, buffers, tables, supervision, *, cfg):
  rows = dspark.teacher_forced(params, output, supervision, cfg)
  logits = _logits(rows, params, buffers, tables)
  constants = {"labels": supervision.labels, "teacher": supervision.teacher}
  flat = jax.tree.map(dflash_lib.flatten_blocks, (rows, constants))
  heads = {
    "own": dspark.own_tables(buffers, tables).head,
    "target": tables.head,
  }
  terms = dspark.token_terms(params["markov"]["w2"], flat[0], heads, flat[1])
  shape = supervision.labels.shape
  terms = {name: term.reshape(shape) for name, term in terms.items()}
  if "confidence" in rows:
    terms["confidence_logits"] = rows["confidence"]
  return terms | {"logits": logits}


def _compare_tokens(case, check, output):
  """Teacher-forced heads, the walk, and every term slot by slot."""
  fixed = (case.params, case.buffers, case.tables)
  found = _token_terms(output, *fixed, case.supervision, cfg=case.cfg)
  rows = case.keep
  check.value("biased_logits", found["logits"], rows=rows)
  if "confidence" in found:
    confidence = found["confidence_logits"]
    check.value("confidence_logits", confidence, rows=rows)
    probability = jax.nn.sigmoid(confidence)
    check.value("confidence_probability", probability, rows=rows)
    check.value("token_confidence_bce", found["confidence"], rows=rows)
  check.value("accept_probability", found["accept"], rows=rows)
  check.value("token_ce", found["ce"], rows=rows)
  check.value("token_l1", found["l1"], rows=rows)
  valid = np.asarray(case.supervision.valid)
  accepted = np.cumprod(np.asarray(found["accept"]) * valid, axis=-1)
  per_block = accepted.sum(axis=-1)[rows]
  check.value("tau_probabilistic", 1 + per_block.mean())
  tokens, confidence, _ = _walk(output, *fixed, case.blocks, cfg=case.cfg)
  check.exact("greedy_tokens", tokens, rows=rows)
  check.value("walk_confidence_logits", confidence, rows=rows)
  proposed = drafter.propose(
    output, case.buffers, case.tables, case.params, case.blocks, cfg=case.cfg
  )
  check.exact("greedy_tokens", proposed, rows=rows, layout="proposal")


def _compare_loss(case, check):
  (loss, found), grads = drafter.gradient(
    case.params,
    case.buffers,
    case.tables,
    case.blocks,
    case.supervision,
    np.float32(0),
    cfg=case.cfg,
  )
  check.value("loss_total", loss)
  for name, value in found.sums.items():
    check.value(f"{name}_numerator", value)
  check.value("weight_denominator", found.weight)
  options = case.cfg.dspark
  for name in _SETTINGS:
    check.given(name, getattr(options, name) >= 0, "setting of the run")
  total = options.ce_loss_alpha * found.sums["ce"]
  total += options.l1_loss_alpha * found.sums["l1"]
  if "confidence" in found.sums:
    total += options.confidence_head_alpha * found.sums["confidence"]
  check.value("loss_total_specforge", total / found.weight)
  check.value("accuracy", drafter.accuracy(found.hits, found.supervised))
  drafter.compare_gradients(case, check, grads)


def _compare_single(case, check, block):
  """The block alone: states, walk, confidence gate, other head types."""
  output, logits = _forward(case, case.params, block)
  check.value("infer_hidden", np.asarray(output.hidden)[0])
  check.value("infer_logits", np.asarray(logits)[0])
  fixed = (case.buffers, case.tables, block)
  tokens, confidence, met = _walk(output, case.params, *fixed, cfg=case.cfg)
  check.exact("infer_greedy_tokens", tokens[0])
  check.value("infer_walk_logits", met[0])
  check.value("infer_walk_confidence_logits", confidence[0])
  if "gate_thresholds" in check.outputs:
    thresholds = check.outputs["gate_thresholds"]
    check.given(
      "gate_thresholds", bool((thresholds >= 0).all()), "chosen thresholds"
    )
    kept = jax.nn.sigmoid(confidence[0, 0])
    lengths = [dspark.gate_lengths(kept, float(x)) for x in thresholds]
    check.exact("gate_lengths", np.asarray(lengths))
  row, index = (int(check.outputs[f"infer_{x}"]) for x in ("row", "block"))
  before = case.supervision.predecessors[row, index][None, None]
  for kind, (ours, theirs) in _VARIANTS.items():
    start = f"variant_{kind}/"
    if f"{start}{theirs}.weight" not in case.folder.inputs:
      continue
    mixer = {
      "kernel": case.folder.inputs[f"{start}{theirs}.weight"].T,
      "bias": case.folder.inputs[f"{start}{theirs}.bias"],
    }
    markov = {name: case.params["markov"][name] for name in ("w1", "w2")}
    params = case.params | {"markov": markov | {ours: mixer}}
    options = dataclasses.replace(case.cfg.dspark, markov_head_type=kind)
    cfg = dataclasses.replace(case.cfg, dspark=options)
    forced = _forced(output, params, *fixed[:2], before, cfg=cfg)
    check.value(f"{start}teacher_forced_logits", forced)
    tokens, _, _ = _walk(output, params, *fixed, cfg=cfg)
    check.exact(f"{start}greedy_tokens", tokens[0])


@functools.partial(jax.jit, static_argnames="cfg")
def _forced(output, params, buffers, tables, before, *, cfg):
  return _logits(_rows(params, output, before, cfg), params, buffers, tables)
