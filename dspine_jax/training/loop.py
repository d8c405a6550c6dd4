"""The training loop of a drafter: windows, metrics, checkpoints, resume, stop.

A killed run goes on with bit-equal parameters: everything a step uses is in the
checkpoint or a function of the step. With several processes each runs this loop
and reads its own rows; they agree on when to stop. Printing, signals and files
other than checkpoints are the caller's.
"""

import contextlib
import time
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs, sharding
from dspine_jax.checkpoints import orbax
from dspine_jax.data import loader, sources
from dspine_jax.drafters import contract
from dspine_jax.training import anchors
from dspine_jax.training import step as step_lib
from dspine_jax.typing import Params, PyTree


class Trained(NamedTuple):
  """A trained drafter.

  Attributes:
    params: trainable tree; on a mesh, whole on every device.
    buffers: the method's frozen arrays, likewise.
  """

  params: Params
  buffers: PyTree


class Stopped(Exception):
  """A run that was asked to stop before its end, its state saved.

  Attributes:
    step: optimiser steps done.
  """

  def __init__(self, step: int):
    super().__init__(f"stopped at step {step}")
    self.step = step


def train(
  cfg: configs.DrafterConfig,
  train_cfg: configs.TrainConfig,
  tables: contract.TargetTables,
  source: sources.Source,
  *,
  mesh: jax.sharding.Mesh | None = None,
  checkpoints: orbax.TrainingCheckpoints | None = None,
  checkpoint_every: int = 100,
  on_start: Callable[[int], None] = lambda step: None,
  on_metrics: Callable[[int, dict[str, np.ndarray]], None] = (
    lambda step, metrics: None
  ),
  stop: Callable[[], bool] = lambda: False,
) -> Trained:
  """Trains to `train_cfg.optimizer.total_steps`, from a checkpoint if any.

  Args:
    cfg: the drafter.
    train_cfg: the run.
    tables: the target's embedding and head.
    source: of the training rows.
    mesh: devices to train on, of all processes; None is the default device.
    checkpoints: where states are kept; None keeps none.
    checkpoint_every: steps between checkpoints; the last step always has one.
    on_start: called with the first step to be run (after a restore).
    on_metrics: called with (step, metrics of that step), one step late so that
      the device is never waited for. Beside the metrics of `make_train_step`
      there is `data_wait`, the seconds for which the step's window was waited.
    stop: asked after every step; once any process's says True, all of them save
      at the same step and end. With several processes that is one step later.

  Raises:
    Stopped: `stop` said so before the last step.
    ValueError: NaN or infinity in loss, gradient or parameters, of which no
      checkpoint is written; data or checkpoints that cannot be read or written;
      a batch that the devices do not divide.
  """
  local = slice(None)
  if mesh is not None:
    local = sharding.local_rows(mesh, train_cfg.batch_size)
    tables = sharding.place(tables, sharding.whole(mesh))
  state, buffers = _start(cfg, train_cfg, tables, mesh, checkpoints)
  train_step = step_lib.make_train_step(cfg, train_cfg, mesh=mesh)
  first, total = int(state.step), train_cfg.optimizer.total_steps
  on_start(first)
  reporter = _Reporter(on_metrics, checkpoints)
  windows = loader.windows(
    source, train_cfg, first_step=first, total_steps=total, local=local
  )
  with contextlib.closing(windows):
    for step, (window, waited_s) in enumerate(_timed(windows), start=first):
      batches = batch_of(source, window, mesh)
      state, metrics = train_step(state, buffers, tables, batches)
      metrics["data_wait"] = np.float32(waited_s)
      done, votes = step + 1, _votes(stop, mesh)
      stopping = reporter.next(step, metrics, votes)
      if done % checkpoint_every == 0 or done == total or stopping:
        # Only a state that is finite, as its loss and gradient are, is kept.
        stopping = reporter.flush() or stopping
        if checkpoints is not None:
          checkpoints.save(done, state, {})
      if stopping and done < total:
        _finish(checkpoints)
        raise Stopped(done)
  _finish(checkpoints)
  params = state.params
  if mesh is not None:
    params = sharding.gathered(params, mesh)
  return Trained(params=params, buffers=buffers)


def batch_of(
  source: sources.Source, window: PyTree, mesh: jax.sharding.Mesh | None
) -> anchors.TrainBatch:
  """A window that the host has read, on devices and with its features.

  Args:
    source: that has read it.
    window: this process's rows, arrays [A, B of them, ...].
    mesh: whose devices get the rows; None is the default device.
  """
  if mesh is None:
    placed = jax.tree.map(jnp.asarray, window)
  else:
    placed = sharding.place_rows(window, mesh)
  return source.features(placed)


def _start(cfg, train_cfg, tables, mesh, checkpoints):
  """The newest checkpoint's state or a fresh one, and the buffers."""
  state, buffers = step_lib.init(cfg, train_cfg, tables, mesh=mesh)
  if checkpoints is not None and checkpoints.latest_step() is not None:
    state, _ = checkpoints.restore(state)
  if mesh is None:
    # Fresh states are placed like restored ones: one program serves both.
    state = jax.device_put(state, jax.local_devices()[0])
  return state, buffers


def _finish(checkpoints) -> None:
  if checkpoints is not None:
    checkpoints.wait()


def _timed(windows: Iterator[PyTree]) -> Iterator[tuple[PyTree, float]]:
  """Each window, and for how many seconds it was waited."""
  while True:
    before_s = time.perf_counter()
    try:
      window = next(windows)
    except StopIteration:
      return
    yield window, time.perf_counter() - before_s


def _votes(stop, mesh) -> Any:
  """Whether to stop: of this process, or a scalar that all processes share."""
  if mesh is None or jax.process_count() == 1:
    return stop()
  return sharding.any_process(stop(), mesh)


class _Reporter:
  """Hands metrics on, one step late, unless they are not finite."""

  def __init__(self, on_metrics, checkpoints):
    self._on_metrics, self._checkpoints = on_metrics, checkpoints
    self._pending: tuple[int, dict, Any] | None = None

  def next(self, step: int, metrics: dict, votes: Any) -> bool:
    """Takes a step's metrics; returns whether to stop after this step.

    What other processes say is known when the step before has ended.
    """
    stopping = self.flush()
    self._pending = step, metrics, votes
    return stopping or votes is True

  def flush(self) -> bool:
    """Reports what is pending; returns whether a process voted to stop."""
    if self._pending is None:
      return False
    step, metrics, votes = jax.device_get(self._pending)
    self._pending = None
    for name in ("loss", "grad_norm", "param_norm"):
      if not np.isfinite(metrics[name]):
        checkpoints = self._checkpoints
        kept = "no checkpoint is kept"
        if checkpoints is not None:
          kept = checkpoints.last_good()
        raise ValueError(
          f"{name} is {metrics[name]} at step {step}; {kept} (a lower learning"
          " rate may help)"
        )
    self._on_metrics(step, metrics)
    return bool(votes)
