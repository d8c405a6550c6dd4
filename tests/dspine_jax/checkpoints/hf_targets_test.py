"""Folders that transformers wrote, against the logits that it computed."""

import functools
import pathlib

import jax
import numpy as np
import pytest

from dspine_jax.checkpoints import target_folder, tensors
from dspine_jax.target import model

ROOT = pathlib.Path(__file__).parents[3] / "tests" / "golden" / "hf_targets"
# float32 on both sides, logits up to 3.6 (they agree to 7e-6).
TOLERANCE = 2e-5


@functools.partial(jax.jit, static_argnames="cfg")
def logits(params, tokens, *, cfg):
  hidden = model.forward(params, tokens, cfg=cfg).hidden
  return model.logits(params, hidden)


@pytest.mark.parametrize(
  ("name", "biases"),
  [
    ("qwen2_biased", 3),
    ("llama_llama3_sharded", 0),
    ("qwen3_yarn_biased", 4),
  ],
)
def test_logits_are_those_of_transformers(name, biases):
  target = target_folder.load_target(ROOT / name)
  assert len(target.cfg.biased_projections) == biases
  with np.load(ROOT / name / "golden.npz") as golden:
    tokens, want = golden["tokens"], golden["logits"]
  got = logits(target.params, tokens, cfg=target.cfg)
  np.testing.assert_allclose(got, want, atol=TOLERANCE)


@pytest.mark.parametrize(
  "name", ["qwen2_biased", "llama_llama3_sharded", "qwen3_yarn_biased"]
)
def test_a_folder_written_again_holds_the_same_bits(name, tmp_path):
  target = target_folder.load_target(ROOT / name)
  target_folder.save_target(
    tmp_path / "new", target.params, target.cfg, dtype="bfloat16"
  )
  old, new = tensors.Reader(ROOT / name), tensors.Reader(tmp_path / "new")
  assert new.names() == old.names()
  for tensor in old.names():
    a, b = old.read(tensor), new.read(tensor)
    assert a.dtype == b.dtype and a.tobytes() == b.tobytes()
  again = target_folder.load_target(tmp_path / "new")
  assert again.cfg == target.cfg
