import numpy as np
import pytest

from dspine_jax.data import prompts

# Every token names its file and its place, so a window tells where it is from.
STREAMS = [
  1000 * index + np.arange(size, dtype=np.int32)
  for index, size in enumerate((30, 3, 12, 200))
]


def cut(count, *, length=8, seed=0, streams=STREAMS):
  return prompts.cut_prompts(streams, length=length, count=count, seed=seed)


def test_prompts_are_distinct_windows_inside_files():
  found = cut(60)
  assert found.shape == (60, 8)
  assert found.dtype == np.int32
  assert len({row[0] for row in found}) == 60
  np.testing.assert_array_equal(
    found - found[:, :1], np.tile(range(8), (60, 1))
  )
  assert len({row[0] // 1000 for row in found}) == 3  # Not the short file.


def test_a_prompt_leaves_at_least_one_token_of_its_file_to_answer():
  # The last token of a file is its end; no prompt may hold it.
  everything = cut(22 + 4 + 192)
  ends = {stream[-1] for stream in STREAMS}
  assert not ends & set(everything.ravel().tolist())
  assert {stream[-2] for stream in STREAMS if len(stream) > 8} <= set(
    everything[:, -1].tolist()
  )


def test_the_seed_alone_decides():
  np.testing.assert_array_equal(cut(20, seed=3), cut(20, seed=3))
  assert not np.array_equal(cut(20, seed=3), cut(20, seed=4))


def test_long_files_give_more_prompts():
  files = cut(100)[:, 0] // 1000
  assert (files == 3).sum() > (files == 0).sum() > (files == 2).sum() > 0


def test_more_prompts_than_windows_are_refused_with_both_numbers():
  with pytest.raises(ValueError, match="218 windows of 8 tokens, 219 prompts"):
    cut(219)
  with pytest.raises(ValueError, match="0 windows of 500 tokens, 1 prompts"):
    cut(1, length=500)
  with pytest.raises(ValueError, match="0 windows"):
    cut(1, streams=[])
