"""Sizes with random weights for the benchmarks, and the models in them."""

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs, target_config
from dspine_jax.decoding import generate
from dspine_jax.drafters import contract, methods
from dspine_jax.target import model
from dspine_jax.training import anchors

_TINY = {
  "target": configs.TargetConfig(
    vocab_size=128,
    hidden_size=32,
    intermediate_size=64,
    num_layers=6,
    num_heads=2,
    num_kv_heads=1,
    head_dim=16,
  ),
  "length": 48,
  "batch_size": 2,
  "num_anchors": 4,
  "num_layers": 2,
  "block_size": 8,
  "rank": 16,
  "message": 8,
}
_BENCH = {
  "target": configs.TargetConfig(
    vocab_size=4096,
    hidden_size=256,
    intermediate_size=768,
    num_layers=12,
    num_heads=8,
    num_kv_heads=4,
    head_dim=32,
  ),
  "length": 512,
  "batch_size": 4,
  "num_anchors": 32,
  "num_layers": 5,
  "block_size": 16,
  "rank": 128,
  "message": 64,
}
_EMBEDDED = _BENCH | {
  "target": target_config.embedded_target(),
  "length": 208,
  "batch_size": 8,
  "num_anchors": 16,
  "num_layers": 2,
}
# Widths and vocabulary of SmolLM2-135M, for the memory of the loss.
_VOCABULARY = _BENCH | {
  "target": configs.TargetConfig(
    model_type="llama",
    vocab_size=49152,
    hidden_size=576,
    intermediate_size=1536,
    num_layers=30,
    num_heads=9,
    num_kv_heads=3,
    head_dim=64,
  ),
  "batch_size": 2,
  "num_anchors": 64,
  "num_layers": 2,
}
PRESETS = {
  "tiny": _TINY,
  "bench": _BENCH,
  "embedded": _EMBEDDED,
  "vocabulary": _VOCABULARY,
}


def drafter_config(preset: dict, method: str) -> configs.DrafterConfig:
  """The drafter of a preset."""
  layers, rank = preset["num_layers"], preset["rank"]
  sizes = {
    "dflash2": {"selector_rank": rank},
    "domino": {"emb_dim": rank, "gru_hidden_dim": 2 * rank},
    "dspark": {"markov_rank": rank},
    "dspine": {"transfer_rank": rank, "message_size": preset["message"]},
  }
  options = {
    name: configs.default_options(name, layers, **given)
    for name, given in sizes.items()
  }
  return configs.drafter_for(
    preset["target"],
    method,
    num_layers=layers,
    mask_token_id=1,
    block_size=preset["block_size"],
    **options,
  )


def random_data(preset: dict, taps: int):
  """Tables and one window [1, B, ...] of random numbers."""
  cfg = preset["target"]
  generator = np.random.default_rng(0)
  shape = (1, preset["batch_size"], preset["length"])

  def normal(*size):
    return jnp.asarray(generator.standard_normal(size, np.float32))

  tables = contract.TargetTables(
    embedding=0.02 * normal(cfg.vocab_size, cfg.hidden_size),
    head=0.02 * normal(cfg.vocab_size, cfg.hidden_size),
  )
  batches = anchors.TrainBatch(
    tokens=jnp.asarray(generator.integers(0, cfg.vocab_size, shape), jnp.int32),
    loss_mask=jnp.ones(shape, bool),
    context_features=normal(*shape, taps * cfg.hidden_size),
    last_hidden=normal(*shape, cfg.hidden_size),
  )
  return tables, batches


def random_models(
  preset: dict, method: str
) -> tuple[generate.TargetModel, generate.DrafterModel]:
  """A target and a drafter with random weights.

  DSpine's writes are zero at the start of training; here they are random, so
  that nothing can be simplified away.
  """
  cfg = drafter_config(preset, method)
  target = generate.TargetModel(
    model.init(jax.random.key(0), preset["target"]), preset["target"]
  )
  drafter = methods.drafter(cfg)
  params = drafter.init(jax.random.key(1), cfg, target.tables)
  leaves, tree = jax.tree.flatten(params)
  keys = jax.random.split(jax.random.key(2), len(leaves))
  leaves = [
    leaf + 0.01 * jax.random.normal(key, leaf.shape)
    for key, leaf in zip(keys, leaves, strict=True)
  ]
  params = jax.tree.unflatten(tree, leaves)
  buffers = drafter.make_buffers(cfg, target.tables)
  return target, generate.DrafterModel(params, buffers, cfg)
