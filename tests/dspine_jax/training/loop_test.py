import dataclasses
import functools
import itertools

import jax
import numpy as np
import pytest

from dspine_jax import configs, sharding
from dspine_jax.checkpoints import orbax
from dspine_jax.data import loader, sources
from dspine_jax.data import rows as rows_lib
from dspine_jax.drafters import methods
from dspine_jax.training import loop, schedules
from dspine_jax.training import step as step_lib
from tests import tiny_models

# Their loops differ in what the methods make of them, hardly from each other.
SLOW = ("dflash2", "dspark")
METHODS = [
  pytest.param(method, marks=pytest.mark.slow) if method in SLOW else method
  for method in sorted(methods.DRAFTERS)
]
TERMS = {
  "dflash": {"ce"},
  "dflash2": {"ce", "selector"},
  "domino": {"ce", "final"},
  "dspark": {"ce", "l1", "confidence"},
  "dspine": {"ce", "l1", "refinement", "alignment"},
}
STEPS, EVERY = 60, 20
ROWS, LENGTH, PROMPT = 48, 24, 4

# Steps compiled so far: runs that differ only in their data share one.
_steps = functools.cache(step_lib.make_train_step)


@pytest.fixture(name="shared_step", autouse=True)
def fixture_shared_step(monkeypatch):
  monkeypatch.setattr(loop.step_lib, "make_train_step", _steps)


def setup_of(method):
  return tiny_models.drafter(
    tiny_models.drafter_config(method, dspine={"alignment_warmup_steps": 4})
  )


def train_config(**optimizer):
  fields = {"learning_rate": 1e-2, "total_steps": STEPS}
  return configs.TrainConfig(
    optimizer=configs.OptimizerConfig(**(fields | optimizer)),
    batch_size=4,
    num_anchors=4,
    chunk_blocks=8,
    seed=1,
  )


@functools.cache
def repetitive_data(method) -> sources.FeatureSet:
  """Rows that go round in seven tokens, with states that say so."""
  setup = setup_of(method)
  embedding, head = map(np.asarray, (setup.tables.embedding, setup.tables.head))
  rng = np.random.default_rng(0)
  ring = rng.choice(setup.cfg.vocab_size - 1, 7, replace=False)
  starts = rng.integers(0, 7, (ROWS, 1))
  tokens = ring[(starts + np.arange(LENGTH + 1)) % 7].astype(np.int32)
  taps = len(setup.cfg.target_layer_ids)
  context = np.tile(embedding[tokens[:, :-1]], (1, 1, taps))
  mask = np.broadcast_to(np.arange(LENGTH) >= PROMPT, (ROWS, LENGTH))
  lengths = np.full((ROWS,), LENGTH, np.int32)
  return sources.FeatureSet(
    rows=rows_lib.Rows(tokens[:, :-1], mask, lengths),
    context_features=context + 0.1 * rng.standard_normal(context.shape, "f4"),
    last_hidden=4 * head[tokens[:, 1:]],
  )


class Run:
  """A training run that remembers what it was told."""

  def __init__(self, method, folder=None, *, train_cfg=None, data=None):
    self.setup = setup_of(method)
    self.train_cfg = train_cfg or train_config()
    self.data = data or repetitive_data(method)
    self.folder = folder
    self.started, self.metrics, self.trained = [], {}, None
    self.waits_s = []

  def go(self, *, every=EVERY, stop_at=None, **more):
    """Trains; raises Killed when the metrics of step `stop_at` come."""

    def on_metrics(step, metrics):
      if step == stop_at:
        raise Killed
      self.waits_s.append(metrics.pop("data_wait"))
      self.metrics[step] = metrics

    arguments = {
      "on_start": self.started.append,
      "on_metrics": on_metrics,
      "checkpoint_every": every,
      **more,
    }
    where = self.setup.cfg, self.train_cfg, self.setup.tables, self.data
    if self.folder is None:
      self.trained = loop.train(*where, **arguments)
      return self
    with orbax.TrainingCheckpoints(self.folder) as checkpoints:
      self.trained = loop.train(*where, checkpoints=checkpoints, **arguments)
    return self

  def restored(self):
    """The newest state on disk, and its step."""
    like, _ = step_lib.init(self.setup.cfg, self.train_cfg, self.setup.tables)
    with orbax.TrainingCheckpoints(self.folder) as checkpoints:
      return checkpoints.restore(like)[0], checkpoints.latest_step()

  def series(self, name):
    return np.array([self.metrics[step][name] for step in sorted(self.metrics)])


class Killed(Exception):
  pass


@pytest.fixture(name="whole", scope="module", params=METHODS)
def fixture_whole(request, tmp_path_factory):
  """A run that nothing disturbs."""
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(loop.step_lib, "make_train_step", _steps)
    return Run(request.param, tmp_path_factory.mktemp("whole")).go()


def assert_equal(found, expected):
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  leaves = jax.tree.leaves(found), jax.tree.leaves(expected)
  for a, b in zip(*leaves, strict=True):
    np.testing.assert_array_equal(a, b)


def assert_finite(tree):
  for leaf in jax.tree.leaves(tree):
    assert np.isfinite(leaf).all()
    assert np.abs(leaf).max(initial=0) < 1e3


def test_training_on_repetitive_text_learns(whole):
  loss, advancement = whole.series("loss"), whole.series("expected_advancement")
  assert loss[-5:].mean() < 0.3 * loss[:5].mean()
  assert advancement[:5].mean() < 1.5
  assert advancement[-5:].mean() > 3.5  # Of at most 5.


def test_every_step_is_reported_once_in_order_with_all_metrics(whole):
  assert whole.started == [0]
  assert len(whole.waits_s) == STEPS
  assert min(whole.waits_s) >= 0
  assert list(whole.metrics) == list(range(STEPS))
  terms = TERMS[whole.setup.cfg.method]
  means = {"accuracy", "base_accuracy", "coverage", "expected_advancement"}
  scalars = terms | means | {"loss", "grad_norm", "param_norm"}
  for metrics in whole.metrics.values():
    assert set(metrics) == scalars | {"slot_accuracy"}
    assert metrics["slot_accuracy"].shape == (whole.setup.cfg.num_proposals,)
    assert all(np.shape(metrics[name]) == () for name in scalars)
    assert_finite(metrics)
    shares = [metrics[name] for name in means - {"expected_advancement"}]
    assert all(
      0 <= share <= 1 for share in [*shares, *metrics["slot_accuracy"]]
    )
    most = whole.setup.cfg.num_proposals + 1
    assert 1 <= metrics["expected_advancement"] <= most


def sum_of_terms(cfg, step, metrics):
  """A method's loss from its reported means, with the schedule of the step."""
  if cfg.method == "dflash2":
    alpha = cfg.dflash2.selector_loss_alpha
    return metrics["ce"] + alpha * metrics["selector"]
  if cfg.method == "domino":
    share = 1 - step / STEPS
    return share * metrics["ce"] + (1 - share) * metrics["final"]
  if cfg.method == "dspark":
    return 0.1 * metrics["ce"] + 0.9 * metrics["l1"] + metrics["confidence"]
  if cfg.method == "dspine":
    options = cfg.dspine
    beta = schedules.alignment_weight(step, options)
    expected = options.ce_weight * metrics["ce"]
    expected += (1 - options.ce_weight) * metrics["l1"]
    expected += metrics["refinement"]
    return expected + beta * metrics["ce"] * metrics["alignment"]
  return metrics["ce"]


def test_the_loss_is_the_sum_of_its_terms(whole):
  for step, metrics in whole.metrics.items():
    expected = sum_of_terms(whole.setup.cfg, step, metrics)
    np.testing.assert_allclose(metrics["loss"], expected, rtol=1e-5)


def test_no_step_is_compiled_twice(whole, tmp_path):
  compiled = _steps(whole.setup.cfg, whole.train_cfg, mesh=None)
  # Also not for a state that comes from a checkpoint.
  run = Run(whole.setup.cfg.method, tmp_path)
  with pytest.raises(Killed):
    run.go(stop_at=EVERY + 3)
  run.go()
  assert run.started == [0, EVERY]
  assert compiled._cache_size() == 1


def test_two_checkpoints_are_kept_and_the_last_one_is_the_result(whole):
  kept = sorted(int(path.name) for path in whole.folder.iterdir())
  assert kept == [STEPS - EVERY, STEPS]
  state, step = whole.restored()
  assert step == state.step == STEPS
  assert_equal(state.params, whole.trained.params)


@pytest.mark.parametrize("stop_at", [EVERY - 1, EVERY, 37])
def test_a_stopped_run_goes_on_to_the_same_bits(whole, tmp_path, stop_at):
  run = Run(whole.setup.cfg.method, tmp_path)
  with pytest.raises(Killed):
    run.go(stop_at=stop_at)
  before = dict(run.metrics)
  run.go()
  first = EVERY if stop_at > EVERY - 1 else 0
  assert run.started == [0, first]
  assert list(before) == list(range(stop_at))
  assert_equal(run.trained.params, whole.trained.params)
  assert_equal(run.trained.buffers, whole.trained.buffers)
  assert_equal(run.metrics, whole.metrics)
  assert_equal(run.restored()[0].opt_state, whole.restored()[0].opt_state)


def test_a_finished_run_is_only_read_back(whole):
  again = Run(whole.setup.cfg.method, whole.folder).go()
  assert again.started == [STEPS]
  assert again.metrics == {}
  assert_equal(again.trained.params, whole.trained.params)


def test_checkpoints_do_not_change_what_is_learned(whole):
  without = Run(whole.setup.cfg.method).go()
  assert_equal(without.trained.params, whole.trained.params)


def test_another_seed_is_another_run(whole):
  train_cfg = whole.train_cfg
  order = [
    loader.row_order(ROWS, 4, seed)[0] for seed in (1, 2, train_cfg.seed)
  ]
  assert_equal(order[0], order[2])
  assert not np.array_equal(order[0], order[1])
  states = [
    step_lib.init(
      whole.setup.cfg,
      configs.TrainConfig(optimizer=train_cfg.optimizer, seed=seed),
      whole.setup.tables,
    )[0]
    for seed in (1, 2)
  ]
  kernels = [state.params["backbone"]["fc"]["kernel"] for state in states]
  assert not np.array_equal(*kernels)
  keys = [jax.random.key_data(state.key) for state in states]
  assert not np.array_equal(*keys)


# What is not finite.

BAD_STEP = 10  # Of the first epoch, which visits every row once.


def damaged_data(method, field, value):
  data = repetitive_data(method)
  array = getattr(data, field).copy()
  order = loader.row_order(ROWS, 4, train_config().seed)
  array[order[BAD_STEP][1]] = value
  return dataclasses.replace(data, **{field: array})


@pytest.mark.parametrize(
  ("method", "field", "value"),
  [
    ("dflash", "context_features", np.nan),
    ("dspine", "last_hidden", np.inf),
  ],
)
def test_data_that_are_not_finite_stop_the_run_and_keep_a_good_state(
  tmp_path, method, field, value
):
  run = Run(method, tmp_path, data=damaged_data(method, field, value))
  message = f"is nan at step {BAD_STEP}; the last good checkpoint is of step 9"
  with pytest.raises(ValueError, match=message):
    run.go(every=3)
  assert max(run.metrics) == BAD_STEP - 1
  state, step = run.restored()
  assert step == state.step == 9
  assert_finite((state.params, state.opt_state))
  # The kept state is the one of a run that never saw the bad row.
  run.data = repetitive_data(method)
  run.go(every=3)
  assert_equal(run.trained.params, Run(method).go().trained.params)


@pytest.mark.parametrize(
  ("every", "kept"),
  [
    (1, f"the last good checkpoint is of step {BAD_STEP} "),
    (11, "there is no good checkpoint yet "),
    (100, "there is no good checkpoint yet "),
  ],
)
def test_the_state_that_a_bad_step_makes_is_not_saved(tmp_path, every, kept):
  data = damaged_data("dflash", "context_features", np.nan)
  run = Run("dflash", tmp_path, data=data)
  with pytest.raises(ValueError, match=f"step {BAD_STEP}; {kept}"):
    run.go(every=every)


def test_a_run_without_checkpoints_says_that_none_is_kept():
  run = Run("dflash", data=damaged_data("dflash", "context_features", np.nan))
  with pytest.raises(ValueError, match="; no checkpoint is kept "):
    run.go()


def test_a_learning_rate_that_overflows_never_reaches_a_checkpoint(tmp_path):
  # Loss and gradient of the step that overflows are still finite.
  run = Run("dflash", tmp_path, train_cfg=train_config(learning_rate=1e38))
  message = "param_norm is inf at step 1; the last good checkpoint is of step 1"
  with pytest.raises(ValueError, match=message):
    run.go(every=1)
  state, step = run.restored()
  assert step == 1
  assert_finite((state.params, state.opt_state))


# The window of a step.


def test_a_window_holds_the_rows_in_order_as_micro_batches():
  data = repetitive_data("dflash")
  cfg = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=1),
    batch_size=2,
    accumulation=3,
  )
  rows = loader.row_order(ROWS, 6, cfg.seed)[0]
  (window,) = loader.windows(data, cfg, first_step=0, total_steps=1)
  batches = loop.batch_of(data, window, None)
  for at in itertools.product(range(3), range(2)):
    row = rows[2 * at[0] + at[1]]
    for found, expected in (
      (batches.tokens, data.rows.tokens),
      (batches.loss_mask, data.rows.loss_mask),
      (batches.context_features, data.context_features),
      (batches.last_hidden, data.last_hidden),
    ):
      np.testing.assert_array_equal(found[at], expected[row])


# Stopping.


def test_a_run_that_is_asked_to_stop_saves_and_goes_on_to_the_same_bits(
  whole, tmp_path
):
  run = Run(whole.setup.cfg.method, tmp_path)
  with pytest.raises(loop.Stopped) as stopped:
    run.go(stop=lambda: len(run.metrics) == 30)
  step = stopped.value.step
  assert 30 < step < 33
  assert list(run.metrics) == list(range(step))
  assert run.restored()[1] == step
  run.go()
  assert run.started == [0, step]
  assert_equal(run.trained.params, whole.trained.params)


def test_a_stop_in_the_last_step_is_an_end():
  run = Run("dflash", train_cfg=train_config(total_steps=1))
  run.go(stop=lambda: True)
  assert run.trained is not None


# On a mesh.


def test_a_mesh_of_one_device_learns_the_same(whole, tmp_path):
  if whole.setup.cfg.method != "dflash":
    pytest.skip("one method is enough; gradients: step_on_meshes_test.py")
  devices = np.asarray(jax.devices()[:1]).reshape(1, 1, 1)
  mesh = jax.sharding.Mesh(devices, sharding.AXES)
  run = Run(whole.setup.cfg.method, tmp_path).go(mesh=mesh)
  assert list(run.metrics) == list(range(STEPS))
  for name in ("loss", "expected_advancement"):
    np.testing.assert_allclose(run.series(name), whole.series(name), rtol=2e-3)
  # Its checkpoints are those of a run without one.
  assert_equal(run.restored()[0].params, run.trained.params)
