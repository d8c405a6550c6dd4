"""What cannot be decoded is refused, by the name and value at fault."""

import dataclasses

import jax
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate
from dspine_jax.decoding import round as round_lib
from tests import tiny_models

TARGET_CFG = tiny_models.target_config()
DECODE = configs.DecodeConfig(max_new_tokens=8)
WARM = configs.SamplingConfig(temperature=0.5)
PROMPTS = jnp.zeros((2, 5), jnp.int32)


def target(**changes):
  cfg = dataclasses.replace(TARGET_CFG, **changes)
  return round_lib.TargetModel({}, cfg)  # Refused before it is read.


def drafter(method="dflash"):
  return round_lib.DrafterModel({}, {}, tiny_models.drafter_config(method))


def refuse(message, *, prompts=PROMPTS, model=None, draft=None, decode=DECODE):
  """Every way in says the same."""
  model, draft = model or target(), draft or drafter()
  lengths = jnp.ones((prompts.shape[0],), jnp.int32)
  keys = jax.random.split(jax.random.key(0), max(prompts.shape[0], 1))
  with pytest.raises(ValueError, match=message):
    generate.check_request(model, draft, prompts, decode=decode)
  for run in (generate.start, generate.generate):
    with pytest.raises(ValueError, match=message):
      run(model, draft, prompts, lengths, decode=decode, keys=keys)


@pytest.mark.parametrize("method", ["dflash", "dspine"])
def test_a_request_that_fits_is_accepted(method):
  whole = jnp.zeros((2, TARGET_CFG.max_positions - 8), jnp.int32)
  last = dataclasses.replace(DECODE, stop_tokens=(0, 60))
  generate.check_request(target(), drafter(method), whole, decode=last)
  generate.check_request(target(), None, PROMPTS, decode=DECODE)


@pytest.mark.parametrize("shape", [(2, 0), (0, 5)])
def test_an_empty_prompt(shape):
  message = rf"prompts of shape \({shape[0]}, {shape[1]}\): empty prompt"
  refuse(message, prompts=jnp.zeros(shape, jnp.int32))


def test_a_prompt_that_leaves_no_positions():
  prompts = jnp.zeros((2, TARGET_CFG.max_positions - 7), jnp.int32)
  refuse("57 tokens.*max_new_tokens=8.*max_positions=64", prompts=prompts)
  with pytest.raises(ValueError, match="57 tokens.*max_positions=64"):
    generate.autoregressive(
      target(),
      prompts,
      jnp.ones((2,), jnp.int32),
      decode=DECODE,
      keys=jax.random.split(jax.random.key(0), 2),
    )


@pytest.mark.parametrize("token", [-1, 61])
def test_a_stop_token_outside_the_vocabulary(token):
  decode = dataclasses.replace(DECODE, stop_tokens=(4, token))
  refuse(f"stop_tokens: {token} .*vocab_size=61", decode=decode)


@pytest.mark.parametrize(
  ("name", "change"),
  [("vocab_size", 62), ("hidden_size", 32), ("num_layers", 5)],
)
def test_a_drafter_of_another_target(name, change):
  made_for = getattr(TARGET_CFG, name)
  field = {"num_layers": "num_target_layers"}.get(name, name)
  message = f"{field}={made_for}, this target has {change}"
  refuse(message, model=target(**{name: change}))


@pytest.mark.parametrize(
  ("method", "kinds"), [("dflash", "'sampled'"), ("dspine", "'full_support'")]
)
def test_an_unknown_proposal(method, kinds):
  decode = configs.DecodeConfig(
    sampling=WARM, rule="rejection", proposal="beam", max_new_tokens=8
  )
  message = f"proposal='beam': {method} has .*{kinds}"
  refuse(message, draft=drafter(method), decode=decode)


@pytest.mark.parametrize(
  ("rule", "sampling"),
  [
    ("greedy", WARM),
    ("rejection", configs.SamplingConfig()),
    ("exact_match", configs.SamplingConfig()),
  ],
)
def test_a_rule_of_another_temperature(rule, sampling):
  message = f"rule='{rule}'.*temperature={sampling.temperature}"
  with pytest.raises(ValueError, match=message):
    configs.DecodeConfig(rule=rule, sampling=sampling)


def test_rejection_of_a_greedy_draft():
  with pytest.raises(ValueError, match="proposal='greedy': rejection"):
    configs.DecodeConfig(rule="rejection", sampling=WARM, proposal="greedy")


def test_an_unknown_rule():
  with pytest.raises(ValueError, match="rule='lucky'"):
    configs.DecodeConfig(rule="lucky")


@pytest.mark.parametrize(
  ("name", "value"),
  [("temperature", -0.1), ("top_k", -1), ("top_p", 0.0), ("top_p", 1.1)],
)
def test_an_impossible_sampling_value(name, value):
  with pytest.raises(ValueError, match=f"{name}={value}"):
    configs.SamplingConfig(**{name: value})


def test_no_new_tokens():
  with pytest.raises(ValueError, match="max_new_tokens=0"):
    configs.DecodeConfig(max_new_tokens=0)
