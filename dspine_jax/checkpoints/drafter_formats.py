"""The forms in which drafters are released: `config.json` of each of them.

A form is a record in `FORMS`. Tensors are named alike in all (`names.py`,
`Drafter.entries`); forms differ in where `config.json` keeps what, and in
whether a folder holds copies of the target's embedding and head:

  zlab        dflash, dflash2: keys of the layers at the top, the method's in
              `dflash_config`
  specforge   all five methods: the same; `projector_type` names the head of
              domino and dspark, DSpine's options are in `dspine_config`
  deepspec    dspark: everything at the top level; copies of both tables
  speculators dflash, dflash2, dspark (vllm): the layers' keys nested in
              `transformer_layer_config`, tapped layers counted from 1; perhaps
              copies, perhaps a reduced vocabulary of the draft

`flat` brings any of them to the shape of the first two, which
`drafter_config.from_json` reads. EAGLE-3 and other drafters of another kind are
refused with the reason.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

from dspine_jax import configs
from dspine_jax.checkpoints import drafter_options, hf_config

Json = drafter_options.Json

# DeepSpec's model reads it when it trains; ours is in TrainConfig.
_DEEPSPEC_ANCHORS = 512
# Whose keys the speculators form follows.
_SPECULATORS_VERSION = "0.5.0"

# Names in `architectures`; the first is written.
_ARCHITECTURES = {
  "dflash": ("DFlashDraftModel", "DFlashSpeculator"),
  "dflash2": ("DFlash2DraftModel",),
  "domino": ("DominoDraftModel",),
  "dspark": ("Qwen3DSparkModel", "DSparkDraftModel", "DSparkSpeculator"),
  "dspine": ("DSpineDraftModel",),
}
_PROJECTORS = ("domino", "dspark")
# Methods that z-lab has not, and DeepSpec not with a `dflash_config`.
_SPECFORGE_ONLY = ("domino", "dspark", "dspine")


class Form(NamedTuple):
  """How folders of one tool are written.

  Attributes:
    methods: that it has.
    write: (cfg, keys of the layers, name of the target or None) -> config.json.
    windows: conventions of sliding layers that its readers run.
    tables: whether folders hold `embed_tokens` and `lm_head`: "never",
      "always", or "maybe".
    lacks: (cfg) -> what else the form has no place for, None if nothing.
  """

  methods: tuple[str, ...]
  write: Callable[[configs.DrafterConfig, dict[str, Any], str | None], Json]
  windows: tuple[str, ...]
  tables: str = "never"
  lacks: Callable[[configs.DrafterConfig], str | None] = lambda cfg: None


def form_of(config: Json) -> str:
  """The form of a `config.json`: key of `FORMS`."""
  if "speculators_model_type" in config or "transformer_layer_config" in config:
    return "speculators"
  own = config.get("dflash_config")
  architecture = (config.get("architectures") or [None])[0]
  if own is None and architecture in _ARCHITECTURES["dspark"]:
    return "deepspec"
  is_specforge = (
    (own or {}).get("projector_type") is not None
    or any(architecture in _ARCHITECTURES[name] for name in _SPECFORGE_ONLY)
    # Our own key, in a file that is otherwise z-lab's too.
    or config.get("sliding_window_convention") == "specforge"
  )
  return "specforge" if is_specforge else "zlab"


def default_form(
  cfg: configs.DrafterConfig, has_tables: bool | None = None
) -> str:
  """The form that a drafter's method was first released in.

  Args:
    cfg: of the drafter.
    has_tables: whether it has its own embedding and head, which DeepSpec's
      folders must have and z-lab's and SpecForge's have not; None takes the
      method's usual.
  """
  if cfg.method == "dspark":
    return "specforge" if has_tables is False else "deepspec"
  if has_tables or cfg.draft_vocab_size is not None:
    return "speculators"
  is_zlab = cfg.method in FORMS["zlab"].methods
  is_zlab = is_zlab and cfg.sliding_window_convention != "specforge"
  return "zlab" if is_zlab else "specforge"


def flat(config: Json, path: object) -> Json:
  """The `config.json` of any form with the layers' keys at the top.

  Raises:
    ValueError: a drafter of another kind, naming the reason.
  """
  _refuse_foreign(config, path)
  if form_of(config) == "speculators":
    config = _flat_speculators(config, path)
    _refuse_foreign(config, path)
  return config


def _refuse_foreign(config: Json, path: object) -> None:
  """ValueError for what would be read wrongly."""
  own = config.get("dflash_config") or {}
  kind = str(config.get("speculators_model_type") or "")
  names = [*(config.get("architectures") or []), kind]
  for name in names:
    if any(part in name.lower() for part in ("eagle", "mtp")):
      raise ValueError(
        f"{path}: {name!r} drafts one token after another from hidden states"
        " (EAGLE, MTP): another kind of drafter, which is not implemented"
      )
  for key in ("quantization_config", "compression_config"):
    if config.get(key):
      raise ValueError(
        f"{path}: {key}: quantised drafters are not implemented; take the"
        " bfloat16 one"
      )
  for key in ("attention_bias", "mlp_bias"):
    if config.get(key):
      raise ValueError(f"{path}: {key}=true: draft layers have no biases here")
  modes = own.get("attention_modes") or [own.get("attention_mode") or "gqa"]
  if set(modes) - {"gqa", "mha"}:
    raise ValueError(
      f"{path}: attention_mode={modes!r} is not implemented (gqa, mha)"
    )
  for key in ("attention_sink_bias", "attention_value_scale"):
    if own.get(key):
      raise ValueError(f"{path}: {key}={own[key]!r} is not implemented")


def _flat_speculators(config: Json, path: object) -> Json:
  method = config.get("speculators_model_type")
  if method not in FORMS["speculators"].methods:
    raise ValueError(
      f"{path}: speculators_model_type={method!r} is not one of"
      f" {FORMS['speculators'].methods}"
    )
  projector = config.get("projector_type", "dflash")
  if projector != "dflash":
    raise ValueError(
      f"{path}: projector_type={projector!r} is not implemented in the form of"
      " speculators; convert it to SpecForge's"
    )
  layers = dict(hf_config.require_key(config, "transformer_layer_config", path))
  # There, `layer_types` alone decides.
  layers.pop("use_sliding_window", None)
  width, of_target = layers.get("hidden_size"), config.get("target_hidden_size")
  if of_target not in (None, width):
    raise ValueError(
      f"{path}: target_hidden_size={of_target} is not the drafter's"
      f" hidden_size={width}: not implemented"
    )
  if method == "dspark" and config.get("sample_from_anchor") is None:
    raise ValueError(
      f"{path}: key 'sample_from_anchor' is missing, and tools differ in what"
      " they take then: set it to true if the anchor's slot was trained to"
      " predict, else to false"
    )
  taps = hf_config.require_key(config, "aux_hidden_state_layer_ids", path)
  non_causal = config.get("sliding_window_non_causal")
  own = {
    key: value
    for key, value in config.items()
    if key not in ("transformer_layer_config", "speculators_config")
  }
  # The index of `hidden_states`, where the embedding's output is the first.
  own["target_layer_ids"] = [index - 1 for index in taps]
  lifted = {
    "architectures": [_ARCHITECTURES[method][0]],
    # The defaults of speculators' own configurations.
    "block_size": config.get("block_size") or 8,
    "sliding_window_non_causal": method == "dflash2"
    if non_causal is None
    else non_causal,
    "dflash_config": own,
    "num_target_layers": config.get("num_target_layers"),
  }
  for key in ("draft_vocab_size", "dtype"):
    if key in config:
      lifted[key] = config[key]
  return layers | lifted


def method_of(config: Json, path: object) -> str:
  """The method of a flat `config.json`.

  `projector_type` comes first: SpecForge's drafters with a head may carry
  DFlash's architecture.

  Raises:
    ValueError: neither names a known method.
  """
  projector = (config.get("dflash_config") or {}).get("projector_type")
  if projector in _PROJECTORS:
    return projector
  if projector not in (None, "dflash"):
    raise ValueError(f"{path}: projector_type={projector!r} is not implemented")
  architecture = (config.get("architectures") or [None])[0]
  by_name = {
    name: method for method, names in _ARCHITECTURES.items() for name in names
  }
  if architecture not in by_name:
    raise ValueError(
      f"{path}: architectures={config.get('architectures')!r} is not one of"
      f" {sorted(by_name)}"
    )
  return by_name[architecture]


def _named(architecture: str, module: str | None) -> dict[str, Any]:
  named: dict[str, Any] = {"architectures": [architecture]}
  if module is not None:
    named["auto_map"] = {"AutoModel": f"{module}.{architecture}"}
  return named


def _write_zlab(cfg, layers, target) -> dict[str, Any]:
  del target
  own = drafter_options.common_json(cfg) | drafter_options.options_json(cfg)
  architecture = _ARCHITECTURES[cfg.method][0]
  if cfg.method == "dflash":
    config = _named(architecture, "dflash") | {"block_size": cfg.block_size}
  else:
    # The newer files: block size and rope nested, no code beside the weights.
    own["block_size"] = cfg.block_size
    layers = _with_rope_parameters(layers)
    config = _named(architecture, None)
  config |= drafter_options.causality_json(cfg)
  return layers | config | {"dflash_config": own}


def _write_specforge(cfg, layers, target) -> dict[str, Any]:
  del target
  own, options = (
    drafter_options.common_json(cfg),
    drafter_options.options_json(cfg),
  )
  # Of DSpark's two, the one that is not DeepSpec's.
  architecture = _ARCHITECTURES[cfg.method][cfg.method == "dspark"]
  module = None if cfg.method == "dflash2" else cfg.method
  config = layers | _named(architecture, module)
  config["block_size"] = cfg.block_size
  if cfg.method == "dspine":
    config["dspine_config"] = options
  else:
    own |= options
  if cfg.method in _PROJECTORS:
    own["projector_type"] = cfg.method
  if cfg.sliding_window is not None:
    config["sliding_window_convention"] = cfg.sliding_window_convention
  if cfg.method == "domino":
    config["emb_dim"] = options["emb_dim"]
  config |= drafter_options.causality_json(cfg)
  return config | {"dflash_config": own}


def _write_deepspec(cfg, layers, target) -> dict[str, Any]:
  del target
  config = layers | _named(_ARCHITECTURES[cfg.method][0], None)
  config |= drafter_options.common_json(cfg) | drafter_options.options_json(cfg)
  config |= {
    "block_size": cfg.block_size,
    "num_anchors": _DEEPSPEC_ANCHORS,
    "tie_word_embeddings": False,
  }
  return config | drafter_options.causality_json(cfg)


def _with_rope_parameters(layers: dict[str, Any]) -> dict[str, Any]:
  """`rope_theta` and `rope_scaling` as newer files nest them."""
  nested = dict(layers)
  theta, scaling = nested.pop("rope_theta"), nested.pop("rope_scaling")
  nested["rope_parameters"] = {"rope_type": "default"} | (scaling or {})
  nested["rope_parameters"]["rope_theta"] = theta
  return nested


def _write_speculators(cfg, layers, target) -> dict[str, Any]:
  own = drafter_options.common_json(cfg) | drafter_options.options_json(cfg)
  taps = [layer + 1 for layer in own.pop("target_layer_ids")]
  layers = _with_rope_parameters(layers)
  layers["architectures"] = ["Qwen3ForCausalLM"]
  for key in ("dtype", "num_target_layers", "sliding_window_convention"):
    layers.pop(key, None)
  non_causal = cfg.method == "dflash2"
  if cfg.sliding_window is not None:
    non_causal = cfg.sliding_window_convention == "speculators_non_causal"
  greedy = {
    "accept_tolerance": 0.0,
    "proposal_type": "greedy",
    "speculative_tokens": cfg.num_proposals,
    "verifier_accept_k": 1,
  }
  architecture = _ARCHITECTURES[cfg.method][cfg.method == "dspark"]
  return {
    **_named(architecture, None),
    **own,
    "aux_hidden_state_layer_ids": taps,
    "block_size": cfg.block_size,
    "draft_vocab_size": cfg.draft_vocab_size or cfg.vocab_size,
    "sample_from_anchor": cfg.sample_from_anchor,
    "sliding_window_non_causal": non_causal,
    "speculators_config": {
      "algorithm": cfg.method,
      "default_proposal_method": "greedy",
      "proposal_methods": [greedy],
      "verifier": {"architectures": [], "name_or_path": target},
    },
    "speculators_model_type": cfg.method,
    "speculators_version": _SPECULATORS_VERSION,
    "target_hidden_size": None,
    "transformer_layer_config": layers,
  }


def _lacking_in_speculators(cfg) -> str | None:
  if cfg.is_causal:
    return "its full layers see all of their block, this drafter is causal"
  options = drafter_options.options_json(cfg)
  for name in ("output_multiplier", "final_logit_softcapping"):
    if name in options:
      return f"has no option {name}"
  return None


def _lacking_in_specforge(cfg) -> str | None:
  # Its DSpine is causal in all layers unless `is_causal` is false for all.
  if cfg.method == "dspine" and drafter_options.only_sliding_is_causal(cfg):
    return "cannot say that DSpine's sliding layers alone are causal"
  return None


FORMS: dict[str, Form] = {
  "zlab": Form(("dflash", "dflash2"), _write_zlab, ("automodel",)),
  "specforge": Form(
    tuple(_ARCHITECTURES),
    _write_specforge,
    ("specforge", "automodel"),
    lacks=_lacking_in_specforge,
  ),
  "deepspec": Form(("dspark",), _write_deepspec, (), tables="always"),
  "speculators": Form(
    ("dflash", "dflash2", "dspark"),
    _write_speculators,
    ("speculators", "speculators_non_causal"),
    tables="maybe",
    lacks=_lacking_in_speculators,
  ),
}


def tables_of(form: str) -> str:
  """`Form.tables`; ValueError if there is no such form."""
  if form not in FORMS:
    raise ValueError(f"form={form!r}: not one of {sorted(FORMS)}")
  return FORMS[form].tables


def check_expressible(
  form: str, cfg: configs.DrafterConfig, has_tables: bool | None = None
) -> None:
  """ValueError if tools that read the form would run the drafter otherwise.

  Args:
    form: key of `FORMS`.
    cfg: of the drafter.
    has_tables: as in `default_form`; None does not ask.
  """
  tables = tables_of(form)
  record = FORMS[form]
  if cfg.method not in record.methods:
    raise ValueError(
      f"form={form!r}: has no {cfg.method} (only {', '.join(record.methods)})"
    )
  if cfg.draft_vocab_size is not None and form != "speculators":
    raise ValueError(
      f"form={form!r}: has no reduced draft vocabulary"
      f" (draft_vocab_size={cfg.draft_vocab_size}), only 'speculators' has"
    )
  if tables == "always" and has_tables is False:
    raise ValueError(
      f"form={form!r}: its folders hold embed_tokens and lm_head, this drafter"
      " has none of its own; name the target that has them"
    )
  if tables == "never" and has_tables:
    raise ValueError(
      f"form={form!r}: its folders hold no embed_tokens and lm_head, and this"
      " drafter has its own; name the target to see whether they are equal"
    )
  reason = record.lacks(cfg)
  if reason is not None:
    raise ValueError(f"form={form!r}: {reason}")
  convention = cfg.sliding_window_convention
  if cfg.sliding_window is not None and convention not in record.windows:
    raise ValueError(
      f"form={form!r}: its tools run sliding layers by {record.windows}, this"
      f" drafter was trained by {convention!r}"
    )
