"""At temperature > 0 the emitted tokens follow the target's law exactly.

Many rows of one prompt, each with its own key, are decoded over several rounds.
The joint law of the first tokens is enumerated from the target and compared by
chi-squared at fixed seeds. Rules and drafters that are wrong in the ways known
from other code bases must fail the same comparison.
"""

import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate, sampling, verify
from dspine_jax.drafters import dflash, dspine, methods
from tests import decoding_oracles, tiny_models

VOCAB, DRAFTS, COUNT, ROWS = 5, 3, 4, 16_384
PROMPT = (1, 3, 0)
TARGET = tiny_models.target_config(vocab_size=VOCAB, num_layers=2)
PLAIN = configs.SamplingConfig(temperature=1.0)
SETTINGS = {
  "plain": PLAIN,
  "all": configs.SamplingConfig(temperature=0.7, top_k=4, top_p=0.9),
}
RIGHT, WRONG = 1e-3, 1e-9  # Least p-value of a right, largest of a wrong one.


@functools.cache
def target():
  """Random, but flat enough that random drafts often stand."""
  sharp = decoding_oracles.target(TARGET, 11)
  head = 0.6 * sharp.params["lm_head"]
  return sharp.replace(params=sharp.params | {"lm_head": head})


def drafter(method, name=None, seed=24, dspark=None):
  """A random drafter; `name` is that of another method with its parameters.

  With seed 24 every accepted count makes up a good share of the rounds.
  """
  cfg = tiny_models.drafter_config(
    method,
    vocab_size=VOCAB,
    num_layers=1,
    block_size=DRAFTS + 1,
    mask_token_id=VOCAB - 1,
    target_layer_ids=(0,),
    num_target_layers=2,
    dflash2={"selector_top_k": 3},
    dspark=dspark or {},
    dspine={"transfer_rank": 4, "replacement_layers": 1, "top_k": 3},
  )
  made = decoding_oracles.drafter(cfg, target().tables, seed)
  return made.replace(cfg=dataclasses.replace(cfg, method=name or method))


@functools.cache
def law(sampling_cfg):
  return decoding_oracles.sequence_law(target(), PROMPT, COUNT, sampling_cfg)


def request(seed=1):
  prompts = jnp.broadcast_to(jnp.array(PROMPT, jnp.int32), (ROWS, len(PROMPT)))
  return {
    "prompts": prompts,
    "prompt_lengths": jnp.full((ROWS,), len(PROMPT), jnp.int32),
    "keys": jax.random.split(jax.random.key(seed), ROWS),
  }


class Evidence(NamedTuple):
  """p-values of all tokens, and of the first two; mean accepted drafts.

  The second of the first two comes from the first round, whatever its length.
  """

  whole: float
  single_round: float
  accepted: float


def decode_many(draft_models, rule, proposal, sampling_cfg=PLAIN) -> Evidence:
  """Decodes all rows with each drafter and tests their tokens together."""
  decode = configs.DecodeConfig(
    max_new_tokens=COUNT, sampling=sampling_cfg, rule=rule, proposal=proposal
  )
  results = [
    generate.generate(target(), model, **request(seed), decode=decode)
    for seed, model in enumerate(draft_models, start=1)
  ]
  tokens = np.concatenate([result.tokens for result in results])
  accepted = np.concatenate([result.accepted for result in results])
  assert all((result.num_tokens == COUNT).all() for result in results)
  wanted = law(sampling_cfg)
  evidence = Evidence(
    decoding_oracles.chi_squared(tokens, wanted),
    decoding_oracles.chi_squared(tokens[:, :2], wanted.sum(axis=(2, 3))),
    float(accepted[accepted >= 0].mean()),
  )
  print(
    f"\n{draft_models[0].cfg.method} {rule} {proposal} {sampling_cfg}:"
    f" {len(tokens)} rows, p-values {evidence.whole:.3g} and"
    f" {evidence.single_round:.3g}, mean accepted {evidence.accepted:.3f}"
  )
  return evidence


def add_rule(monkeypatch, name, rule):
  """A rule under a name of its own, so that nothing compiled is reused."""
  monkeypatch.setitem(verify.RULES, name, rule)
  rules = (*configs.VERIFY_RULES, name)
  monkeypatch.setattr(configs, "VERIFY_RULES", rules)


def check_follows_the_target(evidence):
  assert evidence.whole > RIGHT
  assert evidence.single_round > RIGHT
  assert 0.05 < evidence.accepted < DRAFTS - 0.5, "all or nothing is accepted"


def test_full_support_and_rejection_follow_the_target_over_several_rounds():
  check_follows_the_target(
    decode_many([drafter("dspine")], "rejection", "full_support")
  )


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "rule", "proposal"),
  [
    ("dspine", "rejection", "candidates"),
    ("dspine", "rejection", "base"),
    ("dflash", "rejection", "sampled"),
    ("dflash2", "rejection", "candidates"),
    ("dflash2", "rejection", "full_support"),
    ("domino", "rejection", "sampled"),
    ("dspark", "rejection", "sampled"),
    ("dflash", "exact_match", "greedy"),
    ("dspine", "exact_match", "full_support"),
  ],
)
def test_tokens_follow_the_target_over_several_rounds(method, rule, proposal):
  check_follows_the_target(decode_many([drafter(method)], rule, proposal))


@pytest.mark.slow
@pytest.mark.parametrize(
  ("rule", "proposal", "name"),
  [
    ("rejection", "full_support", "all"),
    ("exact_match", "base", "all"),
  ],
)
def test_temperature_top_k_and_top_p_bend_both_laws_alike(rule, proposal, name):
  check_follows_the_target(
    decode_many([drafter("dspine")], rule, proposal, SETTINGS[name])
  )


@pytest.mark.slow
def test_the_law_is_met_to_a_finer_scale_over_many_drafters():
  models = [drafter("dspine", seed=seed) for seed in range(40, 44)]
  check_follows_the_target(decode_many(models, "rejection", "full_support"))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["plain", "all"])
def test_autoregressive_tokens_follow_the_enumerated_law(name):
  decode = configs.DecodeConfig(
    max_new_tokens=COUNT, sampling=SETTINGS[name], rule="exact_match"
  )
  result = generate.autoregressive(target(), **request(), decode=decode)
  value = decoding_oracles.chi_squared(result.tokens, law(SETTINGS[name]))
  print(f"\nautoregressive {name}: p-value {value:.3g}")
  assert value > RIGHT


# Deliberate mistakes.


def one_key_for_two(logits, proposal, *, accept_keys, **others):
  """The acceptance test's key also draws the replacement."""
  others["replace_keys"] = accept_keys
  return verify.rejection(logits, proposal, accept_keys=accept_keys, **others)


def no_residual(logits, proposal, *, sampling_cfg, replace_keys, **others):
  """A fallen draft is replaced by a draw from p itself."""
  verdict = verify.rejection(
    logits,
    proposal,
    sampling_cfg=sampling_cfg,
    replace_keys=replace_keys,
    **others,
  )
  p = sampling.probabilities(logits, sampling_cfg)
  p = jnp.take_along_axis(p, verdict.accepted[:, None, None], axis=1)[:, 0]
  return verdict.replace(next_token=sampling.draw(replace_keys, p))


def _one_hot(tokens):
  return jax.nn.one_hot(tokens, VOCAB, dtype=jnp.float32)


def one_hot_on_the_best(logits, proposal, **others):
  """q of a greedy draft, although the draft was sampled."""
  q = _one_hot(jnp.argmax(proposal.probs, axis=-1))
  return verify.rejection(logits, proposal.replace(probs=q), **others)


def one_hot_on_the_drawn(logits, proposal, **others):
  """q = 1 for whatever token was drawn."""
  q = _one_hot(proposal.tokens)
  return verify.rejection(logits, proposal.replace(probs=q), **others)


def test_the_key_of_the_draft_must_not_draw_the_replacement(monkeypatch):
  seen = []

  def propose(*arguments, keys, **others):
    seen.append(keys)
    return dflash.propose(*arguments, keys=keys, **others)

  def rule(logits, proposal, *, replace_keys, **others):
    del replace_keys
    return verify.rejection(logits, proposal, replace_keys=seen[-1], **others)

  recording = dflash.DRAFTER._replace(propose=propose)
  monkeypatch.setitem(methods.DRAFTERS, "recording", recording)
  add_rule(monkeypatch, "draft_key_again", rule)
  model = drafter("dflash", "recording")
  evidence = decode_many([model], "draft_key_again", "sampled")
  assert seen
  assert evidence.whole < WRONG


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "proposal", "rule"),
  [
    ("dflash", "sampled", one_key_for_two),
    ("dflash", "sampled", no_residual),
    ("dspine", "full_support", no_residual),
    ("dspine", "full_support", one_hot_on_the_best),
  ],
)
def test_a_wrong_rule_is_seen(method, proposal, rule, monkeypatch):
  add_rule(monkeypatch, rule.__name__, rule)
  evidence = decode_many([drafter(method)], rule.__name__, proposal)
  # Enough for `check_follows_the_target` to fail, which asks for both.
  assert evidence.whole < WRONG


@pytest.mark.slow
@pytest.mark.parametrize("proposal", ["full_support", "candidates"])
def test_the_base_law_is_not_that_of_walked_tokens(proposal, monkeypatch):
  def propose(*arguments, kind, **others):
    walked = dspine.propose(*arguments, kind=kind, **others)
    base = dspine.propose(*arguments, kind="base", **others)
    return walked.replace(probs=base.probs)

  liar = dspine.DRAFTER._replace(propose=propose)
  monkeypatch.setitem(methods.DRAFTERS, "base_law", liar)
  model = drafter("dspine", "base_law")
  evidence = decode_many([model], "rejection", proposal)
  assert evidence.whole < WRONG


@pytest.mark.slow
@pytest.mark.parametrize("rule", ["rejection", "exact_match"])
def test_ending_a_proposal_by_its_confidence_is_lossless(rule):
  model = drafter("dspark", dspark={"confidence_threshold": 0.7})
  evidence = decode_many([model], rule, "sampled")
  check_follows_the_target(evidence)
  whole = decode_many([drafter("dspark")], rule, "sampled")
  assert evidence.accepted < whole.accepted - 0.05, "nothing was ended"


@pytest.mark.slow
def test_ending_a_proposal_by_the_token_itself_is_not(monkeypatch):
  # What may end a proposal before a token must not depend on that token.
  def propose(*arguments, **others):
    made = dflash.propose(*arguments, **others)
    likely = jnp.take_along_axis(made.probs, made.tokens[..., None], -1)[..., 0]
    kept = jnp.cumprod((likely > 0.3).astype(jnp.int32), axis=-1)
    return made.replace(lengths=jnp.sum(kept, axis=-1))

  choosy = dflash.DRAFTER._replace(propose=propose)
  monkeypatch.setitem(methods.DRAFTERS, "choosy", choosy)
  evidence = decode_many([drafter("dflash", "choosy")], "rejection", "sampled")
  assert max(evidence.whole, evidence.single_round) < WRONG


@pytest.mark.slow
def test_one_hot_on_the_drawn_token_is_lossless_but_accepts_less(monkeypatch):
  # Acceptance p(x), replacement from p without x: right for any x, at the
  # price of sum p q instead of sum min(p, q).
  add_rule(monkeypatch, "one_hot_on_the_drawn", one_hot_on_the_drawn)
  model = drafter("dflash")
  evidence = decode_many([model], "one_hot_on_the_drawn", "sampled")
  check_follows_the_target(evidence)
  full = decode_many([model], "rejection", "sampled")
  assert evidence.accepted < full.accepted - 0.1
