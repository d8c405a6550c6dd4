"""The order of rows, and windows that threads read ahead."""

import contextlib
import subprocess
import sys
import threading
import time

import grain
import numpy as np
import pytest

from dspine_jax import configs
from dspine_jax.data import loader

ROWS, WIDTH = 11, 3


def train_config(**changes):
  fields = {"batch_size": 4, "accumulation": 2, "seed": 3}
  return configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=1), **(fields | changes)
  )


class Numbered:
  """A source whose row i is full of i, and which remembers its reads."""

  def __init__(self, *, bad=None, row_bytes=8 * WIDTH):
    self.bad, self.row_bytes = bad, row_bytes
    self.reads, self.threads = [], set()

  def __len__(self):
    return ROWS

  def read(self, rows):
    self.reads.append(rows)
    self.threads.add(threading.current_thread())
    if self.bad in rows:
      raise ValueError(f"row {self.bad} is damaged")
    return {"tokens": np.repeat(rows[:, None], WIDTH, axis=1)}

  def features(self, placed):
    raise AssertionError("the loader has no devices")


def tokens(source, first, total, *, cfg=None, **options):
  """Rows of the windows, [steps, A, B_local]."""
  iterator = loader.windows(
    source,
    cfg or train_config(),
    first_step=first,
    total_steps=total,
    **options,
  )
  with contextlib.closing(iterator):
    return np.array([window["tokens"][..., 0] for window in iterator])


def rows_of(order, step):
  rows = order[step]
  assert rows is not None
  return rows


def epochs(count, rows_per_step, seed, number=3):
  """The first rows of an order, an epoch a line."""
  order = loader.row_order(count, rows_per_step, seed)
  steps = -(-count * number // rows_per_step)
  rows = np.concatenate([rows_of(order, step) for step in range(steps)])
  return rows[: count * number].reshape(number, count)


@pytest.mark.parametrize(("count", "rows_per_step"), [(10, 5), (7, 3), (3, 8)])
def test_every_epoch_is_a_permutation(count, rows_per_step):
  for epoch in epochs(count, rows_per_step, seed=0):
    assert sorted(epoch) == list(range(count))


def test_the_order_is_row_by_row_that_of_graining_one_at_a_time():
  # Also what runs of earlier versions, with the same seed, were trained on.
  mixed = int(np.random.SeedSequence(5).generate_state(1)[0])
  single = grain.MapDataset.range(7).shuffle(seed=mixed).repeat()
  order = loader.row_order(7, 3, seed=5)
  for step in reversed(range(20)):
    expected = [single[3 * step + i] for i in range(3)]
    np.testing.assert_array_equal(rows_of(order, step), expected)
  assert rows_of(order, 0).tolist() == [6, 4, 0]
  assert rows_of(order, 2).tolist() == [5, 5, 6]


def test_epochs_and_seeds_have_orders_of_their_own():
  # Also epoch 1 of a seed is not epoch 0 of the next seed.
  orders = [tuple(row) for seed in range(4) for row in epochs(20, 4, seed)]
  assert len(set(orders)) == 12


def test_an_empty_training_set_is_refused():
  with pytest.raises(ValueError, match="the training set is empty"):
    loader.row_order(0, 4, seed=0)


def test_windows_hold_the_rows_of_their_steps_as_micro_batches():
  found = tokens(Numbered(), 0, 9)
  assert found.shape == (9, 2, 4)
  order = loader.row_order(ROWS, 8, seed=3)
  for step, rows in enumerate(found):
    np.testing.assert_array_equal(rows.reshape(-1), rows_of(order, step))


@pytest.mark.parametrize("first", [4, 8, 9])
def test_a_later_start_goes_on_there_and_reads_nothing_before(first):
  source = Numbered()
  rest = tokens(source, first, 9)
  assert len(rest) == len(source.reads) == 9 - first
  if first < 9:
    np.testing.assert_array_equal(rest, tokens(Numbered(), 0, 9)[first:])


@pytest.mark.parametrize("hosts", [1, 2, 4])
def test_the_columns_of_all_hosts_are_the_window(hosts):
  size = 4 // hosts
  parts = [
    tokens(Numbered(), 2, 7, local=slice(host * size, (host + 1) * size))
    for host in range(hosts)
  ]
  whole = tokens(Numbered(), 2, 7)
  np.testing.assert_array_equal(np.concatenate(parts, axis=2), whole)


@pytest.mark.parametrize(("windows", "ahead"), [(0.5, 1), (1, 1), (3.9, 3)])
def test_memory_bounds_what_is_read_ahead_and_one_window_always_is(
  windows, ahead
):
  source = Numbered(row_bytes=1000)
  iterator = loader.windows(
    source,
    train_config(),
    first_step=0,
    total_steps=9,
    local=slice(1, 3),
    prefetch_bytes=int(windows * 2 * 2 * 1000),
  )
  with contextlib.closing(iterator):
    next(iterator)
    deadline = time.monotonic() + 5
    while len(source.reads) < 1 + ahead and time.monotonic() < deadline:
      time.sleep(0.001)
    time.sleep(0.2)
    assert len(source.reads) == 1 + ahead
  assert threading.current_thread() not in source.threads


def test_what_a_thread_raises_the_next_window_raises():
  order = loader.row_order(ROWS, 8, seed=3)
  bad = (set(range(ROWS)) - set(rows_of(order, 0))).pop()
  found = []
  iterator = loader.windows(
    Numbered(bad=bad), train_config(), first_step=0, total_steps=9
  )
  with (
    contextlib.closing(iterator),
    pytest.raises(ValueError, match="is damaged") as raised,
  ):
    found.extend(iterator)
  assert str(raised.value) == f"row {bad} is damaged"
  assert len(found) >= 1


def threads():
  return [one for one in threading.enumerate() if "prefetch" in one.name]


def test_closing_ends_the_threads():
  iterator = loader.windows(
    Numbered(), train_config(), first_step=0, total_steps=10**6
  )
  next(iterator)
  assert threads()
  iterator.close()
  deadline = time.monotonic() + 5
  while threads() and time.monotonic() < deadline:
    time.sleep(0.001)
  assert not threads()


UNFINISHED = """
import sys
from tests.dspine_jax.data import loader_test as test
iterator = test.loader.windows(
  test.Numbered(), test.train_config(), first_step=0, total_steps=10**6
)
next(iterator)
sys.exit(7)
"""


def test_a_process_ends_with_windows_on_their_way():
  done = subprocess.run([sys.executable, "-c", UNFINISHED], timeout=60)
  assert done.returncode == 7
