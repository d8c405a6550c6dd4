"""The `config.json` of each method's released drafters.

All share Hugging Face's keys for the layers (`drafter_folder.py`); what differs
is where a method keeps its own options and its label convention:

  dflash   z-lab: `dflash_config`
  dflash2  z-lab: the same, with convolution and selector
  domino   SpecForge: the same, with projector_type "domino" and `shift_label`
  dspark   DeepSpec: at the top level; SpecForge: nested in `dflash_config`,
           with projector_type "dspark"
  dspine   SpecForge: `dflash_config`, options in `dspine_config`

Missing keys take the released defaults. Settings of training that the released
files do not hold (decay constant, objective, loss weights) are written beside
the others.
"""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from dspine_jax import configs

Json = Mapping[str, Any]

# DeepSpec's model reads it when it trains; ours is in TrainConfig.
_DEEPSPEC_ANCHORS = 512


class Format(NamedTuple):
  """How one method is written down.

  Attributes:
    architectures: names in `architectures`; the first is the one written.
    options: (config.json, its dflash_config) -> keys of the method's options.
    write: (cfg, keys of `dflash_config` that all methods have) -> keys to add
      at the top level.
    shift_key: key of `dflash_config` that holds the label shift.
  """

  architectures: tuple[str, ...]
  options: Callable[[Json, Json], dict[str, Any]]
  write: Callable[[configs.DrafterConfig, dict[str, Any]], dict[str, Any]]
  shift_key: str = "sample_from_anchor"


def method_of(config: Json, path: object) -> str:
  """The method of a `config.json`.

  `projector_type` comes first: SpecForge's drafters with a head may carry
  DFlash's architecture.

  Raises:
    ValueError: neither names a known method.
  """
  projector = (config.get("dflash_config") or {}).get("projector_type")
  if projector in ("domino", "dspark"):
    return projector
  if projector not in (None, "dflash"):
    raise ValueError(f"{path}: projector_type={projector!r} is not implemented")
  architecture = (config.get("architectures") or [None])[0]
  by_name = {
    name: method
    for method, entry in FORMATS.items()
    for name in entry.architectures
  }
  if architecture not in by_name:
    raise ValueError(
      f"{path}: architectures={config.get('architectures')!r} is not one of"
      f" {sorted(by_name)}"
    )
  return by_name[architecture]


def method_options(
  config: Json, own: Json, method: str, num_layers: int
) -> dict[str, Any]:
  """{method: its options} as DrafterConfig takes them.

  Args:
    config: all of `config.json`.
    own: its `dflash_config`.
    method: as found by `method_of`.
    num_layers: decides a default.
  """
  options = FORMATS[method].options(config, own)
  return {method: configs.default_options(method, num_layers, **options)}


def _known(kind: type, *sources: Json) -> dict[str, Any]:
  """The options that the sources name, earlier sources first."""
  found = {}
  for field in dataclasses.fields(kind):
    for source in sources:
      if source.get(field.name) is not None:
        found.setdefault(field.name, source[field.name])
  return found


def _dspine_options(config: Json, own: Json) -> dict[str, Any]:
  del own
  stored = dict(config.get("dspine_config") or {})
  known = {field.name for field in dataclasses.fields(configs.DSpineOptions)}
  unknown = sorted(set(stored) - known)
  if unknown:
    raise ValueError(f"dspine_config: unknown keys {unknown}")
  return stored


def _write_dflash(cfg, common) -> dict[str, Any]:
  return {"dflash_config": common | dataclasses.asdict(cfg.dflash)}


def _write_dflash2(cfg, common) -> dict[str, Any]:
  options = dataclasses.asdict(cfg.dflash2)
  # Only drafters whose targets transform their logits have these two.
  if options["final_logit_softcapping"] is None:
    del options["final_logit_softcapping"]
  if options["output_multiplier"] == 1:
    del options["output_multiplier"]
  return {"dflash_config": common | options}


def _write_domino(cfg, common) -> dict[str, Any]:
  options = dataclasses.asdict(cfg.domino) | {"projector_type": "domino"}
  return {"dflash_config": common | options, "emb_dim": cfg.domino.emb_dim}


def _write_dspark(cfg, common) -> dict[str, Any]:
  """DeepSpec's form, which has no `dflash_config`."""
  return (
    common
    | dataclasses.asdict(cfg.dspark)
    | {
      "num_anchors": _DEEPSPEC_ANCHORS,
      "tie_word_embeddings": False,
    }
  )


def nest_dspark(config: dict[str, Any]) -> dict[str, Any]:
  """SpecForge's form of a DSpark `config.json` in DeepSpec's."""
  fields = dataclasses.fields(configs.DSparkOptions)
  moved = {field.name for field in fields} | {
    "loss_decay_gamma",
    "mask_token_id",
    "num_anchors",
    "sample_from_anchor",
    "target_layer_ids",
  }
  own = {name: config[name] for name in moved if name in config}
  rest = {name: value for name, value in config.items() if name not in moved}
  return rest | {
    "architectures": [FORMATS["dspark"].architectures[1]],
    "dflash_config": own | {"projector_type": "dspark"},
  }


def _write_dspine(cfg, common) -> dict[str, Any]:
  options = dataclasses.asdict(cfg.dspine)
  return {"dflash_config": common, "dspine_config": options}


FORMATS = {
  "dflash": Format(
    ("DFlashDraftModel",),
    lambda config, own: _known(configs.DFlashOptions, own),
    _write_dflash,
  ),
  "dflash2": Format(
    ("DFlash2DraftModel",),
    lambda config, own: _known(configs.DFlash2Options, own),
    _write_dflash2,
  ),
  "domino": Format(
    ("DominoDraftModel",),
    lambda config, own: _known(configs.DominoOptions, own, config),
    _write_domino,
    shift_key="shift_label",
  ),
  "dspark": Format(
    ("Qwen3DSparkModel", "DSparkDraftModel"),
    lambda config, own: _known(configs.DSparkOptions, own, config),
    _write_dspark,
  ),
  "dspine": Format(("DSpineDraftModel",), _dspine_options, _write_dspine),
}
