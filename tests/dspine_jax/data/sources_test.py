import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.data import rows as rows_lib
from dspine_jax.data import sources
from dspine_jax.decoding import generate
from dspine_jax.target import model
from dspine_jax.training import loop
from dspine_jax.training import step as step_lib
from tests import tiny_folder, tiny_models

TAPS = (0, 2)
COUNT, PROMPT, NEW = 5, 5, 6
# One program runs all rows, another two at a time: float32 rounding differs.
TOLERANCE = 1e-5


@pytest.fixture(name="target", scope="module")
def fixture_target():
  cfg = tiny_models.target_config()
  return generate.TargetModel(tiny_models.target_params(cfg), cfg)


@pytest.fixture(name="rows", scope="module")
def fixture_rows():
  return rows_lib.from_answers(
    tiny_folder.random_answers(COUNT, vocab=61, prompt=PROMPT, new=NEW)
  )


@pytest.fixture(name="computed", scope="module")
def fixture_computed(target, rows):
  counts = []
  computed = sources.compute_features(
    target, rows, TAPS, batch_size=2, progress=counts.append
  )
  assert counts == [2 * 11, 2 * 11, 11]  # The repeated row is not counted.
  return computed


def direct(target, rows, documents=None):
  return jax.jit(
    lambda tokens, documents: model.forward(
      target.params,
      tokens,
      cfg=target.cfg,
      tap_layers=TAPS,
      documents=documents,
    )
  )(jnp.asarray(rows.tokens), documents)


def packed(rows):
  """The same tokens as rows of two documents."""
  documents = np.zeros(rows.tokens.shape, np.int32)
  documents[:, 4:] = 4
  return rows._replace(documents=documents)


def test_features_are_the_direct_pass_of_the_target(target, rows, computed):
  out = direct(target, rows)
  for found, expected in (
    (computed.context_features, out.features),
    (computed.last_hidden, out.hidden),
  ):
    assert found.dtype == np.float32
    assert np.abs(found).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_documents_of_a_packed_row_do_not_see_each_other(target, rows):
  rows = packed(rows)
  out = direct(target, rows, jnp.asarray(rows.documents))
  computed = sources.compute_features(target, rows, TAPS, batch_size=2)
  flown = sources.batch(sources.OnTheFly(target, rows, TAPS), np.arange(COUNT))
  for found in (computed, flown):
    np.testing.assert_allclose(
      found.last_hidden, out.hidden, rtol=TOLERANCE, atol=TOLERANCE
    )
  apart = direct(target, rows).hidden
  assert np.abs(np.asarray(apart - out.hidden))[:, 4:].max() > 0.1
  np.testing.assert_array_equal(flown.documents, rows.documents)


def test_padding_tokens_change_nothing_before_them(target, rows, computed):
  tokens = rows.tokens.copy()
  padding = np.arange(tokens.shape[1]) >= rows.lengths[:, None]
  assert padding.any()
  tokens[padding] = 60
  other = sources.compute_features(
    target, rows._replace(tokens=tokens), TAPS, batch_size=2
  )
  for name in ("context_features", "last_hidden"):
    found, expected = getattr(other, name), getattr(computed, name)
    np.testing.assert_array_equal(found[~padding], expected[~padding])
    assert (found[padding] != expected[padding]).any()


def test_fewer_rows_than_a_batch_are_computed_once_each(target, rows, computed):
  found = list(
    sources.compute(target, rows, TAPS, batch_size=8, dtype="float32")
  )
  assert [one.fresh for one in found] == [COUNT]
  fresh = found[0].rows[-COUNT:]
  assert sorted(fresh) == list(range(COUNT))
  np.testing.assert_allclose(
    found[0].last_hidden[-COUNT:],
    computed.last_hidden[fresh],
    rtol=TOLERANCE,
    atol=TOLERANCE,
  )


def test_a_batch_holds_the_rows_asked_for(rows, computed):
  index = np.array([3, 0, 3])
  batch = sources.batch(computed, index)
  np.testing.assert_array_equal(batch.tokens, rows.tokens[index])
  np.testing.assert_array_equal(batch.loss_mask, rows.loss_mask[index])
  np.testing.assert_array_equal(
    batch.context_features, computed.context_features[index]
  )
  np.testing.assert_array_equal(batch.last_hidden, computed.last_hidden[index])
  assert batch.documents is None


def test_features_on_the_fly_are_the_stored_ones(target, rows, computed):
  source = sources.OnTheFly(target, rows, TAPS)
  index = np.array([4, 1, 0, 2])
  window = jax.tree.map(
    lambda x: jnp.asarray(x.reshape(2, 2, -1)), source.read(index)
  )
  found = source.features(window)
  expected = sources.batch(computed, index)
  real = np.arange(rows.tokens.shape[1]) < rows.lengths[index][:, None]
  for name in ("tokens", "loss_mask", "context_features", "last_hidden"):
    flat = np.asarray(getattr(found, name)).reshape(
      getattr(expected, name).shape
    )
    np.testing.assert_allclose(
      flat[real],
      np.asarray(getattr(expected, name))[real],
      rtol=TOLERANCE,
      atol=TOLERANCE,
    )


def test_the_bytes_of_a_row_are_those_that_reading_takes(
  target, rows, computed
):
  for source in (
    computed,
    sources.OnTheFly(target, rows, TAPS),
    sources.OnTheFly(target, packed(rows), TAPS),
  ):
    assert len(source) == COUNT
    read = source.read(np.array([1, 2]))
    assert sum(x.nbytes for x in read.values()) == 2 * source.row_bytes


def test_training_on_the_fly_is_training_on_stored_features(
  target, rows, computed, monkeypatch
):
  # Both runs share one compiled step.
  make = functools.cache(step_lib.make_train_step)
  monkeypatch.setattr(loop.step_lib, "make_train_step", make)
  cfg = tiny_models.drafter_config("dflash", target_layer_ids=TAPS)
  train_cfg = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=3),
    batch_size=2,
    num_anchors=3,
  )

  def losses(source):
    found = []
    loop.train(
      cfg,
      train_cfg,
      target.tables,
      source,
      on_metrics=lambda step, metrics: found.append(
        [metrics["loss"], metrics["grad_norm"]]
      ),
    )
    return np.array(found)

  stored, flown = losses(computed), losses(sources.OnTheFly(target, rows, TAPS))
  assert stored.shape == (3, 2) and (stored[0] != stored[1]).all()
  # Muon turns rounding of small gradients into steps of full size.
  np.testing.assert_allclose(flown, stored, rtol=1e-4)
