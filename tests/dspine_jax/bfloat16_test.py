"""A pass in bfloat16: the dtypes of every method, and the numbers of two."""

import dataclasses

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate
from dspine_jax.decoding import round as round_lib
from dspine_jax.drafters import methods
from dspine_jax.training import step as step_lib
from tests import tiny_models

# A loss of order 10 from bfloat16 states, each with 8 bits of precision.
LOSS_TOLERANCE = 0.02


def half(cfg):
  return dataclasses.replace(cfg, dtype="bfloat16")


def window_gradient(setup, cfg):
  train = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=10), num_anchors=4
  )
  batch = jax.tree.map(lambda x: x[None], tiny_models.train_batch(setup.cfg))

  def gradient(params):
    return step_lib.window_gradient(
      params,
      setup.buffers,
      setup.tables,
      batch,
      jax.random.key(0),
      jnp.asarray(5),
      cfg=cfg,
      train=train,
    )

  return gradient


@pytest.mark.parametrize("method", sorted(methods.DRAFTERS))
def test_training_keeps_float32_parameters_and_losses(method):
  setup = tiny_models.drafter(tiny_models.drafter_config(method))
  gradient = window_gradient(setup, half(setup.cfg))
  # Leaves, since typed structures take no abstract arrays.
  leaves = jax.eval_shape(lambda p: jax.tree.leaves(gradient(p)), setup.params)
  assert len(leaves) > len(jax.tree.leaves(setup.params))
  assert {leaf.dtype for leaf in leaves} == {np.dtype(np.float32)}


@pytest.mark.parametrize("method", ["dflash", "dspine"])
def test_the_loss_is_that_of_float32_but_for_rounding(method):
  setup = tiny_models.drafter(tiny_models.drafter_config(method))
  exact, rounded = (
    jax.jit(window_gradient(setup, cfg))(setup.params)
    for cfg in (setup.cfg, half(setup.cfg))
  )
  np.testing.assert_allclose(rounded[0], exact[0], rtol=LOSS_TOLERANCE)
  assert rounded[0] != exact[0]
  norms = [
    np.sqrt(sum(np.sum(np.square(leaf)) for leaf in jax.tree.leaves(g)))
    for g in (exact[2], rounded[2])
  ]
  np.testing.assert_allclose(norms[1], norms[0], rtol=0.1)


@pytest.mark.parametrize("method", sorted(methods.DRAFTERS))
def test_decoding_has_bfloat16_states_and_caches(method):
  vocab = tiny_models.target_config().vocab_size
  cfg = tiny_models.target_config(dtype="bfloat16")
  setup = tiny_models.drafter(tiny_models.drafter_config(method))
  target = round_lib.TargetModel(tiny_models.target_params(cfg), cfg)
  drafter = round_lib.DrafterModel(setup.params, setup.buffers, half(setup.cfg))
  decode = configs.DecodeConfig(max_new_tokens=8)
  prompts = jnp.arange(10, dtype=jnp.int32).reshape(2, 5) % vocab

  def start_and_step(keys):
    state = generate.start(
      target, drafter, prompts, jnp.asarray([5, 3]), decode=decode, keys=keys
    )
    after = round_lib.speculative_round(target, drafter, state, decode=decode)
    caches = (after.target_cache.layers, after.draft_cache.layers)
    return tuple(map(jax.tree.leaves, (state, after, caches)))

  keys = jax.random.split(jax.random.key(0), 2)
  before, after, caches = jax.eval_shape(start_and_step, keys)
  assert [x.dtype for x in before] == [x.dtype for x in after]
  assert {x.dtype for x in caches} == {jnp.dtype(jnp.bfloat16)}
