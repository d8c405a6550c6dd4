"""Which rows each step trains on, and their windows read ahead by threads.

A deterministic shuffle of all rows, a new permutation each epoch (`grain`). The
rows of a step are a function of seed and step alone, so the position of a run
is its step: it goes on from there with any number of hosts. Each host reads its
own columns of the window. Not here: what a row holds (`sources`), and devices.
"""

import os

import grain
import jax
import numpy as np

from dspine_jax import configs
from dspine_jax.data import sources

# Host memory of windows that wait to be trained on. One window is always read
# ahead, however large it is.
PREFETCH_BYTES = 4 << 30
# Windows of small models: more of them ahead would smooth nothing.
_MOST_WINDOWS = 16
_MOST_THREADS = 4


def row_order(count: int, rows_per_step: int, seed: int) -> grain.MapDataset:
  """Element s: the row indices of step s, [rows_per_step] int64.

  Args:
    count: rows there are.
    rows_per_step: rows of a step; an epoch may end in the middle of one.
    seed: of the permutations.

  Raises:
    ValueError: there are no rows.
  """
  if count < 1:
    raise ValueError("the training set is empty")
  # Grain adds the epoch to its seed: without the hash, epoch 1 of one seed
  # would be epoch 0 of the next.
  mixed = int(np.random.SeedSequence(seed).generate_state(1)[0])
  order = grain.MapDataset.range(count).shuffle(seed=mixed).repeat()
  return order.batch(rows_per_step)


def windows(
  source: sources.Source,
  train_cfg: configs.TrainConfig,
  *,
  first_step: int,
  total_steps: int,
  local: slice = slice(None),
  prefetch_bytes: int = PREFETCH_BYTES,
) -> grain.DatasetIterator:
  """Iterates over the windows of steps first_step .. total_steps - 1.

  An element is `source.read` of the step's rows as [A, B_local, ...] arrays.
  Nothing before `first_step` is read. `close()` ends the threads; leave it to
  `contextlib.closing`. What `read` raises in a thread, `next` raises.

  Args:
    source: of the rows.
    train_cfg: gives A, B and the seed.
    first_step: of the first window.
    total_steps: steps of the whole run.
    local: which columns of B this process reads.
    prefetch_bytes: host memory of the windows read ahead; at least one is.
  """
  shape = train_cfg.accumulation, train_cfg.batch_size
  columns = len(range(*local.indices(train_cfg.batch_size)))
  order = row_order(len(source), shape[0] * shape[1], train_cfg.seed)

  def read(rows: np.ndarray) -> dict[str, np.ndarray]:
    own = rows.reshape(shape)[:, local]
    found = source.read(own.reshape(-1))
    return jax.tree.map(lambda x: x.reshape(*own.shape, *x.shape[1:]), found)

  window_bytes = shape[0] * columns * source.row_bytes
  ahead = prefetch_bytes // max(window_bytes, 1)
  ahead = min(max(ahead, 1), _MOST_WINDOWS)
  options = grain.ReadOptions(
    num_threads=min(ahead, _MOST_THREADS, os.cpu_count() or 1),
    prefetch_buffer_size=ahead,
  )
  steps = order[first_step:total_steps].map(read)
  return iter(steps.to_iter_dataset(options))
