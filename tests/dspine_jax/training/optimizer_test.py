import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp
from optax import contrib

from dspine_jax import configs
from dspine_jax.training import optimizer
from tests import oracles, tiny_models


def config(**changes):
  fields = {"total_steps": 100, "learning_rate": 0.1, "warmup_ratio": 0.1}
  return configs.OptimizerConfig(**(fields | changes))


@pytest.mark.parametrize("schedule", ["cosine", "wsd"])
@pytest.mark.parametrize("final", [0.0, 0.1])
def test_the_learning_rate_follows_its_named_shape(schedule, final):
  cfg = config(schedule=schedule, final_lr_ratio=final, decay_ratio=0.4)
  rate = jax.jit(optimizer.learning_rate(cfg))
  for step in (0, 1, 5, 9, 10, 11, 30, 59, 60, 61, 80, 99, 100, 130):
    assert float(rate(step)) == pytest.approx(
      oracles.learning_rate(step, cfg), abs=1e-7
    ), step


def test_warm_up_starts_at_zero_and_ends_at_the_peak():
  for schedule in ("cosine", "wsd"):
    rate = optimizer.learning_rate(config(schedule=schedule))
    assert float(rate(0)) == 0
    assert float(rate(5)) == pytest.approx(0.05)
    assert float(rate(10)) == pytest.approx(0.1)
    assert float(rate(100)) == pytest.approx(0, abs=1e-8)


def test_a_wsd_run_is_the_same_until_its_decay_whatever_the_total():
  short = config(schedule="wsd", decay_ratio=0.2)
  long = config(
    schedule="wsd", decay_ratio=0.2, total_steps=200, warmup_ratio=0.05
  )
  rates = [optimizer.learning_rate(cfg) for cfg in (short, long)]
  for step in (0, 3, 10, 40, 79):
    assert float(rates[0](step)) == pytest.approx(float(rates[1](step)))
  assert float(rates[0](95)) < float(rates[1](95))


def test_a_run_of_one_step_has_a_schedule():
  for schedule in ("cosine", "wsd"):
    rate = optimizer.learning_rate(config(schedule=schedule, total_steps=1))
    assert np.isfinite(float(rate(0))) and np.isfinite(float(rate(1)))


def tree():
  """One leaf of every kind, kernels also stacked over layers."""
  rng = np.random.default_rng(0)

  def normal(*shape):
    return jnp.asarray(rng.standard_normal(shape), jnp.float32)

  return {
    "proj": {"kernel": normal(6, 4)},
    "stacked": {"kernel": normal(3, 6, 4)},
    "norm": {"scale": normal(6)},
    "stacked_norm": {"scale": normal(3, 6)},
    "bias": normal(4),
    "embed_tokens": normal(9, 6),
  }


def first_update(cfg, grads, params):
  """The update of the first step with a learning rate."""
  transform = optimizer.make_optimizer(cfg)

  def two_steps(grads, params):
    state = transform.init(params)
    _, state = transform.update(
      jax.tree.map(jnp.zeros_like, grads), state, params
    )
    return transform.update(grads, state, params)[0]

  return jax.jit(two_steps)(grads, params)


def next_state(transform, grads, params):
  """The optimiser's state after its first step."""
  return jax.jit(
    lambda grads, params: transform.update(
      grads, transform.init(params), params
    )[1]
  )(grads, params)


def test_muon_orthogonalises_kernels_and_nothing_else():
  cfg = config(name="muon", warmup_ratio=0.0, clip_norm=1e9)
  got = first_update(cfg, tree(), tree())
  adam = first_update(config(warmup_ratio=0.0, clip_norm=1e9), tree(), tree())
  kernels = [got["proj"]["kernel"], *got["stacked"]["kernel"]]
  for kernel in kernels:
    values = np.linalg.svd(np.asarray(kernel), compute_uv=False)
    # Newton-Schulz leaves singular values of about 0.7 to 1.2.
    assert values.max() / values.min() < 2
  for name in ("norm", "stacked_norm"):
    np.testing.assert_array_equal(
      np.sign(got[name]["scale"]), np.sign(adam[name]["scale"])
    )
  # Adam moves every coordinate of these by the same amount.
  for leaf in (
    got["norm"]["scale"],
    got["stacked_norm"]["scale"],
    got["bias"],
    got["embed_tokens"],
  ):
    size = np.abs(np.asarray(leaf))
    assert size.max() / size.min() < 1.01
  spread = np.abs(np.asarray(got["proj"]["kernel"]))
  assert spread.max() / spread.min() > 2


def test_muon_treats_each_stacked_layer_like_an_unstacked_one():
  params = tree()
  single = {"proj": {"kernel": params["stacked"]["kernel"][1]}}
  stacked = {"proj": params["stacked"]}
  cfg = config(name="muon", warmup_ratio=0.0, clip_norm=1e9)
  got = first_update(cfg, stacked, stacked)["proj"]["kernel"][1]
  want = first_update(cfg, single, single)["proj"]["kernel"]
  np.testing.assert_allclose(got, want, atol=1e-5)


def test_muons_adam_part_uses_the_configured_moments():
  params, grads = {"bias": jnp.ones(2)}, {"bias": jnp.asarray([0.3, -0.1])}
  cfg = config(
    name="muon", adam_b1=0.5, adam_b2=0.6, warmup_ratio=0.0, schedule="wsd"
  )
  got = first_update(cfg, grads, params)
  # Second step of Adam with Nesterov momentum, the first gradient being zero.
  b1, b2 = 0.5, 0.6
  mean = b1 * (1 - b1) / (1 - b1**3) + (1 - b1) / (1 - b1**2)
  size = cfg.learning_rate * mean / ((1 - b2) / (1 - b2**2)) ** 0.5
  np.testing.assert_allclose(got["bias"], [-size, size], rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_gradients_are_clipped_to_the_global_norm(name):
  params = {"a": {"kernel": jnp.ones((2, 2))}, "bias": jnp.ones(3)}
  grads = {"a": {"kernel": jnp.full((2, 2), 3.0)}, "bias": jnp.full(3, 4.0)}
  cfg = config(name=name, clip_norm=1.0, warmup_ratio=0.0)
  clip = optimizer.make_optimizer(cfg)
  plain = optimizer.make_optimizer(config(name=name, clip_norm=1e9))
  norm = float(optax.tree.norm(grads))
  scaled = jax.tree.map(lambda g: g / norm, grads)
  # The moments of clipped gradients are those of gradients of norm one.
  got = next_state(clip, grads, params)
  want = next_state(plain, scaled, params)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, rtol=1e-5)


@pytest.mark.parametrize("name", ["adamw", "muon"])
def test_parameters_without_a_gradient_stay_bit_by_bit(name):
  # What a method's options leave unread; weight decay is zero by default.
  params, cfg = tree(), config(name=name, warmup_ratio=0.0)
  grads = jax.tree.map(jnp.zeros_like, params)
  grads["proj"] = params["proj"]
  updates = first_update(cfg, grads, params)
  assert np.abs(updates.pop("proj")["kernel"]).max() > 1e-4
  for leaf in jax.tree.leaves(updates):
    np.testing.assert_array_equal(leaf, 0.0)


def test_small_gradients_are_not_clipped():
  params, grads = {"bias": jnp.ones(3)}, {"bias": jnp.full(3, 0.1)}
  clip, plain = (
    optimizer.make_optimizer(config(clip_norm=norm)) for norm in (1.0, 1e9)
  )
  got, want = (next_state(t, grads, params) for t in (clip, plain))
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_array_equal(a, b)


def test_adamw_takes_decayed_steps_of_the_learning_rate():
  params, grads = {"bias": jnp.asarray([2.0])}, {"bias": jnp.asarray([0.5])}
  cfg = config(
    weight_decay=0.3, warmup_ratio=0.0, learning_rate=0.01, schedule="wsd"
  )
  transform = optimizer.make_optimizer(cfg)

  @jax.jit
  def second_update(grads, params):
    _, state = transform.update(grads, transform.init(params), params)
    return transform.update(grads, state, params)[0]

  update = second_update(grads, params)
  # Equal gradients: the bias-corrected ratio is one; then weight decay.
  assert float(update["bias"][0]) == pytest.approx(
    -0.01 * (1 + 0.3 * 2.0), rel=1e-5
  )


def test_every_kernel_of_a_drafter_is_muons_and_nothing_else():
  setup = tiny_models.drafter(tiny_models.drafter_config("dspine"))
  axes = optimizer._matrix_axes(setup.params)
  found = jax.tree_util.tree_leaves_with_path(
    axes, is_leaf=lambda x: isinstance(x, contrib.MuonDimensionNumbers)
  )
  named = {jax.tree_util.keystr(path): axis for path, axis in found}
  kernels = {
    jax.tree_util.keystr(path)
    for path, _ in jax.tree_util.tree_leaves_with_path(setup.params)
    if path[-1].key == "kernel"
  }
  # Two layers of seven maps, fc, three shared maps, two readouts and writes.
  assert len(kernels) == 2 * 7 + 1 + 3 + 2 * 2
  assert set(named) == kernels
  for axis in named.values():
    assert (axis.reduction_axis, axis.output_axis) == (0, 1)
