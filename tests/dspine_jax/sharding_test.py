import jax
import numpy as np
import pytest
from jax.sharding import AbstractMesh
from jax.sharding import PartitionSpec as Spec

from dspine_jax import configs, sharding
from dspine_jax.data import rows as rows_lib
from dspine_jax.data import sources
from dspine_jax.decoding import round as round_lib
from dspine_jax.drafters import methods
from dspine_jax.target import model
from dspine_jax.training import optimizer
from tests import on_devices, tiny_models

MESH = AbstractMesh((2, 4, 2), sharding.AXES)
METHODS = sorted(methods.DRAFTERS)


def spec(path, shape, rules=sharding.DRAFTER_RULES):
  return sharding.spec_of(rules, path, shape, MESH)


@pytest.mark.parametrize("name", configs.OPTIMIZERS)
@pytest.mark.parametrize("method", METHODS)
def test_one_rule_fits_every_array_of_a_drafter(method, name):
  setup = tiny_models.drafter(tiny_models.drafter_config(method))
  cfg = configs.OptimizerConfig(name=name, total_steps=5)
  moments = jax.eval_shape(optimizer.make_optimizer(cfg).init, setup.params)
  for tree in (setup.params, moments):
    found = sharding.specs(sharding.DRAFTER_RULES, tree, MESH)
    leaves = jax.tree.leaves(tree)
    for leaf, one in zip(leaves, jax.tree.leaves(found), strict=True):
      if leaf.ndim < 2 or leaf.shape[0] == 2:
        assert not any(one)


@pytest.mark.parametrize("markov", ["gated", "rnn"])
def test_one_rule_fits_every_markov_head(markov):
  cfg = tiny_models.drafter_config(
    "dspark", dspark={"markov_head_type": markov}
  )
  sharding.specs(sharding.DRAFTER_RULES, tiny_models.drafter(cfg).params, MESH)


@pytest.mark.parametrize("tied", [True, False])
def test_one_rule_fits_every_array_of_a_target(tied):
  cfg = tiny_models.target_config(tie_embeddings=tied, attention_bias=True)
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
  found = sharding.specs(sharding.TARGET_RULES, shapes, MESH)
  layer = found["layers"][0]
  assert layer["self_attn"]["q_proj"]["kernel"] == Spec("fsdp", "tensor")
  assert layer["self_attn"]["q_proj"]["bias"] == Spec("tensor")
  assert layer["mlp"]["down_proj"]["kernel"] == Spec("tensor", "fsdp")
  assert found["embed_tokens"] == Spec(None, ("fsdp", "tensor"))


def test_a_path_without_a_rule_is_refused_with_its_name():
  with pytest.raises(ValueError, match="parameter head/new: 0 sharding rules"):
    spec("head/new", (8, 8))
  twice = (*sharding.DRAFTER_RULES, ("new|kernel", Spec()))
  with pytest.raises(ValueError, match="parameter a/kernel: 2 sharding rules"):
    spec("a/kernel", (8, 8), twice)
  # Only whole names count.
  with pytest.raises(ValueError, match="parameter a/my_kernel: 0"):
    spec("a/my_kernel", (8, 8))


def test_what_does_not_divide_stays_whole_and_layers_may_be_stacked():
  assert spec("fc/kernel", (24, 10)) == Spec("fsdp", None)
  assert spec("fc/kernel", (22, 10)) == Spec(None, None)
  assert spec("layers/fc/kernel", (3, 24, 10)) == Spec(None, "fsdp", None)
  assert spec("correction/up", (61, 8)) == Spec(None, "fsdp")
  assert spec(("a", 0, "kernel"), (8, 8)) == Spec("fsdp", None)
  assert spec("step", ()) == Spec()


def one_device():
  devices = np.asarray(jax.devices()[:1]).reshape(1, 1, 1)
  return jax.sharding.Mesh(devices, sharding.AXES)


def test_an_array_in_two_places_of_a_tree_stays_one():
  x = jax.numpy.ones((3,))
  tree = {"embedding": x, "head": x, "key": jax.random.key(0)}
  placed = sharding.place(tree, sharding.whole(one_device()))
  assert placed["embedding"] is placed["head"]
  assert placed["key"].sharding == sharding.whole(one_device())


def test_rows_that_the_devices_do_not_divide_are_refused():
  assert sharding.local_rows(one_device(), 3) == slice(0, 3)
  with pytest.raises(ValueError, match=r"batch_size=6: .*16 devices.*2,4,2"):
    sharding.require_rows(MESH, 6)


# Features of a split target.


def feature_distance():
  cfg = tiny_models.target_config()
  params = tiny_models.target_params(cfg)
  rng = np.random.default_rng(0)
  tokens = rng.integers(0, cfg.vocab_size, (8, 12)).astype(np.int32)
  lengths = np.full((8,), 12, np.int32)
  rows = rows_lib.Rows(tokens, np.ones((8, 12), bool), lengths)
  devices = np.asarray(jax.devices()).reshape(2, 2, 2)
  mesh = jax.sharding.Mesh(devices, sharding.AXES)
  where = sharding.shardings(sharding.TARGET_RULES, params, mesh)
  split = sharding.place(params, where)
  kernel = split["layers"][0]["mlp"]["down_proj"]["kernel"]
  assert kernel.addressable_shards[0].data.shape == (18, 12)
  found = []
  for own, place in (
    (params, lambda x: jax.tree.map(jax.numpy.asarray, x)),
    (split, lambda x: sharding.place_rows(x, mesh)),
  ):
    target = round_lib.TargetModel(own, cfg)
    source = sources.OnTheFly(target, rows, (0, 2))
    window = jax.tree.map(lambda x: x[None], source.read(np.arange(8)))
    found.append(source.features(place(window)))
  alone, together = found
  assert together.last_hidden.sharding.is_equivalent_to(
    sharding.batch_sharding(mesh), 4
  )
  return [
    float(np.abs(a - b).max() / np.abs(b).max())
    for a, b in (
      (np.asarray(together.context_features), alone.context_features),
      (np.asarray(together.last_hidden), alone.last_hidden),
    )
  ]


def test_a_split_target_gives_the_features_of_a_whole_one():
  found = on_devices.call(__name__, "feature_distance", devices=8)
  assert max(found) < 1e-5
