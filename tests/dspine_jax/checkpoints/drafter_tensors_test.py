"""The tensors of drafter folders: names, tables, vocabularies, refusals."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax.checkpoints import (
  drafter_folder,
  drafter_formats,
)
from dspine_jax.drafters import contract
from tests import drafter_files, tiny_models

PAIRS = [
  (form, method)
  for form, record in drafter_formats.FORMS.items()
  for method in record.methods
]


@pytest.mark.parametrize(("form", "method"), PAIRS)
def test_an_export_that_is_read_and_written_again_is_equal(
  form, method, tmp_path
):
  setup = drafter_files.save(tmp_path / "a", method, form)
  assert drafter_formats.form_of(drafter_files.read_config(tmp_path / "a")) in (
    form,
    # What z-lab and SpecForge write of these two does not tell them apart.
    "zlab" if method in ("dflash", "dflash2") else form,
  )
  loaded = drafter_folder.load_drafter(tmp_path / "a")
  cfg = dataclasses.replace(loaded.cfg, num_target_layers=4)
  assert cfg == dataclasses.replace(setup.cfg)
  drafter_folder.save_drafter(
    tmp_path / "b", *loaded, dtype="bfloat16", form=form
  )
  assert drafter_files.raw(tmp_path / "a") == drafter_files.raw(tmp_path / "b")
  assert drafter_files.read_config(tmp_path / "a") == drafter_files.read_config(
    tmp_path / "b"
  )


@pytest.mark.parametrize(
  ("name", "match"),
  [
    ("layers.0.self_attn.qkv_proj.weight", "Laguna"),
    ("layers.0.self_attn.g_proj.weight", "Laguna"),
    ("aux_hidden_norms.0.weight", "Laguna"),
    ("layers.1.self_attn.q_proj.bias", "biases"),
    ("layers.1.mlp.up_proj.weight_scale", "quantised"),
    ("midlayer.self_attn.q_proj.weight", "EAGLE-3"),
    ("layers.7.self_attn.q_proj.weight", "not a tensor of this method"),
  ],
)
def test_tensors_that_would_not_be_read_are_refused(name, match, tmp_path):
  drafter_files.save(tmp_path, "dflash")
  drafter_files.rewrite(
    tmp_path, lambda arrays: arrays | {name: np.zeros(2, np.float32)}
  )
  with pytest.raises(ValueError, match=match):
    drafter_folder.load_drafter(tmp_path)


def test_what_loaders_ignore_is_no_error(tmp_path):
  setup = drafter_files.save(tmp_path, "dflash", dtype="float32")
  more = (
    "rotary_emb.inv_freq",
    "verifier_norm.weight",
    "verifier_lm_head.weight",
  )
  extra = {name: np.zeros(2, np.float32) for name in more}
  drafter_files.rewrite(tmp_path, lambda arrays: arrays | extra)
  loaded = drafter_folder.load_drafter(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, setup.params)


@pytest.mark.parametrize("method", ["domino", "dspark"])
def test_the_container_of_early_heads_is_opened(method, tmp_path):
  setup = drafter_files.save(tmp_path, method, dtype="float32")
  heads = ("prefix_gru", "embed_proj", "markov_head", "confidence_head")
  drafter_files.rewrite(
    tmp_path,
    lambda arrays: {
      f"logit_head.{name}" if name.startswith(heads) else name: array
      for name, array in arrays.items()
    },
  )
  loaded = drafter_folder.load_drafter(tmp_path)
  jax.tree.map(np.testing.assert_array_equal, loaded.params, setup.params)


def test_a_head_of_its_own_is_never_replaced_unseen(tmp_path):
  setup = drafter_files.save(tmp_path / "a", "dflash", "zlab", dtype="float32")
  own = {
    "embed_tokens": setup.tables.embedding,
    "lm_head": setup.tables.head + 1,
  }
  # No other of DFlash's forms holds tables.
  drafter_folder.save_drafter(tmp_path / "b", setup.params, own, setup.cfg)
  assert "speculators_model_type" in drafter_files.read_config(tmp_path / "b")
  with pytest.raises(ValueError, match="this drafter has its own"):
    drafter_folder.save_drafter(
      tmp_path / "c", setup.params, own, setup.cfg, form="zlab"
    )
  loaded = drafter_folder.load_drafter(tmp_path / "b")
  kept = drafter_folder.without_copies(loaded, setup.tables)
  # Equal copies are dropped, others stay and are what the draft is made with.
  assert set(kept.buffers) == {"lm_head"}
  np.testing.assert_array_equal(kept.buffers["lm_head"], own["lm_head"])


REDUCED = 17


def reduced(folder):
  """A speculators folder of DFlash with 17 of 61 tokens, and its token ids."""
  cfg = tiny_models.drafter_config("dflash", draft_vocab_size=REDUCED)
  setup = tiny_models.drafter(dataclasses.replace(cfg, draft_vocab_size=None))
  ids = np.sort(np.random.default_rng(3).permutation(61)[:REDUCED])
  named = np.zeros(61, bool)
  named[ids] = True
  buffers = {
    "lm_head": 0.5 * jax.random.normal(jax.random.key(4), (REDUCED, 24)),
    "d2t": jnp.asarray(ids - np.arange(REDUCED), jnp.int32),
    "t2d": jnp.asarray(named),
  }
  drafter_folder.save_drafter(folder, setup.params, buffers, cfg)
  return setup, ids


def test_a_reduced_vocabulary_is_read_and_written_back(tmp_path):
  _, ids = reduced(tmp_path / "a")
  stored = drafter_files.raw(tmp_path / "a")
  assert stored["d2t"][:2] == ("int64", (REDUCED,))
  assert stored["t2d"][:2] == ("bool", (61,))
  loaded = drafter_folder.load_drafter(tmp_path / "a")
  np.testing.assert_array_equal(np.arange(REDUCED) + loaded.buffers["d2t"], ids)
  drafter_folder.save_drafter(tmp_path / "b", *loaded, form="speculators")
  assert drafter_files.raw(tmp_path / "b") == stored
  with pytest.raises(ValueError, match="has no reduced draft vocabulary"):
    drafter_folder.save_drafter(tmp_path / "c", *loaded, form="zlab")
  # A reduced head is no copy of the target's, whatever its rows are.
  tables = contract.TargetTables(
    embedding=jnp.zeros((61, 24)), head=jnp.zeros((61, 24))
  )
  kept = drafter_folder.without_copies(loaded, tables)
  assert set(kept.buffers) == set(loaded.buffers)


@pytest.mark.parametrize(
  ("change", "match"),
  [
    (lambda arrays: arrays.pop("lm_head.weight"), "missing lm_head.weight"),
    (lambda arrays: arrays.pop("d2t"), "missing d2t"),
    (
      lambda arrays: arrays.update(d2t=arrays["d2t"] + 50),
      "d2t does not name draft_vocab_size=17 different tokens",
    ),
    (
      lambda arrays: arrays.update(d2t=-np.arange(REDUCED)),
      "d2t does not name",
    ),
    (
      lambda arrays: arrays.update(t2d=~arrays["t2d"]),
      "d2t and t2d name different tokens",
    ),
  ],
)
def test_a_damaged_vocabulary_is_refused(change, match, tmp_path):
  reduced(tmp_path)

  def changed(arrays):
    change(arrays)

  drafter_files.rewrite(tmp_path, changed)
  with pytest.raises(ValueError, match=match):
    drafter_folder.load_drafter(tmp_path)


def test_a_vocabulary_without_t2d_is_enough(tmp_path):
  reduced(tmp_path)
  drafter_files.rewrite(
    tmp_path, lambda arrays: {k: arrays[k] for k in arrays if k != "t2d"}
  )
  assert "t2d" not in drafter_folder.load_drafter(tmp_path).buffers
