"""Tiny targets and drafters with weights that leave nothing a no-op.

Shapes come from the library's own `init`; the values are NumPy's, so that no
compilation is paid for them: norms scatter around 1, writes are not zero.
"""

import functools
import types
from typing import NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import configs, layers
from dspine_jax.drafters import (
  backbone,
  contract,
  dspine,
  methods,
)
from dspine_jax.drafters import candidates as candidates_lib
from dspine_jax.target import model
from dspine_jax.training import anchors as anchors_lib

# Row 0: blocks that overlap (2 and 4), a block that ends behind the row (15).
# Row 1: two blocks and two of padding.
LENGTH = 18
ANCHORS = np.array([[2, 4, 9, 15], [1, 10, 0, 0]], np.int32)
KEEP = np.array([[True] * 4, [True, True, False, False]])


def target_config(**changes) -> configs.TargetConfig:
  """Head width times heads (40) differs from the model width (24)."""
  fields = {
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_layers": 4,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 10,
    "rope_theta": 1e4,
    "tie_embeddings": False,
    "max_positions": 64,
  }
  return configs.TargetConfig(**(fields | changes))


def fill(shapes, seed: int):
  """Random values for a tree of shapes, by the name of each leaf."""
  rng = np.random.default_rng(seed)

  def value(path, leaf):
    noise = rng.standard_normal(leaf.shape)
    name = getattr(path[-1], "key", None) if path else None
    if name == "kernel":
      noise = noise / np.sqrt(leaf.shape[-2])
    elif name == "scale":
      noise = 1 + 0.2 * noise
    else:
      noise = 0.5 * noise
    return jnp.asarray(noise, jnp.float32)

  return jax.tree_util.tree_map_with_path(value, shapes)


@functools.cache
def target_params(cfg: configs.TargetConfig, seed: int = 0):
  shapes = jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))
  return fill(shapes, seed)


class Setup(NamedTuple):
  """A drafter with everything its functions take."""

  cfg: configs.DrafterConfig
  params: dict
  buffers: dict
  tables: contract.TargetTables

  @property
  def method(self) -> contract.Drafter:
    return methods.drafter(self.cfg)


# Sizes that differ from each other, so that no two axes can be confused.
OPTIONS = {
  "dflash": {},
  "dflash2": {"conv_group_size": 8, "selector_rank": 7, "selector_top_k": 4},
  "domino": {"emb_dim": 7, "gru_hidden_dim": 9},
  "dspark": {"markov_rank": 7},
  "dspine": {
    "transfer_rank": 14,
    "message_size": 9,
    "top_k": 4,
    "replacement_layers": 1,
  },
}


# By convention: one full and one sliding layer, or two sliding ones. Windows
# are narrower than the context of the later blocks and wider than that of the
# first.
WINDOWS = {
  "automodel": ("full_attention", "sliding_attention"),
  "specforge": ("sliding_attention", "full_attention"),
  "speculators": ("full_attention", "sliding_attention"),
  "speculators_non_causal": ("sliding_attention", "sliding_attention"),
}


def windowed(convention: str) -> dict:
  """Changes of `drafter_config` that give it sliding layers."""
  return {
    "layer_types": WINDOWS[convention],
    "sliding_window": 6,
    "sliding_window_convention": convention,
  }


def drafter_config(method: str, **changes) -> configs.DrafterConfig:
  """A tiny drafter; `method={...}` among the changes are options of it.

  Options of other methods are left out.
  """
  given = {name: changes.pop(name, {}) for name in OPTIONS}
  convention = configs.conventions(method)
  own = {}
  if convention.options is not None:
    own[method] = convention.options(**(OPTIONS[method] | given[method]))
  fields = {
    "method": method,
    "vocab_size": 61,
    "hidden_size": 24,
    "intermediate_size": 36,
    "num_layers": 2,
    "num_heads": 4,
    "num_kv_heads": 2,
    "head_dim": 10,
    "rope_theta": 1e4,
    "block_size": 5,
    "mask_token_id": 60,
    "target_layer_ids": (0, 2),
    "num_target_layers": 4,
    "is_causal": convention.is_causal,
    "sample_from_anchor": convention.sample_from_anchor,
    "max_positions": 64,
  }
  return configs.DrafterConfig(**(fields | own | changes))


@functools.cache
def drafter(cfg: configs.DrafterConfig, seed: int = 1) -> Setup:
  shape = jax.ShapeDtypeStruct((cfg.vocab_size, cfg.hidden_size), jnp.float32)
  tables = contract.TargetTables(
    embedding=fill(shape, seed + 1), head=fill(shape, seed + 2)
  )
  method = methods.drafter(cfg)
  shapes = jax.eval_shape(lambda: method.init(jax.random.key(0), cfg, tables))
  params = {
    name: fill(part, seed if name == "backbone" else seed + 3)
    for name, part in shapes.items()
  }
  return Setup(cfg, params, method.make_buffers(cfg, tables), tables)


@functools.cache
def train_batch(cfg: configs.DrafterConfig, seed: int = 5):
  """Two rows; answers from position 1 on, with a hole in each."""
  rng = np.random.default_rng(seed)
  taps = len(cfg.target_layer_ids)
  mask = np.ones((2, LENGTH), bool)
  mask[:, 0] = False
  mask[0, 6] = False
  mask[1, 13] = False
  shape = (2, LENGTH, cfg.hidden_size)
  return anchors_lib.TrainBatch(
    tokens=jnp.asarray(
      rng.integers(0, cfg.vocab_size - 1, (2, LENGTH)), jnp.int32
    ),
    loss_mask=jnp.asarray(mask),
    context_features=jnp.asarray(
      rng.standard_normal((2, LENGTH, taps * cfg.hidden_size)), jnp.float32
    ),
    last_hidden=jnp.asarray(rng.standard_normal(shape), jnp.float32),
  )


def block_inputs(params, batch, anchors, keep, replace, cfg):
  """Blocks in the training layout."""
  batch_size, length = batch.tokens.shape
  positions = jnp.broadcast_to(
    jnp.arange(length, dtype=jnp.int32)[None], (batch_size, length)
  )
  return contract.BlockInputs(
    anchors=anchors,
    keep=keep,
    tokens=anchors_lib.block_tokens(batch.tokens, anchors, cfg.block_size),
    context=backbone.context_kv(
      params["backbone"], batch.context_features, positions, cfg=cfg
    ),
    replaced=replace,
    for_loss=True,
  )


class Pass(NamedTuple):
  """A whole drafter pass of the training layout.

  Attributes:
    output: of the method's forward.
    candidates: [B, N, P, C], None for methods without transition scores.
    scores: [B, N, P, C, C], [slot, predecessor, candidate], or None.
  """

  output: contract.DrafterOutput
  candidates: jax.Array | None = None
  scores: jax.Array | None = None


def whole_pass(params, buffers, tables, batch, anchors, keep, replace, *, cfg):
  """Context, blocks and, for DSpine, candidates and transition scores."""
  inputs = block_inputs(params, batch, anchors, keep, replace, cfg)
  method = methods.drafter(cfg)
  output = method.forward(params, buffers, tables, inputs, cfg=cfg)
  if cfg.dspine is None:
    return Pass(output)
  first = cfg.first_slot
  logits = model.head_logits(tables.head, output.hidden[:, :, first:])
  _, ids = candidates_lib.top_candidates(logits, cfg.dspine.top_k)
  predecessors = candidates_lib.predecessor_ids(inputs.tokens[..., 0], ids)
  scores = dspine.transition_scores(
    dspine.refinement_params(params),
    output.pre_injection[:, :, first:],
    predecessors,
    ids,
    buffers,
    tables,
    cfg.rms_norm_eps,
  )
  return Pass(output, ids, scores)


_compiled = {}


def compiled_pass(setup: Setup, *arguments):
  """`whole_pass` compiled for these shapes, once a session, and its leaves."""
  arguments = (setup.params, setup.buffers, setup.tables, *arguments)
  leaves, structure = jax.tree.flatten(arguments)
  key = (setup.cfg, structure, tuple(leaf.shape for leaf in leaves))
  if key not in _compiled:

    def from_leaves(*leaves):
      # Lowering fills trees with descriptions of arrays, which the checked
      # dataclasses of the library refuse; so only leaves are arguments.
      return whole_pass(*structure.unflatten(leaves), cfg=setup.cfg)

    _compiled[key] = jax.jit(from_leaves).lower(*leaves).compile()
  return _compiled[key], leaves


def run(setup: Setup, batch=None, anchors=ANCHORS, keep=KEEP, replace=None):
  """`whole_pass` of a setup."""
  batch = train_batch(setup.cfg) if batch is None else batch
  replace = np.zeros_like(keep) if replace is None else replace
  blocks = (jnp.asarray(x) for x in (anchors, keep, replace))
  compiled, leaves = compiled_pass(setup, batch, *blocks)
  return compiled(*leaves)


def host(record) -> types.SimpleNamespace:
  """A flat record's arrays in NumPy, which the checked dataclass refuses."""
  return types.SimpleNamespace(
    **{name: np.asarray(value) for name, value in vars(record).items()}
  )


def proposal(setup: Setup, output, kind="greedy", temperature=0.0, seed=0):
  """Of all blocks of `run`, [B * N, P], as the decode loop asks for it."""
  anchors = np.take_along_axis(
    np.asarray(train_batch(setup.cfg).tokens), ANCHORS, axis=1
  ).reshape(-1)

  def from_hidden(hidden):
    return setup.method.propose(
      setup.params,
      setup.buffers,
      setup.tables,
      contract.DrafterOutput(hidden=hidden),
      jnp.asarray(anchors),
      cfg=setup.cfg,
      sampling_cfg=configs.SamplingConfig(temperature=temperature),
      kind=kind,
      keys=jax.random.split(jax.random.key(seed), len(anchors)),
    )

  hidden = output.hidden
  made = jax.jit(from_hidden)(hidden.reshape(-1, 1, *hidden.shape[2:]))
  return made, anchors


def stacked(setup: Setup) -> Setup:
  """The same drafter with scanned layers."""
  params = {
    name: part | {"layers": layers.stack_layers(part["layers"])}
    if "layers" in part
    else part
    for name, part in setup.params.items()
  }
  return setup._replace(params=params)
