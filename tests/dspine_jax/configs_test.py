import dataclasses
import math

import pytest

from dspine_jax import configs, rope_scaling
from tests import tiny_models


def refused(config, match, **changes):
  with pytest.raises(ValueError, match=match):
    dataclasses.replace(config, **changes)


@pytest.mark.parametrize(
  "name",
  [
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
  ],
)
@pytest.mark.parametrize("value", [0, -4])
def test_widths_must_be_positive_integers(name, value):
  for config in (
    tiny_models.target_config(),
    tiny_models.drafter_config("dflash"),
  ):
    refused(config, f"{name}={value!r}: must be a positive", **{name: value})


def test_heads_must_divide_and_head_width_be_even():
  config = tiny_models.target_config()
  refused(config, "num_kv_heads=3: must divide num_heads=4", num_kv_heads=3)
  refused(config, "head_dim=7: must be even", head_dim=7)


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"block_size": 1}, "block_size=1: must be at least 2"),
    ({"mask_token_id": 61}, r"mask_token_id=61: .*vocab_size=61"),
    ({"mask_token_id": -1}, "mask_token_id=-1"),
    ({"decay_gamma": 0.0}, "decay_gamma=0.0: must be positive"),
    ({"target_layer_ids": (0, 3)}, "layer 3 cannot be tapped"),
    ({"target_layer_ids": (2, 1)}, "ascending"),
    (
      {"dspine": configs.DSpineOptions(transfer_rank=25, top_k=4)},
      "transfer_rank=25: cannot exceed hidden_size=24",
    ),
    (
      {"dspine": configs.DSpineOptions(transfer_rank=8, top_k=62)},
      "top_k=62: cannot exceed vocab_size=61",
    ),
  ],
)
def test_an_impossible_drafter_is_refused_by_name(changes, match):
  refused(tiny_models.drafter_config("dspine"), match, **changes)


SLIDING = {
  "layer_types": ("full_attention", "sliding_attention"),
  "sliding_window": 8,
}


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"sliding_window": None}, "sliding_window=None: does not fit layer_types"),
    ({"layer_types": ()}, r"sliding_window=8: does not fit layer_types=\(\)"),
    ({"layer_types": ("full_attention",) * 2}, "sliding_window=8: does not"),
    ({"layer_types": ("sliding_attention",)}, "one for each of num_layers=2"),
    ({"layer_types": ("sliding", "full")}, "layer_types=.*: not all in"),
    ({"sliding_window": 4}, "sliding_window=4: .* at least block_size=5"),
    (
      {"sliding_window_convention": "vllm"},
      "sliding_window_convention='vllm': not in .*speculators",
    ),
  ],
)
def test_an_impossible_window_is_refused_by_name(changes, match):
  cfg = tiny_models.drafter_config("dflash", **SLIDING)
  refused(cfg, match, **changes)


def test_a_convention_without_a_window_is_refused():
  match = "sliding_window_convention='specforge': needs a sliding_window"
  cfg = tiny_models.drafter_config("dflash")
  refused(cfg, match, sliding_window_convention="specforge")


@pytest.mark.parametrize("method", sorted(configs.CONVENTIONS))
def test_every_method_takes_windows_and_either_causality(method):
  # Heads of a released width fit into this target.
  target = tiny_models.target_config(
    num_layers=36, hidden_size=1024, vocab_size=1100
  )
  sizes = {"num_layers": 3, "mask_token_id": 60, "block_size": 8}
  own = configs.conventions(method).is_causal
  for is_causal, want in ((None, own), (True, True), (False, False)):
    cfg = configs.drafter_for(target, method, is_causal=is_causal, **sizes)
    assert cfg.is_causal == want
    assert cfg.layer_types == () and cfg.sliding_window is None
  cfg = configs.drafter_for(
    target,
    method,
    sliding_window=9,
    sliding_window_convention="specforge",
    **sizes,
  )
  assert cfg.layer_types == ("sliding_attention",) * 3
  assert cfg.sliding_window == 9
  assert cfg.sliding_window_convention == "specforge"


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"transfer_rank": 0}, "transfer_rank=0"),
    ({"message_size": -1}, "message_size=-1"),
    ({"top_k": 0}, "top_k=0"),
    ({"ce_weight": 1.5}, "ce_weight=1.5: must lie between 0 and 1"),
    ({"replacement_probability": -0.1}, "replacement_probability=-0.1"),
    ({"replacement_hold_ratio": 0.5}, "replacement_hold_ratio=0.5: needs"),
    ({"replacement_end_ratio": 1.5}, "replacement_hold_ratio"),
    ({"replacement_layers": -1}, "replacement_layers=-1"),
    ({"alignment_weight": -0.5}, "alignment_weight=-0.5: must not"),
    ({"layer_supervision": "mse"}, "layer_supervision='mse': not in"),
    ({"readout_init": "random"}, "readout_init='random': not in"),
  ],
)
def test_impossible_dspine_options_are_refused_by_name(changes, match):
  refused(configs.DSpineOptions(), match, **changes)


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"name": "sgd"}, "name='sgd': not in"),
    ({"schedule": "linear"}, "schedule='linear': not in"),
    ({"total_steps": 0}, "total_steps=0"),
    ({"learning_rate": 0.0}, "learning_rate=0.0"),
    ({"clip_norm": -1.0}, "clip_norm=-1.0"),
    ({"warmup_ratio": 1.1}, "warmup_ratio=1.1"),
    ({"decay_ratio": -0.1}, "decay_ratio=-0.1"),
    ({"final_lr_ratio": 2.0}, "final_lr_ratio=2.0"),
  ],
)
def test_an_impossible_optimizer_is_refused_by_name(changes, match):
  refused(configs.OptimizerConfig(total_steps=10), match, **changes)


@pytest.mark.parametrize(
  ("changes", "match"),
  [
    ({"temperature": -0.1}, "temperature=-0.1"),
    ({"temperature": math.inf}, "temperature=inf"),
    ({"temperature": math.nan}, "temperature=nan"),
    ({"top_k": -1}, "top_k=-1"),
    ({"top_p": 0.0}, "top_p=0.0"),
    ({"top_p": 1.1}, "top_p=1.1"),
  ],
)
def test_impossible_sampling_is_refused_by_name(changes, match):
  refused(configs.SamplingConfig(), match, **changes)


def test_the_verify_rule_must_fit_the_temperature():
  warm = configs.SamplingConfig(temperature=1.0)
  configs.DecodeConfig(sampling=warm, rule="rejection")
  configs.DecodeConfig(sampling=warm, rule="exact_match", proposal="greedy")
  for sampling, rule, match in (
    (warm, "greedy", "rule='greedy': does not fit temperature=1.0"),
    (configs.SamplingConfig(), "rejection", "temperature=0.0"),
    (configs.SamplingConfig(), "typical", "rule='typical': not in"),
  ):
    with pytest.raises(ValueError, match=match):
      configs.DecodeConfig(sampling=sampling, rule=rule)
  with pytest.raises(ValueError, match="proposal='greedy': rejection"):
    configs.DecodeConfig(sampling=warm, rule="rejection", proposal="greedy")
  with pytest.raises(ValueError, match="max_new_tokens=0"):
    configs.DecodeConfig(max_new_tokens=0)


def test_configurations_are_hashable_and_frozen():
  for config in (
    tiny_models.target_config(
      rope_scaling=rope_scaling.Llama3Scaling(factor=2.0)
    ),
    tiny_models.drafter_config("dspine"),
    configs.OptimizerConfig(total_steps=1),
    configs.DecodeConfig(),
  ):
    assert hash(config) == hash(dataclasses.replace(config))
    with pytest.raises(dataclasses.FrozenInstanceError):
      config.vocab_size = 3


def test_the_label_shift_decides_slots_and_proposals():
  plain = tiny_models.drafter_config("dflash")
  shifted = tiny_models.drafter_config("dflash", sample_from_anchor=True)
  assert (plain.first_slot, plain.num_proposals) == (1, 4)
  assert (shifted.first_slot, shifted.num_proposals) == (0, 5)


@pytest.mark.parametrize("layers", range(1, 12))
def test_three_fifths_of_the_layers_are_replaced_rounded_up(layers):
  got = configs.default_replacement_layers(layers)
  assert got == math.ceil(round(0.6 * layers, 9))


def test_the_paper_replaces_three_of_five_layers():
  assert configs.default_replacement_layers(5) == 3
  assert configs.DSpineOptions().replacement_layers == 3


@pytest.mark.parametrize(("block", "gamma"), [(16, 7), (10, 5), (8, 4)])
def test_decay_constants_of_dflash(block, gamma):
  assert configs.default_decay_gamma(block) == gamma


def test_a_drafter_takes_widths_taps_and_conventions():
  target = tiny_models.target_config(num_layers=36)
  dflash = configs.drafter_for(
    target, "dflash", num_layers=5, mask_token_id=60, block_size=8
  )
  dspine = configs.drafter_for(
    target,
    "dspine",
    num_layers=4,
    mask_token_id=60,
    dspine=configs.DSpineOptions(transfer_rank=8, message_size=4),
  )
  for name in ("vocab_size", "hidden_size", "head_dim", "rope_theta"):
    assert getattr(dflash, name) == getattr(target, name)
  assert dflash.target_layer_ids == (1, 9, 17, 25, 33)
  assert dflash.num_target_layers == 36
  assert not dflash.is_causal and dspine.is_causal
  assert dflash.dspine is None and dspine.dspine.transfer_rank == 8
  assert dflash.decay_gamma == 4 and dspine.decay_gamma == 7
  assert dspine.block_size == 16 and dspine.num_proposals == 15


def test_a_drafter_inherits_neither_the_scaling_nor_the_biases_of_its_target():
  target = tiny_models.target_config(
    num_layers=6,
    attention_bias=True,
    rope_scaling=rope_scaling.YarnScaling(
      factor=4.0, original_max_positions=64
    ),
  )
  made = configs.drafter_for(target, "dflash", num_layers=2, mask_token_id=60)
  assert made.rope_scaling is None
  assert target.biased_projections and not made.biased_projections


@pytest.mark.parametrize(
  ("method", "proposals", "gamma", "options"),
  [
    ("dflash", 7, 4.0, configs.DFlashOptions()),
    ("dflash2", 7, 4.0, configs.DFlash2Options()),
    ("domino", 8, 7.0, configs.DominoOptions()),
    ("dspark", 8, 4.0, configs.DSparkOptions()),
    ("dspine", 7, 7.0, configs.DSpineOptions(replacement_layers=2)),
  ],
)
def test_a_method_takes_its_released_conventions(
  method, proposals, gamma, options
):
  target = tiny_models.target_config(num_layers=36, hidden_size=1024)
  others = {"dspark": configs.DSparkOptions(markov_rank=3)}
  cfg = configs.drafter_for(
    target,
    method,
    num_layers=3,
    mask_token_id=60,
    block_size=8,
    **(others if method != "dspark" else {}),
  )
  assert (cfg.num_proposals, cfg.decay_gamma) == (proposals, gamma)
  assert cfg.is_causal == (method == "dspine")
  for name in configs.CONVENTIONS:
    assert getattr(cfg, name) == (options if name == method else None)


@pytest.mark.parametrize(
  ("options", "changes", "match"),
  [
    ("DFlashOptions", {"objective": "kl"}, "objective='kl': not in"),
    ("DFlashOptions", {"ce_weight": 1.5}, "ce_weight=1.5: must lie"),
    ("DFlashOptions", {"d_pace_alpha": -0.1}, "d_pace_alpha=-0.1: must lie"),
    ("DFlash2Options", {"objective": "tv"}, "objective='tv': not in"),
    ("DFlash2Options", {"selector_rank": 0}, "selector_rank=0: must be"),
    ("DFlash2Options", {"conv_kernel_size": 0}, "conv_kernel_size=0"),
    ("DFlash2Options", {"final_logit_softcapping": 0.0}, "softcapping=0.0"),
    ("DFlash2Options", {"selector_loss_alpha": -1.0}, "alpha=-1.0: must not"),
    ("DominoOptions", {"gru_hidden_dim": 0}, "gru_hidden_dim=0: must be"),
    ("DominoOptions", {"pure_draft_prefix_len": -1}, "prefix_len=-1: must not"),
    ("DominoOptions", {"lambda_start": 1.5}, "lambda_start=1.5: must lie"),
    ("DSparkOptions", {"markov_head_type": "lstm"}, "type='lstm': not in"),
    ("DSparkOptions", {"l1_loss_alpha": -0.1}, "alpha=-0.1: must not"),
    (
      "DSparkOptions",
      {"confidence_threshold": 0.5, "enable_confidence_head": False},
      "confidence_threshold=0.5: needs enable_confidence_head",
    ),
  ],
)
def test_impossible_options_of_a_method_are_refused(options, changes, match):
  with pytest.raises(ValueError, match=match):
    getattr(configs, options)(**changes)
