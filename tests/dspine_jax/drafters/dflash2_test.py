import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import contract, dflash, dflash2
from dspine_jax.training import anchors as anchors_lib
from tests import head_oracles, oracles, tiny_models

CFG = tiny_models.drafter_config("dflash2")
SETUP = tiny_models.drafter(CFG)
SELECTOR, HEAD = SETUP.params["selector"], SETUP.tables.head
TOP_K = CFG.dflash2.selector_top_k
TOLERANCE = 2e-5  # Sums of 32 float32 terms against float64.


@functools.cache
def whole():
  return tiny_models.run(SETUP).output


def hidden():
  return np.asarray(whole().hidden)[:, :, 1:]


def unary():
  return hidden().astype(np.float64) @ head_oracles.array(HEAD).T


@functools.cache
def supervision():
  """Labels of which some are candidates, some the best, some neither."""
  found = anchors_lib.supervise(
    tiny_models.train_batch(CFG),
    jnp.asarray(tiny_models.ANCHORS),
    jnp.asarray(tiny_models.KEEP),
    SETUP.method.supervised,
    cfg=CFG,
  )
  labels, order = np.array(found.labels), np.argsort(-unary(), axis=-1)
  labels[0] = order[0, :, :, 1]
  labels[1, 0] = order[1, 0, :, 0]
  return dataclasses.replace(found, labels=jnp.asarray(labels, jnp.int32))


@functools.partial(jax.jit, static_argnames="cfg")
def loss_and_grad(params, hidden, supervision, denominator, cfg):
  def loss(params, hidden):
    return dflash2.loss(
      params,
      {},
      SETUP.tables,
      contract.DrafterOutput(hidden=hidden),
      supervision,
      cfg=cfg,
      window=contract.LossWindow(
        denominator=denominator,
        ce_scale=None,
        scheduled_weight=jnp.zeros(()),
      ),
      chunk_size=3,
    )

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  return value_and_grad(params, hidden)


def evaluate(alpha=1.0, denominator=9.0, given=None, **changes):
  options = dataclasses.replace(
    CFG.dflash2, selector_loss_alpha=alpha, **changes
  )
  cfg = dataclasses.replace(CFG, dflash2=options)
  return loss_and_grad(
    SETUP.params,
    whole().hidden,
    supervision() if given is None else given,
    jnp.asarray(denominator, jnp.float32),
    cfg,
  )


class Sums:
  """Weighted sums by a loop over slots; `shift` moves the predecessors."""

  def __init__(self, shift=0):
    given, logits = tiny_models.host(supervision()), unary()
    self.ce = self.selector = self.covered_weight = 0.0
    self.hits = np.zeros(CFG.num_proposals)
    for where in np.ndindex(*given.weights.shape):
      weight, label = float(given.weights[where]), int(given.labels[where])
      before = (int(given.predecessors[where]) + shift) % 61
      ids = oracles.top_k(logits[where], TOP_K)
      scores = head_oracles.selector_scores(
        SELECTOR, hidden()[where], logits[where], before, ids
      )
      self.ce += weight * oracles.cross_entropy(logits[where], label)
      if label in ids:
        place = ids.index(label)
        self.selector += weight * oracles.cross_entropy(scores, place)
        self.covered_weight += weight
        right = int(np.argmax(scores)) == place
        self.hits[where[-1]] += right and given.valid[where]


def test_another_objective_takes_the_place_of_the_unary_cross_entropy():
  # Logits and teacher pass the same scale and bound.
  given = tiny_models.host(supervision())

  def bounded(states):
    logits = 0.5 * states.astype(np.float64) @ head_oracles.array(HEAD).T
    return oracles.softmax(3.0 * np.tanh(logits / 3.0))

  q, p = bounded(hidden()), bounded(given.teacher)
  kl = (given.weights * (p * np.log(p / q)).sum(axis=-1)).sum()
  (value, report), _ = evaluate(
    alpha=0.5,
    objective="forward_kl",
    output_multiplier=0.5,
    final_logit_softcapping=3.0,
  )
  assert float(report.sums["kl"]) == pytest.approx(kl, rel=TOLERANCE)
  want = (kl + 0.5 * float(report.sums["selector"])) / 9
  assert float(value) == pytest.approx(want, rel=TOLERANCE)


def test_the_loss_adds_the_selectors_cross_entropy_over_its_candidates():
  want = Sums()
  weight = float(jnp.sum(supervision().weights))
  assert 0 < want.covered_weight < weight
  for alpha in (1.0, 0.25):
    (value, report), _ = evaluate(alpha)
    total = want.ce + alpha * want.selector
    assert float(value) == pytest.approx(total / 9, rel=TOLERANCE)
    assert float(report.sums["ce"]) == pytest.approx(want.ce, rel=TOLERANCE)
    found = float(report.sums["selector"])
    assert found == pytest.approx(want.selector, rel=TOLERANCE)
  np.testing.assert_array_equal(report.hits, want.hits)


def test_other_readings_of_the_objective_would_be_seen():
  (value, _), _ = evaluate()
  want, others = Sums(), Sums(shift=1)
  right = (want.ce + want.selector) / 9
  wrong = {
    "a selector with its own denominator": want.ce / 9
    + want.selector / want.covered_weight,
    "predecessors of another slot": (others.ce + others.selector) / 9,
  }
  for name, other in wrong.items():
    assert abs(other - right) > 100 * TOLERANCE * right, name
    assert float(value) != pytest.approx(other, rel=TOLERANCE), name


def test_the_selectors_gradient_reaches_the_backbone():
  (_, _), (_, with_selector) = evaluate()
  (_, _), (params, without) = evaluate(alpha=0.0)
  assert np.abs(with_selector - without).max() > 1e-3
  assert not with_selector[:, :, 0].any()
  assert not any(leaf.any() for leaf in jax.tree.leaves(params["selector"]))


def test_without_supervision_the_loss_is_zero():
  nothing = jax.tree.map(jnp.zeros_like, supervision())
  (value, _), grads = evaluate(denominator=0.0, given=nothing)
  assert float(value) == 0
  assert not any(leaf.any() for leaf in jax.tree.leaves(grads))


def test_pair_scores_equal_a_plain_loop():
  ids = np.argsort(-unary(), axis=-1)[..., :TOP_K]
  at = np.take_along_axis(unary(), ids, axis=-1).astype(np.float32)
  before = np.random.default_rng(0).integers(0, 61, (*ids.shape[:-1], 3))
  got = dflash2.pair_scores(
    SELECTOR, *(jnp.asarray(x) for x in (hidden(), at, before, ids))
  )
  for where in np.ndindex(*before.shape):
    want = head_oracles.selector_scores(
      SELECTOR,
      hidden()[where[:-1]],
      unary()[where[:-1]],
      before[where],
      ids[where[:-1]],
    )
    np.testing.assert_allclose(got[where], want, atol=1e-4)


def paths(follow):
  """Greedy paths of all blocks; `follow` picks the next predecessor."""
  _, anchors = tiny_models.proposal(SETUP, whole())
  flat = unary().reshape(-1, *unary().shape[2:])
  states = hidden().reshape(-1, *hidden().shape[2:])
  found = []
  for logits, rows, anchor in zip(flat, states, anchors, strict=True):
    before, path = int(anchor), []
    for one, state in zip(logits, rows, strict=True):
      ids = oracles.top_k(one, TOP_K)
      scores = head_oracles.selector_scores(SELECTOR, state, one, before, ids)
      path.append(ids[int(np.argmax(scores))])
      before = follow(path[-1], ids, int(anchor))
    found.append(path)
  return np.array(found)


def test_the_greedy_walk_follows_its_own_choices():
  got, _ = tiny_models.proposal(SETUP, whole())
  np.testing.assert_array_equal(got.tokens, paths(lambda own, *unused: own))
  # Not the unary argmax before, nor the anchor all along.
  assert (got.tokens != paths(lambda own, ids, anchor: ids[0])).any()
  assert (got.tokens != paths(lambda own, ids, anchor: anchor)).any()


def test_an_empty_codebook_leaves_the_argmax_of_every_slot():
  params = SETUP.params | {
    "selector": SELECTOR
    | {"successor_codebook": jnp.zeros_like(SELECTOR["successor_codebook"])}
  }
  got, _ = tiny_models.proposal(SETUP._replace(params=params), whole())
  dflash_setup = SETUP._replace(cfg=tiny_models.drafter_config("dflash"))
  want, _ = tiny_models.proposal(dflash_setup, whole())
  np.testing.assert_array_equal(got.tokens, want.tokens)
  fresh = SETUP.method.init(jax.random.key(0), CFG, SETUP.tables)["selector"]
  assert not fresh["successor_codebook"].any()
  assert fresh["predecessor_codebook"].any()


def test_logits_are_scaled_and_then_bounded():
  logits = jnp.array([[-300.0, 0.0, 12.0]])
  options = configs.DFlash2Options(
    output_multiplier=0.5, final_logit_softcapping=20.0
  )
  want = 20 * np.tanh(np.array([[-150.0, 0.0, 6.0]]) / 20)
  got = dflash2.unary_logits(logits, options)
  np.testing.assert_allclose(got, want, rtol=1e-6)
  plain = dflash2.unary_logits(logits, configs.DFlash2Options())
  np.testing.assert_array_equal(plain, logits)


def test_the_labels_are_those_of_dflash():
  assert dflash2.DRAFTER.supervised is dflash.supervised
  assert CFG.first_slot == 1 and not CFG.is_causal


# Those of DFlash are only read by its loss.
@pytest.mark.parametrize(
  "method", sorted(set(tiny_models.OPTIONS) - {"dflash"})
)
def test_a_method_without_its_options_is_refused(method):
  cfg = tiny_models.drafter_config(method, **{method: {}})
  cfg = dataclasses.replace(cfg, **{method: None})
  one = dataclasses.replace(cfg, method=method)
  with pytest.raises(ValueError, match=f"{method}=None: method '{method}'"):
    tiny_models.methods.drafter(one).entries(one)
