"""The released config.json and tensor names of the methods beside DSpine."""

import dataclasses
import json
import re

import jax
import numpy as np
import pytest

from dspine_jax import configs
from dspine_jax.checkpoints import drafter_config, drafter_folder, tensors
from dspine_jax.drafters import methods
from tests import stored_tensors, tiny_models

METHODS = sorted(methods.DRAFTERS)
LAYERS = {
  "head_dim": 128,
  "hidden_size": 2560,
  "intermediate_size": 9728,
  "max_position_embeddings": 40960,
  "model_type": "qwen3",
  "num_attention_heads": 32,
  "num_hidden_layers": 5,
  "num_key_value_heads": 8,
  "num_target_layers": 36,
  "rms_norm_eps": 1e-06,
  "rope_theta": 1000000,
  "vocab_size": 151936,
}
TAPS = {"mask_token_id": 151669, "target_layer_ids": [1, 9, 17, 25, 33]}
DFLASH2 = LAYERS | {
  "architectures": ["DFlash2DraftModel"],
  "block_size": 8,
  "is_causal": False,
  "dflash_config": TAPS
  | {
    "conv_kernel_size": 2,
    "conv_group_size": 16,
    "selector_rank": 256,
    "selector_top_k": 16,
  },
}
DOMINO = LAYERS | {
  "architectures": ["DominoDraftModel"],
  "block_size": 16,
  "emb_dim": 256,
  "dflash_config": TAPS
  | {
    "projector_type": "domino",
    "emb_dim": 256,
    "gru_hidden_dim": 1024,
    "pure_draft_prefix_len": 1,
    "shift_label": True,
  },
}
HEADS = {
  "markov_rank": 256,
  "markov_head_type": "vanilla",
  "enable_confidence_head": True,
  "confidence_head_with_markov": True,
}
DSPARK = (
  LAYERS
  | TAPS
  | HEADS
  | {
    "architectures": ["Qwen3DSparkModel"],
    "block_size": 7,
    "num_anchors": 512,
    "tie_word_embeddings": False,
  }
)
NESTED_DSPARK = LAYERS | {
  "architectures": ["DSparkDraftModel"],
  "block_size": 7,
  "dflash_config": TAPS | HEADS | {"projector_type": "dspark"},
}
RELEASED = {"dflash2": DFLASH2, "domino": DOMINO, "dspark": DSPARK}
SHARED = configs.DrafterConfig(
  method="dflash2",
  vocab_size=151936,
  hidden_size=2560,
  intermediate_size=9728,
  num_layers=5,
  num_heads=32,
  num_kv_heads=8,
  head_dim=128,
  block_size=8,
  mask_token_id=151669,
  target_layer_ids=(1, 9, 17, 25, 33),
  num_target_layers=36,
  decay_gamma=4.0,
)


def parse(config):
  return drafter_config.from_json(config)


def test_released_configs_parse_to_their_values():
  want = dataclasses.replace(SHARED, dflash2=configs.DFlash2Options())
  assert parse(DFLASH2) == want
  domino = dataclasses.replace(
    SHARED,
    method="domino",
    block_size=16,
    sample_from_anchor=True,
    decay_gamma=7.0,
    domino=configs.DominoOptions(),
  )
  assert parse(DOMINO) == domino
  dspark = dataclasses.replace(
    SHARED,
    method="dspark",
    block_size=7,
    sample_from_anchor=True,
    dspark=configs.DSparkOptions(),
  )
  assert parse(DSPARK) == dspark == parse(NESTED_DSPARK)
  assert (domino.num_proposals, dspark.num_proposals) == (16, 7)


def test_options_are_read_from_where_each_format_has_them():
  own = DFLASH2["dflash_config"] | {
    "selector_top_k": 4,
    "output_multiplier": 0.2,
    "final_logit_softcapping": 20.0,
  }
  got = parse(DFLASH2 | {"dflash_config": own}).dflash2
  assert (got.selector_top_k, got.output_multiplier) == (4, 0.2)
  assert got.final_logit_softcapping == 20
  own = DOMINO["dflash_config"] | {"shift_label": False, "gru_hidden_dim": 64}
  got = parse(DOMINO | {"dflash_config": own})
  assert got.domino.gru_hidden_dim == 64 and got.num_proposals == 15
  got = parse(DSPARK | {"markov_rank": 8, "markov_head_type": "rnn"}).dspark
  assert (got.markov_rank, got.markov_head_type) == (8, "rnn")


@pytest.mark.parametrize("projector", ["domino", "dspark"])
def test_the_projector_type_decides_over_dflash_s_architecture(projector):
  own = TAPS | {"projector_type": projector}
  config = LAYERS | {
    "architectures": ["DFlashDraftModel"],
    "block_size": 16,
    "dflash_config": own,
  }
  assert parse(config).method == projector


@pytest.mark.parametrize(
  ("config", "match"),
  [
    (
      DOMINO | {"dflash_config": TAPS | {"projector_type": "mlp"}},
      "projector_type='mlp' is not implemented",
    ),
    (DSPARK | {"markov_head_type": "gru"}, "markov_head_type='gru': not in"),
    (DSPARK | {"markov_rank": 0}, "markov_rank=0: must be positive"),
    (DSPARK | {"confidence_threshold": 1.5}, "confidence_threshold=1.5"),
    (DSPARK | {"mask_token_id": None}, "key 'mask_token_id' is missing"),
    (
      DFLASH2 | {"dflash_config": TAPS | {"conv_group_size": 48}},
      "conv_group_size=48: must divide hidden_size=2560",
    ),
    (
      DFLASH2 | {"dflash_config": TAPS | {"selector_top_k": 200000}},
      "selector_top_k=200000: cannot exceed vocab_size",
    ),
  ],
)
def test_impossible_configs_are_refused_with_their_file(config, match):
  with pytest.raises(ValueError, match=f"^some/config.json: .*{match}"):
    drafter_config.from_json(config, "some/config.json")


@pytest.mark.parametrize("method", METHODS)
def test_every_option_is_written_and_read_back(method):
  changes = {
    "dflash": {"objective": "forward_kl", "ce_weight": 0.2},
    "dflash2": {
      "objective": "d_pace",
      "output_multiplier": 0.5,
      "final_logit_softcapping": 9.0,
    },
    "domino": {"pure_draft_prefix_len": 2, "lambda_decay_ratio": 0.5},
    "dspark": {"markov_head_type": "gated", "confidence_threshold": 0.3},
    "dspine": {
      "injects": False,
      "refines": False,
      "layer_supervision": "token_ce",
      "readout_init": "whitened",
    },
  }
  for options in ({}, changes.get(method, {})):
    for shift in (False, True):
      cfg = tiny_models.drafter_config(
        method, sample_from_anchor=shift, decay_gamma=3.5, **{method: options}
      )
      text = json.dumps(drafter_config.to_json(cfg))
      assert parse(json.loads(text)) == cfg


@pytest.mark.parametrize("method", METHODS)
def test_a_file_that_does_not_tell_its_causality_has_the_methods(method):
  cfg = tiny_models.drafter_config(method)
  for change in ({}, {"is_causal": None}):
    written = drafter_config.to_json(cfg)
    written.pop("is_causal", None)
    assert parse(written | change) == cfg


def test_a_released_dflash2_slides_in_all_layers():
  # Keys as z-lab writes them; it names no convention.
  got = parse(
    DFLASH2
    | {
      "layer_types": ["sliding_attention"] * 5,
      "max_window_layers": 5,
      "sliding_window": 2048,
      "use_sliding_window": True,
    }
  )
  assert got.layer_types == ("sliding_attention",) * 5
  assert got.sliding_window == 2048 and not got.is_causal
  assert got.sliding_window_convention == "automodel"


@pytest.mark.parametrize("method", sorted(RELEASED))
def test_written_configs_have_the_released_keys(method):
  cfg = parse(RELEASED[method])
  written = drafter_config.to_json(
    cfg, "deepspec" if method == "dspark" else "specforge"
  )

  def check(theirs, ours):
    for key, value in theirs.items():
      if isinstance(value, dict):
        check(value, ours[key])
      else:
        assert ours[key] == value, key

  check(RELEASED[method], written)
  if method == "dspark":
    assert "dflash_config" not in written


def test_dspark_s_config_can_be_written_as_specforge_nests_it():
  cfg = dataclasses.replace(parse(DSPARK), decay_gamma=3.0)
  nested = drafter_config.to_json(cfg, "specforge")
  assert nested["architectures"] == ["DSparkDraftModel"]
  own = nested["dflash_config"]
  assert own["projector_type"] == "dspark"
  assert own.items() >= {**TAPS, **HEADS}.items()
  assert not set(nested) & {"markov_rank", "mask_token_id", "target_layer_ids"}
  assert parse(nested) == cfg


COUNTS = {"dflash2": 81, "domino": 62, "dspark": 64}


def added(method):
  """The names that a method adds to the 58, written out."""
  if method == "dflash2":
    parts = ("base_kernel", "kernel_projection.weight")
    return {
      *(
        f"layers.{i}.{sublayer}_conv.{part}"
        for i in range(5)
        for sublayer in ("attention", "mlp")
        for part in parts
      ),
      "candidate_selector.hidden_projection.weight",
      "candidate_selector.predecessor_codebook",
      "candidate_selector.successor_codebook",
    }
  if method == "domino":
    return {
      "prefix_gru.weight_ih_l0",
      "prefix_gru.weight_hh_l0",
      "embed_proj.0.weight",
      "embed_proj.2.weight",
    }
  return {
    "embed_tokens.weight",
    "lm_head.weight",
    "markov_head.markov_w1.weight",
    "markov_head.markov_w2.weight",
    "confidence_head.proj.weight",
    "confidence_head.proj.bias",
  }


SHAPES = {
  "layers.0.mlp_conv.base_kernel": (2, 2, 2560),
  "layers.4.attention_conv.kernel_projection.weight": (640, 2560),
  "candidate_selector.hidden_projection.weight": (256, 2560),
  "candidate_selector.successor_codebook": (151936, 256),
  "prefix_gru.weight_ih_l0": (3072, 2560),
  "prefix_gru.weight_hh_l0": (3072, 1024),
  "embed_proj.0.weight": (256, 3584),
  "embed_proj.2.weight": (151936, 256),
  "lm_head.weight": (151936, 2560),
  "markov_head.markov_w2.weight": (151936, 256),
  "confidence_head.proj.weight": (1, 2816),
  "confidence_head.proj.bias": (1,),
}


@pytest.mark.parametrize("method", sorted(RELEASED))
def test_five_layers_have_the_released_tensors(method):
  cfg = parse(RELEASED[method])
  entries = methods.drafter(cfg).entries(cfg)
  names = {entry.name for entry in entries}
  assert len(entries) == len(names) == COUNTS[method]
  assert names >= added(method)
  assert len(names - added(method)) == 58
  shapes = {e.name: e.shape[::-1] if e.transposed else e.shape for e in entries}
  for name in added(method) & set(SHAPES):
    assert shapes[name] == SHAPES[name], name


@pytest.mark.parametrize("kind", ["gated", "rnn"])
def test_other_markov_heads_have_one_more_map(kind):
  cfg = parse(DSPARK | {"markov_head_type": kind})
  entries = methods.drafter(cfg).entries(cfg)
  shapes = {e.name: e.shape[::-1] if e.transposed else e.shape for e in entries}
  assert len(entries) == 66
  if kind == "gated":
    assert shapes["markov_head.gate_proj.weight"] == (256, 2816)
    assert shapes["markov_head.gate_proj.bias"] == (256,)
  else:
    assert shapes["markov_head.joint_proj.weight"] == (768, 3072)
    assert shapes["markov_head.joint_proj.bias"] == (768,)


def save(folder, method, **options):
  cfg = tiny_models.drafter_config(method, **{method: options})
  setup = tiny_models.drafter(cfg)
  drafter_folder.save_drafter(folder, setup.params, setup.buffers, cfg)
  return setup


def assert_equal(got, want):
  assert jax.tree.structure(got) == jax.tree.structure(want)
  jax.tree.map(np.testing.assert_array_equal, got, want)


SAVED = [
  *((method, {}) for method in METHODS),
  ("dspark", {"markov_head_type": "gated"}),
  ("dspark", {"markov_head_type": "rnn", "enable_confidence_head": False}),
]


@pytest.mark.parametrize(("method", "options"), SAVED)
@pytest.mark.parametrize("prefix", ["", "model."])
def test_a_saved_drafter_is_loaded_unchanged(method, options, prefix, tmp_path):
  setup = save(tmp_path, method, **options)
  arrays = stored_tensors.read(tmp_path)
  named = {f"{prefix}{name}": array for name, array in arrays.items()}
  tensors.write_tensors(tmp_path, named)
  loaded = drafter_folder.load_drafter(tmp_path)
  assert loaded.cfg == setup.cfg
  assert_equal(loaded.params, setup.params)
  assert_equal(loaded.buffers, setup.buffers)


def rename(folder, old, new):
  arrays = stored_tensors.read(folder)
  arrays = {name.replace(old, new): array for name, array in arrays.items()}
  tensors.write_tensors(folder, arrays)


def test_the_legacy_name_of_the_markov_head_is_read(tmp_path):
  setup = save(tmp_path, "dspark", markov_head_type="gated")
  rename(tmp_path, "markov_head.", "logit_head.")
  loaded = drafter_folder.load_drafter(tmp_path)
  assert_equal(loaded.params, setup.params)
  rename(tmp_path, "logit_head.", "other_head.")
  name = re.escape("missing markov_head.markov_w1.weight")
  with pytest.raises(ValueError, match=name):
    drafter_folder.load_drafter(tmp_path)


def test_a_dspark_file_without_copies_of_the_tables_borrows_them(tmp_path):
  setup = save(tmp_path, "dspark")
  arrays = stored_tensors.read(tmp_path)
  for name in ("embed_tokens.weight", "lm_head.weight"):
    del arrays[name]
  tensors.write_tensors(tmp_path, arrays)
  loaded = drafter_folder.load_drafter(tmp_path)
  assert_equal(loaded.params, setup.params)
  assert loaded.buffers == {}
  # And is written back as it was.
  drafter_folder.save_drafter(tmp_path / "again", *loaded)
  assert set(stored_tensors.read(tmp_path / "again")) == set(arrays)


def test_dflash2_does_without_no_tensor_of_its_own(tmp_path):
  save(tmp_path, "dflash2")
  arrays = stored_tensors.read(tmp_path)
  del arrays["layers.1.mlp_conv.base_kernel"]
  tensors.write_tensors(tmp_path, arrays)
  with pytest.raises(ValueError, match="missing layers.1.mlp_conv.base_kernel"):
    drafter_folder.load_drafter(tmp_path)
