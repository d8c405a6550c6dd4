import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import sampling, verify
from dspine_jax.drafters import contract
from tests import decoding_oracles

VOCAB, DRAFTS = 7, 4
ROWS, MANY = 300, 20_000
WARM = configs.SamplingConfig(temperature=0.8, top_k=5, top_p=0.95)
PLAIN = configs.SamplingConfig(temperature=1.0)


class Host(NamedTuple):
  """A `Verdict` in NumPy."""

  accepted: np.ndarray
  next_token: np.ndarray


@functools.cache
def keys(count, seed):
  return jax.random.split(jax.random.key(seed), count)


def logits(rows=ROWS, seed=0):
  shape = (rows, DRAFTS + 1, VOCAB)
  values = np.random.default_rng(seed).standard_normal(shape)
  return jnp.asarray(2 * values, jnp.float32)


draw = jax.jit(sampling.draw)


def close_drafts(target_logits, cfg, seed=1):
  """Proposals whose law q is near p, so that all counts occur."""
  noise = np.random.default_rng(seed).standard_normal(target_logits.shape)
  near = target_logits[:, :-1] + 0.3 * jnp.asarray(noise[:, :-1], jnp.float32)
  q = sampling.probabilities(near, cfg)
  rows = target_logits.shape[0]
  return contract.Proposal(tokens=draw(keys(rows, seed), q), probs=q)


def far_drafts(rows=MANY):
  """The same logits in each row, and drafts whose law is far from theirs."""
  target_logits = jnp.broadcast_to(logits(1), (rows, DRAFTS + 1, VOCAB))
  q = sampling.probabilities(logits(1, seed=9)[:, :-1], PLAIN)
  q = jnp.broadcast_to(q, (rows, DRAFTS, VOCAB))
  return target_logits, contract.Proposal(draw(keys(rows, 1), q), q)


@functools.partial(jax.jit, static_argnames=("rule", "cfg"))
def run_rule(target_logits, proposal, accept_keys, replace_keys, rule, cfg):
  return verify.RULES[rule](
    target_logits,
    proposal,
    sampling_cfg=cfg,
    accept_keys=accept_keys,
    replace_keys=replace_keys,
  )


def check(rule, target_logits, proposal, cfg=PLAIN, accept=2, replace=3):
  rows = target_logits.shape[0]
  verdict = run_rule(
    target_logits, proposal, keys(rows, accept), keys(rows, replace), rule, cfg
  )
  return Host(np.asarray(verdict.accepted), np.asarray(verdict.next_token))


def one_hot_logits(tokens):
  return 10.0 * jax.nn.one_hot(jnp.array([tokens]), VOCAB + 3)


def test_the_rules_are_those_of_the_configuration():
  assert tuple(verify.RULES) == configs.VERIFY_RULES


def test_greedy_example_of_the_docstring():
  proposal = contract.Proposal(tokens=jnp.array([[5, 9]], jnp.int32))
  verdict = check("greedy", one_hot_logits([5, 7, 2]), proposal)
  assert (int(verdict.accepted[0]), int(verdict.next_token[0])) == (1, 7)


def test_rejection_example_of_the_docstring():
  rows = MANY
  p, q = jnp.array([0.6, 0.4]), jnp.array([0.9, 0.1])
  proposal = contract.Proposal(
    tokens=jnp.zeros((rows, 1), jnp.int32),
    probs=jnp.broadcast_to(q, (rows, 1, 2)),
  )
  target_logits = jnp.broadcast_to(jnp.log(p), (rows, 2, 2))
  verdict = check("rejection", target_logits, proposal)
  stands = verdict.accepted == 1
  law = np.array([1 / 3, 2 / 3])
  assert decoding_oracles.chi_squared(stands[:, None].astype(int), law) > 1e-3
  assert (verdict.next_token[~stands] == 1).all()


def plain_greedy(rows, drafts):
  best = [list(row).index(max(row)) for row in rows]
  stands = 0
  while stands < len(drafts) and drafts[stands] == best[stands]:
    stands += 1
  return stands, best[stands]


def test_greedy_equals_the_plain_loop_for_every_accepted_count():
  target_logits = logits()
  best = np.argmax(np.asarray(target_logits), axis=-1)
  wrong = np.random.default_rng(3).random((ROWS, DRAFTS)) < 0.25
  drafts = (best[:, :-1] + wrong) % VOCAB
  proposal = contract.Proposal(tokens=jnp.asarray(drafts, jnp.int32))
  verdict = check("greedy", target_logits, proposal)
  counts = set()
  for row, values in enumerate(np.asarray(target_logits)):
    want = plain_greedy(values, drafts[row].tolist())
    assert (verdict.accepted[row], verdict.next_token[row]) == want
    counts.add(want[0])
  assert counts == set(range(DRAFTS + 1))


def plain_rejection(p, q, drafts, uniform, noise):
  """The rule of the module's docstring for one row, draft by draft."""
  for slot, token in enumerate(drafts):
    if uniform[slot] >= min(1.0, p[slot][token] / q[slot][token]):
      rest = decoding_oracles.residual(p[slot], q[slot])
      break
  else:
    slot, rest = len(drafts), p[len(drafts)]
  with np.errstate(divide="ignore"):
    return slot, int(np.argmax(np.log(rest) + noise))


@pytest.mark.parametrize("cfg", [PLAIN, WARM], ids=["plain", "warm"])
def test_rejection_equals_the_plain_loop_for_every_accepted_count(cfg):
  target_logits = logits()
  proposal = close_drafts(target_logits, cfg)
  verdict = check("rejection", target_logits, proposal, cfg)
  uniform = jax.vmap(lambda key: jax.random.uniform(key, (DRAFTS,)))
  uniform = np.asarray(uniform(keys(ROWS, 2)))
  noise = np.asarray(sampling.gumbel(keys(ROWS, 3), (VOCAB,)))
  rows, q = np.asarray(target_logits), np.asarray(proposal.probs, np.float64)
  drafts = np.asarray(proposal.tokens).tolist()
  counts = set()
  for row in range(ROWS):
    p = [decoding_oracles.probabilities(x, cfg) for x in rows[row]]
    want = plain_rejection(p, q[row], drafts[row], uniform[row], noise[row])
    got = verdict.accepted[row], verdict.next_token[row]
    assert got == want, f"row {row}"
    counts.add(want[0])
  assert counts == set(range(DRAFTS + 1))


def test_rejection_never_keeps_what_the_target_cannot_say():
  target_logits = jnp.where(jnp.arange(VOCAB)[None, None] == 2, -jnp.inf, 0.0)
  target_logits = jnp.broadcast_to(target_logits, (ROWS, DRAFTS + 1, VOCAB))
  q = jnp.full((ROWS, DRAFTS, VOCAB), 1 / VOCAB)
  tokens = jnp.full((ROWS, DRAFTS), 2, jnp.int32)
  verdict = check("rejection", target_logits, contract.Proposal(tokens, q))
  np.testing.assert_array_equal(verdict.accepted, np.zeros(ROWS))
  assert not (verdict.next_token == 2).any()


def test_rejection_keeps_every_draft_of_the_targets_own_law():
  target_logits = logits()
  q = sampling.probabilities(target_logits, PLAIN)[:, :-1]
  proposal = contract.Proposal(draw(keys(ROWS, 1), q), q)
  verdict = check("rejection", target_logits, proposal)
  np.testing.assert_array_equal(verdict.accepted, np.full(ROWS, DRAFTS))


def test_rejection_without_the_draft_law_is_an_error():
  proposal = contract.Proposal(tokens=jnp.zeros((1, DRAFTS), jnp.int32))
  with pytest.raises(ValueError, match="rule='rejection'.*greedy"):
    check("rejection", logits(1), proposal)


@pytest.mark.parametrize("cfg", [PLAIN, WARM], ids=["plain", "warm"])
def test_exact_match_equals_the_targets_own_draws(cfg):
  target_logits = logits()
  proposal = close_drafts(target_logits, cfg)
  verdict = check("exact_match", target_logits, proposal, cfg)
  noise = np.asarray(sampling.gumbel(keys(ROWS, 2), (DRAFTS + 1, VOCAB)))
  rows = np.asarray(target_logits)
  drafts, counts = np.asarray(proposal.tokens).tolist(), set()
  for row in range(ROWS):
    p = [decoding_oracles.probabilities(x, cfg) for x in rows[row]]
    with np.errstate(divide="ignore"):
      drawn = np.log(p) + noise[row]
    want = plain_greedy(drawn.tolist(), drafts[row])
    assert (verdict.accepted[row], verdict.next_token[row]) == want
    counts.add(want[0])
  assert counts == set(range(DRAFTS + 1))


def test_exact_match_needs_no_law_of_the_draft():
  target_logits = logits()
  proposal = close_drafts(target_logits, PLAIN)
  with_law = check("exact_match", target_logits, proposal)
  without = check("exact_match", target_logits, proposal.replace(probs=None))
  np.testing.assert_array_equal(with_law.accepted, without.accepted)
  np.testing.assert_array_equal(with_law.next_token, without.next_token)


def first_token(verdict, proposal):
  drafts = np.asarray(proposal.tokens)[:, 0]
  return np.where(verdict.accepted > 0, drafts, verdict.next_token)[:, None]


@pytest.mark.parametrize("rule", ["rejection", "exact_match"])
def test_tokens_of_one_slot_follow_the_target_whatever_the_draft(rule):
  target_logits, proposal = far_drafts()
  verdict = check(rule, target_logits, proposal)
  p = decoding_oracles.probabilities(np.asarray(target_logits[0, 0]), PLAIN)
  p_value = decoding_oracles.chi_squared(first_token(verdict, proposal), p)
  print(f"{rule}: p-value {p_value:.3g}")
  assert p_value > 1e-3
  # The share of accepted first drafts is sum min(p, q), or sum p q.
  q = np.asarray(proposal.probs[0, 0], np.float64)
  share = (np.minimum(p, q) if rule == "rejection" else p * q).sum()
  stands = (verdict.accepted > 0).astype(int)[:, None]
  rates = np.array([1 - share, share])
  assert decoding_oracles.chi_squared(stands, rates) > 1e-3


def test_replacing_with_the_noise_of_the_draft_is_seen():
  # What the module's docstring warns of: one key for draft and replacement.
  target_logits, proposal = far_drafts()
  verdict = check("rejection", target_logits, proposal, replace=1)
  p = decoding_oracles.probabilities(np.asarray(target_logits[0, 0]), PLAIN)
  p_value = decoding_oracles.chi_squared(first_token(verdict, proposal), p)
  print(f"the draft's key again: p-value {p_value:.3g}")
  assert p_value < 1e-9


# Proposals that end early.


def ended(proposal, seed=6):
  """With lengths 0..M, independent of what was drafted."""
  rows, drafts = proposal.tokens.shape
  lengths = np.random.default_rng(seed).integers(0, drafts + 1, rows)
  return proposal.replace(lengths=jnp.asarray(lengths, jnp.int32))


@pytest.mark.parametrize("rule", sorted(verify.RULES))
def test_no_token_behind_the_end_of_a_proposal_is_accepted(rule):
  target_logits = logits()
  if rule == "greedy":
    tokens = sampling.argmax(target_logits)[:, :-1]
    proposal = contract.Proposal(tokens=tokens)
  else:
    proposal = close_drafts(target_logits, PLAIN)
  short = ended(proposal)
  whole, cut = (check(rule, target_logits, one) for one in (proposal, short))
  lengths = np.asarray(short.lengths)
  np.testing.assert_array_equal(
    cut.accepted, np.minimum(whole.accepted, lengths)
  )
  # What fell inside falls in the same way.
  inside = whole.accepted < lengths
  np.testing.assert_array_equal(
    cut.next_token[inside], whole.next_token[inside]
  )
  assert inside.any() == (rule != "greedy") and not inside.all()


def test_a_full_length_is_no_end():
  target_logits = logits()
  proposal = close_drafts(target_logits, PLAIN)
  lengths = jnp.full((ROWS,), DRAFTS, jnp.int32)
  for rule in verify.RULES:
    want = check(rule, target_logits, proposal)
    got = check(rule, target_logits, proposal.replace(lengths=lengths))
    np.testing.assert_array_equal(got.accepted, want.accepted)
    np.testing.assert_array_equal(got.next_token, want.next_token)


def test_the_token_behind_the_end_follows_the_target_and_not_the_residual():
  target_logits, proposal = far_drafts()
  empty = proposal.replace(lengths=jnp.zeros((MANY,), jnp.int32))
  verdict = check("rejection", target_logits, empty)
  assert not verdict.accepted.any()
  p = decoding_oracles.probabilities(np.asarray(target_logits[0, 0]), PLAIN)
  drawn = verdict.next_token[:, None]
  assert decoding_oracles.chi_squared(drawn, p) > 1e-3
  q = np.asarray(proposal.probs[0, 0])
  rest = decoding_oracles.residual(p, q)
  assert decoding_oracles.chi_squared(drawn, rest) < 1e-9
