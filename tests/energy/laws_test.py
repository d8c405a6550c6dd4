"""Every law: figures of its paper, parts, gradients, limits, dtypes."""

import jax
import numpy as np
import pytest
from jax import numpy as jnp

from energy import architecture, laws

MODELS = architecture.shipped_models()
LLAMA = MODELS["Llama 3.1 8B"].architecture
PAPER = laws.SIMPLE_OF_THE_PAPER
LAWS = list(laws.LAWS.values())


def positive_theta(law, architecture_=LLAMA):
  """A theta with which every term is worth about a joule at 1000 / 1000."""
  design = np.asarray(law.design(architecture_, 1000, 1000, 100))
  return 1 / design


@pytest.mark.parametrize(
  ("request_", "joules"),
  [
    ((68000, 247, 0), 1787.7),
    ((68000, 247, 63000), 668.7),
    ((5000, 247, 0), 138.1),
  ],
)
def test_simple_gives_the_worked_example(request_, joules):
  assert abs(float(laws.SIMPLE(PAPER, LLAMA, *request_)) - joules) < 0.1


def test_simple_gives_the_shares_of_the_worked_example():
  whole = laws.SIMPLE.parts(PAPER, LLAMA, 68000, 247)
  cached = laws.SIMPLE.parts(PAPER, LLAMA, 68000, 247, 63000)
  joules = sum(map(float, cached.values()))
  assert round(100 * float(cached["kv_reads"]) / joules) == 86
  saved = 1 - float(cached["prefill"]) / float(whole["prefill"])
  assert round(100 * saved) == 93
  assert float(whole["kv_reads"]) == float(cached["kv_reads"])


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_parts_add_up_to_the_law(law):
  theta = positive_theta(law)
  inputs = np.asarray([64.0, 1000.0])[:, None]
  outputs = np.asarray([1.0, 64.0, 4000.0])
  parts = law.parts(theta, LLAMA, inputs, outputs, 32)
  assert set(parts) == set(laws.PARTS)
  assert all(part.shape == (2, 3) for part in parts.values())
  np.testing.assert_allclose(
    sum(parts.values()), law(theta, LLAMA, inputs, outputs, 32), rtol=1e-5
  )


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_gradients_agree_with_finite_differences(law):
  theta = jnp.asarray(positive_theta(law), jnp.float32)
  with jax.enable_x64(True):
    theta = np.asarray(theta, np.float64)

    def joules(theta, sizes, inputs, outputs, cached):
      return law(theta, sizes, inputs, outputs, cached)

    sizes = architecture.Architecture(*map(float, LLAMA))
    point = (theta, sizes, 900.0, 700.0, 300.0)
    slopes = jax.grad(joules, argnums=(0, 1, 2, 3, 4))(*point)
    flat, rebuild = jax.flatten_util.ravel_pytree(point)
    slope = jax.flatten_util.ravel_pytree(slopes)[0]
    for i, value in enumerate(np.asarray(flat)):
      step = 1e-5 * abs(value)
      ends = [joules(*rebuild(flat.at[i].add(s * step))) for s in (1, -1)]
      numeric = float(ends[0] - ends[1]) / (2 * step)
      scale = max(abs(numeric), 1e-6 * float(joules(*point)) / abs(value))
      assert abs(float(slope[i]) - numeric) < 1e-6 * scale, i


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_jit_and_vmap_change_nothing(law):
  theta = positive_theta(law)
  inputs, outputs = np.asarray([64.0, 2000.0]), np.asarray([10.0, 300.0])
  plain = law(theta, LLAMA, inputs, outputs)
  np.testing.assert_allclose(
    jax.jit(lambda i, o: law(theta, LLAMA, i, o))(inputs, outputs),
    plain,
    rtol=1e-5,
  )
  np.testing.assert_allclose(
    jax.vmap(lambda i, o: law(theta, LLAMA, i, o))(inputs, outputs),
    plain,
    rtol=1e-5,
  )
  stacked = architecture.stack([LLAMA, MODELS["OPT 1.3B"].architecture])
  both = law(theta, stacked, 64, 10)
  np.testing.assert_allclose(both[0], law(theta, LLAMA, 64, 10), rtol=1e-5)


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_more_tokens_never_cost_less_and_a_cache_never_more(law):
  theta = positive_theta(law)
  lengths = np.geomspace(1, 1e5, 40)
  # Baseline 3 of its paper spreads a constant by the share of output.
  if law.name != "baseline3":
    assert (np.diff(law(theta, LLAMA, lengths, 100)) >= 0).all()
  assert (np.diff(law(theta, LLAMA, 100, lengths)) > 0).all()
  cached = np.linspace(0, 1000, 11)
  saved = np.diff(law(theta, LLAMA, 1000, 100, cached))
  assert (saved <= 0).all()


def test_a_cache_saves_prefill_alone():
  for law in LAWS:
    theta = positive_theta(law)
    whole = law.parts(theta, LLAMA, 1000, 100)
    cached = law.parts(theta, LLAMA, 1000, 100, 1000)
    assert float(cached["prefill"]) == 0
    for name in ("kv_reads", "next_token", "request"):
      assert float(whole[name]) == float(cached[name])


@pytest.mark.parametrize("law", LAWS, ids=lambda law: law.name)
def test_empty_requests_are_finite(law):
  theta = positive_theta(law)
  for inputs, outputs in ((0, 0), (0, 10), (10, 0)):
    found = law.parts(theta, LLAMA, inputs, outputs)
    assert all(np.isfinite(float(part)) for part in found.values())
    if outputs == 0:
      assert float(found["next_token"]) == 0
      assert float(found["kv_reads"]) == 0


def test_whole_numbers_do_not_overflow():
  exact = laws.SWEETSPOT((0, 1, 0, 0, 0, 0), LLAMA, 68000.0, 1.0)
  whole = laws.SWEETSPOT(
    (0, 1, 0, 0, 0, 0), LLAMA, np.int32(68000), np.int32(1)
  )
  assert float(whole) == float(exact) == 68000.0**2


def test_float64_where_it_is_enabled():
  assert laws.SIMPLE(PAPER, LLAMA, 10, 10).dtype == jnp.float32
  with jax.enable_x64(True):
    assert laws.SIMPLE(PAPER, LLAMA, 10, 10).dtype == jnp.float64


def test_simple_is_its_formula():
  theta0, theta1, theta2, theta3 = PAPER
  d, layers, share, i, o = 4096, 32, 0.25, 300.0, 70.0
  by_hand = (
    theta1 * d**2 * layers * i
    + theta2 * d * layers * share * (i * o + o**2 / 2)
    + (theta0 + theta3 * d * layers) * o
  )
  assert float(laws.SIMPLE(PAPER, LLAMA, i, o)) == pytest.approx(by_hand)


def test_capacity_shares_weights_by_what_fits_into_the_memory():
  law = laws.capacity_law(memory_bytes=80e9, max_requests=1000)
  theta = (0, 0, 1, 0, 0)
  n = LLAMA.parameters
  # 32 layers of 1024 keys and values in two bytes each, 4096 positions.
  cache = 2 * 2 * 32 * 1024 * 4096
  fits = (80e9 - 2 * n) / cache
  found = float(law(theta, LLAMA, 4000, 96))
  assert found == pytest.approx(n * 96 / fits, rel=1e-5)
  short = float(law(theta, LLAMA, 1, 1))
  assert short == pytest.approx(n / 1000, rel=1e-5)
  given = float(law(theta, LLAMA, 4000, 96, concurrency=8))
  assert given == pytest.approx(n * 96 / 8, rel=1e-5)
  small = laws.capacity_law(memory_bytes=10e9)
  assert np.isinf(float(small(theta, LLAMA, 10, 10)))


@pytest.mark.parametrize(
  ("lengths", "message"),
  [
    ((-1, 2), "input_tokens=-1: must not be negative"),
    ((1, float("nan")), "output_tokens=nan: must be finite"),
    ((1, 2, float("inf")), "cached_tokens=inf: must be finite"),
    ((10, 2, 11), "cached_tokens=11: more than input_tokens=10"),
  ],
)
def test_impossible_lengths(lengths, message):
  with pytest.raises(ValueError, match=message):
    laws.check_lengths(*lengths)
