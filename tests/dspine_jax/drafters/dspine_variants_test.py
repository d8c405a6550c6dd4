"""What is left of DSpine with parts of it away, against written-out twins."""

import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import (
  backbone,
  candidates,
  contract,
  dflash,
  dspine,
)
from dspine_jax.drafters import transfer_space as transfer_space_lib
from dspine_jax.training import anchors as anchors_lib
from dspine_jax.training import step as step_lib
from kernels.adjacent_injection import reference as injection_math
from tests import oracles, tiny_models

# float32 sums of a few dozen terms, in another order.
TOLERANCE = 2e-5
BETA = 0.3
ANCHORS, KEEP = (
  jnp.asarray(tiny_models.ANCHORS),
  jnp.asarray(tiny_models.KEEP),
)
SETUP = tiny_models.drafter(tiny_models.drafter_config("dspine"))
BATCH = tiny_models.train_batch(SETUP.cfg)
NOTHING = {"injects": False, "refines": False, "alignment_weight": 0.0}


def config(**options):
  return tiny_models.drafter_config("dspine", dspine=options)


def supervise():
  return anchors_lib.supervise(
    BATCH, ANCHORS, KEEP, dspine.supervised, cfg=SETUP.cfg
  )


def blocks(core):
  return tiny_models.block_inputs(
    {"backbone": core}, BATCH, ANCHORS, KEEP, None, SETUP.cfg
  )


def objective(params, cfg, *, beta=BETA, forward_params=None):
  """(loss, (report, output)); the pass may have other parameters."""
  through = params if forward_params is None else forward_params
  models = SETUP.buffers, SETUP.tables
  output = dspine.forward(
    through, *models, blocks(through["backbone"]), cfg=cfg
  )
  supervision = supervise()
  window = contract.LossWindow(
    denominator=jnp.sum(supervision.weights),
    ce_scale=None,
    scheduled_weight=jnp.asarray(beta, jnp.float32),
  )
  value, report = dspine.loss(
    params,
    *models,
    output,
    supervision,
    cfg=cfg,
    window=window,
    chunk_size=3,
  )
  return value, (report, output)


@functools.cache
def evaluate(cfg, beta=BETA):
  """((loss, (report, output)), gradient) of a variant."""
  run = functools.partial(objective, cfg=cfg, beta=beta)
  return jax.jit(jax.value_and_grad(run, has_aux=True))(SETUP.params)


def assert_close(got, want):
  """Equal within `TOLERANCE` of each array's largest element."""
  assert jax.tree.structure(got) == jax.tree.structure(want)
  pairs = jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want)
  for (path, a), b in zip(*pairs, strict=True):
    bound = TOLERANCE * np.abs(b).max()
    np.testing.assert_allclose(a, b, rtol=0, atol=bound, err_msg=str(path))


def log_softmax(states):
  logits = states[:, :, 1:] @ SETUP.tables.head.T
  return logits - jax.scipy.special.logsumexp(logits, axis=-1, keepdims=True)


def token_losses(log_q, labels, teacher):
  """0.1 CE + 0.9 L1 of every slot, as it is written on paper."""
  ce = -jnp.sum(log_q * jax.nn.one_hot(labels, log_q.shape[-1]), axis=-1)
  p = jax.nn.softmax(teacher @ SETUP.tables.head.T)
  return 0.1 * ce + 0.9 * jnp.sum(jnp.abs(jnp.exp(log_q) - p), axis=-1)


def test_with_nothing_left_it_is_a_causal_dflash_with_ce_and_l1():
  causal = tiny_models.drafter_config("dflash", is_causal=True)

  def written_out(core):
    output = dflash.forward(
      {"backbone": core}, {}, SETUP.tables, blocks(core), cfg=causal
    )
    supervision = supervise()
    each = token_losses(
      log_softmax(output.hidden), supervision.labels, supervision.teacher
    )
    total = jnp.sum(each * supervision.weights)
    return total / jnp.sum(supervision.weights), output.hidden

  want = jax.jit(jax.value_and_grad(written_out, has_aux=True))(
    SETUP.params["backbone"]
  )
  (want_loss, want_hidden), want_gradient = want
  (loss, (report, output)), gradient = evaluate(config(**NOTHING))
  np.testing.assert_array_equal(output.hidden, want_hidden)
  assert output.layer_features == (None, None)
  assert set(report.sums) == {"ce", "l1"}
  assert float(loss) == pytest.approx(float(want_loss), rel=1e-6)
  assert_close(gradient["backbone"], want_gradient)
  # What is not read has no gradient at all, so that no optimiser moves it.
  for leaf in jax.tree.leaves(gradient["injection"]):
    assert not leaf.any()


def silenced(params):
  """The same drafter whose layers write zeros."""
  layers = tuple(
    layer | {"write": jax.tree.map(jnp.zeros_like, layer["write"])}
    for layer in params["injection"]["layers"]
  )
  return params | {"injection": params["injection"] | {"layers": layers}}


def test_without_injection_only_the_refinement_writes():
  def written_out(params):
    return objective(params, SETUP.cfg, forward_params=silenced(params))

  want = jax.jit(jax.value_and_grad(written_out, has_aux=True))(SETUP.params)
  got = evaluate(config(injects=False))
  assert_close(got, want)
  gradient = got[1]
  first, last = gradient["injection"]["layers"]
  assert not first["write"]["kernel"].any()
  assert np.abs(last["write"]["kernel"]).max() > 1e-6
  # Alignment still trains every readout.
  assert np.abs(first["readout"]["kernel"]).max() > 1e-6


def test_without_refinement_the_loss_is_without_its_term():
  (full, (want, full_output)), _ = evaluate(SETUP.cfg)
  (loss, (got, output)), gradient = evaluate(config(refines=False))
  np.testing.assert_array_equal(output.hidden, full_output.hidden)
  refinement = want.sums.pop("refinement") / want.weight
  assert float(refinement) > 0.1
  assert float(loss) == pytest.approx(float(full - refinement), rel=TOLERANCE)
  want.sums["refinement"] = refinement * want.weight
  assert set(got.sums) == {"ce", "l1", "alignment"}
  # The last write still reaches the base logits.
  last = gradient["injection"]["layers"][-1]["write"]["kernel"]
  assert np.abs(last).max() > 1e-6


def test_without_refinement_a_hit_is_that_of_the_base_logits():
  result = tiny_models.run(SETUP)
  ids = np.asarray(result.candidates)
  # The best candidate, the second, and a token that is none.
  labels = ids[..., 0].copy()
  labels[:, 1] = ids[:, 1, :, 1]
  labels[:, 2] = [[min(set(range(61)) - set(s)) for s in b] for b in ids[:, 2]]
  rows = {"hidden": result.output.hidden[:, :, 1:].reshape(8, 4, -1)}
  constants = {
    "labels": jnp.asarray(labels).reshape(8, 4),
    "teacher": jnp.zeros_like(rows["hidden"]),
  }
  options = config(refines=False).dspine
  run = jax.jit(
    lambda *arguments: dspine.token_terms({}, *arguments, options, 1e-6)
  )
  terms = run(rows, SETUP.tables.head, constants)
  assert set(terms) == {"ce", "l1", "covered", "base_hit", "hit"}
  blocks_of = np.arange(8).reshape(2, 4)
  best, second, none = (np.ravel(blocks_of[:, i]) for i in (0, 1, 2))
  for name in ("hit", "base_hit"):
    assert terms[name][best].all() and not terms[name][second].any()
  assert terms["covered"][second].all() and not terms["covered"][none].any()


def test_without_weight_the_alignment_is_neither_computed_nor_reported():
  (want, (report, _)), gradient = evaluate(SETUP.cfg, beta=0.0)
  (got, (without, output)), same = evaluate(config(alignment_weight=0.0))
  assert float(got) == pytest.approx(float(want), rel=1e-6)
  assert_close(same, gradient)
  assert set(report.sums) - set(without.sums) == {"alignment"}
  assert output.layer_features == (None, None)


def test_token_ce_is_the_cross_entropy_of_the_layers_below():
  (loss, (report, output)), gradient = evaluate(
    config(layer_supervision="token_ce")
  )
  (base, _), base_gradient = evaluate(config(alignment_weight=0.0))
  supervision = tiny_models.host(jax.jit(supervise)())
  head = np.asarray(SETUP.tables.head, np.float64)
  scale = np.asarray(SETUP.params["backbone"]["norm"]["scale"], np.float64)
  states, _ = output.layer_features
  total = 0.0
  for row, block, slot in np.ndindex(supervision.labels.shape):
    state = np.asarray(states[row, block, slot + 1], np.float64)
    state = state / np.sqrt((state**2).mean() + SETUP.cfg.rms_norm_eps) * scale
    ce = oracles.cross_entropy(
      head @ state, supervision.labels[row, block, slot]
    )
    total += ce * supervision.weights[row, block, slot]
  assert float(report.sums["alignment"]) == pytest.approx(total, rel=TOLERANCE)
  # Beta alone weighs it: no cross-entropy of the last layer on top.
  want = float(base) + BETA * total / supervision.weights.sum()
  assert float(loss) == pytest.approx(want, rel=TOLERANCE)

  # The difference of the gradients is the term's own, differentiated whole.
  def term(params):
    kept = dspine.forward(
      params,
      SETUP.buffers,
      SETUP.tables,
      blocks(params["backbone"]),
      cfg=config(layer_supervision="token_ce"),
    ).layer_features[0]
    square = jnp.mean(kept**2, axis=-1, keepdims=True)
    norm = params["backbone"]["norm"]["scale"].reshape(1, 1, 1, -1)
    normed = kept * jax.lax.rsqrt(square + SETUP.cfg.rms_norm_eps) * norm
    log_q = log_softmax(normed)
    hot = jax.nn.one_hot(supervision.labels, log_q.shape[-1])
    ce = -jnp.sum(log_q * hot, axis=-1)
    return BETA * jnp.sum(ce * supervision.weights) / supervision.weights.sum()

  of_term = jax.jit(jax.grad(term))(SETUP.params)
  for (path, a), b, c in zip(
    jax.tree_util.tree_leaves_with_path(gradient),
    jax.tree.leaves(base_gradient),
    jax.tree.leaves(of_term),
    strict=True,
  ):
    size = max(float(np.abs(x).max()) for x in (a, b, c))
    np.testing.assert_allclose(
      a, b + c, rtol=0, atol=TOLERANCE * size, err_msg=str(path)
    )


def test_the_draft_without_refinement_is_that_of_the_base_logits():
  output = tiny_models.run(SETUP).output
  hidden = np.asarray(output.hidden)[:, :, 1:].reshape(8, 4, -1)
  logits = hidden @ np.asarray(SETUP.tables.head).T
  setup = SETUP._replace(cfg=config(refines=False))
  greedy, _ = tiny_models.proposal(setup, output)
  np.testing.assert_array_equal(greedy.tokens, logits.argmax(axis=-1))
  assert greedy.probs is None
  # At T > 0 every kind is independent sampling of the base law.
  got, anchors = tiny_models.proposal(
    setup, output, kind="full_support", temperature=0.7
  )
  want = candidates.propose(
    jnp.asarray(logits),
    4,
    lambda *unused: pytest.fail("scores of pairs are not asked for"),
    jnp.asarray(anchors),
    sampling_cfg=configs.SamplingConfig(temperature=0.7),
    kind="base",
    keys=jax.random.split(jax.random.key(0), 8),
  )
  np.testing.assert_array_equal(got.tokens, want.tokens)
  np.testing.assert_allclose(got.probs, want.probs, atol=1e-6)


def test_whitened_readouts_give_the_codes_themselves(monkeypatch):
  # The feature of a centred row is the row's own code.
  monkeypatch.setattr(backbone, "init", lambda *unused: {})
  head = SETUP.tables.head
  rank = SETUP.cfg.dspine.transfer_rank
  space = transfer_space_lib.transfer_space(head, rank)
  made = {
    name: dspine.init(
      jax.random.key(0), config(readout_init=name), SETUP.tables
    )["injection"]["layers"]
    for name in ("principal", "whitened")
  }
  rows = np.asarray(head) / np.linalg.norm(head, axis=1, keepdims=True)
  rows = jnp.asarray(rows - space.mean)
  want = injection_math.token_vector(jnp.asarray(space.codes))
  for layer in made["whitened"]:
    got = injection_math.feature(layer["readout"]["kernel"], rows)
    np.testing.assert_allclose(got, want, atol=1e-4)
    assert np.linalg.norm(layer["readout"]["kernel"]) == pytest.approx(
      np.linalg.norm(space.directions), rel=1e-5
    )
  readout = made["principal"][0]["readout"]["kernel"]
  principal = injection_math.feature(readout, rows)
  assert np.abs(principal - want).max() > 0.1


def test_no_probability_of_replacement_replaces_nothing():
  cfg = config(replacement_probability=0.0)
  plan = dspine.schedule(jnp.asarray(0), 100, cfg)
  key = jax.random.key(0)
  drawn = step_lib.draw(key, BATCH.loss_mask, 4, plan.replacement)
  plain = step_lib.draw(key, BATCH.loss_mask, 4, None)
  assert not drawn.replace.any()
  np.testing.assert_array_equal(drawn.anchors, plain.anchors)
  full = dspine.schedule(jnp.asarray(0), 100, SETUP.cfg).replacement
  assert step_lib.draw(key, BATCH.loss_mask, 40, full).replace.any()


def test_token_ce_needs_a_layer_below_the_last():
  with pytest.raises(ValueError, match="layer_supervision='token_ce': has no"):
    tiny_models.drafter_config(
      "dspine",
      dspine={"layer_supervision": "token_ce"},
      num_layers=1,
      target_layer_ids=(0,),
    )
  assert isinstance(config(layer_supervision="token_ce"), configs.DrafterConfig)
