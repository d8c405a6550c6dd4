"""A block is the same in the training layout and alone at inference."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import kv_cache
from dspine_jax.decoding import round as round_lib
from dspine_jax.drafters import backbone, contract, dspine
from tests import oracles, tiny_models

# The same float32 operations over other shapes.
TOLERANCE = 1e-5
ANCHORS, SIZE = tiny_models.ANCHORS, 5


def cut(batch, row, length):
  """The first `length` positions of one row, and nothing else."""
  return jax.tree.map(lambda x: x[row : row + 1, :length], batch)


def alone(setup, row, block):
  """One block of one request, with only the positions before its anchor."""
  batch, anchor = tiny_models.train_batch(setup.cfg), ANCHORS[row, block]
  token = int(batch.tokens[row, anchor])
  batch = cut(batch, row, int(anchor))
  positions = jnp.arange(anchor, dtype=jnp.int32)[None]

  def single(params, buffers, tables, features, block_tokens):
    inputs = contract.BlockInputs(
      anchors=jnp.full((1, 1), anchor, jnp.int32),
      keep=jnp.ones((1, 1), bool),
      tokens=block_tokens,
      context=backbone.context_kv(
        params["backbone"], features, positions, cfg=setup.cfg
      ),
      for_loss=True,
    )
    return setup.method.forward(params, buffers, tables, inputs, cfg=setup.cfg)

  block_tokens = jnp.full((1, 1, SIZE), token, jnp.int32)
  return jax.jit(single)(
    setup.params,
    setup.buffers,
    setup.tables,
    batch.context_features,
    block_tokens,
  )


@pytest.mark.parametrize(
  ("method", "row", "block"),
  [
    ("dflash", 0, 2),
    ("dflash2", 0, 1),  # An anchor inside another block.
    ("dspine", 1, 0),  # One context position.
    ("dspine", 0, 3),  # A block that ends behind the training row.
  ],
)
def test_a_trained_block_equals_the_block_alone(method, row, block):
  setup = tiny_models.drafter(tiny_models.drafter_config(method))
  whole = tiny_models.run(setup).output
  single = alone(setup, row, block)
  pairs = [(whole.hidden, single.hidden)]
  if method == "dspine":
    pairs.append((whole.pre_injection, single.pre_injection))
    pairs += zip(whole.layer_features, single.layer_features, strict=True)
  for trained, inferred in pairs:
    np.testing.assert_allclose(
      trained[row, block], inferred[0, 0], atol=TOLERANCE
    )


def from_cache(setup, row, block):
  """One block over a cache that was written in two pieces, and has more room.

  What lies behind the context is the part of the row that a verification
  computed and the round did not accept.
  """
  cfg, batch = setup.cfg, tiny_models.train_batch(setup.cfg)
  anchor = int(ANCHORS[row, block])
  drafter = round_lib.DrafterModel(setup.params, setup.buffers, cfg)
  features = batch.context_features[row : row + 1]
  stacked = not isinstance(setup.params["backbone"]["layers"], tuple)

  def single(drafter, features, token):
    cache = kv_cache.init(
      cfg, 1, tiny_models.LENGTH, num_layers=cfg.num_layers, stacked=stacked
    )
    first = anchor // 2
    cache = round_lib.write_context(drafter, cache, features[:, :first])
    cache = kv_cache.advance(cache, jnp.array([first]))
    cache = round_lib.write_context(drafter, cache, features[:, first:])
    cache = kv_cache.advance(cache, jnp.array([anchor - first]))
    inputs = contract.BlockInputs(
      anchors=cache.lengths[:, None],
      keep=jnp.ones((1, 1), bool),
      tokens=jnp.broadcast_to(token, (1, 1, SIZE)),
      context=cache.layers,
    )
    return setup.method.forward(
      drafter.params, drafter.buffers, setup.tables, inputs, cfg=cfg
    )

  return jax.jit(single)(drafter, features, batch.tokens[row, anchor])


@pytest.mark.parametrize(
  ("convention", "method", "scan", "row", "block"),
  [
    ("automodel", "dflash", False, 0, 2),
    ("automodel", "domino", True, 0, 3),
    ("specforge", "dflash2", True, 0, 3),
    ("speculators", "dspark", False, 0, 2),
    ("speculators_non_causal", "dspine", True, 1, 1),
  ],
)
def test_a_trained_block_with_windows_equals_the_block_over_a_cache(
  convention, method, scan, row, block
):
  changes = tiny_models.windowed(convention)
  assert ANCHORS[row, block] > changes["sliding_window"]
  setup = tiny_models.drafter(tiny_models.drafter_config(method, **changes))
  whole = tiny_models.run(setup).output.hidden[row, block]
  setup = tiny_models.stacked(setup) if scan else setup
  single = from_cache(setup, row, block).hidden[0, 0]
  np.testing.assert_allclose(single, whole, atol=3e-5)


@pytest.mark.parametrize("is_replaced", [False, True])
def test_every_dspine_block_equals_plain_numpy(is_replaced):
  cfg = tiny_models.drafter_config("dspine")
  setup, batch = tiny_models.drafter(cfg), tiny_models.train_batch(cfg)
  replace = np.zeros((2, 4), bool)
  if is_replaced:
    replace[0, [1, 3]] = replace[1, 0] = True
  got = tiny_models.run(setup, replace=replace).output
  for row in range(2):
    slots = ANCHORS[row][:, None] + np.arange(SIZE)
    slots = np.minimum(slots, tiny_models.LENGTH - 1)
    want = oracles.draft_row(
      setup.params,
      setup.tables.embedding,
      batch.context_features[row],
      np.asarray(batch.tokens[row])[slots],
      ANCHORS[row],
      tiny_models.KEEP[row],
      cfg,
      codes=setup.buffers["transfer_codes"],
      replace=replace[row],
    )
    np.testing.assert_allclose(got.hidden[row], want["hidden"], atol=3e-5)
    np.testing.assert_allclose(
      got.pre_injection[row], want["pre_injection"], atol=3e-5
    )
    for layer, features in enumerate(want["layer_features"]):
      # Features have an RMS of one; a small |R h| magnifies its rounding.
      np.testing.assert_allclose(
        got.layer_features[layer][row], features, atol=1e-4
      )


def test_scanned_layers_equal_unrolled_layers():
  cfg = tiny_models.drafter_config("dspine")
  setup = tiny_models.drafter(cfg)
  replace = np.array([[True, False, True, False], [True] * 4])
  want = tiny_models.run(setup, replace=replace)
  got = tiny_models.run(tiny_models.stacked(setup), replace=replace)
  assert got.output.layer_features.shape[0] == cfg.num_layers
  for a, b in (
    (got.output.hidden, want.output.hidden),
    (got.output.pre_injection, want.output.pre_injection),
    (got.output.layer_features, jnp.stack(want.output.layer_features)),
  ):
    np.testing.assert_allclose(a, b, atol=3e-5)
  np.testing.assert_array_equal(got.candidates, want.candidates)
  np.testing.assert_allclose(got.scores, want.scores, atol=1e-4)


def while_loops(setup):
  batch = tiny_models.train_batch(setup.cfg)
  blocks = (ANCHORS, tiny_models.KEEP, np.zeros((2, 4), bool))
  compiled, _ = tiny_models.compiled_pass(
    setup, batch, *(jnp.asarray(x) for x in blocks)
  )
  return compiled.as_text().count(" while(")


def test_a_whole_dspine_pass_has_no_loop_over_slots():
  # Context, five reads and writes, candidates and all transition scores: a
  # layer is one parallel step.
  setup = tiny_models.drafter(tiny_models.drafter_config("dspine"))
  assert while_loops(setup) == 0
  # Scanned: the layers of the context, and the layers of the blocks.
  assert while_loops(tiny_models.stacked(setup)) == 2


def test_a_loop_over_slots_would_be_seen():
  def slots(h):
    return jax.lax.scan(lambda c, x: (c * x, c), h[0], h)[1]

  text = jax.jit(slots).lower(jnp.ones((40, 3))).compile().as_text()
  assert text.count(" while(") == 1


def test_the_blocks_of_a_pass_are_a_loop_over_single_blocks_in_parallel():
  cfg = tiny_models.drafter_config("dspine")
  setup = tiny_models.drafter(cfg)
  last = dspine.refinement_params(setup.params)
  whole = tiny_models.run(setup)
  batch = tiny_models.train_batch(cfg)
  score = jax.jit(dspine.transition_scores, static_argnums=6)
  for row in range(2):
    for block in np.flatnonzero(tiny_models.KEEP[row]):
      anchor = batch.tokens[row, ANCHORS[row, block]]
      for slot in range(SIZE - 1):
        ids = whole.candidates[row, block, slot]
        before = (
          jnp.full_like(ids, anchor)
          if slot == 0
          else whole.candidates[row, block, slot - 1]
        )
        want = score(
          last,
          whole.output.pre_injection[row, block, slot + 1],
          before,
          ids,
          setup.buffers,
          setup.tables,
          cfg.rms_norm_eps,
        )
        np.testing.assert_allclose(
          whole.scores[row, block, slot], want, atol=1e-4
        )
