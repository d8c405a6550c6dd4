import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import contract, domino, gru
from dspine_jax.training import anchors as anchors_lib
from dspine_jax.training import schedules
from tests import head_oracles, oracles, tiny_models

SHIFTED = tiny_models.drafter_config("domino")
PLAIN = tiny_models.drafter_config("domino", sample_from_anchor=False)
EACH = pytest.mark.parametrize("cfg", [SHIFTED, PLAIN], ids=["shift", "plain"])
TOLERANCE = 2e-5  # Sums of 40 float32 terms against float64.


def setup_of(cfg):
  return tiny_models.drafter(cfg)


@functools.cache
def whole(cfg):
  return tiny_models.run(setup_of(cfg)).output


def hidden(cfg):
  return np.asarray(whole(cfg).hidden)[:, :, cfg.first_slot :]


def base_logits(cfg):
  head = head_oracles.array(setup_of(cfg).tables.head)
  return hidden(cfg).astype(np.float64) @ head.T


def corrected(cfg, where, before):
  """[P, V] of one block, given the token before each slot."""
  setup = setup_of(cfg)
  return head_oracles.domino_logits(
    setup.params,
    setup.tables.embedding,
    base_logits(cfg)[where],
    hidden(cfg)[where],
    before,
    cfg.domino.pure_draft_prefix_len,
  )


@functools.cache
def supervision(cfg):
  return anchors_lib.supervise(
    tiny_models.train_batch(cfg),
    jnp.asarray(tiny_models.ANCHORS),
    jnp.asarray(tiny_models.KEEP),
    setup_of(cfg).method.supervised,
    cfg=cfg,
  )


@functools.partial(jax.jit, static_argnames="cfg")
def _evaluate(params, output, supervision, share, cfg):
  def loss(params):
    return domino.loss(
      params,
      {},
      setup_of(cfg).tables,
      output,
      supervision,
      cfg=cfg,
      window=contract.LossWindow(
        denominator=jnp.asarray(9.0),
        ce_scale=None,
        scheduled_weight=share,
      ),
      chunk_size=3,
    )

  return jax.value_and_grad(loss, has_aux=True)(params)


def evaluate(cfg, share):
  share = jnp.asarray(share, jnp.float32)
  return _evaluate(
    setup_of(cfg).params, whole(cfg), supervision(cfg), share, cfg
  )


def oracle_sums(cfg, moved=0):
  """Weighted cross-entropies of base and corrected logits, and hits."""
  given = tiny_models.host(supervision(cfg))
  base, final = 0.0, 0.0
  hits = np.zeros(cfg.num_proposals)
  for where in np.ndindex(*given.weights.shape[:2]):
    before = np.roll(given.predecessors[where], moved)
    logits = corrected(cfg, where, before)
    for slot in range(cfg.num_proposals):
      weight = float(given.weights[where][slot])
      label = int(given.labels[where][slot])
      plain = base_logits(cfg)[where][slot]
      base += weight * oracles.cross_entropy(plain, label)
      final += weight * oracles.cross_entropy(logits[slot], label)
      hit = int(np.argmax(logits[slot])) == label
      hits[slot] += hit and given.valid[where][slot]
  return base, final, hits


@EACH
def test_the_loss_moves_from_base_to_corrected_logits(cfg):
  base, final, hits = oracle_sums(cfg)
  assert abs(base - final) > 1
  for share in (1.0, 0.35, 0.0):
    (value, report), _ = evaluate(cfg, share)
    want = (share * base + (1 - share) * final) / (9 + 1e-6)
    assert float(value) == pytest.approx(want, rel=TOLERANCE)
  assert float(report.sums["ce"]) == pytest.approx(base, rel=TOLERANCE)
  assert float(report.sums["final"]) == pytest.approx(final, rel=TOLERANCE)
  np.testing.assert_array_equal(report.hits, hits)


@EACH
def test_a_gru_that_is_one_token_late_would_be_seen(cfg):
  (_, report), _ = evaluate(cfg, 0.0)
  _, late, _ = oracle_sums(cfg, moved=1)
  found = float(report.sums["final"])
  assert abs(found - late) > 10 * TOLERANCE * found


def test_the_first_token_of_a_block_is_its_anchor_in_both_conventions():
  # Slot k predicts anchor + k + 1 with the shift and anchor + k without; either
  # way the first label follows the anchor, and the state has read the anchor.
  batch = tiny_models.train_batch(SHIFTED)
  for cfg in (SHIFTED, PLAIN):
    given = supervision(cfg)
    for block in range(2):  # Anchors 2 and 4 of row 0.
      anchor = int(tiny_models.ANCHORS[0, block])
      tokens = np.asarray(batch.tokens[0])
      assert given.predecessors[0, block, 0] == tokens[anchor]
      assert given.labels[0, block, 0] == tokens[anchor + 1]
  assert (SHIFTED.num_proposals, PLAIN.num_proposals) == (5, 4)
  np.testing.assert_array_equal(
    supervision(SHIFTED).labels[:, :, :4], supervision(PLAIN).labels
  )


def test_at_the_start_the_head_learns_nothing_and_at_the_end_it_does():
  (_, _), start = evaluate(SHIFTED, 1.0)
  (_, _), end = evaluate(SHIFTED, 0.0)
  for name in ("prefix_gru", "correction"):
    assert not any(leaf.any() for leaf in jax.tree.leaves(start[name]))
    assert all(leaf.any() for leaf in jax.tree.leaves(end[name]))


@pytest.mark.parametrize("prefix", [0, 1, 3, 9])
def test_the_first_proposals_keep_their_base_logits(prefix):
  options = dataclasses.replace(SHIFTED.domino, pure_draft_prefix_len=prefix)
  cfg = dataclasses.replace(SHIFTED, domino=options)
  setup = setup_of(SHIFTED)
  rows = domino.teacher_forced(
    setup.params, setup.tables, whole(SHIFTED), supervision(SHIFTED), cfg
  )
  has = np.abs(rows["low_rank"]).max(axis=(0, 1, 3)) > 0
  np.testing.assert_array_equal(has, np.arange(5) >= prefix)


@EACH
def test_the_greedy_walk_feeds_the_gru_with_its_own_tokens(cfg):
  setup = setup_of(cfg)
  got, anchors = tiny_models.proposal(setup, whole(cfg))
  places = list(np.ndindex(2, 4))
  for row, where in enumerate(places):
    want = head_oracles.greedy_path(
      lambda before, where=where: corrected(cfg, where, before),
      anchors[row],
      cfg.num_proposals,
    )
    assert got.tokens[row].tolist() == want
  assert got.probs is None and got.lengths is None
  # The correction matters, or this would be DFlash.
  best = base_logits(cfg).argmax(axis=-1).reshape(len(places), -1)
  assert (np.asarray(got.tokens) != best).any()
  np.testing.assert_array_equal(got.tokens[:, 0], best[:, 0])


def test_a_fresh_head_leaves_dflash_s_proposals():
  setup = setup_of(SHIFTED)
  params = setup.method.init(jax.random.key(1), SHIFTED, setup.tables)
  params = params | {"backbone": setup.params["backbone"]}
  got, _ = tiny_models.proposal(setup._replace(params=params), whole(SHIFTED))
  best = base_logits(SHIFTED).argmax(axis=-1).reshape(8, -1)
  np.testing.assert_array_equal(got.tokens, best)


def test_the_gru_equals_a_plain_one_in_pytorchs_order():
  params = tiny_models.fill(
    jax.eval_shape(lambda: gru.init(jax.random.key(0), 6, 4)), 3
  )
  inputs = np.random.default_rng(0).standard_normal((2, 3, 5, 6))
  got = gru.run(params, jnp.asarray(inputs, jnp.float32))
  for where in np.ndindex(2, 3):
    state = np.zeros(4)
    for step, token in enumerate(inputs[where]):
      state = head_oracles.gru_step(params, state, token)
      np.testing.assert_allclose(got[where][step], state, atol=1e-6)

  def exchanged(kernel):
    reset, update, new = np.split(np.asarray(kernel), 3, axis=1)
    return {"kernel": np.concatenate([update, reset, new], axis=1)}

  wrong = {name: exchanged(part["kernel"]) for name, part in params.items()}
  first = head_oracles.gru_step(wrong, np.zeros(4), inputs[0, 0, 0])
  assert np.abs(first - got[0, 0, 0]).max() > 0.01


def test_a_fresh_gru_is_uniform_within_the_root_of_its_width():
  params = gru.init(jax.random.key(0), 20, 64)
  for leaf in jax.tree.leaves(params):
    assert 0.95 / 8 < np.abs(leaf).max() <= 1 / 8
    assert abs(float(leaf.mean())) < 0.01


@pytest.mark.parametrize(
  ("ratio", "step", "want"),
  [
    (1.0, 0, 1.0),
    (1.0, 25, 0.75),
    (1.0, 100, 0.0),
    (0.5, 25, 0.5),
    (0.5, 60, 0.0),
    (0.0, 0, 1.0),
    (0.0, 1, 0.0),
  ],
)
def test_lambda_falls_linearly_over_its_share_of_training(ratio, step, want):
  options = configs.DominoOptions(lambda_decay_ratio=ratio)
  got = jax.jit(lambda s: schedules.base_share(s, 100, options))(step)
  assert float(got) == pytest.approx(want, abs=1e-6)
  cfg = dataclasses.replace(SHIFTED, domino=options)
  schedule = domino.schedule(step, 100, cfg)
  assert float(schedule.weight) == pytest.approx(want, abs=1e-6)
  assert schedule.replacement is None


def test_the_number_of_decay_steps_is_cut_not_rounded():
  options = configs.DominoOptions(lambda_start=0.8, lambda_decay_ratio=0.5)
  got = float(schedules.base_share(1, 37, options))
  assert got == pytest.approx(0.8 * (1 - 1 / 18), abs=1e-6)
