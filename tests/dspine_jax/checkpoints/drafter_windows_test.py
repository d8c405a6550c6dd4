"""Sliding layers in config.json: who wrote it decides how they run."""

import json
import pathlib

import pytest

from dspine_jax import configs
from dspine_jax.checkpoints import drafter_config, drafter_formats
from dspine_jax.drafters import methods
from tests import drafter_files, tiny_models

METHODS = sorted(methods.DRAFTERS)
GOLDEN = pathlib.Path(__file__).parents[2] / "golden"


def parse(config):
  return drafter_config.from_json(config)


def sliding(method, **nested):
  """A released config.json with a sliding layer and no `is_causal`."""
  config = drafter_files.read_config(GOLDEN / method)
  if method == "dspark":
    config = drafter_config.to_json(parse(config), "specforge")
  config.pop("is_causal", None)
  count = config["num_hidden_layers"]
  own = {**config["dflash_config"], **nested}
  return config | {
    "dflash_config": {k: v for k, v in own.items() if v is not None},
    "layer_types": ["sliding_attention"] + ["full_attention"] * (count - 1),
    "sliding_window": 64,
    "use_sliding_window": True,
  }


@pytest.mark.parametrize(
  ("method", "projector", "convention"),
  [
    ("domino", "domino", "specforge"),
    ("domino", None, "specforge"),
    ("dspark", "dspark", "specforge"),
    ("dspark", None, "specforge"),
    ("dspine", None, "specforge"),
    ("dflash", "dflash", "specforge"),
    # These do not tell who wrote them.
    ("dflash", None, "automodel"),
    ("dflash2", None, "automodel"),
  ],
)
def test_sliding_layers_of_specforge_are_causal_unless_a_key_says_else(
  method, projector, convention
):
  config = sliding(method, projector_type=projector)
  for absent in ({}, {"is_causal": None}):
    got = parse(config | absent)
    assert got.sliding_window_convention == convention
    assert (got.method, got.is_causal) == (method, method == "dspine")
  # A value holds for all layers, whoever wrote it.
  for value in (False, True):
    got = parse(config | {"is_causal": value})
    assert got.sliding_window_convention == "automodel"
    assert got.is_causal == value
  named = parse(config | {"sliding_window_convention": "automodel"})
  assert named.sliding_window_convention == "automodel"


@pytest.mark.parametrize("is_causal", [True, False])
@pytest.mark.parametrize("method", METHODS)
def test_causality_and_windows_are_written_and_read_back(method, is_causal):
  for convention in (None, *tiny_models.WINDOWS):
    changes = {} if convention is None else tiny_models.windowed(convention)
    cfg = tiny_models.drafter_config(method, is_causal=is_causal, **changes)
    written = drafter_config.to_json(cfg)
    usual = configs.conventions(method).is_causal
    assert written.get("is_causal", usual) == is_causal
    assert written["use_sliding_window"] == bool(changes)
    assert parse(json.loads(json.dumps(written))) == cfg


@pytest.mark.parametrize("form", ["specforge", "zlab"])
@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize("convention", ["automodel", "specforge"])
@pytest.mark.parametrize("method", METHODS)
def test_specforge_runs_a_written_drafter_as_it_was_trained(
  method, convention, is_causal, form
):
  changes = tiny_models.windowed(convention)
  cfg = tiny_models.drafter_config(method, is_causal=is_causal, **changes)
  only_sliding = convention == "specforge" and not is_causal
  if form == "zlab" and (
    convention == "specforge" or method not in ("dflash", "dflash2")
  ):
    with pytest.raises(ValueError, match="form='zlab'"):
      drafter_config.to_json(cfg, form)
    return
  if only_sliding and method == "dspine":
    with pytest.raises(ValueError, match="DSpine's sliding layers alone"):
      drafter_config.to_json(cfg, form)
    return
  written = drafter_config.to_json(cfg, form)
  # Its rule, which is SGLang's: a value holds for all layers, and without one
  # full layers see all of their block and sliding ones are causal.
  given = written.get("is_causal")
  rule = {"full_attention": given, "sliding_attention": given}
  if given is None:
    rule = {"full_attention": False, "sliding_attention": True}
  assert rule["full_attention"] == is_causal
  assert rule["sliding_attention"] == (is_causal or convention == "specforge")
  assert parse(json.loads(json.dumps(written))) == cfg
  if form == "specforge":
    assert written["sliding_window_convention"] == convention


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_a_drafter_of_specforge_s_windows_stays_in_its_form(method):
  changes = tiny_models.windowed("specforge")
  cfg = tiny_models.drafter_config(method, **changes)
  written = drafter_config.to_json(cfg)
  assert drafter_formats.form_of(written) == "specforge"
  assert written == drafter_config.to_json(cfg, "specforge")
