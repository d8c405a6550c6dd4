import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate, verify
from dspine_jax.decoding import round as round_lib
from tests import decoding_oracles, tiny_models

DRAFTS, STOP, ROWS = 4, 9, 40


def random_tokens(rng, *shape):
  """Tokens 5..9: the stop token is one of five."""
  return rng.integers(5, 10, shape).astype(np.int32)


def test_clip_example_of_the_docstring():
  counts, stopped = round_lib.clip_at_stop(
    jnp.array([[4, 9, 7]]), jnp.array([3]), (9,)
  )
  assert (counts.tolist(), stopped.tolist()) == ([2], [True])


@pytest.mark.parametrize("stop_tokens", [(), (9,), (9, 6)])
def test_clip_keeps_all_up_to_the_first_stop_token(stop_tokens):
  rng = np.random.default_rng(0)
  emitted = random_tokens(rng, ROWS, DRAFTS + 1)
  counts = rng.integers(0, DRAFTS + 2, ROWS).astype(np.int32)
  got, stopped = round_lib.clip_at_stop(
    jnp.asarray(emitted), jnp.asarray(counts), stop_tokens
  )
  for row in range(ROWS):
    want = []
    for token in emitted[row, : counts[row]]:
      want.append(token)
      if token in stop_tokens:
        break
    assert got[row] == len(want)
    assert stopped[row] == bool(want and want[-1] in stop_tokens)


def test_new_tokens_go_behind_those_of_each_row():
  buffer = jnp.arange(12, dtype=jnp.int32).reshape(2, 6)
  new = jnp.array([[50, 51], [60, 61]], jnp.int32)
  got = round_lib.append_tokens(buffer, new, jnp.array([4, 1]))
  np.testing.assert_array_equal(
    got, [[0, 1, 2, 3, 50, 51], [6, 60, 61, 9, 10, 11]]
  )


def test_a_drafter_borrows_the_tied_head():
  cfg = tiny_models.target_config()
  target = decoding_oracles.target(cfg, 0)
  assert target.tables.head is target.params["lm_head"]
  tied = round_lib.TargetModel(
    {"embed_tokens": target.params["embed_tokens"]}, cfg
  )
  assert tied.tables.head is tied.tables.embedding


@functools.cache
def models():
  cfg = tiny_models.drafter_config("dflash", block_size=DRAFTS + 1)
  target = decoding_oracles.target(tiny_models.target_config(), 0)
  return target, decoding_oracles.drafter(cfg, target.tables, 1)


@pytest.fixture
def started():
  """A state after the prefill, with room that differs from row to row."""
  target, drafter = models()
  rng = np.random.default_rng(1)
  decode = configs.DecodeConfig(max_new_tokens=7, stop_tokens=(STOP,))
  state = generate.start(
    target,
    drafter,
    jnp.asarray(random_tokens(rng, ROWS, 3)),
    jnp.asarray(rng.integers(1, 4, ROWS), jnp.int32),
    decode=decode,
    keys=jax.random.split(jax.random.key(0), ROWS),
    limits=jnp.asarray(rng.integers(1, 8, ROWS), jnp.int32),
  )
  return drafter, state, decode


def test_commit_takes_what_stands_up_to_limit_and_stop_token(started):
  drafter, before, decode = started
  rng = np.random.default_rng(2)
  drafts = random_tokens(rng, ROWS, DRAFTS)
  accepted = rng.integers(0, DRAFTS + 1, ROWS).astype(np.int32)
  next_token = random_tokens(rng, ROWS)
  width = len(drafter.cfg.target_layer_ids) * drafter.cfg.hidden_size
  after = jax.jit(round_lib.commit, static_argnames="decode")(
    drafter,
    before,
    jnp.asarray(drafts),
    verify.Verdict(jnp.asarray(accepted), jnp.asarray(next_token)),
    jnp.ones((ROWS, DRAFTS + 1, width)),
    decode=decode,
  )
  endings = set()
  for row in range(ROWS):
    new = []
    if not before.done[row]:
      new = [*drafts[row, : accepted[row]], next_token[row]]
      new = new[: int(before.limits[row]) - 1]
      if STOP in new:
        new = new[: new.index(STOP) + 1]
    first = int(before.tokens[row, 0])
    count = 1 + len(new)
    assert after.num_tokens[row] == count
    assert after.tokens[row, :count].tolist() == [first, *new]
    assert after.anchor[row] == [first, *new][-1]
    stopped, full = STOP in new, count == before.limits[row]
    assert after.done[row] == bool(before.done[row] or stopped or full)
    for cache, old in (
      (after.target_cache, before.target_cache),
      (after.draft_cache, before.draft_cache),
    ):
      assert cache.lengths[row] == old.lengths[row] + len(new)
    assert after.round_lengths[row, 0] == len(new)
    assert after.accepted[row, 0] == (-1 if before.done[row] else accepted[row])
    endings.add((bool(before.done[row]), stopped, bool(full)))
  assert after.rounds == 1
  assert len(endings) >= 4, endings
