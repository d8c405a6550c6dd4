"""Parameters of a dense decoder, counted from its `config.json`.

One line a family for what it adds to two embeddings, attention and MLP; the
counts agree with the released checkpoints to the last parameter. Families:
Llama, Mistral, Qwen2, Qwen3, Gemma 1 to 3, Granite, Phi, Phi-3, OPT, Falcon,
StarCoder2. No other `model_type` is guessed at.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple


class Sizes(NamedTuple):
  """The sizes of a decoder, under one name each."""

  hidden_size: int
  num_layers: int
  num_heads: int
  num_kv_heads: int
  head_dim: int
  intermediate_size: int
  vocab_size: int


class Family(NamedTuple):
  """How a `model_type` differs from Llama.

  Attributes:
    gated: the MLP has three matrices instead of two.
    norms: vectors of width d in the norms of a layer (LayerNorm has two each).
    final_norm: the same for the last norm.
    attention_bias: which of "qkv" and "o" have a bias if the configuration
      does not say `attention_bias`, `qkv_bias`, `use_bias` or `bias`.
    mlp_bias: whether the matrices of the MLP have one, unless it says so.
    head_norms: norms over `head_dim`, in each layer.
    tied: whether the head is the embedding, unless the configuration says.
    head_bias: the untied head has a bias.
  """

  gated: bool = True
  norms: int = 2
  final_norm: int = 1
  attention_bias: str = ""
  mlp_bias: bool = False
  head_norms: int = 0
  tied: bool = False
  head_bias: bool = False


FAMILIES = {
  "llama": Family(),
  "mistral": Family(),
  "granite": Family(),
  "qwen2": Family(attention_bias="qkv"),
  "qwen3": Family(head_norms=2),
  "gemma": Family(tied=True),
  "gemma2": Family(norms=4, tied=True),
  "gemma3": Family(norms=4, head_norms=2, tied=True),
  "gemma3_text": Family(norms=4, head_norms=2, tied=True),
  "phi3": Family(),
  "phi": Family(
    gated=False,
    norms=2,  # One LayerNorm, shared by attention and MLP.
    final_norm=2,
    attention_bias="qkvo",
    mlp_bias=True,
    head_bias=True,
  ),
  "starcoder2": Family(
    gated=False,
    norms=4,
    final_norm=2,
    attention_bias="qkvo",
    mlp_bias=True,
    tied=True,
  ),
  "opt": Family(
    gated=False,
    norms=4,
    final_norm=2,
    attention_bias="qkvo",
    mlp_bias=True,
    tied=True,
  ),
  "falcon": Family(gated=False, norms=4, final_norm=2, tied=True),
}

_HIDDEN = ("hidden_size", "n_embd", "d_model")
_LAYERS = ("num_hidden_layers", "n_layer")
_HEADS = ("num_attention_heads", "n_head")
_INNER = ("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner")


def read_sizes(config: Mapping[str, Any], name: str) -> Sizes:
  """The sizes under whatever names the family has for them.

  Raises:
    ValueError: begins with `name`; a size is missing, not a positive whole
      number, or KV heads do not divide the query heads.
  """
  hidden = _size(config, _HIDDEN, name)
  heads = _size(config, _HEADS, name)
  kv_heads = _kv_heads(config, heads, name)
  if heads % kv_heads:
    raise ValueError(
      f"{name}: num_key_value_heads={kv_heads} does not divide"
      f" num_attention_heads={heads}"
    )
  if config.get("head_dim") is None and hidden % heads:
    raise ValueError(
      f"{name}: num_attention_heads={heads} does not divide"
      f" hidden_size={hidden}, and there is no head_dim"
    )
  return Sizes(
    hidden_size=hidden,
    num_layers=_size(config, _LAYERS, name),
    num_heads=heads,
    num_kv_heads=kv_heads,
    head_dim=_size(config, ("head_dim",), name, hidden // heads),
    intermediate_size=_size(
      config,
      _INNER,
      name,
      # Falcon's configurations leave it out; no other family's do.
      4 * hidden if config.get("model_type") == "falcon" else None,
    ),
    vocab_size=_size(config, ("vocab_size",), name),
  )


def parameters(config: Mapping[str, Any], sizes: Sizes, name: str) -> int:
  """All parameters, embeddings included.

  Raises:
    ValueError: begins with `name`; no family of that `model_type`.
  """
  kind = config.get("model_type")
  if kind not in FAMILIES:
    raise ValueError(
      f"{name}: model_type {kind!r} is not among {sorted(FAMILIES)}"
    )
  family, d = FAMILIES[kind], sizes.hidden_size
  layer = _attention(config, family, sizes) + _mlp(config, family, sizes)
  norms = family.norms
  if kind == "falcon" and not _two_norms(config):
    norms = 2
  layer += norms * d + family.head_norms * sizes.head_dim
  total = sizes.num_layers * layer + family.final_norm * d
  embedding = sizes.vocab_size * d
  tied = config.get("tie_word_embeddings")
  if not (family.tied if tied is None else tied):
    embedding *= 2
    embedding += sizes.vocab_size if family.head_bias else 0
  if kind == "opt":
    embedding += _opt_positions(config, sizes)
  return total + embedding


def _size(
  config: Mapping[str, Any],
  keys: tuple[str, ...],
  name: str,
  default: int | None = None,
) -> int:
  found = [config[key] for key in keys if config.get(key) is not None]
  value = found[0] if found else default
  if value is None:
    raise ValueError(f"{name}: key {keys[0]!r} is missing")
  if isinstance(value, bool) or not isinstance(value, int) or value < 1:
    raise ValueError(f"{name}: {keys[0]}={value!r} must be a whole number >= 1")
  return value


def _kv_heads(config: Mapping[str, Any], heads: int, name: str) -> int:
  if config.get("model_type") == "falcon":
    if config.get("new_decoder_architecture"):
      return _size(config, ("num_kv_heads", "n_head_kv"), name, heads)
    # Released configurations leave the flag out where it is true.
    return 1 if config.get("multi_query", True) else heads
  return _size(config, ("num_key_value_heads",), name, heads)


def _attention(config, family: Family, sizes: Sizes) -> int:
  queries = sizes.num_heads * sizes.head_dim
  keys = sizes.num_kv_heads * sizes.head_dim
  biased = family.attention_bias
  for key in ("attention_bias", "qkv_bias", "use_bias", "enable_bias", "bias"):
    if isinstance(config.get(key), bool):
      biased = "qkvo" if config[key] else ""
  matrices = sizes.hidden_size * (2 * queries + 2 * keys)
  bias = queries + 2 * keys if "qkv" in biased else 0
  return matrices + bias + (sizes.hidden_size if "o" in biased else 0)


def _mlp(config, family: Family, sizes: Sizes) -> int:
  d, inner = sizes.hidden_size, sizes.intermediate_size
  biased = family.mlp_bias
  for key in ("mlp_bias", "use_bias", "enable_bias", "bias"):
    if isinstance(config.get(key), bool):
      biased = config[key]
  matrices = 3 if family.gated else 2
  bias = (matrices - 1) * inner + d if biased else 0
  return matrices * d * inner + bias


def _two_norms(config: Mapping[str, Any]) -> bool:
  """Falcon: the parallel layers of the first release share one LayerNorm."""
  return bool(
    config.get("new_decoder_architecture")
    or not config.get("parallel_attn", True)
  )


def _opt_positions(config, sizes: Sizes) -> int:
  """OPT: learned positions, two more than said, and a narrower embedding."""
  extra = (int(config.get("max_position_embeddings", 2048)) + 2) * (
    sizes.hidden_size
  )
  width = config.get("word_embed_proj_dim", sizes.hidden_size)
  if width != sizes.hidden_size:
    extra += sizes.vocab_size * (width - sizes.hidden_size)
    extra += 2 * width * sizes.hidden_size
  return extra
