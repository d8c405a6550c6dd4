import dataclasses
import math

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from dspine_jax import (
  kv_cache,
  layers,
  rope_scaling,
  target_config,
)
from dspine_jax.checkpoints import names
from dspine_jax.target import model
from tests import oracles, tiny_models

# Three layers in float32 against float64; states have an RMS of one.
TOLERANCE = 2e-5
QWEN = tiny_models.target_config(num_layers=3)
LLAMA = tiny_models.target_config(
  num_layers=3,
  model_type="llama",
  tie_embeddings=True,
  rope_theta=1e4,
  # So that all three cases of the scaling fall on this head's frequencies.
  rope_scaling=rope_scaling.Llama3Scaling(
    factor=4.0, original_max_positions=64
  ),
)
BIASED = tiny_models.target_config(
  num_layers=3, attention_bias=True, tie_embeddings=False
)
TAPS = (0, 1)
PROMPT, STEP = 6, 3

forward = jax.jit(
  model.forward,
  static_argnames=("cfg", "cache_is_empty", "tap_layers"),
)
prefill = jax.jit(
  model.prefill, static_argnames=("cfg", "capacity", "tap_layers")
)


def tokens(*shape, seed=0):
  rng = np.random.default_rng(seed)
  return jnp.asarray(rng.integers(0, QWEN.vocab_size, shape), jnp.int32)


def stacked(params):
  return params | {"layers": layers.stack_layers(params["layers"])}


@pytest.mark.parametrize(
  "cfg", [QWEN, LLAMA, BIASED], ids=["qwen3", "llama", "biased"]
)
def test_forward_agrees_with_plain_numpy(cfg):
  params, ids = tiny_models.target_params(cfg), tokens(2, 9)
  out = forward(params, ids, cfg=cfg, tap_layers=TAPS)
  logits = model.logits(params, out.hidden)
  head = params["embed_tokens" if cfg.tie_embeddings else "lm_head"]
  for row in range(2):
    hidden, outputs = oracles.target_forward(params, ids[row], cfg)
    np.testing.assert_allclose(out.hidden[row], hidden, atol=TOLERANCE)
    want = np.concatenate([outputs[layer] for layer in TAPS], axis=-1)
    np.testing.assert_allclose(out.features[row], want, atol=TOLERANCE * 3)
    want = hidden @ np.asarray(head, np.float64).T
    np.testing.assert_allclose(logits[row], want, atol=TOLERANCE * 5)
  assert logits.dtype == jnp.float32
  assert out.cache is None


def test_tied_head_is_the_embedding_and_untied_is_not():
  tied, untied = (
    tiny_models.target_params(LLAMA),
    tiny_models.target_params(QWEN),
  )
  assert model.head(tied) is model.embedding(tied)
  assert model.head(untied) is untied["lm_head"]
  assert "lm_head" not in tied


def test_features_of_a_layer_are_what_a_model_cut_behind_it_computes():
  params, ids = tiny_models.target_params(QWEN), tokens(2, 9)
  full = forward(params, ids, cfg=QWEN, tap_layers=TAPS)
  for place, layer in enumerate(TAPS):
    cut = params | {"layers": params["layers"][: layer + 1]}
    cfg = dataclasses.replace(QWEN, num_layers=layer + 1)
    hidden = forward(cut, ids, cfg=cfg).hidden
    width = QWEN.hidden_size
    tapped = full.features[..., place * width : (place + 1) * width]
    normed = layers.rms_norm(tapped, params["norm"]["scale"], QWEN.rms_norm_eps)
    np.testing.assert_allclose(normed, hidden, atol=TOLERANCE)


def test_without_taps_features_have_no_width():
  params = tiny_models.target_params(QWEN)
  ids = tokens(2, 9)
  features = jax.eval_shape(
    lambda: model.forward(params, ids, cfg=QWEN).features
  )
  assert features.shape == (2, 9, 0)


def test_a_token_never_changes_what_comes_before_it():
  params, ids = tiny_models.target_params(QWEN), tokens(2, 9)
  base = forward(params, ids, cfg=QWEN, tap_layers=TAPS)
  changed = ids.at[:, 5].set((ids[:, 5] + 1) % QWEN.vocab_size)
  other = forward(params, changed, cfg=QWEN, tap_layers=TAPS)
  np.testing.assert_array_equal(base.hidden[:, :5], other.hidden[:, :5])
  np.testing.assert_array_equal(base.features[:, :5], other.features[:, :5])
  assert (base.hidden[:, 5:] != other.hidden[:, 5:]).any(axis=-1).all()


def ragged_decode(params, cfg, prompts, steps, kept):
  """Prefill, then a step a tuple of `steps`; row r keeps kept[i][r] tokens."""
  lengths = jnp.array([2, PROMPT, 4], jnp.int32)
  out = prefill(
    params, prompts, lengths, cfg=cfg, capacity=PROMPT + 9, tap_layers=TAPS
  )
  outs, cache = [out], out.cache
  for new, counts in zip(steps, kept, strict=True):
    out = forward(params, new, cfg=cfg, cache=cache, tap_layers=TAPS)
    outs.append(out)
    cache = kv_cache.advance(out.cache, jnp.asarray(counts, jnp.int32))
  return lengths, outs, cache


def test_ragged_cached_decoding_equals_full_forward_passes():
  params = tiny_models.target_params(QWEN)
  prompts = tokens(3, PROMPT)
  steps = [tokens(3, STEP, seed=1), tokens(3, STEP, seed=2)]
  kept = [(1, STEP, 0), (2, 2, 2)]
  lengths, outs, cache = ragged_decode(params, QWEN, prompts, steps, kept)
  # What each row has committed when its second step starts, then that step.
  full = np.zeros((3, PROMPT + 2 * STEP), np.int32)
  starts = np.asarray(lengths) + np.array(kept[0])
  for row in range(3):
    length = int(lengths[row])
    full[row, :length] = prompts[row, :length]
    full[row, length : starts[row]] = steps[0][row, : kept[0][row]]
    full[row, starts[row] : starts[row] + STEP] = steps[1][row]
  want = forward(params, jnp.asarray(full), cfg=QWEN, tap_layers=TAPS)
  for row in range(3):
    at = slice(starts[row], starts[row] + STEP)
    for name in ("hidden", "features"):
      np.testing.assert_allclose(
        getattr(outs[2], name)[row],
        getattr(want, name)[row, at],
        atol=TOLERANCE,
      )
    length = slice(int(lengths[row]))
    np.testing.assert_allclose(
      outs[0].hidden[row, length], want.hidden[row, length], atol=TOLERANCE
    )
  np.testing.assert_array_equal(cache.lengths, starts + np.array(kept[1]))


def test_rejected_tokens_leave_no_trace():
  params, prompts = tiny_models.target_params(QWEN), tokens(3, PROMPT)
  last = tokens(3, STEP, seed=2)
  right = tokens(3, STEP, seed=1)
  wrong = right.at[:, 1:].set((right[:, 1:] + 7) % QWEN.vocab_size)
  kept = [(1, 1, 0), (3, 3, 3)]
  _, clean, _ = ragged_decode(params, QWEN, prompts, [right, last], kept)
  _, dirty, _ = ragged_decode(params, QWEN, prompts, [wrong, last], kept)
  np.testing.assert_array_equal(clean[2].hidden, dirty[2].hidden)
  np.testing.assert_array_equal(clean[2].features, dirty[2].features)
  assert (clean[1].hidden[:, 1:] != dirty[1].hidden[:, 1:]).any()


def test_right_padding_never_changes_a_prompt():
  params, prompts = tiny_models.target_params(QWEN), tokens(3, PROMPT)
  lengths = jnp.array([2, PROMPT, 4], jnp.int32)
  options = {"cfg": QWEN, "capacity": PROMPT + 9, "tap_layers": TAPS}
  out = prefill(params, prompts, lengths, **options)
  inside = np.arange(PROMPT)[None] < np.asarray(lengths)[:, None]
  other = prefill(params, jnp.where(inside, prompts, 5), lengths, **options)
  np.testing.assert_array_equal(out.hidden[inside], other.hidden[inside])
  np.testing.assert_array_equal(out.cache.lengths, lengths)
  for k, unpadded in zip(out.cache.layers, other.cache.layers, strict=True):
    for row in range(3):
      length = int(lengths[row])
      np.testing.assert_array_equal(
        k[0][row, :, :length], unpadded[0][row, :, :length]
      )
  # Without any padding, and without the library.
  alone, outputs = oracles.target_forward(params, prompts[2, :4], QWEN)
  want = np.concatenate([outputs[layer] for layer in TAPS], axis=-1)
  np.testing.assert_allclose(out.hidden[2, :4], alone, atol=TOLERANCE)
  np.testing.assert_allclose(out.features[2, :4], want, atol=TOLERANCE * 3)


def test_scanned_layers_equal_unrolled_layers():
  params, prompts = tiny_models.target_params(QWEN), tokens(3, PROMPT)
  steps, kept = [tokens(3, STEP, seed=1)], [(1, STEP, 0)]
  _, want, cache = ragged_decode(params, QWEN, prompts, steps, kept)
  _, got, scanned = ragged_decode(stacked(params), QWEN, prompts, steps, kept)
  for a, b in zip(got, want, strict=True):
    np.testing.assert_allclose(a.hidden, b.hidden, atol=TOLERANCE)
    np.testing.assert_allclose(a.features, b.features, atol=TOLERANCE)
  np.testing.assert_array_equal(scanned.lengths, cache.lengths)
  for a, b in zip(
    layers.unstack_layers(scanned.layers), cache.layers, strict=True
  ):
    for part in range(2):
      np.testing.assert_allclose(a[part], b[part], atol=TOLERANCE)


def test_a_prompt_longer_than_the_cache_is_refused():
  params = tiny_models.target_params(QWEN)
  with pytest.raises(ValueError, match="6 tokens .*capacity=5"):
    model.prefill(params, tokens(1, 6), jnp.array([6]), cfg=QWEN, capacity=5)


def test_bfloat16_runs_the_residual_stream_and_stays_close():
  params, ids = tiny_models.target_params(QWEN), tokens(2, 9)
  cfg = dataclasses.replace(QWEN, dtype="bfloat16")
  out = forward(params, ids, cfg=cfg, tap_layers=TAPS)
  assert out.hidden.dtype == out.features.dtype == jnp.bfloat16
  assert model.logits(params, out.hidden).dtype == jnp.float32
  want = forward(params, ids, cfg=QWEN, tap_layers=TAPS)
  # Six additions to the stream, each with an error of about 2^-8.
  error = jnp.abs(out.hidden.astype(jnp.float32) - want.hidden)
  assert 1e-4 < float(jnp.mean(error)) < 2e-2


def test_the_embedded_target_has_its_announced_size():
  entries = names.target_entries(target_config.embedded_target())
  count = sum(math.prod(entry.shape) for entry in entries)
  assert count == pytest.approx(5.1e6, rel=0.01)


def test_init_shrinks_what_is_written_into_the_residual_stream():
  # All maps have one shape, so that little is compiled.
  cfg = tiny_models.target_config(
    num_layers=2,
    hidden_size=48,
    intermediate_size=48,
    num_kv_heads=4,
    head_dim=12,
  )
  params = model.init(jax.random.key(0), cfg)
  layer = params["layers"][0]

  def spread(kernel):
    """Standard deviation times the root of the fan-in; 1 is LeCun-normal."""
    return float(jnp.std(kernel)) * kernel.shape[0] ** 0.5

  for block, name, want in (
    ("self_attn", "q_proj", 1.0),
    ("self_attn", "o_proj", 0.5),  # 1 / sqrt(2 * 2 layers)
    ("mlp", "up_proj", 1.0),
    ("mlp", "down_proj", 0.5),
  ):
    got = spread(layer[block][name]["kernel"])
    assert got == pytest.approx(want, rel=0.1), name
  assert float(jnp.std(params["embed_tokens"])) == pytest.approx(0.02, rel=0.1)
  first, second = (p["mlp"]["up_proj"]["kernel"] for p in params["layers"])
  assert (first != second).any()
  assert (params["lm_head"] != params["embed_tokens"]).any()


def test_the_head_s_gradient_in_bfloat16_multiplies_in_bfloat16():
  head, hidden = jnp.ones((61, 24), jnp.bfloat16), jnp.ones((5, 24))
  weights = jnp.arange(5 * 61, dtype=jnp.float32).reshape(5, 61) % 7

  def total(head, hidden):
    return jnp.sum(weights * jnp.tanh(0.01 * model.head_logits(head, hidden)))

  gradient = jax.grad(total, argnums=(0, 1))
  half = hidden.astype(jnp.bfloat16)
  equations = jax.make_jaxpr(gradient)(head, half).eqns
  products = [e for e in equations if e.primitive.name == "dot_general"]
  assert len(products) == 2
  for product in products:
    assert {x.aval.dtype for x in product.invars} == {jnp.dtype(jnp.bfloat16)}
  exact = gradient(head.astype(jnp.float32), hidden)
  for got, want in zip(gradient(head, half), exact, strict=True):
    np.testing.assert_allclose(got.astype(jnp.float32), want, rtol=2**-6)
