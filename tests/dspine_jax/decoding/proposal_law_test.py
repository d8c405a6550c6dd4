"""A proposal's `probs` are the law that its tokens were drawn from."""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate
from dspine_jax.decoding import round as round_lib
from dspine_jax.drafters import contract, methods
from dspine_jax.target import model
from tests import decoding_oracles, oracles, tiny_models

VOCAB, TOP_K, DRAFTS, ROWS = 7, 3, 3, 20_000
TOLERANCE = 5e-6  # float32 passes and softmax against float64.
TARGET = tiny_models.target_config(vocab_size=VOCAB, num_layers=2)
PLAIN = configs.SamplingConfig(temperature=1.0)
SHARP = configs.SamplingConfig(temperature=0.7, top_k=5, top_p=0.95)
KINDS = [
  ("dflash", "sampled"),
  ("dspine", "full_support"),
  ("dspine", "candidates"),
  ("dspine", "base"),
]
EACH_KIND = pytest.mark.parametrize(("method", "kind"), KINDS)
EACH_SAMPLING = pytest.mark.parametrize(
  "sampling_cfg", [PLAIN, SHARP], ids=["plain", "sharp"]
)


class Draft(NamedTuple):
  """One block's pass, before tokens are drawn from it."""

  target: round_lib.TargetModel
  drafter: round_lib.DrafterModel
  output: contract.DrafterOutput
  anchor: int

  @property
  def logits(self):
    hidden = self.output.hidden[0, 0, 1:]
    return np.asarray(model.logits(self.target.params, hidden), np.float64)

  def law(self, sampling_cfg, kind):
    u = self.output.pre_injection
    return decoding_oracles.proposal_law(
      self.drafter,
      self.target.tables.head,
      self.logits,
      None if u is None else np.asarray(u[0, 0, 1:]),
      sampling_cfg,
      kind,
    )


@functools.cache
def draft(method, top_k=TOP_K) -> Draft:
  target = decoding_oracles.target(TARGET, 4)
  cfg = tiny_models.drafter_config(
    method,
    vocab_size=VOCAB,
    num_layers=2,
    block_size=DRAFTS + 1,
    mask_token_id=VOCAB - 1,
    target_layer_ids=(0,),
    num_target_layers=2,
    dspine={"transfer_rank": 5, "replacement_layers": 1, "top_k": top_k},
  )
  drafter = decoding_oracles.drafter(cfg, target.tables, 5)
  state = generate.start(
    target,
    drafter,
    jnp.array([[1, 4, 2]], jnp.int32),
    jnp.array([3], jnp.int32),
    decode=configs.DecodeConfig(max_new_tokens=4),
    keys=jax.random.split(jax.random.key(0), 1),
  )
  output = jax.jit(round_lib.draft)(
    target, drafter, state.anchor, state.draft_cache
  )
  output = output.replace(layer_features=None)
  return Draft(target, drafter, output, int(state.anchor[0]))


@functools.partial(jax.jit, static_argnames=("sampling_cfg", "kind"))
def _propose(target, drafter, output, anchor, keys, sampling_cfg, kind):
  rows = keys.shape[0]
  output = jax.tree.map(lambda x: jnp.repeat(x, rows, axis=0), output)
  return methods.drafter(drafter.cfg).propose(
    drafter.params,
    drafter.buffers,
    target.tables,
    output,
    jnp.full((rows,), anchor, jnp.int32),
    cfg=drafter.cfg,
    sampling_cfg=sampling_cfg,
    kind=kind,
    keys=keys,
  )


@functools.cache
def proposals(method, kind, sampling_cfg, top_k=TOP_K):
  """Tokens [N, M] and probs [N, M, V] of one block, drawn with N keys."""
  one = draft(method, top_k)
  keys = jax.random.split(jax.random.key(7), ROWS)
  proposal = _propose(
    one.target, one.drafter, one.output, one.anchor, keys, sampling_cfg, kind
  )
  return np.asarray(proposal.tokens), np.asarray(proposal.probs)


@EACH_SAMPLING
@EACH_KIND
def test_probs_are_the_plain_law_given_the_drawn_prefix(
  method, kind, sampling_cfg
):
  one = draft(method)
  tokens, probs = proposals(method, kind, sampling_cfg)
  law = one.law(sampling_cfg, kind)
  np.testing.assert_allclose(probs.sum(axis=-1), 1, atol=TOLERANCE)
  seen = set()
  for row in range(2000):
    predecessors = [one.anchor, *tokens[row, :-1].tolist()]
    for slot, predecessor in enumerate(predecessors):
      want = law(slot, predecessor)
      np.testing.assert_allclose(probs[row, slot], want, atol=TOLERANCE)
      np.testing.assert_array_equal(probs[row, slot] > 0, want > 0)
      seen.add((slot, predecessor))
  assert len(seen) > DRAFTS + 1, "the walk took a single path"


@EACH_SAMPLING
@EACH_KIND
def test_drawn_tokens_follow_the_returned_law(method, kind, sampling_cfg):
  one = draft(method)
  tokens, _ = proposals(method, kind, sampling_cfg)
  law = one.law(sampling_cfg, kind)
  joint = decoding_oracles.joint_law(law, one.anchor, VOCAB, DRAFTS)
  p_value = decoding_oracles.chi_squared(tokens, joint)
  print(f"{method} {kind}: p-value {p_value:.3g}")
  assert p_value > 1e-3


def test_a_walk_with_one_noise_for_all_slots_is_seen():
  # The test above must see dependent slots: here slot 1 repeats slot 0's luck.
  one = draft("dflash")
  law = one.law(PLAIN, "sampled")
  noise = np.random.default_rng(0).gumbel(size=(ROWS, 1, VOCAB))
  logs = np.log([law(slot, 0) for slot in range(DRAFTS)])
  tokens = np.argmax(logs[None] + noise, axis=-1)
  joint = decoding_oracles.joint_law(law, one.anchor, VOCAB, DRAFTS)
  assert decoding_oracles.chi_squared(tokens, joint) < 1e-9


def test_refined_laws_are_far_from_the_base_law():
  # Or else the tests of this folder could not tell one from the other.
  one = draft("dspine")
  base, refined = one.law(PLAIN, "base"), one.law(PLAIN, "full_support")
  for slot in range(1, DRAFTS):
    gaps = [
      np.abs(base(slot, a) - refined(slot, a)).sum() for a in range(VOCAB)
    ]
    assert max(gaps) > 0.2


@EACH_SAMPLING
def test_candidates_leave_all_other_tokens_out(sampling_cfg):
  one = draft("dspine")
  tokens, probs = proposals("dspine", "candidates", sampling_cfg)
  for slot in range(DRAFTS):
    ids = oracles.top_k(one.logits[slot], TOP_K)
    others = [token for token in range(VOCAB) if token not in ids]
    assert not probs[:, slot][:, others].any()
    assert set(tokens[:, slot]) <= set(ids)


def test_full_support_keeps_the_base_probabilities_outside():
  one = draft("dspine")
  tokens, probs = proposals("dspine", "full_support", PLAIN)
  outside = 0
  for slot in range(DRAFTS):
    ids = oracles.top_k(one.logits[slot], TOP_K)
    others = [token for token in range(VOCAB) if token not in ids]
    base = decoding_oracles.probabilities(one.logits[slot], PLAIN)[others]
    want = np.broadcast_to(base, (ROWS, len(others)))
    np.testing.assert_allclose(probs[:, slot][:, others], want, atol=TOLERANCE)
    outside += np.isin(tokens[:, slot], others).sum()
  assert outside > 100


def test_full_support_without_an_outside_is_the_law_of_the_candidates():
  for sampling_cfg, top_k in (
    (PLAIN, VOCAB),
    (dataclasses.replace(PLAIN, top_k=2), TOP_K),
  ):
    full = proposals("dspine", "full_support", sampling_cfg, top_k)
    law = draft("dspine", top_k).law(sampling_cfg, "candidates")
    anchor = draft("dspine", top_k).anchor
    joint = decoding_oracles.joint_law(law, anchor, VOCAB, DRAFTS)
    assert np.isfinite(full[1]).all()
    assert decoding_oracles.chi_squared(full[0], joint) > 1e-3
    np.testing.assert_allclose(full[1].sum(axis=-1), 1, atol=TOLERANCE)


@pytest.mark.parametrize("method", ["dflash", "dspine"])
def test_a_greedy_draft_has_no_law_and_needs_no_key(method):
  one = draft(method)
  runs = [
    _propose(
      one.target,
      one.drafter,
      one.output,
      one.anchor,
      jax.random.split(jax.random.key(seed), 2),
      PLAIN,
      "greedy",
    )
    for seed in (0, 1)
  ]
  assert runs[0].probs is None
  np.testing.assert_array_equal(runs[0].tokens, runs[1].tokens)


@EACH_KIND
def test_a_rows_draft_depends_on_its_own_key_alone(method, kind):
  one = draft(method)
  tokens, _ = proposals(method, kind, PLAIN)
  keys = jax.random.split(jax.random.key(8), ROWS)
  keys = keys.at[4:7].set(jax.random.split(jax.random.key(7), ROWS)[4:7])
  others = _propose(
    one.target, one.drafter, one.output, one.anchor, keys, PLAIN, kind
  )
  np.testing.assert_array_equal(others.tokens[4:7], tokens[4:7])
  assert not (others.tokens[7:] == tokens[7:]).all()
