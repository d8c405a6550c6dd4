"""The teacher-forced proxy: laws of given tokens, overlaps, and their sum."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate
from dspine_jax.drafters import contract, methods
from dspine_jax.training import overlap
from tests import tiny_models

# All kinds of one method with pairs of candidates, and every other method.
CASES = [
  *[("dspine", kind) for kind in methods.DRAFTERS["dspine"].proposal_kinds],
  *[
    (method, drafter.proposal_kinds[0])
    for method, drafter in methods.DRAFTERS.items()
    if method != "dspine"
  ],
]


@pytest.mark.parametrize(("method", "kind"), CASES)
def test_tokens_that_were_drawn_have_the_law_they_were_drawn_from(method, kind):
  setup = tiny_models.drafter(tiny_models.drafter_config(method))
  cfg, rows = setup.cfg, 6
  rng = np.random.default_rng(0)
  shape = (rows, 1, cfg.block_size, cfg.hidden_size)
  states = rng.standard_normal((2, *shape)).astype(np.float32)
  output = contract.DrafterOutput(
    hidden=jnp.asarray(states[0]), pre_injection=jnp.asarray(states[1])
  )
  keys = jax.random.split(jax.random.key(1), rows)
  anchor = jnp.asarray(rng.integers(0, cfg.vocab_size, rows), jnp.int32)

  @jax.jit
  def propose(output, forced):
    return setup.method.propose(
      setup.params,
      setup.buffers,
      setup.tables,
      output,
      anchor,
      cfg=cfg,
      sampling_cfg=configs.SamplingConfig(temperature=0.8),
      kind=kind,
      keys=keys,
      forced=forced,
    )

  drawn = propose(output, None)
  again = propose(output, drawn.tokens)
  np.testing.assert_array_equal(again.tokens, drawn.tokens)
  np.testing.assert_allclose(again.probs, drawn.probs, atol=1e-6)
  # Other tokens before change the law of methods that read them.
  other = propose(output, (drawn.tokens + 1) % cfg.vocab_size)
  changed = np.abs(other.probs - drawn.probs)[:, 1:].max() > 1e-3
  reads_tokens = method != "dflash" and kind != "base"
  assert changed == reads_tokens


def test_overlaps_are_the_shared_mass_of_both_laws():
  setup = tiny_models.drafter(tiny_models.drafter_config("dflash"))
  cfg = setup.cfg
  target_cfg = tiny_models.target_config()
  target = generate.TargetModel(
    tiny_models.target_params(target_cfg), target_cfg
  )
  drafter = generate.DrafterModel(setup.params, setup.buffers, cfg)
  batch = tiny_models.train_batch(cfg)
  sampling_cfg = configs.SamplingConfig(temperature=1.0)

  @jax.jit
  def measure(target, drafter, batch):
    return overlap.overlaps(
      target,
      drafter,
      batch,
      jax.random.key(0),
      num_anchors=3,
      sampling_cfg=sampling_cfg,
      kind="sampled",
    )

  found, valid = measure(target, drafter, batch)
  rows = len(batch.tokens)
  assert found.shape == valid.shape == (rows * 3, cfg.num_proposals)
  assert valid.any() and not valid.all()
  inside = np.asarray(found)[np.asarray(valid)]
  assert (inside > 0).all() and (inside < 1).all()
  # A draft of the target's own states would always be kept.
  same = batch.replace(last_hidden=jnp.zeros_like(batch.last_hidden))
  flat = drafter.replace(
    params={
      "backbone": drafter.params["backbone"]
      | {"norm": {"scale": jnp.zeros(cfg.hidden_size)}}
    }
  )
  found, valid = measure(target, flat, same)
  np.testing.assert_allclose(np.asarray(found)[np.asarray(valid)], 1, atol=1e-5)


def test_products_are_summed_over_the_blocks_that_reach_a_slot():
  sums, counts = overlap.kept(
    jnp.array([[0.5, 0.5, 0.9], [0.2, 0.4, 0.3]]),
    jnp.array([[True, True, True], [True, False, False]]),
  )
  np.testing.assert_allclose(sums, [0.7, 0.25, 0.225], rtol=1e-6)
  np.testing.assert_array_equal(counts, [2, 1, 1])
