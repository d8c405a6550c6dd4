"""DRAFTERS: the name of a method -> its functions. The only such table."""

from dspine_jax import configs
from dspine_jax.drafters import (
  contract,
  dflash,
  dflash2,
  domino,
  dspark,
  dspine,
)

DRAFTERS: dict[str, contract.Drafter] = {
  "dflash": dflash.DRAFTER,
  "dflash2": dflash2.DRAFTER,
  "domino": domino.DRAFTER,
  "dspark": dspark.DRAFTER,
  "dspine": dspine.DRAFTER,
}


def drafter(cfg: configs.DrafterConfig) -> contract.Drafter:
  """The functions of `cfg.method`; ValueError if there is no such method."""
  if cfg.method not in DRAFTERS:
    raise ValueError(f"method={cfg.method!r}: not one of {sorted(DRAFTERS)}")
  return DRAFTERS[cfg.method]
