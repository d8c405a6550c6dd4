"""Heads that read drafted tokens: `probs` are the law given the whole prefix.

As `proposal_law_test.py`, for laws that may depend on all tokens drafted before
(Domino's GRU, DSpark's recurrent head) and for DFlash2's selector.
"""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import contract
from tests import decoding_oracles, head_oracles, oracles, tiny_models

VOCAB, DRAFTS, TOP_K, ROWS = 6, 3, 3, 20_000
TOLERANCE = 5e-6  # float32 products and softmax against float64.
PLAIN = configs.SamplingConfig(temperature=1.0)
SHARP = configs.SamplingConfig(temperature=0.7, top_k=5, top_p=0.95)
CASES = [
  ("dflash2", {}, "candidates"),
  ("dflash2", {}, "full_support"),
  ("domino", {}, "sampled"),
  ("dspark", {"markov_head_type": "vanilla"}, "sampled"),
  ("dspark", {"markov_head_type": "gated"}, "sampled"),
  ("dspark", {"markov_head_type": "rnn"}, "sampled"),
]
EACH_CASE = pytest.mark.parametrize(
  ("method", "options", "kind"),
  CASES,
  ids=["-".join([m, *o.values(), k]) for m, o, k in CASES],
)
EACH_SAMPLING = pytest.mark.parametrize(
  "sampling_cfg", [PLAIN, SHARP], ids=["plain", "sharp"]
)
ANCHOR = 4


class Drawn(NamedTuple):
  """Many proposals of one block, and what they were drawn from."""

  tokens: np.ndarray
  probs: np.ndarray
  setup: tiny_models.Setup
  hidden: np.ndarray
  sampling_cfg: configs.SamplingConfig
  kind: str

  def law(self, prefix):
    """[V], the law of the token behind `prefix`, which starts with anchor."""
    return _law(self, tuple(int(token) for token in prefix))

  def joint(self, law=None):
    """[V] * M, the law of whole proposals."""
    law = law or self.law
    joint = np.ones((VOCAB,) * DRAFTS)
    for tokens in np.ndindex(*joint.shape):
      for slot, token in enumerate(tokens):
        joint[tokens] *= law((ANCHOR, *tokens[:slot]))[token]
    return joint


def _law(drawn, prefix):
  setup, cfg = drawn.setup, drawn.sampling_cfg
  slot = len(prefix) - 1
  base = drawn.hidden @ head_oracles.array(setup.tables.head).T
  if setup.cfg.method == "domino":
    logits = head_oracles.domino_logits(
      setup.params,
      setup.tables.embedding,
      base,
      drawn.hidden,
      prefix,
      setup.cfg.domino.pure_draft_prefix_len,
    )
    return decoding_oracles.probabilities(logits[slot], cfg)
  if setup.cfg.method == "dspark":
    kind = setup.cfg.dspark.markov_head_type
    logits = head_oracles.markov_logits(
      setup.params, kind, base, drawn.hidden, prefix
    )
    return decoding_oracles.probabilities(logits[slot], cfg)
  plain = decoding_oracles.probabilities(base[slot], cfg)
  ids = oracles.top_k(base[slot], TOP_K)
  kept = [token for token in ids if plain[token] > 0]
  scores = head_oracles.selector_scores(
    setup.params["selector"],
    drawn.hidden[slot],
    base[slot],
    prefix[-1],
    kept,
  )
  share = oracles.softmax(scores / cfg.temperature)
  is_full = drawn.kind == "full_support"
  result = plain.copy() if is_full else np.zeros(VOCAB)
  result[kept] = share * (plain[kept].sum() if is_full else 1.0)
  return result


@functools.cache
def draw(case, sampling_cfg) -> Drawn:
  method, options, kind = CASES[case]
  more = {"selector_top_k": TOP_K} if method == "dflash2" else {}
  cfg = tiny_models.drafter_config(
    method,
    vocab_size=VOCAB,
    block_size=DRAFTS + (0 if method != "dflash2" else 1),
    mask_token_id=VOCAB - 1,
    **{method: options | more},
  )
  setup = tiny_models.drafter(cfg)
  shape = (1, 1, cfg.block_size, cfg.hidden_size)
  states = 0.4 * np.random.default_rng(2).standard_normal(shape)
  states = states.astype(np.float32)

  @jax.jit
  def propose(keys):
    hidden = jnp.broadcast_to(states, (ROWS, *shape[1:]))
    return setup.method.propose(
      setup.params,
      setup.buffers,
      setup.tables,
      contract.DrafterOutput(hidden=hidden),
      jnp.full((ROWS,), ANCHOR, jnp.int32),
      cfg=cfg,
      sampling_cfg=sampling_cfg,
      kind=kind,
      keys=keys,
    )

  proposal = propose(jax.random.split(jax.random.key(7), ROWS))
  hidden = states[0, 0, cfg.first_slot :].astype(np.float64)
  return Drawn(
    np.asarray(proposal.tokens),
    np.asarray(proposal.probs),
    setup,
    hidden,
    sampling_cfg,
    kind,
  )


def case_of(method, options, kind):
  return CASES.index((method, options, kind))


@EACH_SAMPLING
@EACH_CASE
def test_probs_are_the_plain_law_given_the_drawn_prefix(
  method, options, kind, sampling_cfg
):
  drawn = draw(case_of(method, options, kind), sampling_cfg)
  assert drawn.tokens.shape == (ROWS, DRAFTS)
  laws = functools.cache(drawn.law)
  for tokens, probs in zip(drawn.tokens[:1500], drawn.probs, strict=False):
    prefix = (ANCHOR, *tokens.tolist())
    for slot in range(DRAFTS):
      want = laws(prefix[: slot + 1])
      np.testing.assert_allclose(probs[slot], want, atol=TOLERANCE)
      np.testing.assert_array_equal(probs[slot] > 0, want > 0)
  assert laws.cache_info().currsize > 2 * DRAFTS, "the walk took a single path"


@EACH_SAMPLING
@EACH_CASE
def test_drawn_tokens_follow_the_law_and_no_other(
  method, options, kind, sampling_cfg
):
  drawn = draw(case_of(method, options, kind), sampling_cfg)
  p_value = decoding_oracles.chi_squared(drawn.tokens, drawn.joint())
  print(f"{method} {kind}: p-value {p_value:.3g}")
  assert p_value > 1e-3

  def from_the_anchor(prefix):
    return drawn.law((ANCHOR,) * len(prefix))

  wrong = drawn.joint(from_the_anchor)
  assert decoding_oracles.chi_squared(drawn.tokens, wrong) < 1e-9


@pytest.mark.parametrize("case", [2, 5], ids=["gru", "rnn"])
def test_a_recurrent_head_remembers_more_than_the_last_token(case):
  drawn = draw(case, PLAIN)
  gaps = [
    np.abs(drawn.law((ANCHOR, 0, 1)) - drawn.law((ANCHOR, a, 1))).sum()
    for a in range(VOCAB)
  ]
  assert max(gaps) > 0.01
