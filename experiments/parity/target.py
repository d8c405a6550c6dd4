"""The target against Hugging Face's Qwen3: full pass, cached steps, taps.

Also what the drafters' folders borrow from it: tables and context features.
"""

import functools
import pathlib

import jax
import numpy as np
from jax import numpy as jnp

from dspine_jax import kv_cache, layers
from dspine_jax.checkpoints import drafter_config, hf_config, target_folder
from dspine_jax.drafters import methods
from dspine_jax.target import model, tapped_layers
from experiments.parity import report

NAME = "qwen3_target"


def compare(folder: report.Folder) -> list[report.Record]:
  """Compares every output array of a target's folder."""
  check = report.Comparison(folder)
  target = target_folder.load_target(folder.path)
  inputs, outputs = folder.inputs, folder.outputs
  tokens = inputs["input_ids"]
  for layout, params in layouts(target.params).items():
    _compare_forward(check, params, target.cfg, tokens, layout)
    if "decode_token_ids" in outputs:
      _compare_decoding(check, params, target.cfg, tokens, layout)
  if "draft_target_layer_ids" in outputs:
    taps = tuple(outputs["draft_target_layer_ids"].tolist())
    check.exact("draft_target_layer_ids", _drafters_taps(folder, target, taps))
    features = states(target, inputs["feature_ids"], taps).features
    sums = np.asarray(features, np.float64).sum(axis=-1)
    check.value("draft_features_sum", sums)
  if "tap_rule_ids" in outputs:
    _compare_tap_rule(check, inputs["tap_rule_cases"])
  return check.finish()


def layouts(params):
  """The same parameters with unrolled and with stacked (scanned) layers."""
  return {"unrolled": params, "scanned": params | _stacked(params["layers"])}


@jax.jit
def _stacked(unrolled):
  return {"layers": layers.stack_layers(unrolled)}


def load_beside(folder: pathlib.Path) -> target_folder.Target:
  """The target beside a drafter's folder; ValueError if there is none."""
  path = folder.parent / NAME
  if not path.is_dir():
    raise ValueError(
      f"{folder}: needs the target's embedding and head from {path}, which is"
      " missing"
    )
  return target_folder.load_target(path)


def states(target: target_folder.Target, ids, taps: tuple[int, ...]):
  """Final-normed states and tapped features of token ids."""
  return _forward(target.params, ids, cfg=target.cfg, tap_layers=taps)[0]


@functools.partial(jax.jit, static_argnames=("cfg", "tap_layers"))
def _forward(params, tokens, *, cfg, tap_layers):
  out = model.forward(params, tokens, cfg=cfg, tap_layers=tap_layers)
  return out, model.logits(params, out.hidden)


def _compare_forward(check, params, cfg, tokens, layout):
  every_layer = tuple(range(cfg.num_layers))
  out, logits = _forward(params, tokens, cfg=cfg, tap_layers=every_layer)
  check.value("logits", logits, layout=layout)
  after = np.stack(np.split(np.asarray(out.features), cfg.num_layers, axis=-1))
  check.value("last_layer_pre_norm", after[-1], layout=layout)
  # The listed states: embeddings, layers, and the last one final-normed.
  first = np.asarray(model.embedding(params))[tokens]
  listed = np.stack([first, *after[:-1], out.hidden])
  check.value("hidden_states", listed, layout=layout)


def _compare_decoding(check, params, cfg, tokens, layout):
  """Cached steps fed with the reference's tokens, so errors do not add up."""
  fed = check.outputs["decode_token_ids"]
  steps = fed.shape[1]
  last, cache = _prefill(
    params, tokens, cfg=cfg, capacity=tokens.shape[1] + steps
  )
  logits = []
  for step in range(steps):
    row, cache = _step(params, fed[:, step : step + 1], cache, cfg=cfg)
    logits.append(np.asarray(row))
  logits = np.stack(logits, axis=1)
  chosen = np.argmax(np.stack([last, *logits.swapaxes(0, 1)], axis=1), axis=-1)
  check.exact("decode_token_ids", chosen[:, :-1], layout=layout)
  check.value("decode_logits", logits, layout=layout)
  check.exact("decode_next_token", chosen[:, -1:], layout=layout)


@functools.partial(jax.jit, static_argnames=("cfg", "capacity"))
def _prefill(params, tokens, *, cfg, capacity):
  lengths = jnp.full((tokens.shape[0],), tokens.shape[1], jnp.int32)
  out = model.prefill(params, tokens, lengths, cfg=cfg, capacity=capacity)
  return model.logits(params, out.hidden[:, -1]), out.cache


@functools.partial(jax.jit, static_argnames="cfg")
def _step(params, token, cache, *, cfg):
  out = model.forward(params, token, cfg=cfg, cache=cache)
  assert out.cache is not None
  cache = kv_cache.advance(out.cache, jnp.ones_like(cache.lengths))
  return model.logits(params, out.hidden[:, 0]), cache


def _drafters_taps(folder, target, taps):
  """Taps of the drafters beside this target; by the rule if there are none.

  Where drafters disagree, one that disagrees with the recorded ids counts.
  """
  answers = []
  for name in methods.DRAFTERS:
    path = folder.path.parent / name / "config.json"
    if path.exists():
      cfg = drafter_config.from_json(hf_config.read_json(path), path)
      answers.append(cfg.target_layer_ids)
  if not answers:
    rule = tapped_layers.tapped_layers(target.cfg.num_layers, len(taps))
    answers.append(rule)
  return np.asarray(max(answers, key=lambda ids: ids != taps))


def _compare_tap_rule(check, cases):
  width = check.outputs["tap_rule_ids"].shape[-1]
  rows = np.full((len(cases), width), -1)
  for row, (num_target_layers, num_draft_layers) in zip(
    rows, cases.tolist(), strict=True
  ):
    try:
      ids = tapped_layers.tapped_layers(num_target_layers, num_draft_layers)
    except ValueError:
      continue  # Refused: the row stays -1.
    row[: len(ids)] = ids[:width]
  check.exact("tap_rule_ids", rows)
