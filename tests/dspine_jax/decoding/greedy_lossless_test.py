"""Greedy speculation gives the target's own tokens, case by case.

A case is one row: a random target, drafter, prompt and limit. Cases of a shape
share their compilation, because parameters are arguments. Random drafters are
rejected almost at once; the scripted drafter errs at chosen slots, so that each
accepted count occurs, and its rounds are known beforehand as well.
"""

import collections
import dataclasses
import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import generate
from dspine_jax.drafters import methods
from dspine_jax.target import model
from tests import decoding_oracles, tiny_models

PROMPT, MAX_NEW, VOCAB, STOP = 6, 24, 13, (3,)
LARGEST_BLOCK = 16
TARGET = tiny_models.target_config(vocab_size=VOCAB, num_layers=3)
DECODE = configs.DecodeConfig(max_new_tokens=MAX_NEW, stop_tokens=STOP)
# Without stop token, and far enough to script a whole block behind the limit.
FREE = configs.DecodeConfig(max_new_tokens=MAX_NEW + LARGEST_BLOCK)
# Two float32 passes of different shape differ by about this, in logits of
# order 5: a smaller margin may be decided by rounding.
ROUNDING = 1e-5

# Cases that are not methods of their own: which one, and what is changed.
_UNREFINED = {"transfer_rank": 10, "refines": False}
VARIANTS = {
  "scripted": ("dflash", {}),
  "windowed": ("dflash", tiny_models.windowed("specforge")),
  "flipped": ("dspine", {"is_causal": False}),
  "unrefined": ("dspine", {"dspine": _UNREFINED}),
}
FAST = [
  ("scripted", 4, 8, 8),
  *[(name, 4, 8, 1) for name in ("windowed", "flipped", "unrefined")],
  ("dspine", 8, 8, 3),
  *[(method, 4, 8, 1) for method in ("dflash2", "domino", "dspark")],
]
SLOW = [
  *[("scripted", block, 8, 27) for block in (2, 4, 8, 16)],
  *[("dflash", block, 8, 20) for block in (2, 16)],
  *[("dspine", block, 8, 20) for block in (2, 8, 16)],
  *[(method, 16, 8, 10) for method in ("dflash2", "domino", "dspark")],
  ("scripted", 4, 1, 40),
  ("scripted", 8, 5, 8),
  ("dspine", 4, 3, 14),
]
assert sum(batch * calls for _, _, batch, calls in SLOW) > 2000


class Case(NamedTuple):
  """A batch of prompts, padded on the right with random tokens."""

  prompts: np.ndarray
  lengths: np.ndarray
  limits: np.ndarray


def random_case(rng, batch):
  """Prompts of 1 to 6 tokens, limits of 1 to 24, half of them 24."""
  limits = rng.integers(1, MAX_NEW + 1, batch)
  return Case(
    prompts=rng.integers(0, VOCAB, (batch, PROMPT)).astype(np.int32),
    lengths=rng.integers(1, PROMPT + 1, batch).astype(np.int32),
    limits=np.where(rng.random(batch) < 0.5, MAX_NEW, limits).astype(np.int32),
  )


def drafter_config(name, block):
  method, changes = VARIANTS.get(name, (name, {}))
  dspine = {"transfer_rank": 10, "replacement_layers": 1}
  cfg = tiny_models.drafter_config(
    method,
    vocab_size=VOCAB,
    num_layers=2,
    block_size=block,
    mask_token_id=VOCAB - 1,
    target_layer_ids=(0, 1),
    num_target_layers=TARGET.num_layers,
    **{"dspine": dspine, **changes},
  )
  return cfg if name != "scripted" else dataclasses.replace(cfg, method=name)


@functools.cache
def unread_keys(batch):
  """Keys that temperature 0 never reads."""
  return jax.random.split(jax.random.key(0), batch)


def request(case):
  return {
    "prompts": jnp.asarray(case.prompts),
    "prompt_lengths": jnp.asarray(case.lengths),
    "keys": unread_keys(len(case.lengths)),
  }


def continuations(target, case):
  """[B, S] prompt and what the target says behind it, by absolute position."""
  result = generate.autoregressive(target, **request(case), decode=FREE)
  out = np.zeros((len(case.lengths), PROMPT + FREE.max_new_tokens), np.int32)
  for row, length in enumerate(case.lengths):
    out[row, :length] = case.prompts[row, :length]
    out[row, length : length + FREE.max_new_tokens] = result.tokens[row]
  return out


def script(rng, target, case, block):
  """Buffers of the scripted drafter: a random cut at each position."""
  continuation = continuations(target, case)
  return {
    "continuation": continuation,
    "cuts": rng.integers(0, block, continuation.shape, np.int32),
    "later": rng.random(continuation.shape) < 0.5,
  }


@functools.partial(jax.jit, static_argnames="cfg")
def all_margins(params, tokens, cfg):
  """[B, S] the largest logit behind each token minus the second."""
  hidden = model.forward(params, tokens, cfg=cfg).hidden
  best = jax.lax.top_k(model.logits(params, hidden), 2)[0]
  return best[..., 0] - best[..., 1]


class Row(NamedTuple):
  """One finished case."""

  rounds: decoding_oracles.Rounds
  limit: int
  margins: np.ndarray  # Of each token.


def check_batch(method, block, batch, seed) -> list[Row]:
  """One random batch: speculative against autoregressive, token for token."""
  rng = np.random.default_rng(seed)
  target = decoding_oracles.target(TARGET, seed)
  cfg = drafter_config(method, block)
  drafter = decoding_oracles.drafter(cfg, target.tables, seed + 1)
  case, buffers = random_case(rng, batch), None
  if method == "scripted":
    buffers = script(rng, target, case, block)
    drafter = drafter.replace(buffers=jax.tree.map(jnp.asarray, buffers))
  arguments = request(case) | {"decode": DECODE}
  limits = jnp.asarray(case.limits)
  got = generate.generate(target, drafter, **arguments, limits=limits)
  want = generate.autoregressive(target, **arguments, limits=limits)
  got, want = Host.of(got), Host.of(want)

  whole = np.zeros((batch, PROMPT + MAX_NEW), np.int32)
  for row, length in enumerate(case.lengths):
    whole[row, :length] = case.prompts[row, :length]
    whole[row, length : length + MAX_NEW] = want.tokens[row]
  margins = np.asarray(all_margins(target.params, jnp.asarray(whole), TARGET))
  rows = []
  for row, length in enumerate(case.lengths):
    count = int(want.num_tokens[row])
    own = margins[row, length - 1 : length - 1 + count]
    name = f"{method} block {block} batch {batch} seed {seed} row {row}"
    check_tokens(got.tokens[row], want.tokens[row], own, name)
    assert got.num_tokens[row] == count, name
    rounds = decoding_oracles.rounds_of(got, row)
    assert rounds.tokens == want.tokens[row, :count].tolist()
    assert sum(rounds.lengths) == count - 1, name
    if buffers is not None:
      assert rounds == decoding_oracles.scripted_rounds(
        buffers["continuation"][row],
        buffers["cuts"][row],
        prompt_length=int(length),
        limit=int(case.limits[row]),
        stop_tokens=STOP,
        num_proposals=block - 1,
      ), name
    rows.append(Row(rounds, int(case.limits[row]), own))
  alive = (got.accepted >= 0).any(axis=0)
  assert got.rounds == alive.sum() == max(len(r.rounds.lengths) for r in rows)
  return rows


class Host(NamedTuple):
  """A `DecodeResult` in NumPy."""

  tokens: np.ndarray
  num_tokens: np.ndarray
  rounds: np.ndarray
  round_lengths: np.ndarray
  accepted: np.ndarray

  @classmethod
  def of(cls, result):
    return cls(*(np.asarray(getattr(result, name)) for name in cls._fields))


def check_tokens(got, want, margins, name):
  """Equal, zeros behind the end included; else says how close the call was."""
  if (got == want).all():
    return
  at = int(np.argmax(got != want))
  margin = margins[at] if at < len(margins) else float("nan")
  kind = "float32 rounding" if margin < ROUNDING else "a real difference"
  raise AssertionError(
    f"{name}: token {at} of {got.tolist()} should be as in {want.tolist()};"
    f" the target's margin there is {margin:.3g}: {kind}"
  )


def check_cases(method, block, batch, calls, monkeypatch) -> list[list[Row]]:
  monkeypatch.setitem(methods.DRAFTERS, "scripted", decoding_oracles.SCRIPTED)
  # No two parametrisations share a target.
  first = 1000 * (20 * len(method) + block) + 100 * batch
  batches = [
    check_batch(method, block, batch, first + call) for call in range(calls)
  ]
  rows = [row for rows in batches for row in rows]
  counts = collections.Counter(a for row in rows for a in row.rounds.accepted)
  least = min(float(row.margins.min()) for row in rows)
  print(
    f"\n{method} block {block} batch {batch}: {len(rows)} cases,"
    f" {sum(len(row.rounds.tokens) for row in rows)} tokens, smallest margin"
    f" {least:.2g}, rounds by accepted {dict(sorted(counts.items()))}"
  )
  return batches


def cut_in_last_round(row):
  lengths, accepted = row.rounds.lengths, row.rounds.accepted
  return bool(lengths) and lengths[-1] < accepted[-1] + 1


def check_coverage(batches, block):
  """Every way for a round and for a row to end has occurred."""
  rows = [row for rows in batches for row in rows]
  counts = {count for row in rows for count in row.rounds.accepted}
  assert counts == set(range(block)), "an accepted count is missing"
  stopped = [row.rounds.tokens[-1] in STOP for row in rows]
  cut = [cut_in_last_round(row) for row in rows]
  single = [len(row.rounds.tokens) == 1 for row in rows]
  pairs = list(zip(rows, stopped, cut, single, strict=True))
  seen = {
    "stop inside a block": any(s and c for _, s, c, _ in pairs),
    "limit inside a block": any(c and not s for _, s, c, _ in pairs),
    "stop right from the prefill": any(
      s and one and row.limit > 1 for row, s, _, one in pairs
    ),
    "limit 1": any(one and not s for _, s, _, one in pairs),
    "neither": any(
      not s and len(r.rounds.tokens) == MAX_NEW for r, s, _, _ in pairs
    ),
    "rows that finish in different rounds": any(
      len({len(row.rounds.lengths) for row in rows}) > 2 for rows in batches
    ),
  }
  assert all(seen.values()), seen


@pytest.mark.parametrize(("method", "block", "batch", "calls"), FAST)
def test_greedy_output_equals_autoregressive_output(
  method, block, batch, calls, monkeypatch
):
  batches = check_cases(method, block, batch, calls, monkeypatch)
  if method == "scripted":
    check_coverage(batches, block)


@pytest.mark.slow
@pytest.mark.parametrize(("method", "block", "batch", "calls"), SLOW)
def test_greedy_output_equals_autoregressive_output_in_thousands_of_cases(
  method, block, batch, calls, monkeypatch
):
  batches = check_cases(method, block, batch, calls, monkeypatch)
  if method == "scripted" and batch == 8:
    check_coverage(batches, block)
