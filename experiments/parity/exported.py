"""Drafters on their way out and in again: the comparisons use what comes back.

Every released form that has the method is written and read, one after the
other, so that an error in any of them shows in all arrays of the set.
"""

import contextlib
import dataclasses
import pathlib
import tempfile
from collections.abc import Iterator

import jax
import numpy as np

from dspine_jax.checkpoints import drafter_folder, drafter_formats
from experiments.parity import report


def forms_of(loaded: drafter_folder.DrafterCheckpoint) -> list[str]:
  """The forms that can hold a drafter as it is."""
  found = []
  for form in drafter_formats.FORMS:
    with contextlib.suppress(ValueError):
      drafter_formats.check_expressible(
        form, loaded.cfg, "lm_head" in loaded.buffers
      )
      found.append(form)
  return found


def through_all(
  loaded: drafter_folder.DrafterCheckpoint,
) -> drafter_folder.DrafterCheckpoint:
  """The drafter after an export and an import in each form."""
  return [after for _, after in steps(loaded)][-1]


def steps(
  loaded: drafter_folder.DrafterCheckpoint,
) -> Iterator[tuple[str, drafter_folder.DrafterCheckpoint]]:
  """(form, the drafter read back from it), one form after the other."""
  for form in forms_of(loaded):
    with tempfile.TemporaryDirectory() as folder:
      drafter_folder.save_drafter(folder + "/drafter", *loaded, form=form)
      again = drafter_folder.load_drafter(folder + "/drafter")
    # Only speculators' form does not tell how deep the target is.
    depth = loaded.cfg.num_target_layers
    cfg = dataclasses.replace(again.cfg, num_target_layers=depth)
    again = again._replace(cfg=cfg)
    yield form, again
    loaded = again


def compare(folder: pathlib.Path) -> list[report.Record]:
  """One record a form: entries and settings that did not come back equal."""
  records = []
  before = drafter_folder.load_drafter(folder)
  for form, after in steps(before):
    name = f"inputs/drafter (through {form})"
    records.append(_record(name, before, after))
    before = after
  return records


def _record(name, before, after) -> report.Record:
  trees = (before.params, before.buffers), (after.params, after.buffers)
  (old, shape), (new, other) = map(jax.tree.flatten, trees)
  if shape != other:
    return report.absent(name, "exact", "other tensors came back")
  pairs = [
    (np.asarray(a), np.asarray(b)) for a, b in zip(old, new, strict=True)
  ]
  differing = sum(int(np.sum(a != b)) for a, b in pairs)
  same = before.cfg == after.cfg
  return report.Record(
    name=name,
    kind="exact",
    error=float(differing),
    bound=report.EXACT_BOUND,
    ok=differing == 0 and same,
    note="" if same else "config.json came back with other settings",
  )
