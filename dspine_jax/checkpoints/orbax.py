"""Training state on disk: what a killed run needs to go on unchanged.

A thin layer over `orbax.checkpoint`: one directory per step, written to a
temporary name first, so that a kill during a save leaves the older ones whole.
The state is any pytree of arrays; PRNG keys are stored as their key data.
"""

import pathlib
from typing import Any

import jax
import orbax.checkpoint as ocp

from dspine_jax.typing import PyTree


class TrainingCheckpoints:
  """The checkpoints of one run.

  Args:
    folder: where they are; made if missing.
    max_to_keep: older ones are deleted.
  """

  def __init__(self, folder: pathlib.Path | str, *, max_to_keep: int = 2):
    self._folder = pathlib.Path(folder).absolute()
    options = ocp.CheckpointManagerOptions(
      max_to_keep=max_to_keep, enable_async_checkpointing=False
    )
    self._manager = ocp.CheckpointManager(self._folder, options=options)

  def __enter__(self) -> "TrainingCheckpoints":
    return self

  def __exit__(self, *unused: object) -> None:
    self._manager.close()

  def latest_step(self) -> int | None:
    """The newest complete checkpoint's step, None if there is none."""
    return self._manager.latest_step()

  def save(self, step: int, state: PyTree, meta: dict[str, Any]) -> None:
    """Writes `state` and a small JSON `meta` under `step`."""
    self._manager.save(
      step,
      args=ocp.args.Composite(
        state=ocp.args.StandardSave(_as_data(state)),
        meta=ocp.args.JsonSave(meta),
      ),
    )
    self._manager.wait_until_finished()

  def restore(self, like: PyTree, step: int | None = None):
    """Reads (state, meta) back.

    Args:
      like: a state of the same structure, shapes and dtypes.
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
      first_line = str(error).strip().splitlines()[0][:200]
      raise ValueError(
        f"{self._folder}/{step}: checkpoint is damaged or of another shape"
        f" ({type(error).__name__}: {first_line})"
      ) from error
    return _as_keys(restored["state"], like), restored["meta"]


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
