import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.drafters import contract, dspine
from tests import oracles, tiny_models

# Sums of 32 terms in float32 against float64, relative.
VALUE_TOLERANCE = 2e-5
# Chunked and whole sums add the same float32 numbers in another order.
CHUNK_TOLERANCE = 2e-5
# With this threshold some slots keep their L1 part and some lose it.
CFG = tiny_models.drafter_config(
  "dspine", dspine={"candidate_mass_threshold": 0.05}
)
SETUP = tiny_models.drafter(tiny_models.drafter_config("dspine"))
ANCHORS, KEEP = tiny_models.ANCHORS, tiny_models.KEEP
CODES, HEAD = SETUP.buffers["transfer_codes"], SETUP.tables.head
BETA = 0.3


@functools.cache
def example():
  """An output, and labels of which half are candidates."""
  result = tiny_models.run(SETUP)
  batch = tiny_models.train_batch(CFG)
  rng = np.random.default_rng(3)
  labels = rng.integers(0, 60, (2, 4, CFG.num_proposals))
  candidates = np.asarray(result.candidates)
  labels[..., 1::2] = candidates[..., 1::2, 2]
  labels[0, 0] = candidates[0, 0, :, 0]
  anchors = np.take_along_axis(np.asarray(batch.tokens), ANCHORS, axis=1)
  before = np.concatenate([anchors[..., None], labels[..., :-1]], axis=-1)
  valid, weights = [], []
  for row in range(2):
    _, row_valid, row_weights = oracles.supervision(
      batch.tokens[row],
      batch.loss_mask[row],
      ANCHORS[row],
      KEEP[row],
      num_proposals=CFG.num_proposals,
      gamma=CFG.decay_gamma,
      stop_at_hole=True,
    )
    valid.append(row_valid)
    weights.append(row_weights)
  teacher = rng.standard_normal((*labels.shape, CFG.hidden_size))
  # Teachers that agree with the drafter give the candidates real mass.
  teacher[:, ::2] = np.asarray(result.output.hidden)[:, ::2, 1:]
  supervision = contract.Supervision(
    labels=jnp.asarray(labels, jnp.int32),
    predecessors=jnp.asarray(before, jnp.int32),
    valid=jnp.asarray(np.array(valid)),
    weights=jnp.asarray(np.array(weights), jnp.float32),
    teacher=jnp.asarray(teacher, jnp.float32),
  )
  return result.output, supervision


def rows_and_constants(output, supervision):
  rows = {
    "hidden": output["hidden"][:, :, 1:],
    "pre_injection": output["pre_injection"][:, :, 1:],
  }
  constants = {
    "labels": supervision.labels,
    "weights": supervision.weights,
    "valid": supervision.valid,
    "teacher": supervision.teacher,
    "predecessor_codes": CODES[supervision.predecessors],
  }
  return jax.tree.map(lambda x: x.reshape(-1, *x.shape[2:]), (rows, constants))


def as_dict(output):
  return {
    "hidden": output.hidden,
    "pre_injection": output.pre_injection,
    "layer_features": output.layer_features,
  }


def window(denominator, ce_scale=None, beta=BETA):
  return contract.LossWindow(
    denominator=jnp.asarray(denominator, jnp.float32),
    ce_scale=None if ce_scale is None else jnp.asarray(ce_scale, jnp.float32),
    scheduled_weight=jnp.asarray(beta, jnp.float32),
  )


@functools.partial(jax.jit, static_argnames="chunk_size")
def loss_and_grads(
  params, output, supervision, denominator, ce_scale, *, chunk_size
):
  def loss(params, output):
    return dspine.loss(
      params,
      SETUP.buffers,
      SETUP.tables,
      contract.DrafterOutput(**output),
      supervision,
      cfg=CFG,
      window=window(denominator, ce_scale),
      chunk_size=chunk_size,
    )

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(params, output)


def evaluate(
  supervision=None, *, denominator=11.0, ce_scale=None, chunk_size=3
):
  """((value, report), gradients) of the example."""
  output, default = example()
  return loss_and_grads(
    SETUP.params,
    as_dict(output),
    default if supervision is None else supervision,
    denominator,
    ce_scale,
    chunk_size=chunk_size,
  )


@functools.cache
def slots():
  """The oracle's terms of every slot, [B][N][P]."""
  output, supervision = example()
  return [
    [
      [
        oracles.dspine_slot(
          SETUP.params,
          CODES,
          HEAD,
          output.hidden[row, block, slot + 1],
          output.pre_injection[row, block, slot + 1],
          supervision.teacher[row, block, slot],
          int(supervision.labels[row, block, slot]),
          int(supervision.predecessors[row, block, slot]),
          CFG,
        )
        for slot in range(CFG.num_proposals)
      ]
      for block in range(4)
    ]
    for row in range(2)
  ]


def of_slots(name):
  return np.array([[[s[name] for s in b] for b in row] for row in slots()])


@functools.cache
def token_terms():
  output, supervision = example()
  rows, constants = rows_and_constants(as_dict(output), supervision)
  terms = jax.jit(
    lambda rows, constants: dspine.token_terms(
      dspine.refinement_params(SETUP.params),
      rows,
      HEAD,
      constants,
      CFG.dspine,
      CFG.rms_norm_eps,
    )
  )(rows, constants)
  return {name: np.asarray(x).reshape(2, 4, -1) for name, x in terms.items()}


@pytest.mark.parametrize(
  "name",
  ["ce", "l1", "refinement", "teacher_mass", "covered", "hit", "base_hit"],
)
def test_every_term_of_a_slot_agrees_with_plain_numpy(name):
  want = of_slots(name)
  np.testing.assert_allclose(
    token_terms()[name], want, rtol=VALUE_TOLERANCE, atol=1e-5
  )
  assert len(np.unique(want)) > 1


def test_an_uncovered_label_has_no_cross_entropy_but_keeps_its_l1():
  terms, supervision = token_terms(), example()[1]
  output = example()[0]
  enough = terms["teacher_mass"] > CFG.dspine.candidate_mass_threshold
  covered = terms["covered"]
  for row, block, slot in np.ndindex(covered.shape):
    # What is left once the teacher's part is taken away, and the reverse.
    ids = oracles.top_k(
      np.asarray(HEAD, np.float64)
      @ np.asarray(output.hidden[row, block, slot + 1], np.float64),
      CFG.dspine.top_k,
    )
    refined = oracles.refine(
      SETUP.params,
      CODES,
      output.pre_injection[row, block, slot + 1],
      int(supervision.predecessors[row, block, slot]),
      CFG.rms_norm_eps,
    )
    scores = np.asarray(HEAD, np.float64)[ids] @ refined
    teacher = np.asarray(HEAD, np.float64) @ np.asarray(
      supervision.teacher[row, block, slot], np.float64
    )
    r, share = oracles.softmax(scores), oracles.softmax(teacher[ids])
    l1 = 0.9 * np.abs(r - share).sum() if enough[row, block, slot] else 0.0
    ce = 0.0
    if covered[row, block, slot]:
      at = ids.index(int(supervision.labels[row, block, slot]))
      ce = -0.1 * np.log(r[at])
    got = terms["refinement"][row, block, slot]
    assert got == pytest.approx(l1 + ce, abs=2e-5)
  for is_covered in (False, True):
    for has_mass in (False, True):
      assert ((covered == is_covered) & (enough == has_mass)).any()


def oracle_loss(denominator, ce_scale=None):
  output, supervision = example()
  weights = np.asarray(supervision.weights, np.float64)
  sums = {
    name: (weights * of_slots(name)).sum()
    for name in ("ce", "l1", "refinement")
  }
  alignment = 0.0
  for features in output.layer_features:
    for row, block, slot in np.ndindex(weights.shape):
      a = np.asarray(features[row, block, slot + 1], np.float64)
      c = np.asarray(CODES[supervision.labels[row, block, slot]], np.float64)
      cosine = a @ c / np.linalg.norm(a) / np.linalg.norm(c)
      alignment += weights[row, block, slot] * (1 - cosine)
  if ce_scale is None:
    ce_scale = sums["ce"] / weights.sum()
  value = 0.1 * sums["ce"] + 0.9 * sums["l1"] + sums["refinement"]
  value = value + BETA * ce_scale * alignment
  return value / max(denominator, 1.0), sums | {"alignment": alignment}


@pytest.mark.parametrize(
  ("denominator", "ce_scale"), [(11.0, None), (7.5, 3.25), (0.25, None)]
)
def test_the_loss_is_the_weighted_mean_of_its_parts(denominator, ce_scale):
  # A denominator below one counts as one.
  (value, report), _ = evaluate(denominator=denominator, ce_scale=ce_scale)
  want, sums = oracle_loss(denominator, ce_scale)
  assert float(value) == pytest.approx(want, rel=VALUE_TOLERANCE)
  assert set(report.sums) == set(sums)
  for name, total in sums.items():
    assert float(report.sums[name]) == pytest.approx(
      total, rel=VALUE_TOLERANCE
    ), name


def test_the_report_counts_supervised_slots_hits_and_prefixes():
  supervision = example()[1]
  (_, report), _ = evaluate()
  valid = np.asarray(supervision.valid)
  for name, field in (
    ("hit", "hits"),
    ("base_hit", "base_hits"),
    ("covered", "covered"),
  ):
    want = (of_slots(name) & valid).sum(axis=(0, 1))
    np.testing.assert_array_equal(getattr(report, field), want)
  prefix = np.zeros(CFG.num_proposals)
  for row in range(2):
    for block in range(4):
      for slot in range(CFG.num_proposals):
        if not (valid & of_slots("hit"))[row, block, slot]:
          break
        prefix[slot] += 1
  np.testing.assert_array_equal(report.prefix_hits, prefix)
  np.testing.assert_array_equal(report.supervised, valid.sum(axis=(0, 1)))
  weights = np.asarray(supervision.weights, np.float64)
  assert float(report.weight) == pytest.approx(weights.sum(), rel=1e-6)
  assert prefix[0] > 0


@jax.jit
def whole_loss_and_grads(params, output, supervision, denominator):
  """The objective by ordinary differentiation of all rows at once."""

  def loss(params, output):
    rows, constants = rows_and_constants(output, supervision)
    terms = dspine.token_terms(
      dspine.refinement_params(params),
      rows,
      HEAD,
      constants,
      CFG.dspine,
      CFG.rms_norm_eps,
    )
    weights = constants["weights"]
    ce = jnp.sum(weights * terms["ce"])
    value = 0.1 * ce + jnp.sum(
      weights * (0.9 * terms["l1"] + terms["refinement"])
    )
    scale = jax.lax.stop_gradient(ce / jnp.sum(weights)) * BETA
    for features in output["layer_features"]:
      a = features[:, :, 1:]
      a = a / jnp.linalg.norm(a, axis=-1, keepdims=True)
      cosine = jnp.sum(a * CODES[supervision.labels], axis=-1)
      value = value + scale * jnp.sum(supervision.weights * (1 - cosine))
    return value / denominator

  return jax.value_and_grad(loss, argnums=(0, 1))(params, output)


@pytest.mark.parametrize("chunk_size", [2, 3, 11])
def test_the_chunked_loss_equals_the_whole_one_with_all_gradients(chunk_size):
  # Of eight blocks: dividing, not dividing, more than there are.
  output, supervision = example()
  (value, _), grads = evaluate(chunk_size=chunk_size)
  want, want_grads = whole_loss_and_grads(
    SETUP.params, as_dict(output), supervision, 11.0
  )
  assert float(value) == pytest.approx(float(want), rel=CHUNK_TOLERANCE)

  def close(path, got, want):
    if "layer_features" in jax.tree_util.keystr(path):
      # The library takes features as normed already; along their own
      # direction the two gradients differ.
      axis = output.layer_features[path[-1].idx]
      axis = axis / jnp.linalg.norm(axis, axis=-1, keepdims=True)
      got = got - jnp.sum(got * axis, axis=-1, keepdims=True) * axis
    scale = float(jnp.abs(want).max())
    np.testing.assert_allclose(
      got, want, atol=CHUNK_TOLERANCE * scale, err_msg=str(path)
    )

  jax.tree_util.tree_map_with_path(close, grads, want_grads)


def test_what_is_not_supervised_never_matters():
  supervision = example()[1]
  masked = ~np.asarray(supervision.valid)
  assert masked[:, :2].any() and not masked.all()
  labels = jnp.where(masked, (supervision.labels + 5) % 60, supervision.labels)
  before = (supervision.predecessors + 3) % 60
  other = dataclasses.replace(
    supervision,
    labels=labels,
    predecessors=jnp.where(masked, before, supervision.predecessors),
    teacher=jnp.where(
      masked[..., None], 2 * supervision.teacher, supervision.teacher
    ),
  )
  got, want = evaluate(other), evaluate()
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)


def test_the_scale_of_the_alignment_is_detached():
  (value, report), grads = evaluate()
  scale = float(report.sums["ce"] / report.weight)
  (same, _), constant = evaluate(ce_scale=scale)
  assert float(value) == pytest.approx(float(same), rel=1e-6)
  for got, want in zip(
    jax.tree.leaves(grads), jax.tree.leaves(constant), strict=True
  ):
    np.testing.assert_allclose(got, want, atol=1e-6)


def test_a_batch_without_supervision_has_zero_loss_and_gradient():
  supervision = example()[1]
  nothing = dataclasses.replace(
    supervision,
    valid=jnp.zeros_like(supervision.valid),
    weights=jnp.zeros_like(supervision.weights),
  )
  (value, report), grads = evaluate(nothing, denominator=0.0)
  assert float(value) == 0
  assert not report.hits.any() and not report.supervised.any()
  for leaf in jax.tree.leaves(grads):
    assert not leaf.any()
