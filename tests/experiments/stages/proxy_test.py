"""The teacher-forced means of a set of answers."""

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax.data import rows as rows_lib
from dspine_jax.data import sources
from experiments.stages import proxy
from tests import tiny_folder


def answered(count):
  answers = tiny_folder.random_answers(count)
  states = np.zeros((*answers.tokens.shape, 1), np.float32)
  return sources.FeatureSet(
    rows=rows_lib.from_answers(answers),
    context_features=states,
    last_hidden=states,
  )


def test_answers_that_fill_up_the_last_batch_count_once():
  # Eleven are a batch of eight and one of three with five seen before.
  data = answered(11)
  found = proxy._over_batches(
    lambda batch, key: (
      jnp.sum(batch.loss_mask),
      jnp.asarray(len(batch.tokens)),
    ),
    data,
    seed=0,
    label="test",
  )
  assert int(found[0]) == data.rows.loss_mask.sum()
  assert int(found[1]) == 16


def test_every_batch_has_its_own_key():
  keys = []
  proxy._over_batches(
    lambda batch, key: keys.append(jax.random.key_data(key).tolist()) or 0,
    answered(11),
    seed=0,
    label="test",
  )
  assert len(keys) == 2 and keys[0] != keys[1]
