"""What each drafting method adds to the shared configuration.

Frozen like `configs.DrafterConfig`, which holds one of them. Names and defaults
are those of the released `config.json`, where it has the option. A method's
label convention is not an option: it is in `configs.CONVENTIONS`.
"""

import dataclasses

LAYER_SUPERVISIONS = ("code_cosine", "token_ce")
MARKOV_HEADS = ("vanilla", "gated", "rnn")
OBJECTIVES = ("cross_entropy", "forward_kl", "d_pace", "ce_l1")
READOUT_INITS = ("principal", "whitened")


def require(condition: bool, name: str, value: object, why: str) -> None:
  """ValueError "name=value: why" unless the condition holds."""
  if not condition:
    raise ValueError(f"{name}={value!r}: {why}")


def _require_positive(options: object, *names: str) -> None:
  for name in names:
    value = getattr(options, name)
    require(value > 0, name, value, "must be positive")


def _require_not_negative(options: object, *names: str) -> None:
  for name in names:
    value = getattr(options, name)
    require(value >= 0, name, value, "must not be negative")


def _require_share(options: object, *names: str) -> None:
  for name in names:
    value = getattr(options, name)
    require(0 <= value <= 1, name, value, "must lie between 0 and 1")


def _require_one_of(options: object, name: str, known: tuple) -> None:
  value = getattr(options, name)
  require(value in known, name, value, f"not in {known}")


def default_replacement_layers(num_layers: int) -> int:
  """ceil(0.6 L): the paper's first 3 of 5 layers, for other depths."""
  return -(-6 * num_layers // 10)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSpineOptions:
  """What DSpine adds to the causal backbone (`dspine_config` in config.json).

  The defaults are the published method; `injects`, `refines`,
  `layer_supervision` and `readout_init` take parts of it away or replace them.

  Attributes:
    transfer_rank: R, width of the whitened token codes.
    message_size: Z, width of gate and message.
    top_k: candidates per slot.
    ce_weight: share of cross-entropy; the rest is L1 to the teacher.
    alignment_weight: beta after its warm-up.
    alignment_warmup_steps: optimiser steps over which beta rises from 0.
    replacement_layers: first layers that read true predecessors in replaced
      blocks.
    replacement_probability: rho at the start, per block.
    replacement_hold_ratio: share of training with the full rho.
    replacement_end_ratio: share of training after which rho is 0.
    candidate_mass_threshold: least teacher mass on the candidates for the L1
      part of the refinement.
    injects: whether layers write into their successors. The last layer's write
      is the refinement's all the same.
    refines: whether the final refinement is trained and selects the draft;
      without it the base logits alone are drafted from.
    layer_supervision: what `alignment_weight` weighs, see
      `drafters.layer_supervision`.
    readout_init: where readouts start, see `transfer_space.READOUTS`.
  """

  transfer_rank: int = 1024
  message_size: int = 512
  top_k: int = 16
  ce_weight: float = 0.1
  alignment_weight: float = 0.5
  alignment_warmup_steps: int = 146
  replacement_layers: int = 3
  replacement_probability: float = 0.5
  replacement_hold_ratio: float = 1 / 6
  replacement_end_ratio: float = 1 / 3
  candidate_mass_threshold: float = 1e-4
  injects: bool = True
  refines: bool = True
  layer_supervision: str = "code_cosine"
  readout_init: str = "principal"

  def __post_init__(self):
    _require_positive(self, "transfer_rank", "message_size", "top_k")
    _require_share(self, "ce_weight", "replacement_probability")
    require(
      0 <= self.replacement_hold_ratio <= self.replacement_end_ratio <= 1,
      "replacement_hold_ratio",
      self.replacement_hold_ratio,
      f"needs 0 <= hold <= end={self.replacement_end_ratio} <= 1",
    )
    _require_not_negative(self, "replacement_layers", "alignment_weight")
    _require_one_of(self, "layer_supervision", LAYER_SUPERVISIONS)
    _require_one_of(self, "readout_init", READOUT_INITS)


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlashOptions:
  """How DFlash trains (baselines, section 3.1); its model has no options.

  Attributes:
    objective: key of `dflash.OBJECTIVES`.
    ce_weight: share of cross-entropy in "ce_l1"; the rest is L1 to the teacher.
    d_pace_alpha: least confidence that "d_pace" gives a slot.
  """

  objective: str = "cross_entropy"
  ce_weight: float = 0.1
  d_pace_alpha: float = 0.5

  def __post_init__(self):
    require(
      self.objective in OBJECTIVES,
      "objective",
      self.objective,
      f"not in {OBJECTIVES}",
    )
    _require_share(self, "ce_weight", "d_pace_alpha")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DFlash2Options(DFlashOptions):
  """What DFlash2 adds: convolutions and a selector (baselines, section 4).

  The objective is that of the unary logits; the selector's term is added to it.

  Attributes:
    conv_kernel_size: taps of a convolution; 2 in all released drafters.
    conv_group_size: channels that share a dynamic kernel.
    selector_rank: width of the codebooks.
    selector_top_k: candidates per slot.
    output_multiplier: of the draft logits, for targets that scale theirs.
    final_logit_softcapping: bound c of c tanh(logit / c), or None.
    selector_loss_alpha: weight of the selector's cross-entropy.
  """

  conv_kernel_size: int = 2
  conv_group_size: int = 16
  selector_rank: int = 256
  selector_top_k: int = 16
  output_multiplier: float = 1.0
  final_logit_softcapping: float | None = None
  selector_loss_alpha: float = 1.0

  def __post_init__(self):
    super().__post_init__()
    _require_positive(
      self,
      "conv_kernel_size",
      "conv_group_size",
      "selector_rank",
      "selector_top_k",
      "output_multiplier",
    )
    if self.final_logit_softcapping is not None:
      _require_positive(self, "final_logit_softcapping")
    _require_not_negative(self, "selector_loss_alpha")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DominoOptions:
  """What Domino adds: a GRU over drafted tokens (baselines, section 5).

  Attributes:
    emb_dim: rank of the logit correction.
    gru_hidden_dim: width of the GRU's state.
    pure_draft_prefix_len: first proposals that keep their base logits.
    lambda_start: share of the base cross-entropy at step 0.
    lambda_decay_ratio: share of training over which it falls to zero.
  """

  emb_dim: int = 256
  gru_hidden_dim: int = 1024
  pure_draft_prefix_len: int = 1
  lambda_start: float = 1.0
  lambda_decay_ratio: float = 1.0

  def __post_init__(self):
    _require_positive(self, "emb_dim", "gru_hidden_dim")
    _require_not_negative(self, "pure_draft_prefix_len")
    _require_share(self, "lambda_start", "lambda_decay_ratio")


@dataclasses.dataclass(frozen=True, kw_only=True)
class DSparkOptions:
  """What DSpark adds: Markov and confidence heads (baselines, section 6).

  Attributes:
    markov_rank: width of the predecessor's embedding.
    markov_head_type: "vanilla", "gated" or "rnn".
    enable_confidence_head: whether there is one.
    confidence_head_with_markov: whether it sees the predecessor's embedding.
    confidence_threshold: proposals end before the first slot whose confidence
      is below it; 0 keeps all.
    ce_loss_alpha: weight of the cross-entropy.
    l1_loss_alpha: weight of the L1 distance to the teacher.
    confidence_head_alpha: weight of the confidence head's cross-entropy.
  """

  markov_rank: int = 256
  markov_head_type: str = "vanilla"
  enable_confidence_head: bool = True
  confidence_head_with_markov: bool = True
  confidence_threshold: float = 0.0
  ce_loss_alpha: float = 0.1
  l1_loss_alpha: float = 0.9
  confidence_head_alpha: float = 1.0

  def __post_init__(self):
    _require_positive(self, "markov_rank")
    _require_one_of(self, "markov_head_type", MARKOV_HEADS)
    _require_not_negative(
      self, "ce_loss_alpha", "l1_loss_alpha", "confidence_head_alpha"
    )
    _require_share(self, "confidence_threshold")
    threshold = self.confidence_threshold
    require(
      threshold == 0 or self.enable_confidence_head,
      "confidence_threshold",
      threshold,
      "needs enable_confidence_head",
    )
