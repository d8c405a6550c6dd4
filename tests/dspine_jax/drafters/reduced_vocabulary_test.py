"""DFlash with tables of its own, and with a head of some tokens only."""

import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate, verify
from dspine_jax.drafters import contract, dflash, methods
from tests import decoding_oracles, tiny_models

VOCAB, REDUCED, ROWS = 23, 6, 4
IDS = np.array([0, 3, 4, 11, 17, 22])
TARGET = tiny_models.target_config(vocab_size=VOCAB, num_layers=2)


def config(method="dflash", **changes):
  return tiny_models.drafter_config(
    method,
    vocab_size=VOCAB,
    num_layers=1,
    mask_token_id=VOCAB - 1,
    target_layer_ids=(0,),
    num_target_layers=2,
    **changes,
  )


@functools.cache
def target():
  return decoding_oracles.target(TARGET, 11)


@functools.cache
def drafter():
  """Its head ranks its few tokens as the target's would."""
  made = decoding_oracles.drafter(config(), target().tables, 24)
  buffers = {
    "lm_head": target().tables.head[IDS],
    "d2t": jnp.asarray(IDS - np.arange(REDUCED), jnp.int32),
  }
  cfg = config(draft_vocab_size=REDUCED)
  return made.replace(buffers=buffers, cfg=cfg)


@functools.cache
def blocks():
  """Hidden states of one block in each of the rows."""
  shape = (ROWS, 1, drafter().cfg.block_size, TARGET.hidden_size)
  return contract.DrafterOutput(
    hidden=jax.random.normal(jax.random.key(2), shape)
  )


def propose(kind, temperature, made=None, **changes):
  made = drafter() if made is None else made
  return methods.drafter(made.cfg).propose(
    made.params,
    made.buffers,
    target().tables,
    blocks(),
    jnp.zeros((ROWS,), jnp.int32),
    cfg=made.cfg,
    sampling_cfg=configs.SamplingConfig(temperature=temperature, **changes),
    kind=kind,
    keys=jax.random.split(jax.random.key(3), ROWS),
  )


def own_logits():
  hidden = np.asarray(blocks().hidden[:, 0, 1:], np.float64)
  return hidden @ np.asarray(drafter().buffers["lm_head"], np.float64).T


def test_greedy_drafts_are_the_best_of_the_few_tokens():
  tokens = propose("greedy", 0.0).tokens
  np.testing.assert_array_equal(tokens, IDS[own_logits().argmax(-1)])


@pytest.mark.parametrize(
  "changes", [{}, {"top_k": 3}, {"top_p": 0.5}, {"top_k": 9}]
)
def test_the_law_has_no_mass_outside_and_the_head_s_inside(changes):
  made = propose("sampled", 0.7, **changes)
  probs = np.asarray(made.probs)
  assert (np.delete(probs, IDS, axis=-1) == 0).all()
  np.testing.assert_allclose(probs.sum(-1), 1, rtol=1e-5)
  if not changes:
    logits = own_logits() / 0.7
    law = np.exp(logits - logits.max(-1, keepdims=True))
    law /= law.sum(-1, keepdims=True)
    np.testing.assert_allclose(probs[..., IDS], law, atol=1e-5)
  assert np.isin(made.tokens, IDS).all()


def test_rejection_brings_back_the_tokens_that_cannot_be_drafted():
  # Emission law of the first slot by enumeration over what may be drafted:
  # q(x) min(1, p / q) plus the rejected mass times the residual.
  q = np.asarray(propose("sampled", 1.0).probs, np.float64)[:, 0]
  p = np.asarray(jax.nn.softmax(jax.random.normal(jax.random.key(5), q.shape)))
  kept = np.minimum(p, q)
  rest = np.maximum(p - q, 0)
  rest = rest / rest.sum(-1, keepdims=True)
  law = kept + (1 - kept.sum(-1, keepdims=True)) * rest
  np.testing.assert_allclose(law, p, atol=1e-6)
  # And that the rule does it: a draft outside p is always replaced, by a token
  # that the few do not contain where p has none of them.
  outside = np.delete(np.arange(VOCAB), IDS)
  logits = jnp.full((ROWS, 5, VOCAB), -jnp.inf).at[..., outside].set(0.0)
  keys = jax.random.split(jax.random.key(6), ROWS)
  verdict = verify.rejection(
    logits,
    propose("sampled", 1.0),
    sampling_cfg=configs.SamplingConfig(temperature=1.0),
    accept_keys=keys,
    replace_keys=keys,
  )
  assert (np.asarray(verdict.accepted) == 0).all()
  assert np.isin(verdict.next_token, outside).all()


def request(count=10):
  prompts = jax.random.randint(jax.random.key(7), (3, 4), 0, VOCAB)
  return (prompts.astype(jnp.int32), jnp.array([4, 3, 2])), {
    "decode": configs.DecodeConfig(max_new_tokens=count),
    "keys": jax.random.split(jax.random.key(8), 3),
  }


def test_greedy_output_is_the_target_s_with_a_reduced_vocabulary():
  rows, options = request()
  plain = generate.autoregressive(target(), *rows, **options)
  drafted = generate.generate(target(), drafter(), *rows, **options)
  np.testing.assert_array_equal(drafted.tokens, plain.tokens)


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_own_tables_are_used_and_equal_ones_change_nothing(method):
  made = decoding_oracles.drafter(config(method), target().tables, 24)
  tables = target().tables
  copies = {"embed_tokens": tables.embedding, "lm_head": tables.head}
  kind = "greedy"
  borrowed = propose(kind, 0.0, made.replace(buffers={})).tokens
  equal = propose(kind, 0.0, made.replace(buffers=copies)).tokens
  np.testing.assert_array_equal(equal, borrowed)
  own = copies | {"lm_head": -tables.head}
  other = propose(kind, 0.0, made.replace(buffers=own)).tokens
  assert (np.asarray(other) != np.asarray(borrowed)).any()
  # The embedding is that of the block's slots.
  for buffers, same in (
    (copies, True),
    ({"embed_tokens": -tables.embedding}, False),
  ):
    got, want = (
      dflash.own_embedding(b, tables).embedding for b in (buffers, {})
    )
    assert np.array_equal(got, want) == same


def blank(kind):
  """A record without values: nothing reads them."""
  return object.__new__(kind)


@pytest.mark.parametrize("method", ["dflash", "dflash2"])
def test_a_drafter_with_its_own_head_is_not_trained(method):
  setup = tiny_models.drafter(tiny_models.drafter_config(method))
  with pytest.raises(ValueError, match="decoded here, not trained"):
    setup.method.loss(
      setup.params,
      {"lm_head": setup.tables.head},
      setup.tables,
      blank(contract.DrafterOutput),
      blank(contract.Supervision),
      cfg=setup.cfg,
      window=blank(contract.LossWindow),
      chunk_size=1,
    )


@pytest.mark.parametrize("method", ["dflash2", "domino", "dspark", "dspine"])
def test_only_dflash_has_a_reduced_vocabulary(method):
  cfg = tiny_models.drafter_config(method)
  with pytest.raises(ValueError, match="only dflash may have a reduced one"):
    dataclasses.replace(cfg, draft_vocab_size=5)
