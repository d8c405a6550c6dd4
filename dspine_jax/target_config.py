"""Configuration of a target: a dense decoder of one of a few families.

Frozen and hashable, as all configurations (`configs.py`). Families differ in
what `Family` says and are otherwise the same: pre-norm layers with RoPE,
grouped keys and SwiGLU. Not here: the keys of their `config.json`
(`checkpoints/hf_config.py`), and mixtures of experts, which no family has.
"""

import dataclasses
from typing import Any, NamedTuple

from dspine_jax.method_options import require as _require
from dspine_jax.rope_scaling import RopeScaling

_QKV = ("q_proj", "k_proj", "v_proj")


class Family(NamedTuple):
  """What tells a family from the others.

  Attributes:
    qk_norm: per-head RMSNorm of queries and keys before RoPE.
    biased: projections of the attention that always have a bias.
    may_be_biased: whether `attention_bias` may give all four projections one.
  """

  qk_norm: bool = False
  biased: tuple[str, ...] = ()
  may_be_biased: bool = False


# By `model_type`. Llama 2, 3.x and SmolLM2 are "llama", Qwen2.5 is "qwen2".
FAMILIES = {
  "qwen3": Family(qk_norm=True, may_be_biased=True),
  "llama": Family(may_be_biased=True),
  "qwen2": Family(biased=_QKV),
  "mistral": Family(),
}

# bfloat16 is for GPUs; XLA:CPU is slower in it.
DTYPES = ("float32", "bfloat16")


@dataclasses.dataclass(frozen=True, kw_only=True)
class TargetConfig:
  """A dense decoder of one of `FAMILIES`.

  Attributes:
    model_type: the family.
    head_dim: independent of hidden_size / num_heads.
    attention_bias: q, k, v and o have a bias, where the family may have one.
    tie_embeddings: the head is the embedding table.
    eos_token_ids: stop tokens of the model's own config, possibly none.
    max_positions: longest sequence the positions were made for.
    dtype: of activations, matrix products and caches, one of `DTYPES`; norms,
      softmax, logits and sums are float32, parameters keep their own.
  """

  model_type: str = "qwen3"
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
  attention_bias: bool = False
  tie_embeddings: bool = True
  max_positions: int = 40960
  eos_token_ids: tuple[int, ...] = ()
  bos_token_id: int | None = None
  dtype: str = "float32"

  def __post_init__(self):
    check_widths(self)
    known = tuple(FAMILIES)
    _require(
      self.model_type in known, "model_type", self.model_type, f"not in {known}"
    )
    _require(
      not self.attention_bias or self._family.may_be_biased,
      "attention_bias",
      self.attention_bias,
      f"is not of the family {self.model_type}",
    )

  @property
  def _family(self) -> Family:
    return FAMILIES[self.model_type]

  @property
  def qk_norm(self) -> bool:
    """Per-head RMSNorm of queries and keys before RoPE."""
    return self._family.qk_norm

  @property
  def biased_projections(self) -> tuple[str, ...]:
    """Projections of the attention that have a bias."""
    return (*_QKV, "o_proj") if self.attention_bias else self._family.biased


def check_widths(cfg: Any) -> None:
  """ValueError unless the sizes of a target or a drafter fit each other."""
  for name in (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_layers",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "max_positions",
  ):
    value = getattr(cfg, name)
    _require(
      isinstance(value, int) and value > 0,
      name,
      value,
      "must be a positive integer",
    )
  _require(
    cfg.num_heads % cfg.num_kv_heads == 0,
    "num_kv_heads",
    cfg.num_kv_heads,
    f"must divide num_heads={cfg.num_heads}",
  )
  _require(cfg.head_dim % 2 == 0, "head_dim", cfg.head_dim, "must be even")
  _require(cfg.dtype in DTYPES, "dtype", cfg.dtype, f"not in {DTYPES}")


def embedded_target() -> TargetConfig:
  """The target that ships with the package: deep and thin, 5.1 M parameters."""
  return TargetConfig(
    vocab_size=2048,
    hidden_size=192,
    intermediate_size=512,
    num_layers=12,
    num_heads=6,
    num_kv_heads=2,
    head_dim=32,
    rope_theta=1e4,
    max_positions=2048,
  )
