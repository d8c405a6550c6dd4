"""Models of published sizes without weights: shapes to compile, or random ones.

Nothing is allocated by the functions that return shapes
(`jax.ShapeDtypeStruct`), so that programs of an 8B target can be compiled and
counted on any machine; `random_like` fills them on a device that has the room.
Speed does not depend on the values, acceptance does: of random weights hardly a
draft token stands.
"""

import dataclasses
import functools
from typing import Any

import jax
from jax import numpy as jnp

from dspine_jax import configs, kv_cache, layers
from dspine_jax.decoding import generate
from dspine_jax.decoding import round as round_lib
from dspine_jax.drafters import backbone, contract, injection, methods
from dspine_jax.target import model
from dspine_jax.training import anchors, optimizer, step
from kernels import hopper, shapes


@dataclasses.dataclass(frozen=True, kw_only=True)
class Size:
  """A target with its drafter and their training recipe.

  Attributes:
    target: the target's configuration.
    drafter: the drafter's.
    num_anchors: draft blocks of a training sequence.
    length: positions of a training sequence.
  """

  target: configs.TargetConfig
  drafter: configs.DrafterConfig
  num_anchors: int
  length: int


def size(name: str, dtype: str) -> Size:
  """ "8B": Qwen3-8B with DSpine as published; "tiny": to try a script.

  Both compute in `dtype`.
  """
  if name == "tiny":
    target = configs.TargetConfig(
      vocab_size=256,
      hidden_size=64,
      intermediate_size=128,
      num_layers=6,
      num_heads=4,
      num_kv_heads=2,
      head_dim=16,
      tie_embeddings=False,
      dtype=dtype,
    )
    options = configs.default_options(
      "dspine", 2, transfer_rank=32, message_size=16, top_k=4
    )
    return _size(target, 2, 4, options, num_anchors=8, length=64)
  if name not in SIZES:
    raise ValueError(f"--size={name}: none of {SIZES}")
  is_shallow = name == "8B-shallow"
  sizes = shapes.QWEN3_8B
  target = configs.TargetConfig(
    vocab_size=sizes.vocab,
    hidden_size=sizes.width,
    intermediate_size=sizes.intermediate,
    num_layers=6 if is_shallow else 36,
    num_heads=sizes.heads,
    num_kv_heads=sizes.kv_heads,
    head_dim=sizes.head_dim,
    tie_embeddings=False,
    dtype=dtype,
  )
  options = configs.default_options(
    "dspine",
    sizes.layers,
    transfer_rank=shapes.RANK,
    message_size=shapes.MESSAGE,
    top_k=shapes.CANDIDATES,
  )
  return _size(
    target,
    2 if is_shallow else sizes.layers,
    shapes.BLOCK,
    options,
    num_anchors=shapes.ANCHORS,
    length=shapes.CONTEXT,
  )


# The shallow one has all widths of 8B and few layers: it compiles in seconds.
SIZES = ("8B", "8B-shallow", "tiny")


def _size(target, num_layers, block_size, options, **recipe) -> Size:
  drafter = configs.drafter_for(
    target,
    "dspine",
    num_layers=num_layers,
    mask_token_id=1,
    block_size=block_size,
    dspine=options,
  )
  return Size(target=target, drafter=drafter, **recipe)


def target_shapes(
  cfg: configs.TargetConfig, *, stacked: bool
) -> generate.TargetModel:
  """A target, its layers stacked to be scanned or in a tuple.

  Parameters have the dtype that the model computes in.
  """

  def init():
    params = model.init(jax.random.key(0), cfg)
    if stacked:
      params["layers"] = layers.stack_layers(params["layers"])
    return params

  return generate.TargetModel(_in_dtype(jax.eval_shape(init), cfg.dtype), cfg)


def drafter_shapes(
  cfg: configs.DrafterConfig, dtype: str | None = None
) -> generate.DrafterModel:
  """A drafter of any method, with its buffers.

  Parameters have the given dtype, else the one that the drafter computes in.
  """
  table = jax.ShapeDtypeStruct(
    (cfg.vocab_size, cfg.hidden_size), jnp.dtype(cfg.dtype)
  )
  init = _dspine_init if cfg.dspine is not None else _init
  params, buffers = jax.eval_shape(functools.partial(init, cfg), table)
  return generate.DrafterModel(
    _in_dtype(params, dtype or cfg.dtype), buffers, cfg
  )


def _init(cfg, table):
  method = methods.drafter(cfg)
  tables = contract.TargetTables(embedding=table, head=table)
  return (
    method.init(jax.random.key(0), cfg, tables),
    method.make_buffers(cfg, tables),
  )


def _dspine_init(cfg, table):
  """DSpine's, whose own one computes with the head's values on the host."""
  del table
  key, options = jax.random.key(0), cfg.dspine
  directions = jnp.zeros((cfg.hidden_size, options.transfer_rank))
  params = {
    "backbone": backbone.init(key, cfg),
    "injection": injection.init(
      key, cfg.num_layers, directions, options.message_size
    ),
  }
  codes = jnp.zeros((cfg.vocab_size, options.transfer_rank), cfg.dtype)
  return params, {"transfer_codes": codes}


def _in_dtype(tree, dtype):
  return jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, jnp.dtype(dtype)), tree
  )


def decode_state(
  target: configs.TargetConfig,
  drafter: configs.DrafterConfig,
  *,
  batch: int,
  context: int,
  new_tokens: int,
  stacked: bool,
) -> round_lib.DecodeState:
  """Requests with `context` cached positions (of zeros), no token generated.

  For shapes alone call it through `jax.eval_shape`.
  """
  capacity = context + drafter.block_size
  lengths = jnp.full((batch,), context, jnp.int32)
  caches = {
    "target_cache": kv_cache.init(
      target, batch, capacity, num_layers=target.num_layers, stacked=stacked
    ),
    "draft_cache": kv_cache.init(
      drafter, batch, capacity, num_layers=drafter.num_layers
    ),
  }
  caches = {
    name: dataclasses.replace(cache, lengths=jnp.copy(lengths))
    for name, cache in caches.items()
  }
  return round_lib.DecodeState(
    tokens=jnp.zeros((batch, new_tokens + drafter.block_size), jnp.int32),
    num_tokens=jnp.ones((batch,), jnp.int32),
    anchor=jnp.ones((batch,), jnp.int32),
    limits=jnp.full((batch,), new_tokens, jnp.int32),
    done=jnp.zeros((batch,), bool),
    keys=jax.random.split(jax.random.key(0), batch),
    rounds=jnp.zeros((), jnp.int32),
    round_lengths=jnp.zeros((batch, new_tokens), jnp.int32),
    accepted=jnp.zeros((batch, new_tokens), jnp.int32),
    **caches,
  )


def training_arguments(
  sizes: Size, train: configs.TrainConfig, key: jax.Array | None = None
) -> tuple[step.TrainState, Any, contract.TargetTables, anchors.TrainBatch]:
  """What a training step takes: shapes, or random arrays with a key.

  Parameters are float32, the rest has the dtype that the drafter computes in.
  """
  cfg, width = sizes.drafter, sizes.target.hidden_size
  drafter = drafter_shapes(cfg, "float32")
  rows = (train.accumulation, train.batch_size, sizes.length)
  features = (*rows, len(cfg.target_layer_ids) * width)
  trees: dict[str, Any] = {
    "params": drafter.params,
    "buffers": drafter.buffers,
    "table": jax.ShapeDtypeStruct((cfg.vocab_size, width), cfg.dtype),
    "tokens": jax.ShapeDtypeStruct(rows, jnp.int32),
    "loss_mask": jax.ShapeDtypeStruct(rows, jnp.bool_),
    "context_features": jax.ShapeDtypeStruct(features, cfg.dtype),
    "last_hidden": jax.ShapeDtypeStruct((*rows, width), cfg.dtype),
  }
  if key is not None:
    trees = random_like(trees, key)
  params = trees.pop("params")
  tx = optimizer.make_optimizer(train.optimizer)

  def state(params):
    return step.TrainState(
      params=params,
      opt_state=tx.init(params),
      step=jnp.zeros((), jnp.int32),
      key=jax.random.key(0),
    )

  started = jax.eval_shape(state, params) if key is None else state(params)
  buffers, table = trees.pop("buffers"), trees.pop("table")
  tables = contract.TargetTables(embedding=table, head=table)
  return started, buffers, tables, anchors.TrainBatch(**trees)


def compile_training(
  sizes: Size,
  train: configs.TrainConfig,
  *,
  triton_products: bool = False,
):
  """One training step compiled for a described H100 (`kernels.hopper`).

  Args:
    sizes: of models and rows.
    train: the run.
    triton_products: matrix products by XLA's own kernels, not by cuBLAS.
  """
  train_step = step.make_train_step(sizes.drafter, train)
  return compile_for_h100(
    # Jitted anew, for the described device.
    lambda *arguments: train_step(*arguments),
    *training_arguments(sizes, train),
    triton_products=triton_products,
    donate_argnums=0,
  )


def compile_for_h100(function, *arguments, triton_products, **jit_options):
  """`hopper.compile_for_h100` without trying kernels on a device."""
  options = {
    "xla_gpu_autotune_level": 0,
    "xla_gpu_enable_triton_gemm": triton_products,
  }
  return hopper.compile_for_h100(
    function, *arguments, compiler_options=options, **jit_options
  )


def random_like(tree: Any, key: jax.Array, scale: float = 0.02) -> Any:
  """Random arrays of the given shapes.

  Normal numbers; ones where a leaf is a norm's scale or boolean; small
  integers. Made leaf by leaf on the device, so that no second copy exists.
  """
  leaves, structure = jax.tree.flatten_with_path(tree)
  filled = []
  for index, (path, leaf) in enumerate(leaves):
    own_key = jax.random.fold_in(key, index)
    is_scale = "scale" in jax.tree_util.keystr(path[-1:])
    if is_scale or leaf.dtype == jnp.bool_:
      filled.append(jnp.ones(leaf.shape, leaf.dtype))
    elif jnp.issubdtype(leaf.dtype, jnp.integer):
      filled.append(jax.random.randint(own_key, leaf.shape, 0, 128, leaf.dtype))
    else:
      filled.append(scale * _normal(own_key, leaf.shape, leaf.dtype))
  return jax.tree.unflatten(structure, filled)


def _normal(key, shape, dtype):
  return jax.random.normal(key, shape, dtype)


_normal = jax.jit(_normal, static_argnums=(1, 2))
