"""Training state on disk: what a killed run needs to go on unchanged.

A thin layer over `orbax.checkpoint`: one directory per step, written to a
temporary name in the background and renamed at the end, so that a kill during a
save leaves the older ones whole. The state is any pytree of arrays, on one
device or on a mesh of several processes, which then all make the same calls;
PRNG keys are stored as their key data. A state is restored to where the state
that it is compared with lies, whatever mesh has written it.
"""

import contextlib
import pathlib
from collections.abc import Generator
from typing import Any

import jax
import orbax.checkpoint as ocp

from dspine_jax.typing import PyTree


class TrainingCheckpoints:
  """The checkpoints of one run.

  Args:
    folder: where they are; made if missing.
    max_to_keep: older ones are deleted, once a newer one is complete.
  """

  def __init__(self, folder: pathlib.Path | str, *, max_to_keep: int = 2):
    self._folder = pathlib.Path(folder).absolute()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=max_to_keep,
      enable_async_checkpointing=True,
      # What a killed save has left; nothing reads it.
      cleanup_tmp_directories=True,
    )
    with self._told("the folder cannot be opened"):
      self._manager = ocp.CheckpointManager(self._folder, options=options)

  def __enter__(self) -> "TrainingCheckpoints":
    return self

  def __exit__(self, error_type: type | None, *unused: object) -> None:
    if error_type is None:
      self.wait()
    with contextlib.suppress(Exception):  # The first error is the one to tell.
      self._manager.close()

  def latest_step(self) -> int | None:
    """The newest complete checkpoint's step, None if there is none.

    Waits for the one that is being written.
    """
    self.wait()
    return self._manager.latest_step()

  def last_good(self) -> str:
    """What a run that cannot go on says about where it can go on from."""
    step = self.latest_step()
    if step is None:
      return "there is no good checkpoint yet"
    return f"the last good checkpoint is of step {step}"

  def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
    """Starts to write `state` and a small JSON `meta` under `step`.

    Returns when the state has been copied, so that its arrays may be donated;
    waits for the save before.

    Raises:
      ValueError: this save or the one before cannot be written.
    """
    self.wait()
    with self._told(f"the checkpoint of step {step} was not written"):
      self._manager.save(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardSave(_as_data(state)),
          meta=ocp.args.JsonSave(meta),
        ),
      )

  def wait(self) -> None:
    """Returns when everything is on disk.

    Raises:
      ValueError: it cannot be written; older checkpoints are still there.
    """
    with self._told("the newest checkpoint was not written"):
      self._manager.wait_until_finished()
      self._manager.check_for_errors()

  @contextlib.contextmanager
  def _told(self, what: str) -> Generator[None]:
    """Errors of writing as ValueError: folder, reason, what to do."""
    try:
      yield
    except Exception as error:
      raise ValueError(
        f"{self._folder}: {what} ({_reason(error)}); older checkpoints are"
        " whole: make room and repeat the command to go on"
      ) from error

  def restore(self, like: PyTree, step: int | None = None):
    """Reads (state, meta) back.

    Args:
      like: a state of the same structure, shapes and dtypes, whose arrays lie
        where the restored ones are to lie.
      step: which one; the newest if None.

    Raises:
      ValueError: no checkpoint, a damaged one, or one of another shape.
    """
    step = self.latest_step() if step is None else step
    if step is None:
      raise ValueError(f"{self._folder}: no checkpoint to restore")
    abstract = jax.tree.map(ocp.utils.to_shape_dtype_struct, _as_data(like))
    try:
      restored = self._manager.restore(
        step,
        args=ocp.args.Composite(
          state=ocp.args.StandardRestore(abstract),
          meta=ocp.args.JsonRestore(),
        ),
      )
    except Exception as error:
      # Orbax and TensorStore raise many types for damaged files.
      raise ValueError(
        f"{self._folder}/{step}: checkpoint is damaged or of another shape"
        f" ({_reason(error)}); {self._way_out(step)}"
      ) from error
    return _as_keys(restored["state"], like), restored["meta"]

  def _way_out(self, step: int) -> str:
    older = [other for other in self._manager.all_steps() if other < step]
    then = f"go on from step {max(older)}" if older else "start anew"
    return f"if it is damaged, delete this folder to {then}"


def _reason(error: Exception) -> str:
  if "No space left" in str(error):  # TensorStore says it in many words.
    return "no space left on the disk"
  lines = str(error).strip().splitlines() or [""]
  return f"{type(error).__name__}: {lines[0][:200]}"


def _is_key(leaf: Any) -> bool:
  return hasattr(leaf, "dtype") and jax.dtypes.issubdtype(
    leaf.dtype, jax.dtypes.prng_key
  )


def _as_data(tree: PyTree) -> PyTree:
  return jax.tree.map(
    lambda leaf: jax.random.key_data(leaf) if _is_key(leaf) else leaf, tree
  )


def _as_keys(tree: PyTree, like: PyTree) -> PyTree:
  return jax.tree.map(
    lambda leaf, ref: (
      jax.random.wrap_key_data(leaf, impl=jax.random.key_impl(ref))
      if _is_key(ref)
      else leaf
    ),
    tree,
    like,
  )
