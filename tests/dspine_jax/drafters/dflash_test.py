import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs, method_options
from dspine_jax.drafters import contract, dflash
from tests import oracles, tiny_models

VALUE_TOLERANCE = 2e-5  # Sums of 32 float32 terms against float64.
CFG = tiny_models.drafter_config("dflash")
SETUP = tiny_models.drafter(CFG)
HEAD = SETUP.tables.head


@functools.cache
def supervision():
  batch = tiny_models.train_batch(CFG)
  rows = [
    oracles.supervision(
      batch.tokens[row],
      batch.loss_mask[row],
      tiny_models.ANCHORS[row],
      tiny_models.KEEP[row],
      num_proposals=CFG.num_proposals,
      gamma=CFG.decay_gamma,
      stop_at_hole=False,
    )
    for row in range(2)
  ]
  labels, valid, weights = (np.array(x) for x in zip(*rows, strict=True))
  # Some labels are what the drafter itself would say.
  best = logits().argmax(axis=-1)
  labels[:, 0] = best[:, 0]
  labels[0, 1, 0] = best[0, 1, 0]
  return contract.Supervision(
    labels=jnp.asarray(labels, jnp.int32),
    predecessors=jnp.zeros(labels.shape, jnp.int32),
    valid=jnp.asarray(valid),
    weights=jnp.asarray(weights, jnp.float32),
    teacher=jnp.asarray(
      0.7 * np.random.default_rng(2).standard_normal((*labels.shape, 24)),
      jnp.float32,
    ),
  )


def hidden():
  return tiny_models.run(SETUP).output.hidden


def logits():
  """Of the predicting slots 1.., [B, N, P, V]."""
  states = np.asarray(hidden(), np.float64)[:, :, 1:]
  return states @ np.asarray(HEAD, np.float64).T


@functools.partial(jax.jit, static_argnames=("chunk_size", "cfg"))
def loss_and_grad(
  hidden, head, supervision, denominator, *, chunk_size, cfg=CFG
):
  def loss(hidden, head):
    return dflash.loss(
      SETUP.params,
      {},
      contract.TargetTables(embedding=head, head=head),
      contract.DrafterOutput(hidden=hidden),
      supervision,
      cfg=cfg,
      window=contract.LossWindow(
        denominator=denominator,
        ce_scale=None,
        scheduled_weight=jnp.zeros(()),
      ),
      chunk_size=chunk_size,
    )

  return jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)(hidden, head)


def evaluate(denominator, chunk_size=3, cfg=CFG):
  return loss_and_grad(
    hidden(),
    HEAD,
    supervision(),
    jnp.asarray(denominator, jnp.float32),
    chunk_size=chunk_size,
    cfg=cfg,
  )


def test_the_loss_is_decayed_cross_entropy_over_the_denominator():
  # Unlike DSpine's, a denominator below one is not raised to one.
  weights, want = np.asarray(supervision().weights, np.float64), 0.0
  for row, block, slot in np.ndindex(weights.shape):
    label = int(supervision().labels[row, block, slot])
    ce = oracles.cross_entropy(logits()[row, block, slot], label)
    want += weights[row, block, slot] * ce
  for denominator in (weights.sum(), 0.25):
    (value, report), _ = evaluate(denominator)
    assert float(value) == pytest.approx(
      want / denominator, rel=VALUE_TOLERANCE
    )
    assert float(report.sums["ce"]) == pytest.approx(want, rel=VALUE_TOLERANCE)
  assert float(report.weight) == pytest.approx(weights.sum(), rel=1e-6)


def test_gradients_are_those_of_weighted_cross_entropy():
  (_, _), (from_hidden, from_head) = evaluate(9.0)
  weights = np.asarray(supervision().weights, np.float64)
  error = oracles.softmax(logits())
  labels = np.asarray(supervision().labels)
  np.put_along_axis(
    error,
    labels[..., None],
    np.take_along_axis(error, labels[..., None], -1) - 1,
    -1,
  )
  want = (error * weights[..., None] / 9.0) @ np.asarray(HEAD, np.float64)
  np.testing.assert_allclose(from_hidden[:, :, 1:], want, atol=1e-5)
  # Slot 0 predicts nothing, and the head is frozen.
  assert not from_hidden[:, :, 0].any()
  assert not from_head.any()


@pytest.mark.parametrize("chunk_size", [2, 11])
def test_chunks_change_neither_the_loss_nor_its_gradient(chunk_size):
  (want, want_report), (want_grad, _) = evaluate(9.0)
  (value, report), (grad, _) = evaluate(9.0, chunk_size)
  assert float(value) == pytest.approx(float(want), rel=1e-6)
  np.testing.assert_allclose(grad, want_grad, atol=1e-6)
  np.testing.assert_array_equal(report.hits, want_report.hits)


def expected(name, ce_weight, alpha):
  """Loss and its gradient by the logits, [B, N, P(, V)], slot by slot."""
  given, head = tiny_models.host(supervision()), np.asarray(HEAD, np.float64)
  value = np.zeros(given.weights.shape)
  slope = np.zeros((*value.shape, len(head)))
  for block in np.ndindex(*value.shape[:2]):
    q = oracles.softmax(logits()[block])
    p = oracles.softmax(np.asarray(given.teacher[block], np.float64) @ head.T)
    labels = given.labels[block]
    ce = np.array([-np.log(row[y]) for row, y in zip(q, labels, strict=True)])
    ce_slope = q - np.eye(len(head))[labels]
    sign = np.sign(q - p)
    l1 = np.abs(q - p).sum(axis=-1)
    l1_slope = q * (sign - (q * sign).sum(axis=-1, keepdims=True))
    share, weight = ce_weight, given.weights[block].astype(np.float64)
    if name == "forward_kl":
      one, one_slope = (p * np.log(p / q)).sum(axis=-1), q - p
    elif name == "ce_l1":
      one = share * ce + (1 - share) * l1
      one_slope = share * ce_slope + (1 - share) * l1_slope
    else:
      one, one_slope = ce, ce_slope
    if name == "d_pace":
      # Constants: the gradient does not go through them.
      weight = oracles.d_pace_weights(ce, given.valid[block], alpha)
    value[block], slope[block] = weight * one, weight[:, None] * one_slope
  return value, slope


@pytest.mark.parametrize(
  ("name", "term"),
  [("forward_kl", "kl"), ("d_pace", "d_pace"), ("ce_l1", "l1")],
)
def test_every_objective_is_the_hand_computed_one(name, term):
  options = {"ce_weight": 0.3, "d_pace_alpha": 0.25}
  value, slope = expected(name, *options.values())
  cfg = dataclasses.replace(
    CFG, dflash=configs.DFlashOptions(objective=name, **options)
  )
  (got, report), (from_hidden, from_head) = evaluate(9.0, cfg=cfg)
  assert float(got) == pytest.approx(value.sum() / 9, rel=VALUE_TOLERANCE)
  want = slope @ np.asarray(HEAD, np.float64) / 9
  np.testing.assert_allclose(from_hidden[:, :, 1:], want, atol=1e-5)
  assert not from_head.any()
  ce, _ = expected("cross_entropy", *options.values())
  assert float(report.sums["ce"]) == pytest.approx(ce.sum(), rel=1e-5)
  if name == "ce_l1":
    l1 = (value.sum() - 0.3 * ce.sum()) / 0.7
    assert float(report.sums["l1"]) == pytest.approx(l1, rel=1e-5)
  else:
    assert float(report.sums[term]) == pytest.approx(value.sum(), rel=1e-5)
  # The argmax decides what is a hit, whatever is minimised.
  (_, plain), _ = evaluate(9.0)
  np.testing.assert_array_equal(report.hits, plain.hits)
  assert abs(value.sum() - ce.sum()) > 1


def test_every_named_objective_exists():
  assert tuple(dflash.OBJECTIVES) == method_options.OBJECTIVES


def test_a_drafter_without_its_options_is_told():
  with pytest.raises(ValueError, match="dflash=None: method 'dflash' needs"):
    dflash.options_of(dataclasses.replace(CFG, dflash=None))


def test_supervision_continues_after_a_hole():
  mask = jnp.array([[[True, False, True, True]]])
  np.testing.assert_array_equal(dflash.supervised(mask), mask)
  # Row 0 has its hole at position 6, inside the blocks of anchors 2 and 4.
  np.testing.assert_array_equal(
    supervision().valid[0, 1], [True, False, True, True]
  )


def test_the_report_counts_hits_and_right_prefixes():
  (_, report), _ = evaluate(9.0)
  valid = np.asarray(supervision().valid)
  hits = logits().argmax(axis=-1) == np.asarray(supervision().labels)
  np.testing.assert_array_equal(report.hits, (hits & valid).sum(axis=(0, 1)))
  prefix = np.zeros(CFG.num_proposals)
  for row, block in np.ndindex(2, 4):
    for slot in range(CFG.num_proposals):
      if not (hits & valid)[row, block, slot]:
        break
      prefix[slot] += 1
  np.testing.assert_array_equal(report.prefix_hits, prefix)
  np.testing.assert_array_equal(report.supervised, valid.sum(axis=(0, 1)))
  assert 0 < prefix[1] < report.hits[0]


def test_without_supervision_the_loss_is_zero():
  nothing = jax.tree.map(jnp.zeros_like, supervision())
  (value, _), grads = loss_and_grad(
    hidden(), HEAD, nothing, jnp.zeros(()), chunk_size=3
  )
  assert float(value) == 0
  assert not any(leaf.any() for leaf in jax.tree.leaves(grads))


def test_the_greedy_proposal_is_the_argmax_of_slots_from_one():
  single = contract.DrafterOutput(hidden=hidden().reshape(8, 1, 5, -1))
  proposal = dflash.propose(
    SETUP.params,
    {},
    SETUP.tables,
    single,
    jnp.zeros((8,), jnp.int32),
    cfg=CFG,
    sampling_cfg=configs.SamplingConfig(),
    kind="greedy",
    keys=jax.random.split(jax.random.key(0), 8),
  )
  want = logits().argmax(axis=-1).reshape(8, -1)
  np.testing.assert_array_equal(proposal.tokens, want)
  assert proposal.probs is None
