"""Tiny drafters as folders, and their files looked at and changed."""

import json

import safetensors.numpy

from dspine_jax.checkpoints import (
  drafter_folder,
  drafter_formats,
  hf_config,
)
from tests import tiny_models


def save(folder, method, form=None, *, dtype="bfloat16", **changes):
  """A tiny drafter in a folder; DSpark's copies only where the form has any."""
  setup = tiny_models.drafter(tiny_models.drafter_config(method, **changes))
  buffers = dict(setup.buffers)
  if form is not None and drafter_formats.FORMS[form].tables == "never":
    buffers = {k: v for k, v in buffers.items() if "codes" in k}
  drafter_folder.save_drafter(
    folder, setup.params, buffers, setup.cfg, dtype=dtype, form=form
  )
  return setup


def raw(folder):
  """Names -> (dtype, shape, bytes), from all files of weights."""
  found = {}
  for path in sorted(folder.glob("*.safetensors")):
    for name, array in safetensors.numpy.load_file(path).items():
      found[name] = (str(array.dtype), array.shape, array.tobytes())
  return found


def read_config(folder):
  return json.loads((folder / "config.json").read_text())


def rewrite(folder, change):
  """Changes the folder's tensors, given as a dict with their own dtypes."""
  path = folder / "model.safetensors"
  arrays = dict(safetensors.numpy.load_file(path))
  safetensors.numpy.save_file(change(arrays) or arrays, path)


def edit_config(folder, **changes):
  hf_config.write_json(folder / "config.json", read_config(folder) | changes)
