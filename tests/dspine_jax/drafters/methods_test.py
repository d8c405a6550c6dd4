import dataclasses

import pytest

from dspine_jax.drafters import dflash, dspine, methods
from tests import tiny_models


def test_a_method_is_found_by_its_name():
  for name, module in (("dflash", dflash), ("dspine", dspine)):
    cfg = tiny_models.drafter_config(name)
    assert methods.drafter(cfg) is module.DRAFTER
    assert methods.DRAFTERS[name] is module.DRAFTER


def test_an_unknown_method_is_named_with_the_known_ones():
  cfg = tiny_models.drafter_config("dflash")
  cfg = dataclasses.replace(cfg, method="medusa")
  with pytest.raises(ValueError, match="method='medusa': .*dflash.*dspine"):
    methods.drafter(cfg)
