import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.drafters import contract, dspark, markov
from dspine_jax.training import anchors as anchors_lib
from tests import head_oracles, tiny_models

KINDS = ("vanilla", "gated", "rnn")
CFGS = {
  kind: tiny_models.drafter_config("dspark", dspark={"markov_head_type": kind})
  for kind in KINDS
}
CFG = CFGS["vanilla"]
EACH_KIND = pytest.mark.parametrize("kind", KINDS)
TOLERANCE = 2e-5  # Sums of 40 float32 terms against float64.


def setup_of(kind="vanilla"):
  return tiny_models.drafter(CFGS[kind])


@functools.cache
def whole():
  """The pass is the same for all head types: so are the backbones."""
  return tiny_models.run(setup_of()).output


def hidden():
  return np.asarray(whole().hidden)


def base_logits():
  head = head_oracles.array(setup_of().tables.head)
  return hidden().astype(np.float64) @ head.T


def biased(kind, where, before):
  return head_oracles.markov_logits(
    setup_of(kind).params, kind, base_logits()[where], hidden()[where], before
  )


@functools.cache
def supervision():
  given = anchors_lib.supervise(
    tiny_models.train_batch(CFG),
    jnp.asarray(tiny_models.ANCHORS),
    jnp.asarray(tiny_models.KEEP),
    setup_of().method.supervised,
    cfg=CFG,
  )
  labels = np.array(given.labels)
  labels[0, :2] = base_logits()[0, :2].argmax(axis=-1)
  return dataclasses.replace(given, labels=jnp.asarray(labels, jnp.int32))


@functools.partial(jax.jit, static_argnames="cfg")
def _evaluate(params, buffers, tables, hidden, supervision, cfg):
  def loss(params, hidden):
    return dspark.loss(
      params,
      buffers,
      tables,
      contract.DrafterOutput(hidden=hidden),
      supervision,
      cfg=cfg,
      window=contract.LossWindow(
        denominator=jnp.asarray(9.0),
        ce_scale=None,
        scheduled_weight=jnp.zeros(()),
      ),
      chunk_size=3,
    )

  value_and_grad = jax.value_and_grad(loss, argnums=(0, 1), has_aux=True)
  return value_and_grad(params, hidden)


def evaluate(kind="vanilla", **options):
  setup, cfg = setup_of(kind), CFGS[kind]
  options = dataclasses.replace(cfg.dspark, **options)
  return _evaluate(
    setup.params,
    setup.buffers,
    setup.tables,
    whole().hidden,
    supervision(),
    dataclasses.replace(cfg, dspark=options),
  )


@functools.cache
def oracle_sums(kind):
  """Weighted sums of CE, L1 and confidence term by a loop over slots."""
  setup, given = setup_of(kind), tiny_models.host(supervision())
  head = head_oracles.array(setup.tables.head)
  sums, hits = np.zeros(3), np.zeros(CFG.num_proposals)
  for where in np.ndindex(*given.weights.shape[:2]):
    before = given.predecessors[where]
    logits = biased(kind, where, before)
    confident = head_oracles.confidence(setup.params, hidden()[where], before)
    for slot in range(CFG.num_proposals):
      teacher = head @ head_oracles.array(given.teacher[where][slot])
      label = int(given.labels[where][slot])
      ce, l1, _, bce = head_oracles.dspark_slot(
        logits[slot], teacher, label, confident[slot]
      )
      sums += float(given.weights[where][slot]) * np.array([ce, l1, bce])
      hit = int(np.argmax(logits[slot])) == label
      hits[slot] += hit and given.valid[where][slot]
  return sums, hits


@EACH_KIND
def test_the_loss_is_the_weighted_mean_of_its_three_terms(kind):
  (value, report), _ = evaluate(kind)
  (ce, l1, bce), hits = oracle_sums(kind)
  for name, want in (("ce", ce), ("l1", l1), ("confidence", bce)):
    assert float(report.sums[name]) == pytest.approx(want, rel=TOLERANCE)
  want = (0.1 * ce + 0.9 * l1 + bce) / (9 + 1e-6)
  assert float(value) == pytest.approx(want, rel=TOLERANCE)
  np.testing.assert_array_equal(report.hits, hits)
  assert 0 < hits.sum() < float(report.supervised.sum())
  # Half the L1 distance, as another tool has it, would be seen.
  half = (0.1 * ce + 0.45 * l1 + bce) / 9
  assert float(value) != pytest.approx(half, rel=1e-2)


def test_the_weights_of_the_terms_are_read():
  (ce, l1, bce), _ = oracle_sums("vanilla")
  (value, report), _ = evaluate(
    ce_loss_alpha=1.0, l1_loss_alpha=0.0, confidence_head_alpha=0.5
  )
  want = (ce + 0.5 * bce) / 9
  assert float(value) == pytest.approx(want, rel=TOLERANCE)
  assert float(report.sums["l1"]) == pytest.approx(l1, rel=TOLERANCE)


def test_the_confidence_heads_target_gives_no_gradient_to_the_draft():
  # With this term alone, what moves the logits stays where it is.
  only = {
    "ce_loss_alpha": 0.0,
    "l1_loss_alpha": 0.0,
    "confidence_head_alpha": 1.0,
  }
  (_, _), (params, _) = evaluate(**only)
  assert not params["markov"]["w2"].any()
  assert params["confidence"]["kernel"].any()
  assert params["markov"]["w1"].any()  # The head's own input.


@pytest.mark.parametrize(
  ("options", "width"),
  [({}, 31), ({"confidence_head_with_markov": False}, 24)],
)
def test_the_confidence_head_sees_what_its_options_say(options, width):
  cfg = tiny_models.drafter_config("dspark", dspark=options)
  setup = tiny_models.drafter(cfg)
  kernel = setup.params["confidence"]["kernel"]
  assert kernel.shape == (width, 1)
  before = np.arange(CFG.num_proposals) + 7
  got = dspark.confidence_logits(
    setup.params,
    jnp.asarray(hidden()[0, 1]),
    setup.params["markov"]["w1"][before],
    cfg.dspark,
  )
  want = head_oracles.confidence(setup.params, hidden()[0, 1], before)
  np.testing.assert_allclose(jax.nn.sigmoid(got), want, atol=1e-5)


def test_without_a_confidence_head_there_is_no_such_term():
  cfg = tiny_models.drafter_config(
    "dspark", dspark={"enable_confidence_head": False}
  )
  setup = tiny_models.drafter(cfg)
  assert "confidence" not in setup.params
  (_, report), _ = _evaluate(
    setup.params,
    setup.buffers,
    setup.tables,
    whole().hidden,
    supervision(),
    cfg,
  )
  assert set(report.sums) == {"ce", "l1"}
  names = {entry.name for entry in setup.method.entries(cfg)}
  assert not any(name.startswith("confidence_head") for name in names)


def test_supervision_stops_at_the_first_hole():
  mask = jnp.array([[[True, True, False, True]]])
  want = [[[True, True, False, False]]]
  np.testing.assert_array_equal(dspark.DRAFTER.supervised(mask), want)


@EACH_KIND
def test_the_greedy_walk_reads_its_own_tokens(kind):
  setup = setup_of(kind)
  got, anchors = tiny_models.proposal(setup, whole())
  for row, where in enumerate(np.ndindex(2, 4)):
    want = head_oracles.greedy_path(
      lambda before, where=where: biased(kind, where, before),
      anchors[row],
      CFG.num_proposals,
    )
    assert got.tokens[row].tolist() == want
  best = base_logits().argmax(axis=-1).reshape(8, -1)
  assert (np.asarray(got.tokens) != best).any()


@EACH_KIND
def test_all_slots_at_once_equal_one_slot_after_the_other(kind):
  setup, options = setup_of(kind), CFGS[kind].dspark
  head = setup.params["markov"]
  before = head["w1"][supervision().predecessors]
  states = jnp.asarray(hidden())
  whole_blocks = markov.teacher_forced(head, kind, before, states)
  state = jnp.zeros((2, 4, options.markov_rank))
  for slot in range(CFG.num_proposals):
    state, bias = markov.step(
      head, kind, state, before[:, :, slot], states[:, :, slot]
    )
    np.testing.assert_allclose(whole_blocks[:, :, slot], bias, atol=1e-6)
  # The state of one block must not be that of the next.
  if kind == "rnn":
    _, other = markov.step(head, kind, state, before[:, :, 0], states[:, :, 0])
    assert np.abs(other - whole_blocks[:, :, 0]).max() > 1e-3


def test_a_fresh_head_leaves_the_argmax_of_every_slot():
  setup = setup_of("rnn")
  params = setup.method.init(jax.random.key(1), CFGS["rnn"], setup.tables)
  params = params | {"backbone": setup.params["backbone"]}
  got, _ = tiny_models.proposal(setup._replace(params=params), whole())
  best = base_logits().argmax(axis=-1).reshape(8, -1)
  np.testing.assert_array_equal(got.tokens, best)


@pytest.mark.parametrize(
  ("threshold", "want"), [(0.0, 3), (0.3, 3), (0.31, 1), (0.9, 1), (0.95, 0)]
)
def test_a_proposal_ends_before_the_first_doubt(threshold, want):
  confidence = jnp.array([[0.9, 0.3, 0.8]], jnp.float32)
  assert dspark.gate_lengths(confidence, threshold).tolist() == [want]


def test_the_threshold_gives_lengths_and_changes_no_token():
  setup = setup_of()
  free, anchors = tiny_models.proposal(setup, whole())
  assert free.lengths is None
  options = dataclasses.replace(CFG.dspark, confidence_threshold=0.25)
  cfg = dataclasses.replace(CFG, dspark=options)
  gated, _ = tiny_models.proposal(setup._replace(cfg=cfg), whole())
  np.testing.assert_array_equal(gated.tokens, free.tokens)
  for row, where in enumerate(np.ndindex(2, 4)):
    before = [anchors[row], *np.asarray(free.tokens)[row, :-1]]
    confident = head_oracles.confidence(setup.params, hidden()[where], before)
    want = int(np.cumprod(confident >= 0.25).sum())
    assert gated.lengths[row] == want
  assert len(set(gated.lengths.tolist())) > 2


def test_a_drafter_computes_with_its_own_tables_if_it_has_them():
  setup = setup_of()
  assert set(setup.buffers) == {"embed_tokens", "lm_head"}
  wrong = setup.tables.replace(
    embedding=0 * setup.tables.embedding, head=-setup.tables.head
  )
  own, _ = tiny_models.proposal(setup._replace(tables=wrong), whole())
  want, _ = tiny_models.proposal(setup, whole())
  np.testing.assert_array_equal(own.tokens, want.tokens)
  borrowed, _ = tiny_models.proposal(setup._replace(buffers={}), whole())
  np.testing.assert_array_equal(borrowed.tokens, want.tokens)
  other = tiny_models.run(setup._replace(tables=wrong)).output.hidden
  np.testing.assert_array_equal(other, whole().hidden)
