import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs, layers
from dspine_jax.decoding import generate
from dspine_jax.decoding import round as round_lib
from tests import decoding_oracles, tiny_models

VOCAB, PROMPT, MAX_NEW = 11, 5, 12
TARGET = tiny_models.target_config(vocab_size=VOCAB, num_layers=2)
GREEDY = configs.DecodeConfig(max_new_tokens=MAX_NEW, stop_tokens=(7, 3))
SAMPLED = configs.DecodeConfig(
  max_new_tokens=MAX_NEW,
  stop_tokens=(2,),
  sampling=configs.SamplingConfig(temperature=1.0),
  rule="rejection",
)
LENGTHS = (5, 1, 3, 4)
LIMITS = (12, 9, 1, 12)
# Each method and each rule once: a further pair compiles all over again.
BOTH = pytest.mark.parametrize(
  ("method", "decode"),
  [("dflash", GREEDY), ("dspine", SAMPLED)],
  ids=["greedy dflash", "sampled dspine"],
)


def drafter_config(method, **changes):
  fields = {
    "vocab_size": VOCAB,
    "num_layers": 2,
    "block_size": 4,
    "mask_token_id": VOCAB - 1,
    "target_layer_ids": (0,),
    "num_target_layers": 2,
    "dspine": {"transfer_rank": 8, "replacement_layers": 1},
  }
  return tiny_models.drafter_config(method, **(fields | changes))


# A window that begins inside most contexts here.
WINDOW = tiny_models.windowed("speculators") | {"sliding_window": 4}


@functools.cache
def models(method, seed=1):
  target = decoding_oracles.target(TARGET, seed)
  changes = WINDOW if method == "windowed" else {}
  cfg = drafter_config("dflash" if changes else method, **changes)
  return target, decoding_oracles.drafter(cfg, target.tables, seed + 1)


def request(seed=1, key=0):
  rng = np.random.default_rng(seed)
  shape = (len(LENGTHS), PROMPT)
  return {
    "prompts": jnp.asarray(rng.integers(0, VOCAB, shape), jnp.int32),
    "prompt_lengths": jnp.asarray(LENGTHS, jnp.int32),
    "keys": jax.random.split(jax.random.key(key), len(LENGTHS)),
    "limits": jnp.asarray(LIMITS, jnp.int32),
  }


def assert_equal(got, want):
  for x, y in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize(
  ("method", "seed"),
  [("dflash", 1), ("dflash", 2), ("dspine", 1), ("dspine", 2), ("windowed", 1)],
)
def test_rounds_equal_those_of_a_plain_loop_without_cache(method, seed):
  target, drafter = models(method, seed)
  arguments = request(seed)
  result = generate.generate(target, drafter, **arguments, decode=GREEDY)
  longest = 0
  for row, length in enumerate(LENGTHS):
    want = decoding_oracles.speculative_greedy(
      target,
      drafter,
      arguments["prompts"][row, :length],
      limit=LIMITS[row],
      stop_tokens=GREEDY.stop_tokens,
    )
    assert decoding_oracles.rounds_of(result, row) == want, f"row {row}"
    longest = max(longest, len(want.lengths))
  assert result.rounds == longest > 1


@BOTH
def test_streamed_rounds_equal_the_loop_on_the_device(method, decode):
  target, drafter = models(method)
  whole = generate.generate(target, drafter, **request(), decode=decode)
  state = generate.start(target, drafter, **request(), decode=decode)
  seen = np.asarray(state.num_tokens)
  while not state.done.all():
    state = generate.step(target, drafter, state, decode=decode)
    assert (np.asarray(state.num_tokens) >= seen).all()
    seen = np.asarray(state.num_tokens)
  assert_equal(generate.result(state), whole)


def test_a_finished_row_stays_as_it_is():
  target, drafter = models("dflash")
  state = generate.start(target, drafter, **request(), decode=GREEDY)
  while not state.done.all():
    state = generate.step(target, drafter, state, decode=GREEDY)
  # Copied, because the next step gives up the buffers of this state.
  final = jax.tree.map(jnp.copy, generate.result(state))
  lengths = np.asarray(state.target_cache.lengths)
  state = generate.step(target, drafter, state, decode=GREEDY)
  assert_equal(generate.result(state), final.replace(rounds=final.rounds + 1))
  for cache in (state.target_cache, state.draft_cache):
    np.testing.assert_array_equal(cache.lengths, lengths)


def test_a_step_gives_up_the_buffers_of_the_old_state():
  target, drafter = models("dflash")
  old = generate.start(target, drafter, **request(), decode=GREEDY)
  new = generate.step(target, drafter, old, decode=GREEDY)
  assert all(x.is_deleted() for x in jax.tree.leaves(old.target_cache))
  assert not any(x.is_deleted() for x in jax.tree.leaves(new))


def test_caches_hold_what_stands_before_the_anchor():
  target, drafter = models("dflash")
  state = generate.start(target, drafter, **request(), decode=GREEDY)
  for _ in range(3):
    want = np.asarray(LENGTHS) + np.asarray(state.num_tokens) - 1
    np.testing.assert_array_equal(state.target_cache.lengths, want)
    np.testing.assert_array_equal(state.draft_cache.lengths, want)
    last = np.take_along_axis(
      np.asarray(state.tokens),
      np.asarray(state.num_tokens)[:, None] - 1,
      axis=1,
    )
    np.testing.assert_array_equal(state.anchor, last[:, 0])
    state = generate.step(target, drafter, state, decode=GREEDY)


def test_no_round_and_no_prompt_of_a_known_shape_compiles_again():
  functions = (generate._start, generate.step, generate.run_rounds)

  def sizes():
    return [function._cache_size() for function in functions]

  target, drafter = models("dflash")
  state = generate.start(target, drafter, **request(), decode=GREEDY)
  state = generate.step(target, drafter, state, decode=GREEDY)
  before = sizes()
  state = generate.step(target, drafter, state, decode=GREEDY)
  state = generate.step(target, drafter, state, decode=GREEDY)
  assert sizes() == before
  generate.run_rounds(target, drafter, state, decode=GREEDY)
  before = sizes()
  target, drafter = models("dflash", seed=2)
  state = generate.start(target, drafter, **request(seed=2), decode=GREEDY)
  state = generate.step(target, drafter, state, decode=GREEDY)
  generate.run_rounds(target, drafter, state, decode=GREEDY)
  assert sizes() == before


@BOTH
def test_a_row_does_not_depend_on_the_other_rows(method, decode):
  target, drafter = models(method)
  first = request()
  result = generate.generate(target, drafter, **first, decode=decode)
  for row in range(2):
    other = request(seed=8, key=9)
    # Other prompts, lengths, limits and keys in all rows but one.
    other["prompt_lengths"] = other["prompt_lengths"][::-1]
    other["limits"] = jnp.asarray((3, 12, 12, 5), jnp.int32)
    mixed = {
      name: value.at[row].set(first[name][row])
      for name, value in other.items()
      if name != "keys"
    }
    mixed["keys"] = jnp.where(
      jnp.arange(len(LENGTHS)) == row, first["keys"], other["keys"]
    )
    again = generate.generate(target, drafter, **mixed, decode=decode)
    assert decoding_oracles.rounds_of(again, row) == decoding_oracles.rounds_of(
      result, row
    )
    assert not (again.tokens == result.tokens).all()


@BOTH
def test_padding_behind_a_prompt_does_not_matter(method, decode):
  target, drafter = models(method)
  first = request()
  padding = jnp.arange(PROMPT)[None] >= first["prompt_lengths"][:, None]
  changed = first | {
    "prompts": jnp.where(
      padding, (first["prompts"] + 3) % VOCAB, first["prompts"]
    )
  }
  assert_equal(
    generate.generate(target, drafter, **changed, decode=decode),
    generate.generate(target, drafter, **first, decode=decode),
  )


def stacked(target, drafter):
  """The same models with one tree for all layers: scanned, not unrolled."""
  params = dict(target.params)
  params["layers"] = layers.stack_layers(params["layers"])
  draft = dict(drafter.params)
  for name in ("backbone", "injection"):
    if name in draft:
      own = dict(draft[name])
      own["layers"] = layers.stack_layers(own["layers"])
      draft[name] = own
  return target.replace(params=params), drafter.replace(params=draft)


@BOTH
def test_scanned_layers_give_the_tokens_of_unrolled_ones(method, decode):
  target, drafter = models(method)
  scanned_target, scanned_drafter = stacked(target, drafter)
  want = generate.generate(target, drafter, **request(), decode=decode)
  got = generate.generate(
    scanned_target, scanned_drafter, **request(), decode=decode
  )
  assert_equal(got, want)
  if decode == GREEDY:
    assert_equal(
      generate.autoregressive(scanned_target, **request(), decode=decode),
      generate.autoregressive(target, **request(), decode=decode),
    )


def test_the_limit_is_the_buffers_size_at_most_and_by_default():
  target, drafter = models("dflash")
  above = request() | {"limits": jnp.full((len(LENGTHS),), 99, jnp.int32)}
  default = request()
  del default["limits"]
  for run in (
    functools.partial(generate.generate, target, drafter),
    functools.partial(generate.autoregressive, target),
  ):
    result = run(**above, decode=GREEDY)
    assert_equal(run(**default, decode=GREEDY), result)
    assert max(result.num_tokens) == MAX_NEW


def test_one_token_needs_no_round():
  target, drafter = models("dflash")
  arguments = request() | {"limits": jnp.ones((len(LENGTHS),), jnp.int32)}
  result = generate.generate(target, drafter, **arguments, decode=GREEDY)
  plain = generate.autoregressive(target, **arguments, decode=GREEDY)
  assert_equal(result, plain)
  assert result.rounds == 0
  assert (result.num_tokens == 1).all() and (result.accepted == -1).all()


@pytest.mark.slow
def test_a_buffer_of_one_token_is_enough_for_one():
  target, drafter = models("dflash")
  decode = dataclasses.replace(GREEDY, max_new_tokens=1)
  result = generate.generate(target, drafter, **request(), decode=decode)
  assert_equal(
    result, generate.autoregressive(target, **request(), decode=decode)
  )
  assert result.tokens.shape == (len(LENGTHS), 1)


def test_autoregressive_rounds_have_one_token_and_no_draft():
  target, _ = models("dflash")
  result = generate.autoregressive(target, **request(), decode=GREEDY)
  for row in range(len(LENGTHS)):
    rounds = decoding_oracles.rounds_of(result, row)
    assert rounds.lengths == [1] * (len(rounds.tokens) - 1)
    assert rounds.accepted == [0] * (len(rounds.tokens) - 1)
    assert not np.asarray(result.tokens[row, len(rounds.tokens) :]).any()
  assert result.rounds == max(result.num_tokens) - 1


def test_the_same_keys_give_the_same_tokens_and_other_keys_others():
  target, drafter = models("dspine")
  first = generate.generate(target, drafter, **request(), decode=SAMPLED)
  assert_equal(
    generate.generate(target, drafter, **request(), decode=SAMPLED), first
  )
  other = generate.generate(target, drafter, **request(key=1), decode=SAMPLED)
  assert not (other.tokens == first.tokens).all()


def test_the_first_proposal_of_a_method_is_the_default():
  cfg = drafter_config("dspine")
  named = dataclasses.replace(SAMPLED, proposal="base")
  assert round_lib.proposal_kind(cfg, SAMPLED) == "full_support"
  assert round_lib.proposal_kind(cfg, named) == "base"
  assert round_lib.proposal_kind(cfg, GREEDY) == "greedy"
