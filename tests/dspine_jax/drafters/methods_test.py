import dataclasses

import pytest

from dspine_jax import configs
from dspine_jax.drafters import (
  dflash,
  dflash2,
  domino,
  dspark,
  dspine,
  methods,
)
from tests import tiny_models

MODULES = {
  "dflash": dflash,
  "dflash2": dflash2,
  "domino": domino,
  "dspark": dspark,
  "dspine": dspine,
}


def test_a_method_is_found_by_its_name():
  assert set(MODULES) == set(methods.DRAFTERS) == set(configs.CONVENTIONS)
  for name, module in MODULES.items():
    cfg = tiny_models.drafter_config(name)
    assert methods.drafter(cfg) is module.DRAFTER
    assert methods.DRAFTERS[name] is module.DRAFTER


def test_an_unknown_method_is_named_with_the_known_ones():
  cfg = tiny_models.drafter_config("dflash")
  cfg = dataclasses.replace(cfg, method="medusa")
  with pytest.raises(ValueError, match="method='medusa': .*dflash.*dspine"):
    methods.drafter(cfg)
