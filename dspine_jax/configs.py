"""Frozen, hashable configurations of targets, drafters, training and decoding.

They are static arguments of jitted functions. They hold no arrays and read no
files; `checkpoints.hf_config` converts them to and from `config.json`.
"""

import dataclasses
import math
from typing import Any, NamedTuple

from dspine_jax import attention_masks
from dspine_jax.method_options import (
  DFlash2Options,
  DFlashOptions,
  DominoOptions,
  DSparkOptions,
  DSpineOptions,
  default_replacement_layers,
)
from dspine_jax.method_options import require as _require
from dspine_jax.rope_scaling import RopeScaling
from dspine_jax.target import tapped_layers
from dspine_jax.target_config import TargetConfig, check_widths

OPTIMIZERS = ("adamw", "muon")
LR_SCHEDULES = ("cosine", "wsd")
VERIFY_RULES = ("greedy", "rejection", "exact_match")


@dataclasses.dataclass(frozen=True, kw_only=True)
class OptimizerConfig:
  """One optimiser run; the same for all methods that are compared.

  Attributes:
    name: "adamw" or "muon" (optax.contrib.muon).
    total_steps: optimiser steps of the whole run.
    schedule: "cosine", or "wsd": constant, then linear over `decay_ratio`.
    warmup_ratio: share of the steps with linearly rising learning rate.
    decay_ratio: last share of the steps, in which "wsd" decays.
    final_lr_ratio: learning rate at the end over its peak.
    clip_norm: bound of the global gradient norm.
  """

  name: str = "adamw"
  learning_rate: float = 6e-4
  total_steps: int
  schedule: str = "cosine"
  warmup_ratio: float = 0.04
  decay_ratio: float = 0.4
  final_lr_ratio: float = 0.0
  weight_decay: float = 0.0
  clip_norm: float = 1.0
  adam_b1: float = 0.9
  adam_b2: float = 0.95

  def __post_init__(self):
    _require(self.name in OPTIMIZERS, "name", self.name, f"not in {OPTIMIZERS}")
    _require(
      self.schedule in LR_SCHEDULES,
      "schedule",
      self.schedule,
      f"not in {LR_SCHEDULES}",
    )
    _require(
      self.total_steps > 0, "total_steps", self.total_steps, "must be > 0"
    )
    for name in ("learning_rate", "clip_norm"):
      value = getattr(self, name)
      _require(value > 0, name, value, "must be positive")
    for name in ("warmup_ratio", "decay_ratio", "final_lr_ratio"):
      value = getattr(self, name)
      _require(0 <= value <= 1, name, value, "must lie between 0 and 1")
    for name in ("adam_b1", "adam_b2"):
      value = getattr(self, name)
      _require(0 <= value < 1, name, value, "must lie in [0, 1)")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DrafterConfig:
  """A block drafter of any method, in the widths of its target.

  Attributes:
    method: key of `drafters.DRAFTERS`.
    hidden_size: equals the target's, whose embedding and head are borrowed.
    block_size: slots of a block, the anchor's included.
    mask_token_id: token embedded in slots 1...
    target_layer_ids: tapped target layers, ascending, zero-based.
    num_target_layers: depth of the target that the taps refer to; None if the
      drafter's file does not tell.
    draft_vocab_size: V', tokens that the drafter's own head can propose; None
      for all of the vocabulary. Only DFlash has such drafters, which are
      decoded, not trained.
    is_causal: slots see only slots at or before them.
    sample_from_anchor: slot k predicts token anchor + k + 1 (label shift), so
      that slot 0 predicts too; otherwise slot k predicts token anchor + k.
    decay_gamma: constant of the position weights exp(-position / gamma).
    layer_types: of each layer, one of `attention_masks.LAYER_TYPES`; empty if
      all are full.
    sliding_window: context that sliding layers see, in positions; None exactly
      if no layer slides.
    sliding_window_convention: where the window begins, and the rule inside the
      block; key of `attention_masks.WINDOW_CONVENTIONS`.
    dtype: of activations, matrix products and caches, as in `TargetConfig`.
    bos_token_id, eos_token_ids, tie_embeddings: of the target; written in
      config.json, where serving tools look for them.
    dflash, dflash2, domino, dspark, dspine: options of the method of that name;
      None for all others.
  """

  method: str
  vocab_size: int
  hidden_size: int
  intermediate_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  rope_theta: float = 1e6
  rope_scaling: RopeScaling | None = None
  rms_norm_eps: float = 1e-6
  max_positions: int = 40960
  block_size: int = 16
  mask_token_id: int
  target_layer_ids: tuple[int, ...]
  num_target_layers: int | None
  draft_vocab_size: int | None = None
  is_causal: bool = False
  sample_from_anchor: bool = False
  decay_gamma: float = 7.0
  layer_types: tuple[str, ...] = ()
  sliding_window: int | None = None
  sliding_window_convention: str = attention_masks.DEFAULT_CONVENTION
  dtype: str = "float32"
  bos_token_id: int | None = None
  eos_token_ids: tuple[int, ...] = ()
  tie_embeddings: bool = False
  dflash: DFlashOptions | None = None
  dflash2: DFlash2Options | None = None
  domino: DominoOptions | None = None
  dspark: DSparkOptions | None = None
  dspine: DSpineOptions | None = None

  def __post_init__(self):
    check_widths(self)
    _require(
      self.block_size >= 2, "block_size", self.block_size, "must be at least 2"
    )
    _require(
      0 <= self.mask_token_id < self.vocab_size,
      "mask_token_id",
      self.mask_token_id,
      f"must be a row of the embedding (vocab_size={self.vocab_size})",
    )
    _require(
      self.decay_gamma > 0, "decay_gamma", self.decay_gamma, "must be positive"
    )
    tapped_layers.check_tapped_layers(
      self.target_layer_ids, self.num_target_layers
    )
    if self.draft_vocab_size is not None:
      self._check_at_most(
        "draft_vocab_size", self.draft_vocab_size, "vocab_size"
      )
      _require(
        self.method == "dflash",
        "draft_vocab_size",
        self.draft_vocab_size,
        f"method {self.method!r} scores the whole vocabulary"
        f" (vocab_size={self.vocab_size}); only dflash may have a reduced one",
      )
    attention_masks.check_windows(
      self.layer_types,
      self.sliding_window,
      self.sliding_window_convention,
      num_layers=self.num_layers,
      block_size=self.block_size,
    )
    if self.dspine is not None:
      self._check_at_most(
        "transfer_rank", self.dspine.transfer_rank, "hidden_size"
      )
      self._check_at_most("top_k", self.dspine.top_k, "vocab_size")
      supervision = self.dspine.layer_supervision
      _require(
        supervision != "token_ce" or self.num_layers > 1,
        "layer_supervision",
        supervision,
        f"has no layer below the last one (num_layers={self.num_layers})",
      )
    if self.dflash2 is not None:
      self._check_at_most(
        "selector_top_k", self.dflash2.selector_top_k, "vocab_size"
      )
      _require(
        self.hidden_size % self.dflash2.conv_group_size == 0,
        "conv_group_size",
        self.dflash2.conv_group_size,
        f"must divide hidden_size={self.hidden_size}",
      )

  def _check_at_most(self, name: str, value: int, bound: str) -> None:
    limit = getattr(self, bound)
    _require(value <= limit, name, value, f"cannot exceed {bound}={limit}")

  @property
  def qk_norm(self) -> bool:
    """Draft layers are Qwen3-style whatever the target is."""
    return True

  @property
  def biased_projections(self) -> tuple[str, ...]:
    """No drafter was released with a bias in its attention."""
    return ()

  @property
  def first_slot(self) -> int:
    """First slot that predicts: 0 with label shift, else 1."""
    return 0 if self.sample_from_anchor else 1

  @property
  def num_proposals(self) -> int:
    """Tokens proposed per round."""
    return self.block_size - self.first_slot


class Conventions(NamedTuple):
  """What the released drafters of a method have in common.

  Attributes:
    options: class of the method's options, or None.
    is_causal: as in `DrafterConfig`.
    sample_from_anchor: as in `DrafterConfig`.
    decay_gamma: as in `DrafterConfig`; None goes by the block size.
  """

  options: type | None = None
  is_causal: bool = False
  sample_from_anchor: bool = False
  decay_gamma: float | None = None


# What a configuration takes unless it says otherwise (baselines, section 1).
# Methods that are not named here follow DFlash and have no options.
CONVENTIONS = {
  "dflash": Conventions(options=DFlashOptions),
  "dflash2": Conventions(options=DFlash2Options),
  "domino": Conventions(
    options=DominoOptions, sample_from_anchor=True, decay_gamma=7.0
  ),
  "dspark": Conventions(
    options=DSparkOptions, sample_from_anchor=True, decay_gamma=4.0
  ),
  "dspine": Conventions(options=DSpineOptions, is_causal=True, decay_gamma=7.0),
}


def conventions(method: str) -> Conventions:
  """Those of the method, or DFlash's without its options."""
  return CONVENTIONS.get(method, Conventions())


def default_options(method: str, num_layers: int, **given: Any) -> Any:
  """A method's released options with the given ones changed, or None."""
  made = conventions(method).options
  if made is None:
    return None
  if made is DSpineOptions:
    given = {
      "replacement_layers": default_replacement_layers(num_layers)
    } | given
  return made(**given)


def drafter_for(
  target: TargetConfig,
  method: str,
  *,
  num_layers: int,
  mask_token_id: int,
  block_size: int = 16,
  is_causal: bool | None = None,
  sliding_window: int | None = None,
  sliding_window_convention: str = "automodel",
  **options: Any,
) -> DrafterConfig:
  """A drafter in the widths of `target`, with the released conventions.

  Args:
    target: whose embedding and head are borrowed.
    method: key of `drafters.DRAFTERS`.
    num_layers: draft layers.
    mask_token_id: token of empty slots.
    block_size: slots of a block.
    is_causal: as in `DrafterConfig`; None takes the method's convention.
    sliding_window: of all layers; None makes them full.
    sliding_window_convention: as in `DrafterConfig`.
    **options: name of a method -> its options. Only those of `method` are
      used; None or nothing takes the released ones.
  """
  convention = conventions(method)
  own = {}
  if convention.options is not None:
    made = options.get(method)
    own[method] = default_options(method, num_layers) if made is None else made
  return DrafterConfig(
    method=method,
    vocab_size=target.vocab_size,
    hidden_size=target.hidden_size,
    intermediate_size=target.intermediate_size,
    num_layers=num_layers,
    num_heads=target.num_heads,
    num_kv_heads=target.num_kv_heads,
    head_dim=target.head_dim,
    dtype=target.dtype,
    rope_theta=target.rope_theta,
    rms_norm_eps=target.rms_norm_eps,
    max_positions=target.max_positions,
    block_size=block_size,
    mask_token_id=mask_token_id,
    target_layer_ids=tapped_layers.tapped_layers(target.num_layers, num_layers),
    num_target_layers=target.num_layers,
    is_causal=convention.is_causal if is_causal is None else is_causal,
    layer_types=()
    if sliding_window is None
    else ("sliding_attention",) * num_layers,
    sliding_window=sliding_window,
    sliding_window_convention=sliding_window_convention,
    sample_from_anchor=convention.sample_from_anchor,
    decay_gamma=convention.decay_gamma or default_decay_gamma(block_size),
    bos_token_id=target.bos_token_id,
    eos_token_ids=target.eos_token_ids,
    tie_embeddings=target.tie_embeddings,
    **own,
  )


def default_decay_gamma(block_size: int) -> float:
  """DFlash's constants: 7, 5, 4 for blocks of 16, 10, 8 (baselines, 3.1)."""
  return {16: 7.0, 10: 5.0, 8: 4.0}.get(block_size, max(1.0, block_size / 2.25))


@dataclasses.dataclass(frozen=True, kw_only=True)
class SamplingConfig:
  """How the next token is drawn from logits.

  Attributes:
    temperature: 0 takes the argmax.
    top_k: most likely tokens kept; 0 keeps all.
    top_p: mass of the most likely tokens kept; 1 keeps all.
  """

  temperature: float = 0.0
  top_k: int = 0
  top_p: float = 1.0

  def __post_init__(self):
    _require(
      0 <= self.temperature < math.inf,
      "temperature",
      self.temperature,
      "must be finite and not negative",
    )
    _require(self.top_k >= 0, "top_k", self.top_k, "must not be negative")
    _require(0 < self.top_p <= 1, "top_p", self.top_p, "must lie in (0, 1]")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DecodeConfig:
  """How a request is decoded.

  Attributes:
    max_new_tokens: size of the output buffer, and each row's default limit.
    stop_tokens: any of these ends a row; it is kept as the last token.
    sampling: of target and draft alike.
    rule: "greedy" (temperature 0), "rejection" or "exact_match".
    proposal: how the draft is drawn at temperature > 0: "greedy", or one of
      the method's `proposal_kinds`; None takes its first.
  """

  max_new_tokens: int = 256
  stop_tokens: tuple[int, ...] = ()
  sampling: SamplingConfig = SamplingConfig()
  rule: str = "greedy"
  proposal: str | None = None

  def __post_init__(self):
    _require(
      self.max_new_tokens > 0,
      "max_new_tokens",
      self.max_new_tokens,
      "must be positive",
    )
    _require(
      self.rule in VERIFY_RULES, "rule", self.rule, f"not in {VERIFY_RULES}"
    )
    greedy = self.sampling.temperature == 0
    _require(
      greedy == (self.rule == "greedy"),
      "rule",
      self.rule,
      f"does not fit temperature={self.sampling.temperature} (greedy is the"
      " rule of temperature 0 and only of it)",
    )
    _require(
      not (self.rule == "rejection" and self.proposal == "greedy"),
      "proposal",
      self.proposal,
      "rejection sampling needs a sampled draft",
    )


@dataclasses.dataclass(frozen=True, kw_only=True)
class TrainConfig:
  """One training run of a drafter.

  Attributes:
    optimizer: the same for all methods that are compared.
    batch_size: sequences per micro-batch.
    accumulation: micro-batches per optimiser step.
    num_anchors: draft blocks per sequence.
    chunk_blocks: blocks whose full-vocabulary rows exist at the same time.
    seed: of parameters, anchors, replacement and data order.
  """

  optimizer: OptimizerConfig
  batch_size: int = 8
  accumulation: int = 1
  num_anchors: int = 16
  chunk_blocks: int = 16
  seed: int = 0

  def __post_init__(self):
    for name in ("batch_size", "accumulation", "num_anchors", "chunk_blocks"):
      value = getattr(self, name)
      _require(value > 0, name, value, "must be positive")
