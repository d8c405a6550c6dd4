"""What the folders of all drafting methods have in common.

Loading with the target beside it, the block layouts (training: many blocks a
row; inference: one block after its context), supervision, gradients, and the
traces of the decode loop. What a method adds is in its own file.
"""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
from flax import struct
from jax import numpy as jnp

from dspine_jax import attention_masks, configs
from dspine_jax.checkpoints import drafter_folder, names, target_folder
from dspine_jax.decoding import generate
from dspine_jax.drafters import backbone, contract, methods
from dspine_jax.target import model
from dspine_jax.training import anchors, losses
from dspine_jax.typing import Params, PyTree
from experiments.parity import exported, report
from experiments.parity import target as target_parity

# Blocks a chunk of the loss: small and odd, so that most sets have several
# chunks with a padded last one. The loss does not depend on it.
_CHUNK_SIZE = 5


@struct.dataclass
class Blocks:
  """Draft blocks with the context features they attend to.

  Arrays of NumPy outside of jitted functions, where they are only indexed.

  Attributes:
    anchors: [B, N] int32.
    keep: [B, N] bool.
    tokens: [B, N, K] int32, true tokens.
    features: [B, S, taps * D].
    replaced: [B, N] bool, blocks that read true predecessors.
  """

  anchors: Any
  keep: Any
  tokens: Any
  features: Any
  replaced: Any


@dataclasses.dataclass(frozen=True)
class Case:
  """A drafter's folder, loaded.

  Attributes:
    folder: inputs and outputs.
    target: the target beside it.
    tables: what the drafter borrows from it.
    params: trainable parameters, unrolled.
    buffers: frozen arrays.
    cfg: its configuration, with the recorded decay constant.
    batch: tokens, mask, features and teacher states of `inputs.npz`.
    blocks: of the training layout, without replacement.
    supervision: labels, weights and teacher states.
    keep: `block_keep` as the index of what is compared.
  """

  folder: report.Folder
  target: target_folder.Target
  tables: contract.TargetTables
  params: Params
  buffers: PyTree
  cfg: configs.DrafterConfig
  batch: anchors.TrainBatch
  blocks: Blocks
  supervision: contract.Supervision
  keep: np.ndarray


def load(folder: report.Folder) -> Case:
  """Loads a drafter, its target, and the blocks of `inputs.npz`.

  Raises:
    ValueError: a file, the target beside it, or an input array is missing, or
      drafter and target do not fit together.
  """
  target = target_parity.load_beside(folder.path)
  loaded = exported.through_all(drafter_folder.load_drafter(folder.path))
  drafter_folder.check_fits(loaded.cfg, target.cfg)
  cfg, inputs = _as_recorded(loaded.cfg, folder.outputs), folder.inputs
  tokens = inputs["input_ids"]
  keep = inputs["block_keep"]
  # Methods without a teacher record no states; theirs are never read.
  states = (
    inputs["target_last_hidden"]
    if "target_last_hidden" in inputs
    else np.zeros((*tokens.shape, cfg.hidden_size), np.float32)
  )
  batch = anchors.TrainBatch(
    tokens=jnp.asarray(tokens),
    loss_mask=jnp.asarray(inputs["loss_mask"] > 0),
    context_features=jnp.asarray(inputs["context_features"]),
    last_hidden=jnp.asarray(states),
  )
  block_tokens, supervision = _supervise(
    batch, inputs["anchor_positions"], keep, cfg=cfg
  )
  return Case(
    folder=folder,
    target=target,
    tables=contract.TargetTables(
      embedding=model.embedding(target.params), head=model.head(target.params)
    ),
    params=loaded.params,
    buffers=loaded.buffers,
    cfg=cfg,
    batch=batch,
    blocks=Blocks(
      anchors=inputs["anchor_positions"],
      keep=keep,
      tokens=np.asarray(block_tokens),
      features=inputs["context_features"],
      replaced=np.zeros_like(keep),
    ),
    supervision=supervision,
    keep=keep,
  )


def reconfigured(case: Case, **changes: Any) -> Case:
  """The same weights and inputs read with another configuration."""
  cfg = dataclasses.replace(case.cfg, **changes)
  _, supervision = _supervise(
    case.batch, case.blocks.anchors, case.keep, cfg=cfg
  )
  return dataclasses.replace(case, cfg=cfg, supervision=supervision)


def _as_recorded(
  cfg: configs.DrafterConfig, outputs: report.Arrays
) -> configs.DrafterConfig:
  """With the settings of the recorded run that config.json does not hold."""
  if "loss_decay_gamma" in outputs:
    gamma = float(outputs["loss_decay_gamma"])
    cfg = dataclasses.replace(cfg, decay_gamma=gamma)
  options = getattr(cfg, cfg.method, None)
  if options is None:
    return cfg
  fields = [field.name for field in dataclasses.fields(options)]
  # Shortest decimal of a recorded float32: 0.1, not its float64 neighbour.
  changes = {
    name: float(str(outputs[name]))
    for name in fields
    if name in outputs and outputs[name].dtype == np.float32
  }
  options = dataclasses.replace(options, **changes)
  return dataclasses.replace(cfg, **{cfg.method: options})


@functools.partial(jax.jit, static_argnames="cfg")
def _supervise(batch, anchor_positions, keep, *, cfg):
  rule = methods.drafter(cfg).supervised
  return (
    anchors.block_tokens(batch.tokens, anchor_positions, cfg.block_size),
    anchors.supervise(batch, anchor_positions, keep, rule, cfg=cfg),
  )


def layouts(params: Params) -> dict[str, Params]:
  """The same drafter with unrolled and with stacked (scanned) layers."""
  stacked = {
    part: target_parity.layouts(tree)["scanned"] if "layers" in tree else tree
    for part, tree in params.items()
  }
  return {"unrolled": params, "scanned": stacked}


@functools.partial(jax.jit, static_argnames="cfg")
def forward(params, buffers, tables, blocks: Blocks, *, cfg):
  """The method's parallel pass, and the head on its states."""
  length = blocks.features.shape[1]
  positions = jnp.broadcast_to(jnp.arange(length), blocks.features.shape[:2])
  core = params["backbone"]
  inputs = contract.BlockInputs(
    anchors=blocks.anchors,
    keep=blocks.keep,
    tokens=blocks.tokens,
    context=backbone.context_kv(core, blocks.features, positions, cfg=cfg),
    replaced=blocks.replaced,
    for_loss=True,
  )
  output = methods.drafter(cfg).forward(
    params, buffers, tables, inputs, cfg=cfg
  )
  return output, model.head_logits(tables.head, output.hidden)


def one_a_row(
  output: contract.DrafterOutput, blocks: Blocks
) -> tuple[contract.DrafterOutput, jax.Array]:
  """Blocks [B, N] as requests [B * N, 1], and their anchor tokens."""

  def reshape(x):
    return x.reshape(-1, 1, *x.shape[2:])

  # Layer features serve the loss only.
  output = dataclasses.replace(output, layer_features=None)
  output = jax.tree.map(reshape, output)
  return output, blocks.tokens[:, :, 0].reshape(-1)


@functools.partial(jax.jit, static_argnames="cfg")
def propose(output, buffers, tables, params, blocks: Blocks, *, cfg):
  """Greedy proposals [B, N, P] of all blocks, as the decode loop makes them."""
  batch, num_blocks = blocks.anchors.shape
  output, anchor_tokens = one_a_row(output, blocks)
  proposal = methods.drafter(cfg).propose(
    params,
    buffers,
    tables,
    output,
    anchor_tokens,
    cfg=cfg,
    sampling_cfg=configs.SamplingConfig(),
    kind="greedy",
    keys=jax.random.split(jax.random.key(0), batch * num_blocks),
  )
  return proposal.tokens.reshape(batch, num_blocks, -1)


@functools.partial(jax.jit, static_argnames="cfg")
def gradient(
  params, buffers, tables, blocks: Blocks, supervision, scheduled_weight, *, cfg
):
  """((loss, report), gradient) of the method's training loss."""

  def loss(params):
    output, _ = forward(params, buffers, tables, blocks, cfg=cfg)
    return objective(
      params,
      buffers,
      tables,
      output,
      supervision,
      scheduled_weight,
      None,
      cfg=cfg,
    )

  return jax.value_and_grad(loss, has_aux=True)(params)


@functools.partial(jax.jit, static_argnames="cfg")
def objective(
  params,
  buffers,
  tables,
  output,
  supervision,
  scheduled_weight,
  ce_scale,
  *,
  cfg,
):
  """(loss, report) of a pass already made."""
  window = contract.LossWindow(
    denominator=jnp.sum(supervision.weights),
    ce_scale=ce_scale,
    scheduled_weight=scheduled_weight,
  )
  return methods.drafter(cfg).loss(
    params,
    buffers,
    tables,
    output,
    supervision,
    cfg=cfg,
    window=window,
    chunk_size=_CHUNK_SIZE,
  )


def compare_inputs(case: Case, check: report.Comparison) -> None:
  """What the set took from its target, made again from the token ids."""
  inputs = case.folder.inputs
  if int(inputs["mask_token_id"]) != case.cfg.mask_token_id:
    raise ValueError(
      f"{case.folder.path}: mask_token_id={int(inputs['mask_token_id'])} in"
      f" inputs.npz, {case.cfg.mask_token_id} in config.json"
    )
  out = target_parity.states(
    case.target, inputs["feature_ids"], case.cfg.target_layer_ids
  )
  check.recomputed("context_features", out.features, inputs["context_features"])
  if "target_last_hidden" in inputs:
    check.recomputed(
      "target_last_hidden", out.hidden, inputs["target_last_hidden"]
    )


def compare_layout(case: Case, check: report.Comparison) -> None:
  """Positions, masks, block inputs, fused context, labels and weights.

  Padding blocks carry anchor 0, mask tokens and a fully masked row, which is
  our convention too; their label tokens mean nothing.
  """
  blocks, cfg = case.blocks, case.cfg
  batch, length = blocks.features.shape[:2]
  context = np.broadcast_to(np.arange(length), (batch, length))
  slots = blocks.anchors[..., None] + np.arange(cfg.block_size)
  positions = [context, slots.reshape(batch, -1)]
  check.exact("position_ids", np.concatenate(positions, axis=1))
  made = _layout(case.params["backbone"], blocks, cfg=cfg)
  check.exact("attention_mask", made["mask"])
  check.exact("noise_ids", made["noise_ids"])
  check.value("context", made["context"])
  labels = case.supervision.labels
  if not cfg.sample_from_anchor:
    labels = labels_of_all_slots(case)
  check.exact("labels", labels, rows=case.keep)
  decay = np.asarray(made["decay"], np.float64)
  if len(decay) > 1:
    fitted = -(len(decay) - 1) / np.log(decay[-1] / decay[0])
    check.value("loss_decay_gamma", np.asarray(fitted))
  else:
    check.given("loss_decay_gamma", cfg.decay_gamma > 0, "one slot: no decay")


def labels_of_all_slots(case: Case) -> np.ndarray:
  """[B, N, K]: the anchor's slot predicts nothing, its label is the anchor."""
  return np.concatenate(
    [case.blocks.tokens[:, :, :1], np.asarray(case.supervision.labels)],
    axis=-1,
  )


@functools.partial(jax.jit, static_argnames="cfg")
def _layout(core, blocks: Blocks, *, cfg):
  """What the forward pass makes of the blocks before its first layer."""
  mask = attention_masks.anchor_blocks(
    blocks.anchors,
    blocks.keep,
    context_length=blocks.features.shape[1],
    block_size=cfg.block_size,
    is_causal=cfg.is_causal,
  )
  return {
    "mask": mask[:, None],
    "noise_ids": backbone.noise_ids(
      blocks.tokens, blocks.keep, cfg.mask_token_id
    ),
    "context": backbone.context_states(core, blocks.features, cfg=cfg),
    "decay": losses.position_decay(cfg.num_proposals, cfg.decay_gamma),
  }


def single_block(case: Case, check: report.Comparison) -> Blocks | None:
  """The recorded block alone after its context, or None if none is recorded.

  Compares where the block is, its positions and its mask.
  """
  outputs = check.outputs
  if "infer_row" not in outputs or "infer_block" not in outputs:
    return None
  row, block = int(outputs["infer_row"]), int(outputs["infer_block"])
  rows, num_blocks = case.keep.shape
  is_valid = 0 <= row < rows and 0 <= block < num_blocks
  is_valid = is_valid and bool(case.keep[row, block])
  for name in ("infer_row", "infer_block"):
    check.given(name, is_valid, "chosen block")
  if not is_valid:
    return None
  whole = case.blocks
  anchor = int(whole.anchors[row, block])
  check.exact("infer_anchor", np.asarray(anchor))
  positions = np.arange(anchor + case.cfg.block_size)
  check.exact("infer_position_ids", positions[None])

  def pick(x):
    return x[row : row + 1, block : block + 1]

  picked = Blocks(
    anchors=pick(whole.anchors),
    keep=pick(whole.keep),
    tokens=pick(whole.tokens),
    features=whole.features[row : row + 1, :anchor],
    replaced=pick(whole.replaced),
  )
  if "infer_attention_mask" in outputs:
    made = _layout(case.params["backbone"], picked, cfg=case.cfg)
    check.exact("infer_attention_mask", made["mask"])
  return picked


@jax.jit
def token_ce(logits, labels) -> jax.Array:
  """Cross-entropy of every slot."""
  return losses.cross_entropy(jax.nn.log_softmax(logits), labels)


def accuracy(hits: jax.Array, supervised: jax.Array) -> np.ndarray:
  """Unweighted share of supervised slots, over all slots of a block."""
  return np.sum(hits) / np.maximum(np.sum(supervised), 1)


def compare_gradients(
  case: Case, check: report.Comparison, grads: Params, prefix: str = ""
) -> None:
  """`grad/*` one by one, and the norms of the gradients of all parameters."""
  entries = [
    entry
    for entry in methods.drafter(case.cfg).entries(case.cfg)
    if entry.path[0] == "params"
  ]
  ours = names.export({"params": jax.device_get(grads)}, entries)
  start = f"{prefix}grad/"
  for name in check.outputs:
    if name.startswith(start) and name.removeprefix(start) in ours:
      check.gradient(name, ours[name.removeprefix(start)])
  listed = f"{prefix}gradnorm/names"
  if listed not in check.outputs:
    return
  recorded = check.outputs[listed].tolist()
  # In the reference's order, followed by parameters that it does not have.
  same = [name for name in recorded if name in ours]
  check.exact(listed, np.asarray([*same, *sorted(set(ours) - set(same))]))
  missing = np.full((1,), np.nan)
  norms = [
    np.linalg.norm(ours.get(name, missing).astype(np.float64))
    for name in recorded
  ]
  check.norms(f"{prefix}gradnorm/values", np.asarray(norms))


def compare_decoding(case: Case, check: report.Comparison) -> None:
  """Greedy decode traces: the target alone, and with this drafter."""
  inputs = case.folder.inputs
  if "gen_prompt_ids" not in inputs:
    return
  prompt = np.asarray(inputs["gen_prompt_ids"], np.int32)
  target = generate.TargetModel(case.target.params, case.target.cfg)
  drafter = generate.DrafterModel(case.params, case.buffers, case.cfg)
  limit = int(inputs["gen_max_new_tokens"])
  decode = configs.DecodeConfig(max_new_tokens=limit)
  request = (jnp.asarray(prompt[None]), jnp.asarray([len(prompt)]))
  keys = jax.random.key(0)[None]  # Greedy: never drawn from.

  def sequence(result):
    tokens = np.asarray(result.tokens)[0, : int(result.num_tokens[0])]
    return np.concatenate([prompt, tokens])

  def rounds(result):
    lengths = np.asarray(result.round_lengths)[0]
    return lengths[lengths > 0]

  plain = generate.autoregressive(target, *request, decode=decode, keys=keys)
  check.exact("gen_greedy_ids", sequence(plain))
  drafted = generate.generate(
    target, drafter, *request, decode=decode, keys=keys
  )
  check.exact("gen_output_ids", sequence(drafted))
  check.exact("gen_acceptance_lengths", rounds(drafted))
  if "gen_stop_token_id" in inputs:
    stop = (int(inputs["gen_stop_token_id"]),)
    stopped = generate.generate(
      target,
      drafter,
      *request,
      decode=dataclasses.replace(decode, stop_tokens=stop),
      keys=keys,
    )
    check.exact("gen_stop_output_ids", sequence(stopped))
    check.exact("gen_stop_acceptance_lengths", rounds(stopped))
