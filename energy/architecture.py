"""What an energy law reads of a model, from its `config.json`.

Sizes only: no weights, no downloads. A model outside of what the laws were
fitted on is either refused here (mixture of experts, latent or linear
attention: the laws have no term for them) or carries a note that has to be
shown beside every figure.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from energy import parameter_count

# Python takes an int where a float is asked for; checkers of types do not all.
Number = int | float

DATASETS = pathlib.Path(__file__).parent / "datasets"

# Where multimodal configurations keep the language model's part.
_NESTED = ("text_config", "llm_config", "language_config", "language_model")

# What the laws have no term for: key -> what it says.
_EXPERTS = (
  "num_experts",
  "num_local_experts",
  "n_routed_experts",
  "moe_intermediate_size",
  "moe_num_experts",
)
_LATENT = ("kv_lora_rank", "q_lora_rank")
_RECURRENT_TYPES = ("mamba", "rwkv", "jamba", "recurrent", "next", "lfm")
_FAMILY_NAMES = {
  "falcon": "Falcon",
  "gemma": "Gemma",
  "gemma2": "Gemma",
  "gemma3": "Gemma",
  "gemma3_text": "Gemma",
  "granite": "Granite",
  "llama": "Llama",
  "mistral": "Mistral",
  "opt": "OPT",
  "phi": "Phi",
  "phi3": "Phi",
  "qwen2": "Qwen",
  "qwen3": "Qwen",
  "starcoder2": "StarCoder",
}
_FULL_LAYERS = ("full_attention", "sliding_attention", "attention")


class Architecture(NamedTuple):
  """Sizes of a dense decoder: numbers, or arrays with one entry a request.

  Attributes:
    hidden_size: d.
    num_layers: L.
    num_heads: query heads.
    num_kv_heads: key and value heads.
    head_dim: width of one head, not always d / num_heads (Gemma).
    parameters: N, all of them, embeddings included.
  """

  hidden_size: Any
  num_layers: Any
  num_heads: Any
  num_kv_heads: Any
  head_dim: Any
  parameters: Any

  @property
  def kv_ratio(self):
    """R of the SIMPLE law: KV heads over query heads."""
    return self.num_kv_heads / self.num_heads

  @property
  def kv_width(self):
    """Numbers in the keys (or values) of one token in one layer."""
    return self.num_kv_heads * self.head_dim

  @property
  def attention_width(self):
    """Width of the queries of one token in one layer."""
    return self.num_heads * self.head_dim


class Model(NamedTuple):
  """A named architecture and what to say about it.

  Attributes:
    name: as printed.
    family: the group that is held out together, such as "Llama".
    architecture: its sizes.
    vocab_size: rows of the head.
    intermediate_size: width of the MLP.
    sliding_window: positions that windowed layers see, or None.
    windowed_layers: how many layers are windowed.
  """

  name: str
  family: str
  architecture: Architecture
  vocab_size: int
  intermediate_size: int
  sliding_window: int | None = None
  windowed_layers: int = 0

  def notes(self, total_tokens: Number) -> list[str]:
    """What a figure for so many tokens has to be read with."""
    if self.sliding_window is None or total_tokens <= self.sliding_window:
      return []
    return [
      f"outside the law's validation: {self.windowed_layers} of"
      f" {self.architecture.num_layers} layers see only {self.sliding_window}"
      f" positions, the request has {total_tokens:g} tokens; the KV term counts"
      " all of them"
    ]


def from_config(
  config: Mapping[str, Any], name: str, family: str | None = None
) -> Model:
  """A model from a Hugging Face configuration.

  Args:
    config: content of `config.json`; nested text configurations are found.
    name: of the model, or the file; begins every error.
    family: None takes that of the configuration's `model_type`.

  Raises:
    ValueError: a missing or impossible size, an unknown `model_type`, or an
      architecture that the laws have no term for.
  """
  config = _text_part(config)
  kind = str(config.get("model_type", ""))
  _refuse_what_no_term_covers(config, kind, name)
  sizes = parameter_count.read_sizes(config, name)
  window, windowed = _window(config, kind, sizes.num_layers, name)
  return Model(
    name=name,
    family=family or _FAMILY_NAMES.get(kind, kind),
    architecture=Architecture(
      hidden_size=sizes.hidden_size,
      num_layers=sizes.num_layers,
      num_heads=sizes.num_heads,
      num_kv_heads=sizes.num_kv_heads,
      head_dim=sizes.head_dim,
      parameters=parameter_count.parameters(config, sizes, name),
    ),
    vocab_size=sizes.vocab_size,
    intermediate_size=sizes.intermediate_size,
    sliding_window=window,
    windowed_layers=windowed,
  )


def from_file(path: pathlib.Path | str) -> Model:
  """A model from a `config.json` or the folder that holds it.

  Raises:
    ValueError: not such a file; otherwise as `from_config`.
  """
  path = pathlib.Path(path)
  if path.is_dir():
    path = path / "config.json"
  return from_config(read_json(path), str(path))


def read_json(path: pathlib.Path | str) -> dict[str, Any]:
  """A JSON object from a file; ValueError with the path if it is not one."""
  path = pathlib.Path(path)
  try:
    found = json.loads(path.read_text(encoding="utf-8"))
  except FileNotFoundError:
    raise ValueError(f"{path}: no such file") from None
  except (OSError, UnicodeDecodeError, json.JSONDecodeError) as error:
    raise ValueError(f"{path}: not readable as JSON ({error})") from None
  if not isinstance(found, dict):
    raise ValueError(f"{path}: a JSON object is needed")
  return found


def shipped_models() -> dict[str, Model]:
  """The models of the SweetSpot and ML.ENERGY data, by name."""
  listed = read_json(DATASETS / "models.json")
  return {
    name: from_config(entry["config"], name, entry["family"])
    for name, entry in listed.items()
  }


def stack(architectures: Sequence[Architecture]) -> Architecture:
  """One architecture of float64 arrays [n], an entry for each given one."""
  return Architecture(
    *(
      np.asarray(column, np.float64)
      for column in zip(*architectures, strict=True)
    )
  )


def _text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
  for key in _NESTED:
    inner = config.get(key)
    if isinstance(inner, Mapping) and "hidden_size" in inner:
      return inner
  return config


def _refuse_what_no_term_covers(config, kind: str, name: str) -> None:
  types = config.get("layer_types") or []
  if not isinstance(types, list):
    raise ValueError(f"{name}: layer_types={types!r}: a list is needed")
  reason = None
  experts = [key for key in _EXPERTS if _at_least(config.get(key), 2)]
  latent = [key for key in _LATENT if config.get(key)]
  mixed = set(map(str, types)) - set(_FULL_LAYERS)
  if experts or "moe" in kind:
    reason = f"mixture of experts ({experts[0] if experts else kind})"
  elif latent:
    reason = f"multi-head latent attention ({latent[0]})"
  elif mixed or any(word in kind for word in _RECURRENT_TYPES):
    found = f"layer_types {sorted(mixed)}" if mixed else kind
    reason = f"linear attention or state space layers ({found})"
  if reason:
    raise ValueError(
      f"{name}: {reason} is outside the laws, which were fitted on dense"
      " decoders and have no term for it"
    )


def _at_least(value: Any, least: int) -> bool:
  return isinstance(value, int | float) and value >= least


def _window(
  config, kind: str, num_layers: int, name: str
) -> tuple[int | None, int]:
  """Length of the window and number of layers that have it."""
  window = config.get("sliding_window")
  types = config.get("layer_types")
  if not window or config.get("use_sliding_window") is False:
    return None, 0
  if not isinstance(window, int) or window < 1:
    raise ValueError(
      f"{name}: sliding_window={window!r} must be a whole number >= 1"
    )
  if types:
    count = sum(one == "sliding_attention" for one in types)
  elif kind == "gemma2":  # Every other layer, beginning with the first.
    count = (num_layers + 1) // 2
  elif kind.startswith("gemma3"):
    pattern = int(config.get("sliding_window_pattern") or 6)
    count = num_layers - num_layers // pattern
  elif kind.startswith("qwen"):
    first = int(config.get("max_window_layers") or 0)
    count = max(0, num_layers - first)
  else:
    count = num_layers
  return (int(window), count) if count else (None, 0)
