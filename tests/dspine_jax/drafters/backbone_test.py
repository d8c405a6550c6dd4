import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import backbone
from tests import oracles, tiny_models

# Two layers in float32 against float64; states have an RMS of one.
TOLERANCE = 2e-5
CFG = tiny_models.drafter_config("dflash")
CAUSAL = tiny_models.drafter_config("dflash", is_causal=True)
ANCHORS, KEEP = tiny_models.ANCHORS, tiny_models.KEEP


def hidden(setup, **changes):
  return np.asarray(tiny_models.run(setup, **changes).output.hidden)


def with_features(batch, row, position, value):
  features = batch.context_features.at[row, position].set(value)
  return batch.replace(context_features=features)


SLIDING = [
  tiny_models.drafter_config("dflash", **tiny_models.windowed(convention))
  for convention in sorted(tiny_models.WINDOWS)
]


@pytest.mark.parametrize(
  "cfg",
  [CFG, CAUSAL, *SLIDING],
  ids=["bidirectional", "causal", *sorted(tiny_models.WINDOWS)],
)
def test_split_attention_equals_one_dense_masked_attention(cfg):
  setup, batch = tiny_models.drafter(cfg), tiny_models.train_batch(cfg)
  got = hidden(setup)
  for row in range(2):
    slots = ANCHORS[row][:, None] + np.arange(cfg.block_size)
    slots = np.minimum(slots, tiny_models.LENGTH - 1)
    want = oracles.draft_row(
      setup.params,
      setup.tables.embedding,
      batch.context_features[row],
      np.asarray(batch.tokens[row])[slots],
      ANCHORS[row],
      KEEP[row],
      cfg,
    )
    # Padding blocks too: they keep their in-block attention.
    np.testing.assert_allclose(got[row], want["hidden"], atol=TOLERANCE)


@pytest.mark.parametrize("cfg", [CFG, CAUSAL], ids=["bidirectional", "causal"])
def test_context_ends_strictly_before_the_anchor(cfg):
  setup, batch = tiny_models.drafter(cfg), tiny_models.train_batch(cfg)
  base = hidden(setup)
  # Row 0 has anchors 2, 4, 9 and 15.
  for position in (0, 3, 4, 9, 14, 15, 17):
    other = hidden(setup, batch=with_features(batch, 0, position, 3.0))
    np.testing.assert_array_equal(base[1], other[1])
    for block, anchor in enumerate(ANCHORS[0]):
      if position < anchor:
        assert (base[0, block] != other[0, block]).any(axis=-1).all()
      else:
        np.testing.assert_array_equal(base[0, block], other[0, block])


@pytest.mark.parametrize("cfg", [CFG, CAUSAL], ids=["bidirectional", "causal"])
def test_blocks_cannot_see_each_other_even_when_they_overlap(cfg):
  setup, batch = tiny_models.drafter(cfg), tiny_models.train_batch(cfg)
  base = hidden(setup)
  # The anchor token of block 1 (position 4) lies inside block 0 (2 to 6).
  tokens = batch.tokens.at[0, 4].set((batch.tokens[0, 4] + 1) % 60)
  other = hidden(setup, batch=batch.replace(tokens=tokens))
  assert (base[0, 1] != other[0, 1]).any(axis=-1).all()
  np.testing.assert_array_equal(base[0, [0, 2, 3]], other[0, [0, 2, 3]])
  np.testing.assert_array_equal(base[1], other[1])
  # Nor does it matter where the others are, or whether they are real.
  moved = np.array([[2, 3, 3, 3], [1, 1, 0, 0]], np.int32)
  other = hidden(setup, anchors=moved, keep=KEEP ^ (moved == 3))
  np.testing.assert_array_equal(base[:, 0], other[:, 0])


def test_only_the_anchor_token_of_a_block_is_read():
  setup, batch = tiny_models.drafter(CFG), tiny_models.train_batch(CFG)
  tokens = np.array(batch.tokens)
  free = np.ones(tokens.shape, bool)
  for row in range(2):
    free[row, ANCHORS[row][KEEP[row]]] = False
  tokens[free] = (tokens[free] + 11) % 60
  other = hidden(setup, batch=batch.replace(tokens=jnp.asarray(tokens)))
  np.testing.assert_array_equal(hidden(setup), other)


def test_a_padding_block_sees_only_itself():
  setup, batch = tiny_models.drafter(CFG), tiny_models.train_batch(CFG)
  rng = np.random.default_rng(0)
  other = batch.replace(
    tokens=(batch.tokens + 1) % 60,
    context_features=jnp.asarray(
      rng.standard_normal(batch.context_features.shape), jnp.float32
    ),
  )
  got = hidden(setup)
  np.testing.assert_array_equal(got[1, 2:], hidden(setup, batch=other)[1, 2:])
  assert np.isfinite(got).all()


def test_block_input_is_the_anchor_then_masks():
  tokens = jnp.arange(12, dtype=jnp.int32).reshape(1, 3, 4)
  keep = jnp.array([[True, False, True]])
  got = backbone.noise_ids(tokens, keep, 99)
  want = [[[0, 99, 99, 99], [99] * 4, [8, 99, 99, 99]]]
  np.testing.assert_array_equal(got, want)


def test_context_is_normed_once_and_not_by_the_layers():
  setup, batch = tiny_models.drafter(CFG), tiny_models.train_batch(CFG)
  core = setup.params["backbone"]
  got = backbone.context_states(core, batch.context_features, cfg=CFG)
  want = oracles.context_states(core, batch.context_features[1], CFG)
  np.testing.assert_allclose(got[1], want, atol=TOLERANCE)


def test_context_keys_do_not_depend_on_where_the_sequence_is_cut():
  # Decoding computes them round by round, at absolute positions.
  setup, batch = tiny_models.drafter(CFG), tiny_models.train_batch(CFG)
  context_kv = jax.jit(backbone.context_kv, static_argnames="cfg")
  positions = jnp.arange(tiny_models.LENGTH, dtype=jnp.int32)
  positions = jnp.stack([positions, positions])
  core = setup.params["backbone"]
  whole = context_kv(core, batch.context_features, positions, cfg=CFG)
  part = context_kv(
    core, batch.context_features[:, 7:10], positions[:, 7:10], cfg=CFG
  )
  for (k, v), (part_k, part_v) in zip(whole, part, strict=True):
    np.testing.assert_allclose(k[:, :, 7:10], part_k, atol=TOLERANCE)
    np.testing.assert_allclose(v[:, :, 7:10], part_v, atol=TOLERANCE)


def test_every_parameter_of_the_backbone_is_random_or_one():
  shapes = jax.eval_shape(lambda: backbone.init(jax.random.key(0), CFG))
  fused = len(CFG.target_layer_ids) * CFG.hidden_size
  assert shapes["fc"]["kernel"].shape == (fused, CFG.hidden_size)
  assert len(shapes["layers"]) == CFG.num_layers
  assert all(leaf.dtype == jnp.float32 for leaf in jax.tree.leaves(shapes))


def test_draft_layers_norm_queries_and_keys_whatever_the_target_does():
  target = tiny_models.target_config(model_type="llama", num_layers=6)
  cfg = configs.drafter_for(target, "dflash", num_layers=2, mask_token_id=0)
  shapes = jax.eval_shape(lambda: backbone.init(jax.random.key(0), cfg))
  assert "q_norm" in shapes["layers"][0]["self_attn"]
