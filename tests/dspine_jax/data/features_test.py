import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.data import features
from dspine_jax.decoding import generate
from dspine_jax.target import model
from tests import tiny_folder, tiny_models

TAPS = (0, 2)
COUNT, PROMPT, NEW = 5, 5, 6
# One program runs all rows, another two at a time: float32 rounding differs.
TOLERANCE = 1e-5


@pytest.fixture(name="target", scope="module")
def fixture_target():
  cfg = tiny_models.target_config()
  return generate.TargetModel(tiny_models.target_params(cfg), cfg)


@pytest.fixture(name="answers", scope="module")
def fixture_answers():
  return tiny_folder.random_answers(COUNT, vocab=61, prompt=PROMPT, new=NEW)


@pytest.fixture(name="computed", scope="module")
def fixture_computed(target, answers):
  counts = []
  computed = features.compute_features(
    target, answers, TAPS, batch_size=2, progress=counts.append
  )
  assert counts == [2 * 11, 2 * 11, 11]  # The repeated row is not counted.
  return computed


def test_features_are_the_direct_pass_of_the_target(target, answers, computed):
  out = jax.jit(
    lambda tokens: model.forward(
      target.params, tokens, cfg=target.cfg, tap_layers=TAPS
    )
  )(jnp.asarray(answers.tokens))
  for found, expected in (
    (computed.context_features, out.features),
    (computed.last_hidden, out.hidden),
  ):
    assert found.dtype == np.float32
    assert np.abs(found).max() > 0.1
    np.testing.assert_allclose(found, expected, rtol=TOLERANCE, atol=TOLERANCE)


def test_memory_mapped_features_are_the_same_bit_by_bit(
  target, answers, computed, tmp_path
):
  mapped = features.compute_features(
    target, answers, TAPS, batch_size=2, folder=tmp_path / "new" / "folder"
  )
  for name in ("context_features", "last_hidden"):
    array = getattr(mapped, name)
    assert isinstance(array, np.memmap)
    np.testing.assert_array_equal(array, getattr(computed, name))
    stored = np.load(tmp_path / "new" / "folder" / f"{name}.npy")
    np.testing.assert_array_equal(stored, array)


def test_finished_files_are_read_again_unless_what_made_them_changed(
  target, answers, computed, tmp_path
):
  def compute(answers, taps=TAPS):
    return features.compute_features(
      target, answers, taps, batch_size=2, folder=tmp_path
    )

  compute(answers)
  path = tmp_path / "last_hidden.npy"
  written = path.stat().st_mtime_ns
  again = compute(answers)
  assert path.stat().st_mtime_ns == written
  np.testing.assert_array_equal(again.last_hidden, computed.last_hidden)
  (tmp_path / "index.json").unlink()  # A killed run has none yet.
  compute(answers)
  assert path.stat().st_mtime_ns > written
  other = answers._replace(tokens=answers.tokens[:, ::-1])
  assert (compute(other).last_hidden != computed.last_hidden).any()
  taps = compute(answers, (1, 2)).context_features
  assert (taps != computed.context_features).any()
  index = tmp_path / "index.json"
  index.write_text("torn")
  np.testing.assert_array_equal(
    compute(answers).last_hidden, computed.last_hidden
  )


def test_padding_tokens_change_nothing_before_them(target, answers, computed):
  tokens = answers.tokens.copy()
  padding = np.arange(tokens.shape[1]) >= answers.lengths[:, None]
  assert padding.any()
  tokens[padding] = 60
  other = features.compute_features(
    target, answers._replace(tokens=tokens), TAPS, batch_size=2
  )
  for name in ("context_features", "last_hidden"):
    found, expected = getattr(other, name), getattr(computed, name)
    np.testing.assert_array_equal(found[~padding], expected[~padding])
    assert (found[padding] != expected[padding]).any()


def test_a_batch_holds_the_rows_asked_for(answers, computed):
  rows = np.array([3, 0, 3])
  batch = computed.batch(rows)
  np.testing.assert_array_equal(batch.tokens, answers.tokens[rows])
  np.testing.assert_array_equal(batch.loss_mask, answers.loss_mask[rows])
  np.testing.assert_array_equal(
    batch.context_features, computed.context_features[rows]
  )
  np.testing.assert_array_equal(batch.last_hidden, computed.last_hidden[rows])


# The order of rows.


def epochs(count, rows_per_step, seed, number=3):
  """The first rows of an order, an epoch a line."""
  order = features.RowOrder(count, rows_per_step, seed)
  steps = -(-count * number // rows_per_step)
  rows = np.concatenate([order.rows(step) for step in range(steps)])
  return rows[: count * number].reshape(number, count)


@pytest.mark.parametrize(("count", "rows_per_step"), [(10, 5), (7, 3), (3, 8)])
def test_every_epoch_is_a_permutation(count, rows_per_step):
  for epoch in epochs(count, rows_per_step, seed=0):
    assert sorted(epoch) == list(range(count))


def test_rows_are_a_function_of_the_step_only():
  forwards = features.RowOrder(7, 3, seed=5)
  backwards = features.RowOrder(7, 3, seed=5)
  seen = {step: backwards.rows(step) for step in reversed(range(20))}
  for step in range(20):
    np.testing.assert_array_equal(forwards.rows(step), seen[step])
    np.testing.assert_array_equal(forwards.rows(step), seen[step])


def test_epochs_and_seeds_have_orders_of_their_own():
  # Also epoch 1 of a seed is not epoch 0 of the next seed.
  orders = [tuple(row) for seed in range(4) for row in epochs(20, 4, seed)]
  assert len(set(orders)) == 12


def test_an_empty_training_set_is_refused():
  with pytest.raises(ValueError, match="the training set is empty"):
    features.RowOrder(0, 4, seed=0)
