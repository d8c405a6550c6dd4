import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.data import answers
from dspine_jax.decoding import generate
from dspine_jax.target import model
from tests import tiny_folder, tiny_models

PROMPT, NEW = 6, 10


@pytest.fixture(name="target", scope="module")
def fixture_target():
  cfg = tiny_models.target_config()
  return generate.TargetModel(tiny_models.target_params(cfg), cfg)


@pytest.fixture(name="prompts", scope="module")
def fixture_prompts():
  rng = np.random.default_rng(0)
  return rng.integers(0, 61, (5, PROMPT)).astype(np.int32)


def decode_config(temperature=0.0, stop_tokens=()):
  return configs.DecodeConfig(
    max_new_tokens=NEW,
    stop_tokens=stop_tokens,
    sampling=configs.SamplingConfig(temperature=temperature),
    rule="greedy" if temperature == 0 else "rejection",
  )


@functools.partial(jax.jit, static_argnames="cfg")
def all_logits(params, tokens, cfg):
  return model.logits(params, model.forward(params, tokens, cfg=cfg).hidden)


def by_hand(target, prompt, stop_tokens):
  """Greedy continuation without any cache: one whole pass a token."""
  tokens = np.zeros((1, PROMPT + NEW), np.int32)
  tokens[0, :PROMPT] = prompt
  for place in range(PROMPT, PROMPT + NEW):
    logits = all_logits(target.params, jnp.asarray(tokens), target.cfg)
    tokens[0, place] = np.argmax(logits[0, place - 1])
    if tokens[0, place] in stop_tokens:
      return tokens[0], place + 1
  return tokens[0], PROMPT + NEW


def small_set(**changes):
  fields = {
    "tokens": np.array([[5, 6, 7, 7, 7, 7], [5, 6, 8, 9, 8, 0]], np.int32),
    "prompt_lengths": np.array([2, 3], np.int32),
    "lengths": np.array([6, 5], np.int32),
    "temperatures": np.array([0, 1], np.float32),
  }
  return answers.AnswerSet(**(fields | changes))


def test_the_loss_mask_is_on_the_answer_only():
  np.testing.assert_array_equal(
    small_set().loss_mask,
    np.array([[0, 0, 1, 1, 1, 1], [0, 0, 0, 1, 1, 0]], bool),
  )


def test_loops_are_those_of_the_answer_not_of_prompt_or_padding():
  np.testing.assert_array_equal(small_set().loops, [True, False])
  in_prompt = small_set(prompt_lengths=np.array([4, 3], np.int32))
  np.testing.assert_array_equal(in_prompt.loops, [False, False])
  padded = small_set(
    tokens=np.array([[5, 6, 7, 0, 0, 0]] * 2, np.int32),
    lengths=np.array([3, 4], np.int32),
  )
  np.testing.assert_array_equal(padded.loops, [False, False])


def test_select_and_join_keep_rows_whole():
  one = small_set()
  both = answers.join([one, one.select(np.array([1]))])
  assert [len(array) for array in both] == [3, 3, 3, 3]
  for array, first in zip(both, one, strict=True):
    np.testing.assert_array_equal(array, first[[0, 1, 1]])
  masked = both.select(both.temperatures == 1)
  np.testing.assert_array_equal(masked.lengths, [5, 5])


def test_greedy_answers_are_those_of_a_plain_loop(target, prompts):
  free = answers.regenerate(
    target, prompts, decode=decode_config(), seed=0, batch_size=5
  )
  # A token in the middle of one answer, so that some answers stop early.
  stop = (int(free.tokens[1, PROMPT + 3]),)
  for stop_tokens in ((), stop):
    found = answers.regenerate(
      target,
      prompts,
      decode=decode_config(stop_tokens=stop_tokens),
      seed=0,
      batch_size=5,
    )
    for row, prompt in enumerate(prompts):
      tokens, length = by_hand(target, prompt, stop_tokens)
      assert found.lengths[row] == length
      np.testing.assert_array_equal(found.tokens[row, :length], tokens[:length])
      assert not found.tokens[row, length:].any()
  assert found.lengths.min() < found.lengths.max()
  assert len(set(free.tokens[:, PROMPT:].ravel())) > 5  # Not one token only.
  np.testing.assert_array_equal(found.prompt_lengths, [PROMPT] * 5)
  np.testing.assert_array_equal(found.temperatures, [0] * 5)


def test_a_sampled_answer_depends_on_its_row_and_seed_not_on_the_batch(
  target, prompts
):
  prompts = np.repeat(prompts[:1], 5, axis=0)
  counted = []

  def answer(batch_size, seed=7):
    return answers.regenerate(
      target,
      prompts,
      decode=decode_config(1.0),
      seed=seed,
      batch_size=batch_size,
      progress=counted.append,
    )

  whole, parts = answer(5), answer(2)
  assert counted == [5 * NEW, 2 * NEW, 2 * NEW, NEW]  # Repeated rows are none.
  for array, other in zip(whole, parts, strict=True):
    np.testing.assert_array_equal(array, other)
  assert len({row.tobytes() for row in whole.tokens}) == 5
  other_seed = answer(5, seed=8)
  assert not (whole.tokens == other_seed.tokens).all(axis=1).any()
  np.testing.assert_array_equal(whole.temperatures, [1] * 5)


@pytest.mark.parametrize(
  ("count", "batch_size"), [(5, 2), (6, 3), (1, 4), (7, 7), (9, 4)]
)
def test_batches_have_one_size_and_every_row_is_fresh_once(count, batch_size):
  found = list(answers.batches(count, batch_size))
  assert {len(rows) for rows, _ in found} == {min(count, batch_size)}
  fresh = np.concatenate([rows[-new:] for rows, new in found])
  np.testing.assert_array_equal(fresh, np.arange(count))
  assert all(0 <= rows.min() and rows.max() < count for rows, _ in found)


def test_a_saved_set_comes_back_equal_and_alone(tmp_path):
  path = tmp_path / "train_t0.5.npz"
  saved = tiny_folder.random_answers(4)
  answers.save(path, saved)
  loaded = answers.load(path)
  for array, other in zip(loaded, saved, strict=True):
    np.testing.assert_array_equal(array, other)
    assert array.dtype == other.dtype
  assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


def test_a_failed_save_leaves_the_old_file(tmp_path, monkeypatch):
  path = tmp_path / "a.npz"
  answers.save(path, small_set())

  def fail(file, **arrays):
    del arrays
    file.write(b"half")
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(np, "savez", fail)
  with pytest.raises(OSError, match="No space"):
    answers.save(path, tiny_folder.random_answers(4))
  np.testing.assert_array_equal(answers.load(path).tokens, small_set().tokens)
  assert [entry.name for entry in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize("share", [0.0, 0.3, 0.9, 0.99])
def test_a_truncated_file_is_a_value_error_that_names_it(tmp_path, share):
  path = tmp_path / "a.npz"
  answers.save(path, tiny_folder.random_answers(50))
  content = path.read_bytes()
  path.write_bytes(content[: int(share * len(content))])
  with pytest.raises(ValueError, match=f"{path}: not an answer set"):
    answers.load(path)


def test_files_of_another_kind_are_value_errors_that_name_them(tmp_path):
  path = tmp_path / "a.npz"
  np.savez(path, tokens=np.zeros((1, 2)))
  with pytest.raises(ValueError, match=f"{path}: .*prompt_lengths"):
    answers.load(path)
  path.write_text("no zip")
  with pytest.raises(ValueError, match=f"{path}: not an answer set"):
    answers.load(path)
  with pytest.raises(ValueError, match=f"{path}x: not an answer set"):
    answers.load(f"{path}x")


def test_prompts_of_any_lengths_are_answered_as_each_alone(target, prompts):
  ragged = [prompts[0], prompts[1][:2], prompts[2], prompts[3][:2]]
  together = answers.regenerate(
    target, ragged, decode=decode_config(), seed=0, batch_size=4
  )
  assert together.prompt_lengths.tolist() == [6, 2, 6, 2]
  assert together.new_tokens == NEW
  for row in (0, 2):
    expected, end = by_hand(target, prompts[row], ())
    assert together.lengths[row] == end
    np.testing.assert_array_equal(together.tokens[row], expected)
  for row in (1, 3):
    alone = answers.regenerate(
      target, [ragged[row]], decode=decode_config(), seed=0, batch_size=1
    )
    end = int(together.lengths[row])
    assert end == 2 + NEW
    np.testing.assert_array_equal(together.tokens[row, :end], alone.tokens[0])
    assert not together.tokens[row, end:].any()


def test_sets_of_unequal_width_are_joined():
  narrow = answers.pad_prompts([np.array([7, 8]), np.array([9])])
  joined = answers.join([small_set(), narrow])
  assert joined.tokens.shape == (4, 6)
  np.testing.assert_array_equal(joined.tokens[2], [7, 8, 0, 0, 0, 0])
  np.testing.assert_array_equal(joined.tokens[:2], small_set().tokens)
  assert joined.lengths.tolist() == [6, 5, 2, 1]
