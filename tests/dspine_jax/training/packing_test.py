"""Documents packed into a row are trained on as if each had its own."""

import functools
from typing import NamedTuple

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import attention_masks, configs, kv_cache, layers
from dspine_jax.data import rows as rows_lib
from dspine_jax.drafters import backbone, contract, dflash, dspine, methods
from dspine_jax.target import model
from dspine_jax.training import anchors as anchors_lib
from dspine_jax.training import step as step_lib
from tests import oracles, tiny_models

# Documents by packed row, and anchors in their documents: with one position of
# context, or with blocks that end behind the document or the row.
LAYOUT = ((8, 6, 5), (11, 9))
PLACES = (((2, 5), (1, 4), (1,)), ((3, 9), (1, 7)))
WIDTH, PADDED, SIZE = 20, 24, 5
BLOCKS = 6
# The same float32 sums in rows of another length.
TOLERANCE = 2e-5


class Blocks(NamedTuple):
  """Anchors, keep and replacement of some rows, [B, N] each."""

  anchors: np.ndarray
  keep: np.ndarray
  replace: np.ndarray


class World(NamedTuple):
  """The same documents and blocks, packed and one a row.

  Attributes:
    packed: rows of `WIDTH`.
    padded: rows of `PADDED`.
    packed_blocks: of the packed rows.
    padded_blocks: of the padded rows.
    pairs: (row, block) of every real block, packed and padded.
  """

  packed: rows_lib.Rows
  padded: rows_lib.Rows
  packed_blocks: Blocks
  padded_blocks: Blocks
  pairs: list[tuple[tuple[int, int], tuple[int, int]]]


def empty_blocks(rows):
  shape = (rows, BLOCKS)
  return Blocks(
    np.zeros(shape, np.int32), np.zeros(shape, bool), np.zeros(shape, bool)
  )


@functools.cache
def world() -> World:
  rng = np.random.default_rng(3)
  lengths = np.asarray([n for row in LAYOUT for n in row], np.int32)
  total = int(lengths.sum())
  # All but the first tokens, less a few holes: at the seams both neighbours.
  mask = rng.random(total) < 0.85
  mask[[5, 6, 7, 8, 9, 13, 14, 18, 30]] = True
  documents = rows_lib.Documents(
    rng.integers(1, 60, total).astype(np.int32), mask, lengths
  )
  packed = rows_lib.pack(documents, WIDTH)
  assert packed.lengths.tolist() == [sum(row) for row in LAYOUT]
  padded = rows_lib.pad(documents)
  more = ((0, 0), (0, PADDED - padded.tokens.shape[1]))
  padded = padded._replace(
    tokens=np.pad(padded.tokens, more), loss_mask=np.pad(padded.loss_mask, more)
  )
  ours, theirs = empty_blocks(len(LAYOUT)), empty_blocks(len(lengths))
  pairs, document = [], 0
  for row, (sizes, places) in enumerate(zip(LAYOUT, PLACES, strict=True)):
    block, start = 0, 0
    for size, inside in zip(sizes, places, strict=True):
      for number, place in enumerate(inside):
        pairs.append(((row, block), (document, number)))
        for blocks, at, anchor in (
          (ours, (row, block), start + place),
          (theirs, (document, number), place),
        ):
          blocks.anchors[at], blocks.keep[at] = anchor, True
          blocks.replace[at] = len(pairs) % 2
        block += 1
      start += size
      document += 1
  return World(packed, padded, ours, theirs, pairs)


@functools.cache
def batch_of(kind: str) -> anchors_lib.TrainBatch:
  """Rows of `world` with what the target computes for them."""
  rows = getattr(world(), kind)
  cfg = tiny_models.target_config()
  documents = None if rows.documents is None else jnp.asarray(rows.documents)
  tokens = jnp.asarray(rows.tokens)
  run = functools.partial(model.forward, cfg=cfg, tap_layers=(0, 2))
  params = tiny_models.target_params(cfg)
  out = jax.jit(run)(params, tokens, documents=documents)
  return anchors_lib.TrainBatch(
    tokens=tokens,
    loss_mask=jnp.asarray(rows.loss_mask),
    context_features=out.features,
    last_hidden=out.hidden,
    documents=documents,
  )


def of_each_document(rows, array):
  """The part of every document, in their order."""
  owners = rows.documents
  if owners is None:
    owners = np.zeros_like(rows.tokens)
  parts = []
  for row, length in enumerate(rows.lengths):
    for start in sorted(set(owners[row, :length].tolist())):
      held = np.flatnonzero(owners[row, :length] == start)
      parts.append(np.asarray(array)[row, held])
  return parts


# The target.


def test_the_target_reads_each_document_as_if_it_were_alone():
  for name in ("context_features", "last_hidden"):
    packed, padded = (
      of_each_document(getattr(world(), kind), getattr(batch_of(kind), name))
      for kind in ("packed", "padded")
    )
    for found, expected in zip(packed, padded, strict=True):
      np.testing.assert_allclose(
        found, expected, rtol=0, atol=TOLERANCE * np.abs(expected).max()
      )


def test_a_packed_pass_of_the_target_has_no_cache():
  cfg, two = tiny_models.target_config(), jnp.zeros((1, 2), jnp.int32)
  cache = kv_cache.init(cfg, 1, 4, num_layers=cfg.num_layers)
  with pytest.raises(ValueError, match="documents: packed rows have no cache"):
    model.forward({}, two, cfg=cfg, cache=cache, documents=two)


class Seen(Exception):
  pass


def test_positions_count_from_the_start_of_each_document(monkeypatch):
  batch, cfg = batch_of("packed"), tiny_models.target_config()
  places = anchors_lib.token_positions(batch)
  want = np.concatenate([np.arange(n) for n in LAYOUT[0]] + [[0]])
  np.testing.assert_array_equal(places[0], want)
  want = np.concatenate([np.arange(n) for n in LAYOUT[1]])
  np.testing.assert_array_equal(places[1], want)

  # The target's too, which its states hardly show: rotations are relative.
  def see(positions, *unused):
    raise Seen(positions)

  monkeypatch.setattr(layers, "rope_table", see)
  with pytest.raises(Seen) as seen:
    model.forward({}, batch.tokens, cfg=cfg, documents=batch.documents)
  np.testing.assert_array_equal(seen.value.args[0], places)


# Masks, by plain loops.


def seen_by_loops(cfg, index):
  """[B, N, K, S] context and [K, K] own slots of a layer of packed rows."""
  documents, blocks = world().packed.documents, world().packed_blocks
  assert documents is not None
  seen = np.zeros((*blocks.anchors.shape, SIZE, WIDTH), bool)
  slides = bool(cfg.layer_types) and "sliding" in cfg.layer_types[index]
  rule = attention_masks.WINDOW_CONVENTIONS[cfg.sliding_window_convention]
  for row, block in np.argwhere(blocks.keep):
    anchor = blocks.anchors[row, block]
    for slot in range(SIZE):
      for t in range(WIDTH):
        within = True
        if slides and rule.moves_with_slot:
          within = anchor + slot - t < cfg.sliding_window
        elif slides:
          within = t >= anchor - cfg.sliding_window
        same = documents[row, t] == documents[row, anchor]
        seen[row, block, slot, t] = t < anchor and same and within
  return seen


@pytest.mark.parametrize("convention", [None, *tiny_models.WINDOWS])
def test_blocks_see_their_own_document_before_the_anchor(convention):
  windows = {} if convention is None else tiny_models.windowed(convention)
  cfg = tiny_models.drafter_config("dflash", **windows)
  blocks, batch = world().packed_blocks, batch_of("packed")
  anchors = jnp.asarray(blocks.anchors)
  inputs = contract.BlockInputs(
    anchors=anchors,
    keep=jnp.asarray(blocks.keep),
    tokens=anchors_lib.block_tokens(batch.tokens, anchors, SIZE),
    context=None,
    origins=anchors_lib.origins(anchors, batch.documents),
  )
  for index in range(cfg.num_layers):
    sight = backbone.sight(index, inputs, cfg)
    assert sight.starts is not None
    t = np.arange(WIDTH)
    visible, starts = np.asarray(sight.visible), np.asarray(sight.starts)
    seen = (t < visible[..., None, None]) & (t >= starts[..., None])
    np.testing.assert_array_equal(seen, seen_by_loops(cfg, index))


def test_the_target_sees_tokens_of_the_same_document_only():
  documents = world().packed.documents
  assert documents is not None
  got = np.asarray(attention_masks.same_document(jnp.asarray(documents)))
  for row, q, k in np.ndindex(*got.shape):
    assert got[row, q, k] == (documents[row, q] == documents[row, k])


# Anchors and labels.


def test_no_anchor_predicts_the_first_token_of_the_next_document():
  batch = batch_of("packed")
  mask = jnp.ones_like(batch.loss_mask)
  anchors, keep = anchors_lib.sample_anchors(
    jax.random.key(0), mask, WIDTH, batch.documents
  )
  # All that there are. Behind the end of row 0 is one position of padding.
  for row, sizes in enumerate(LAYOUT):
    lasts = {*(np.cumsum(sizes) - 1).tolist(), WIDTH - 1}
    found = np.asarray(anchors[row])[np.asarray(keep[row])]
    assert set(found.tolist()) == set(range(WIDTH)) - lasts


@pytest.mark.parametrize(
  ("rule", "stop_at_hole", "shift"),
  [(dflash.supervised, False, False), (dspine.supervised, True, True)],
  ids=["dflash", "dspine"],
)
def test_labels_end_with_the_document(rule, stop_at_hole, shift):
  cfg = tiny_models.drafter_config("dflash", sample_from_anchor=shift)
  packed, padded = (
    anchors_lib.supervise(
      batch_of(kind), jnp.asarray(b.anchors), jnp.asarray(b.keep), rule, cfg=cfg
    )
    for kind, b in (
      ("packed", world().packed_blocks),
      ("padded", world().padded_blocks),
    )
  )
  assert not packed.valid[~world().packed_blocks.keep].any()
  for ours, theirs in world().pairs:
    valid = np.asarray(packed.valid[ours])
    np.testing.assert_array_equal(valid, padded.valid[theirs])
    np.testing.assert_array_equal(packed.weights[ours], padded.weights[theirs])
    for name in ("labels", "predecessors"):
      found, expected = getattr(packed, name), getattr(padded, name)
      np.testing.assert_array_equal(found[ours][valid], expected[theirs][valid])
    np.testing.assert_allclose(
      packed.teacher[ours][valid], padded.teacher[theirs][valid], atol=TOLERANCE
    )
    # And by a plain loop over the document.
    rows = world().padded
    end = rows.lengths[theirs[0]]
    _, expected, _ = oracles.supervision(
      rows.tokens[theirs[0], :end],
      rows.loss_mask[theirs[0], :end],
      world().padded_blocks.anchors[theirs[0]],
      world().padded_blocks.keep[theirs[0]],
      num_proposals=cfg.num_proposals,
      gamma=cfg.decay_gamma,
      stop_at_hole=stop_at_hole,
    )
    np.testing.assert_array_equal(valid, expected[theirs[1]])


def test_tokens_of_slots_behind_the_document_are_padding():
  batch, blocks = batch_of("packed"), world().packed_blocks
  got = anchors_lib.block_tokens(
    batch.tokens, jnp.asarray(blocks.anchors), SIZE, batch.documents
  )
  rows = world().padded
  for ours, (document, number) in world().pairs:
    anchor = world().padded_blocks.anchors[document, number]
    np.testing.assert_array_equal(
      got[ours], rows.tokens[document, anchor : anchor + SIZE]
    )


# The drafters.


def setup_of(method, convention):
  windows = {} if convention is None else tiny_models.windowed(convention)
  return tiny_models.drafter(tiny_models.drafter_config(method, **windows))


def draws_of(kind, cfg):
  blocks = getattr(world(), f"{kind}_blocks")
  anchors, keep, replace = (jnp.asarray(x) for x in blocks)
  return step_lib.Draws(anchors, keep, None if cfg.dspine is None else replace)


def hidden(setup, kind):
  """The drafter's states of all blocks."""
  run = functools.partial(step_lib.run_blocks, cfg=setup.cfg)
  out = jax.jit(run)(
    setup.params,
    setup.buffers,
    setup.tables,
    batch_of(kind),
    draws_of(kind, setup.cfg),
  )
  return np.asarray(out.hidden)


def gradient(setup, kind, monkeypatch):
  """Loss, report and gradient of a step over all rows."""
  draws = draws_of(kind, setup.cfg)
  monkeypatch.setattr(step_lib, "draw", lambda *unused: draws)
  window = jax.tree.map(lambda x: x[None], batch_of(kind))
  train = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=20),
    batch_size=window.tokens.shape[1],
    num_anchors=BLOCKS,
    chunk_blocks=4,
  )
  run = functools.partial(step_lib.window_gradient, cfg=setup.cfg, train=train)
  models = setup.params, setup.buffers, setup.tables
  return jax.jit(run)(*models, window, jax.random.key(0), jnp.asarray(12))


def assert_close(found, expected):
  """Equal within `TOLERANCE` of each array's largest element."""
  assert jax.tree.structure(found) == jax.tree.structure(expected)
  leaves = jax.tree.leaves(found), jax.tree.leaves(expected)
  for a, b in zip(*leaves, strict=True):
    np.testing.assert_allclose(a, b, rtol=0, atol=TOLERANCE * np.abs(b).max())


# Every method, and a window that moves with the slot or does not.
FORWARD = [
  *((method, None) for method in sorted(methods.DRAFTERS)),
  ("dflash", "automodel"),
  ("dflash", "speculators"),
]


@pytest.mark.parametrize(("method", "convention"), FORWARD)
def test_packed_blocks_compute_what_they_compute_in_rows_of_their_own(
  method, convention
):
  setup = setup_of(method, convention)
  found, expected = hidden(setup, "packed"), hidden(setup, "padded")
  for ours, theirs in world().pairs:
    assert_close(found[ours], expected[theirs])


@pytest.mark.slow
@pytest.mark.parametrize(
  ("method", "convention"),
  [("dspine", "automodel"), ("dflash", "speculators")],
)
def test_loss_and_gradients_of_packed_rows_are_those_of_rows_of_their_own(
  method, convention, monkeypatch
):
  setup = setup_of(method, convention)
  found, expected = (
    gradient(setup, kind, monkeypatch) for kind in ("packed", "padded")
  )
  assert_close(found, expected)
  assert all(np.abs(leaf).max() > 0 for leaf in jax.tree.leaves(found[2]))


def test_a_step_draws_no_anchor_at_a_seam():
  setup = setup_of("dflash", None)
  window = jax.tree.map(lambda x: x[None], batch_of("packed"))
  window = window.replace(loss_mask=window.tokens > 0)
  valid = [
    sum(size - 1 for size in sizes) for sizes in LAYOUT
  ]  # All but the last token of every document.
  train = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=20),
    batch_size=window.tokens.shape[1],
    num_anchors=max(valid),
    chunk_blocks=4,
  )
  run = functools.partial(step_lib.window_gradient, cfg=setup.cfg, train=train)
  models = setup.params, setup.buffers, setup.tables
  key, step = jax.random.key(0), jnp.asarray(0)
  _, report, _ = jax.jit(run)(*models, window, key, step)
  assert int(report.supervised[0]) == sum(valid)
