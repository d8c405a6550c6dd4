import dataclasses
import functools

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.drafters import backbone, contract, dflash, dspine
from dspine_jax.target import model
from tests import oracles, tiny_models

# float32 scores of order 10 against float64.
SCORE_TOLERANCE = 1e-4
CFG = tiny_models.drafter_config("dspine")
SETUP = tiny_models.drafter(CFG)
ANCHORS, KEEP, LENGTH = (
  tiny_models.ANCHORS,
  tiny_models.KEEP,
  tiny_models.LENGTH,
)
KEPT = [(row, block) for row, block in zip(*np.nonzero(KEEP), strict=True)]


def with_layers(setup, change):
  """The drafter with `change(index, layer)` applied to its injections."""
  inject = setup.params["injection"]
  new = tuple(change(i, layer) for i, layer in enumerate(inject["layers"]))
  return setup._replace(
    params=setup.params | {"injection": inject | {"layers": new}}
  )


def zero_writes(layer):
  return layer | {"write": {"kernel": 0 * layer["write"]["kernel"]}}


def outputs(result):
  output = result.output
  return (output.hidden, output.pre_injection, *output.layer_features)


def changed_blocks(a, b):
  """Whether anything of a block differs, [B, N]."""
  return np.any(
    [
      np.any(x != y, axis=(2, 3))
      for x, y in zip(outputs(a), outputs(b), strict=True)
    ],
    axis=0,
  )


def test_zero_writes_are_exactly_the_causal_backbone():
  got = tiny_models.run(with_layers(SETUP, lambda _, x: zero_writes(x)))
  plain = tiny_models.drafter_config("dflash", is_causal=True)
  core = {"backbone": SETUP.params["backbone"]}
  want = tiny_models.run(
    tiny_models.Setup(plain, core, {}, SETUP.tables)
  ).output
  np.testing.assert_array_equal(got.output.hidden, want.hidden)
  assert (tiny_models.run(SETUP).output.hidden != want.hidden).any()


def test_init_is_the_backbone_with_zero_writes_at_the_directions(monkeypatch):
  shapes = jax.eval_shape(lambda: backbone.init(jax.random.key(4), CFG))
  keys = []

  def cheap_init(key, cfg):
    keys.append(jax.random.key_data(key))
    return tiny_models.fill(shapes, 0)

  monkeypatch.setattr(backbone, "init", cheap_init)
  params = dspine.init(jax.random.key(4), CFG, SETUP.tables)
  plain = dflash.init(jax.random.key(4), CFG, SETUP.tables)
  np.testing.assert_array_equal(*keys)
  assert jax.tree.structure(params["backbone"]) == jax.tree.structure(
    plain["backbone"]
  )
  head = np.asarray(SETUP.tables.head)
  _, directions = oracles.transfer_codes(head, CFG.dspine.transfer_rank)
  for layer in params["injection"]["layers"]:
    assert not layer["write"]["kernel"].any()
    got = np.asarray(layer["readout"]["kernel"])
    sign = np.sign((got * directions).sum(axis=0))
    np.testing.assert_allclose(got, directions * sign, atol=1e-5)


def test_changing_a_later_slot_never_changes_an_earlier_output(monkeypatch):
  # Slots are all MASK; here every slot is given its true token instead, so
  # that a slot can be changed by itself. The codes read stay those of slot 0.
  monkeypatch.setattr(backbone, "noise_ids", lambda tokens, keep, mask: tokens)

  batch = tiny_models.train_batch(CFG)

  def from_tokens(tokens):
    inputs = tiny_models.block_inputs(
      SETUP.params,
      batch,
      jnp.asarray(ANCHORS),
      jnp.asarray(KEEP),
      None,
      CFG,
    )
    output = dspine.forward(
      SETUP.params,
      SETUP.buffers,
      SETUP.tables,
      dataclasses.replace(inputs, tokens=tokens),
      cfg=CFG,
    )
    return output.hidden, output.pre_injection, *output.layer_features

  run = jax.jit(from_tokens)
  tokens = np.random.default_rng(0).integers(0, 60, (2, 4, CFG.block_size))
  base = run(jnp.asarray(tokens))
  for slot in range(CFG.block_size):
    other = tokens.copy()
    other[:, 1, slot] = (other[:, 1, slot] + 1) % 60
    for a, b in zip(base, run(jnp.asarray(other)), strict=True):
      np.testing.assert_array_equal(a[:, 1, :slot], b[:, 1, :slot])
      np.testing.assert_array_equal(a[:, [0, 2, 3]], b[:, [0, 2, 3]])
      assert (a[:, 1, slot:] != b[:, 1, slot:]).any(axis=-1).all()


def test_only_the_anchor_token_of_a_block_is_read_without_replacement():
  batch = tiny_models.train_batch(CFG)
  tokens = np.array(batch.tokens)
  free = np.ones(tokens.shape, bool)
  for row in range(2):
    free[row, ANCHORS[row][KEEP[row]]] = False
  tokens[free] = (tokens[free] + 11) % 60
  got = tiny_models.run(SETUP, batch=batch.replace(tokens=jnp.asarray(tokens)))
  # Padding blocks have their anchor at 0, whose token is changed here.
  assert not changed_blocks(got, tiny_models.run(SETUP))[KEEP].any()


def test_changing_one_anchor_token_changes_only_its_block():
  batch = tiny_models.train_batch(CFG)
  # Position 4 is block 1's anchor and lies inside block 0 (2 to 6).
  tokens = batch.tokens.at[0, 4].set((batch.tokens[0, 4] + 1) % 60)
  got = tiny_models.run(SETUP, batch=batch.replace(tokens=tokens))
  changed = changed_blocks(got, tiny_models.run(SETUP))
  want = np.zeros((2, 4), bool)
  want[0, 1] = True
  np.testing.assert_array_equal(changed, want)


def test_slot_zero_is_the_causal_backbones():
  plain = with_layers(SETUP, lambda _, layer: zero_writes(layer))
  got, want = tiny_models.run(SETUP).output, tiny_models.run(plain).output
  np.testing.assert_array_equal(got.hidden[:, :, 0], want.hidden[:, :, 0])
  assert (got.hidden[:, :, 1:] != want.hidden[:, :, 1:]).any(axis=-1).all()


def test_replacement_affects_only_its_own_blocks():
  replace = np.zeros((2, 4), bool)
  replace[0, 2] = replace[1, 0] = True
  got = tiny_models.run(SETUP, replace=replace)
  changed = changed_blocks(got, tiny_models.run(SETUP))
  np.testing.assert_array_equal(changed, replace)


def test_replacement_leaves_slots_whose_predecessor_is_the_anchor():
  # Slot 1 reads the anchor's code either way.
  got = tiny_models.run(SETUP, replace=np.ones((2, 4), bool)).output
  want = tiny_models.run(SETUP).output
  np.testing.assert_array_equal(got.hidden[:, :, :2], want.hidden[:, :, :2])
  assert (got.hidden[:, :, 2:] != want.hidden[:, :, 2:]).any(axis=-1).all()


def test_replacement_affects_only_the_first_layers():
  # CFG replaces in layer 0 alone: without its write nothing is left of it.
  everywhere = np.ones((2, 4), bool)
  without_first = with_layers(
    SETUP, lambda i, layer: layer if i >= 1 else zero_writes(layer)
  )
  got = tiny_models.run(without_first, replace=everywhere)
  assert not changed_blocks(got, tiny_models.run(without_first)).any()
  only_first = with_layers(
    SETUP, lambda i, layer: layer if i < 1 else zero_writes(layer)
  )
  got = tiny_models.run(only_first, replace=everywhere)
  assert changed_blocks(got, tiny_models.run(only_first)).all()


def test_candidates_are_the_best_of_the_ordinary_logits_in_order():
  result = tiny_models.run(SETUP)
  head = np.asarray(SETUP.tables.head, np.float64)
  for row, block in KEPT:
    hidden = np.asarray(result.output.hidden[row, block, 1:], np.float64)
    for slot, logits in enumerate(hidden @ head.T):
      want = oracles.top_k(logits, CFG.dspine.top_k)
      np.testing.assert_array_equal(result.candidates[row, block, slot], want)


def test_every_cached_row_is_a_direct_refinement():
  result, batch = tiny_models.run(SETUP), tiny_models.train_batch(CFG)
  head = np.asarray(SETUP.tables.head, np.float64)
  codes = SETUP.buffers["transfer_codes"]
  for row, block in KEPT:
    u = np.asarray(result.output.pre_injection[row, block, 1:])
    ids = np.asarray(result.candidates[row, block])
    anchor = int(batch.tokens[row, ANCHORS[row, block]])
    for slot in range(CFG.num_proposals):
      before = [anchor] * 4 if slot == 0 else ids[slot - 1]
      for a, predecessor in enumerate(before):
        refined = oracles.refine(
          SETUP.params, codes, u[slot], predecessor, CFG.rms_norm_eps
        )
        np.testing.assert_allclose(
          result.scores[row, block, slot, a],
          head[ids[slot]] @ refined,
          atol=SCORE_TOLERANCE,
        )


def proposals():
  """The greedy proposal of every block, each as a request of its own."""
  result, batch = tiny_models.run(SETUP), tiny_models.train_batch(CFG)
  anchors = jnp.take_along_axis(batch.tokens, jnp.asarray(ANCHORS), axis=1)
  single = contract.DrafterOutput(
    hidden=result.output.hidden.reshape(8, 1, CFG.block_size, -1),
    pre_injection=result.output.pre_injection.reshape(8, 1, CFG.block_size, -1),
  )
  propose = functools.partial(
    dspine.propose,
    cfg=CFG,
    sampling_cfg=configs.SamplingConfig(),
    kind="greedy",
    keys=jax.random.split(jax.random.key(0), 8),
  )
  proposal = jax.jit(propose)(
    SETUP.params, SETUP.buffers, SETUP.tables, single, anchors.reshape(8)
  )
  assert proposal.probs is None
  return proposal.tokens.reshape(2, 4, -1)


def test_the_walk_over_the_cache_is_sequential_refinement():
  result, batch = tiny_models.run(SETUP), tiny_models.train_batch(CFG)
  proposed, differs = proposals(), 0
  for row, block in KEPT:
    ids = np.asarray(result.candidates[row, block])
    want = oracles.sequential_refinement(
      SETUP.params,
      SETUP.buffers["transfer_codes"],
      SETUP.tables.head,
      result.output.pre_injection[row, block, 1:],
      ids,
      batch.tokens[row, ANCHORS[row, block]],
      CFG.rms_norm_eps,
    )
    np.testing.assert_array_equal(proposed[row, block], want)
    walked = oracles.greedy_walk(np.asarray(result.scores[row, block]), ids)
    assert walked == want
    differs += want != list(ids[:, 0])
  # Refinement changes the choice somewhere, or the test would prove nothing.
  assert differs > 0


def test_refinement_replaces_the_predicted_write_of_the_last_layer():
  # With the feature itself in the place of a code, refining gives back the
  # ordinary state: same weights, no new parameters.
  output = tiny_models.run(SETUP).output
  last = dspine.refinement_params(SETUP.params)
  rank = CFG.dspine.transfer_rank
  u = output.pre_injection
  read = np.asarray(u, np.float64) @ np.asarray(
    last["layer"]["readout"]["kernel"], np.float64
  )
  predicted = read / np.linalg.norm(read, axis=-1, keepdims=True)
  assert predicted.shape[-1] == rank
  got = jax.jit(dspine.refine, static_argnums=3)(
    last,
    u[:, :, 2:],
    jnp.asarray(predicted[:, :, 1:-1], jnp.float32),
    CFG.rms_norm_eps,
  )
  np.testing.assert_allclose(got, output.hidden[:, :, 2:], atol=2e-5)


@pytest.mark.parametrize("tied", [True, False])
def test_a_tied_target_gives_its_embedding_as_the_head(tied):
  # Qwen3-4B ties them: the codes are then those of the embedding table.
  target = tiny_models.target_config(tie_embeddings=tied)
  params = tiny_models.target_params(target)
  tables = contract.TargetTables(
    embedding=model.embedding(params), head=model.head(params)
  )
  assert (tables.head is tables.embedding) == tied
  got = np.asarray(dspine.make_buffers(CFG, tables)["transfer_codes"])
  table = params["embed_tokens" if tied else "lm_head"]
  want, _ = oracles.transfer_codes(table, CFG.dspine.transfer_rank)
  sign = np.sign((got * want).sum(axis=0))
  np.testing.assert_allclose(got, want * sign, atol=1e-4)
