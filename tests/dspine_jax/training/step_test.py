import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import contract, methods
from dspine_jax.training import anchors as anchors_lib
from dspine_jax.training import schedules
from dspine_jax.training import step as step_lib
from tests import tiny_models

# Two micro-batches of two rows: the second has other blocks and far fewer
# supervised slots, so that a mean of means is no mean.
ANCHORS = np.stack([tiny_models.ANCHORS, [[1, 3, 8, 0], [2, 0, 0, 0]]])
KEEP = np.stack(
  [tiny_models.KEEP, [[True, True, True, False], [True, False, False, False]]]
)
REPLACE = np.array(
  [
    [[True, False, True, False], [False, True, False, False]],
    [[False, True, False, False], [True, False, False, False]],
  ]
)
STEP, TOTAL = 5, 20
# Sums of the same float32 terms in another order.
TOLERANCE = 2e-5

# And an objective whose weights depend on the model.
METHODS = [*sorted(methods.DRAFTERS), "d_pace"]


def setup_of(method):
  options = {"dspine": {"alignment_warmup_steps": 10}}
  if method == "d_pace":
    method, options = "dflash", {"dflash": {"objective": method}}
  return tiny_models.drafter(tiny_models.drafter_config(method, **options))


def train_config(accumulation, batch_size):
  return configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=TOTAL),
    accumulation=accumulation,
    batch_size=batch_size,
    num_anchors=ANCHORS.shape[-1],
    chunk_blocks=3,
  )


def micro_batches(cfg):
  first = tiny_models.train_batch(cfg, seed=5)
  second = tiny_models.train_batch(cfg, seed=6)
  return first, second.replace(loss_mask=second.loss_mask.at[:, 7:].set(False))


def draws_of(cfg):
  """The draws of both micro-batches, and the same ones for one batch."""
  replace = REPLACE if cfg.dspine is not None else None
  each = [
    step_lib.Draws(
      jnp.asarray(ANCHORS[i], jnp.int32),
      jnp.asarray(KEEP[i]),
      None if replace is None else jnp.asarray(replace[i]),
    )
    for i in range(2)
  ]
  together = step_lib.Draws(
    *(
      None if part is None else jnp.asarray(part).reshape(-1, part.shape[-1])
      for part in (ANCHORS.astype(np.int32), KEEP, replace)
    )
  )
  return each, [together]


def window_gradient(monkeypatch, setup, batches, draws):
  """`window_gradient` of a window with the draws given, not drawn."""
  left = iter(draws)
  monkeypatch.setattr(step_lib, "draw", lambda *unused: next(left))
  train = train_config(*batches.tokens.shape[:2])
  run = functools.partial(step_lib.window_gradient, cfg=setup.cfg, train=train)
  key, step = jax.random.key(0), jnp.asarray(STEP)
  models = setup.params, setup.buffers, setup.tables
  return jax.jit(run)(*models, batches, key, step)


def stack(*batches):
  return jax.tree.map(lambda *leaves: jnp.stack(leaves), *batches)


def as_one(*batches):
  """[A, B, ...] of the micro-batches as one batch [1, A * B, ...]."""
  return jax.tree.map(lambda *leaves: jnp.concatenate(leaves)[None], *batches)


@pytest.fixture(name="both", scope="module", params=METHODS)
def fixture_both(request):
  """(setup, window of two micro-batches, the same rows as one batch)."""
  setup = setup_of(request.param)
  micros = micro_batches(setup.cfg)
  each, together = draws_of(setup.cfg)
  with pytest.MonkeyPatch.context() as patch:
    window = window_gradient(patch, setup, stack(*micros), each)
    batch = window_gradient(patch, setup, as_one(*micros), together)
  return setup, window, batch


def assert_close(found, expected):
  """Equal within `TOLERANCE` of each array's largest element."""

  assert jax.tree.structure(found) == jax.tree.structure(expected)
  leaves = jax.tree.leaves(found), jax.tree.leaves(expected)
  for a, b in zip(*leaves, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(b).max())


def test_a_window_of_micro_batches_is_one_large_batch(both):
  _, (loss, report, gradient), (loss_one, report_one, gradient_one) = both
  assert_close(loss, loss_one)
  assert_close(report, report_one)
  assert_close(gradient, gradient_one)
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(gradient))


def test_more_micro_batches_take_no_more_memory():
  cfg, *arrays = setup_of("dflash")
  micros = micro_batches(cfg)

  def temporaries(copies):
    batches = jax.tree.map(lambda *x: jnp.stack(x), *(micros * copies))
    train = train_config(2 * copies, 2)

    # Shapes in the place of arrays would be refused where records are checked.
    @jax.jit
    def gradient(step):
      arguments = (*arrays, batches, jax.random.key(0), step)
      return step_lib.window_gradient(*arguments, cfg=cfg, train=train)[2]

    compiled = gradient.lower(jnp.asarray(STEP)).compile()
    return compiled.memory_analysis().temp_size_in_bytes

  # Unrolled they would run side by side, with the activations of all.
  assert temporaries(3) < 1.1 * temporaries(1)


def test_the_window_report_counts_all_micro_batches(both):
  _, (_, report, _), _ = both
  # Of 24 slots of kept blocks those behind a hole, an end or a mask are out.
  assert 0 < report.supervised[-1] < report.supervised[0] <= KEEP.sum()


def gradient_with_scales_apart(setup):
  """The window's gradient if each micro-batch took its own alignment scale."""
  micros = micro_batches(setup.cfg)
  each, _ = draws_of(setup.cfg)
  supervised = [
    anchors_lib.supervise(
      batch,
      draws.anchors,
      draws.keep,
      methods.drafter(setup.cfg).supervised,
      cfg=setup.cfg,
    )
    for batch, draws in zip(micros, each, strict=True)
  ]
  weights = jnp.stack([jnp.sum(one.weights) for one in supervised])
  window = contract.LossWindow(
    denominator=jnp.sum(weights),
    ce_scale=None,
    scheduled_weight=schedules.alignment_weight(
      jnp.asarray(STEP), setup.cfg.dspine
    ),
  )

  def loss(params):
    parts = [
      step_lib.micro_loss(
        params,
        setup.buffers,
        setup.tables,
        *micro,
        window,
        cfg=setup.cfg,
        chunk_size=3,
      )[0]
      for micro in zip(micros, each, supervised, strict=True)
    ]
    return parts[0] + parts[1]

  return jax.jit(jax.grad(loss))(setup.params)


def test_an_alignment_scale_of_each_micro_batch_would_be_seen(both):
  setup, (_, _, gradient), (_, _, gradient_one) = both
  if setup.cfg.dspine is None:
    pytest.skip("no term with a scale")
  apart = gradient_with_scales_apart(setup)

  def distance(tree):
    leaves = jax.tree.map(
      lambda a, b: jnp.max(jnp.abs(a - b)), tree, gradient_one
    )
    return max(map(float, jax.tree.leaves(leaves)))

  assert distance(apart) > 100 * distance(gradient)
  with pytest.raises(AssertionError):
    assert_close(apart, gradient_one)


# Draws.


def test_replacement_is_drawn_apart_from_the_anchors():
  mask = tiny_models.train_batch(tiny_models.drafter_config("dflash")).loss_mask
  key = jax.random.key(3)
  draws = {
    rho: step_lib.draw(key, mask, 4, None if rho is None else jnp.asarray(rho))
    for rho in (None, 0.0, 0.5, 1.0)
  }
  for one in draws.values():
    np.testing.assert_array_equal(one.anchors, draws[None].anchors)
    np.testing.assert_array_equal(one.keep, draws[None].keep)
  assert draws[None].replace is None
  assert not draws[0.0].replace.any()
  assert draws[1.0].replace.all()


def test_the_share_of_replaced_blocks_is_the_probability():
  mask = jnp.ones((40, 60), bool)
  draws = step_lib.draw(jax.random.key(0), mask, 50, jnp.asarray(0.3))
  # Five standard deviations of 2000 draws.
  assert abs(float(draws.replace.mean()) - 0.3) < 0.052


# Evaluation.


def test_evaluation_is_the_training_report_without_replacement():
  setup = setup_of("dspine")
  batch, _ = micro_batches(setup.cfg)
  train = train_config(1, 2)
  models = setup.params, setup.buffers, setup.tables
  key = jax.random.key(1)
  report = step_lib.make_eval_step(setup.cfg, train)(
    *models, batch, jax.random.split(key, 1)[0]
  )
  run = jax.jit(
    functools.partial(step_lib.window_gradient, cfg=setup.cfg, train=train)
  )

  def trained(step):
    window = jax.tree.map(lambda leaf: leaf[None], batch)
    return run(*models, window, key, jnp.asarray(step))[1]

  assert_close(trained(TOTAL), report)  # Replacement has ended.
  early = trained(0)
  assert abs(early.sums["ce"] - report.sums["ce"]) > 1e-3
  np.testing.assert_array_equal(early.supervised, report.supervised)


# Means.


def report_of(**changes):
  fields = {
    "sums": {"ce": jnp.asarray(6.0), "l1": jnp.asarray(1.5)},
    "hits": jnp.array([3.0, 1.0]),
    "prefix_hits": jnp.array([3.0, 1.0]),
    "base_hits": jnp.array([1.0, 1.0]),
    "covered": jnp.array([4.0, 1.0]),
    "supervised": jnp.array([4.0, 2.0]),
    "weight": jnp.asarray(3.0),
  }
  return contract.LossReport(**(fields | changes))


def test_means_of_a_report_are_the_hand_computed_ones():
  means = step_lib.summarize(report_of(prefix_hits=jnp.array([3.0, 0.5])))
  expected = {
    "ce": 2.0,
    "l1": 0.5,
    "accuracy": 4 / 6,
    "base_accuracy": 2 / 6,
    "coverage": 5 / 6,
    "slot_accuracy": [3 / 4, 1 / 2],
    "expected_advancement": 1 + 3 / 4 + 0.5 / 2,
  }
  assert set(means) == set(expected)
  for name, value in expected.items():
    np.testing.assert_allclose(means[name], value, rtol=1e-6, err_msg=name)


def test_means_of_an_empty_report_are_zero_and_advancement_one():
  empty = jax.tree.map(jnp.zeros_like, report_of())
  means = step_lib.summarize(empty)
  assert means.pop("expected_advancement") == 1
  assert not any(np.any(value) for value in means.values())


def test_every_step_draws_its_own_anchors():
  setup = setup_of("dflash")
  train = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=TOTAL),
    batch_size=2,
    num_anchors=3,
  )
  state, buffers = step_lib.init(setup.cfg, train, setup.tables)
  window = jax.tree.map(lambda x: x[None], tiny_models.train_batch(setup.cfg))
  train_step = step_lib.make_train_step(setup.cfg, train)
  found = []
  for _ in range(2):
    state, metrics = train_step(state, buffers, setup.tables, window)
    found.append(metrics)
  # The rate rises from zero: the first step has left the parameters alone.
  assert float(found[0]["param_norm"]) != float(found[1]["param_norm"])
  assert float(found[0]["loss"]) != float(found[1]["loss"])
