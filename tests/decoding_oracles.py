"""Decoding without tricks, and what its tests compare with.

Plain Python and NumPy: no cache, no jit, one full pass a token. Also here: a
scripted drafter that errs where it is told, the target's law by enumeration,
and the chi-squared test.
"""

import functools
import itertools
import math
from typing import NamedTuple

import jax
import numpy as np
import scipy.stats
from jax import numpy as jnp

from dspine_jax import configs
from dspine_jax.decoding import round as round_lib
from dspine_jax.drafters import contract, dflash, methods
from dspine_jax.target import model
from tests import oracles, tiny_models


@functools.cache
def _target_shapes(cfg: configs.TargetConfig):
  return jax.eval_shape(lambda: model.init(jax.random.key(0), cfg))


def target(cfg: configs.TargetConfig, seed: int) -> round_lib.TargetModel:
  return round_lib.TargetModel(tiny_models.fill(_target_shapes(cfg), seed), cfg)


def drafter(
  cfg: configs.DrafterConfig, tables: contract.TargetTables, seed: int
) -> round_lib.DrafterModel:
  """A random drafter; DSpine's writes are not zero, its codes the target's."""
  shapes = tiny_models.drafter(cfg).params
  buffers = methods.drafter(cfg).make_buffers(cfg, tables)
  return round_lib.DrafterModel(tiny_models.fill(shapes, seed), buffers, cfg)


# A drafter that knows the target's own continuation. Buffers: `continuation`
# [B, S], the token at each absolute position; `cuts` [B, S], how many proposals
# are right in a block whose anchor has that position; `later` [B, S], whether a
# proposal of that position is wrong behind a cut.


def _scripted_forward(params, buffers, tables, inputs, *, cfg):
  del params, buffers, tables
  shape = (*inputs.anchors.shape, cfg.block_size, cfg.hidden_size)
  where = inputs.anchors[..., None, None].astype(jnp.float32)
  return contract.DrafterOutput(hidden=jnp.broadcast_to(where, shape))


def _scripted_propose(
  params,
  buffers,
  tables,
  output,
  anchor_tokens,
  *,
  cfg,
  sampling_cfg,
  kind,
  keys,
):
  del params, tables, anchor_tokens, sampling_cfg, kind, keys
  anchors = output.hidden[:, 0, :1, 0].astype(jnp.int32)
  slots = jnp.arange(cfg.num_proposals)[None]
  positions = anchors + slots + 1
  right = jnp.take_along_axis(buffers["continuation"], positions, axis=1)
  later = jnp.take_along_axis(buffers["later"], positions, axis=1)
  cut = jnp.take_along_axis(buffers["cuts"], anchors, axis=1)
  wrong = (slots == cut) | ((slots > cut) & later)
  tokens = jnp.where(wrong, (right + 1) % cfg.vocab_size, right)
  return contract.Proposal(tokens=tokens)


SCRIPTED = dflash.DRAFTER._replace(
  make_buffers=lambda cfg, tables: {},
  forward=_scripted_forward,
  propose=_scripted_propose,
)


class Rounds(NamedTuple):
  """A row's output: `DecodeResult` with Python lists of its own rounds."""

  tokens: list[int]
  lengths: list[int]
  accepted: list[int]


def _clip(new, room, stop_tokens):
  """At most `room` tokens, and nothing behind a stop token."""
  clipped = []
  for token in new[:room]:
    clipped.append(int(token))
    if token in stop_tokens:
      break
  return clipped


def scripted_rounds(
  continuation, cuts, *, prompt_length, limit, stop_tokens, num_proposals
) -> Rounds:
  """What one row must do with the scripted drafter.

  Args:
    continuation: [S], the target's tokens by absolute position.
    cuts: [S], right proposals of a block whose anchor is at that position.
    prompt_length: position of the first generated token.
    limit: most tokens.
    stop_tokens: each ends the row.
    num_proposals: M.
  """
  tokens, lengths, accepted = [int(continuation[prompt_length])], [], []
  while tokens[-1] not in stop_tokens and len(tokens) < limit:
    end = prompt_length + len(tokens)
    stands = min(int(cuts[end - 1]), num_proposals)
    new = continuation[end : end + stands + 1]
    new = _clip(new, limit - len(tokens), stop_tokens)
    tokens += new
    lengths.append(len(new))
    accepted.append(stands)
  return Rounds(tokens, lengths, accepted)


def _draft_greedy(models, sequence, outputs):
  """The drafter's proposals behind `sequence`, whose last token is anchor."""
  target, drafter = models
  cfg, anchor = drafter.cfg, len(sequence) - 1
  features = np.concatenate(
    [outputs[layer][:anchor] for layer in cfg.target_layer_ids], axis=-1
  )
  codes = drafter.buffers.get("transfer_codes")
  out = oracles.draft_row(
    drafter.params,
    model.embedding(target.params),
    features,
    [[sequence[-1]] * cfg.block_size],
    [anchor],
    [True],
    cfg,
    codes=codes,
  )
  head = np.asarray(model.head(target.params), np.float64)
  logits = out["hidden"][0, cfg.first_slot :] @ head.T
  if codes is None:
    return [int(np.argmax(row)) for row in logits]
  return oracles.sequential_refinement(
    drafter.params,
    codes,
    head,
    out["pre_injection"][0, cfg.first_slot :],
    [oracles.top_k(row, cfg.dspine.top_k) for row in logits],
    sequence[-1],
    cfg.rms_norm_eps,
  )


def _greedy_tokens(target, sequence, count):
  """The argmax behind each of the last `count` prefixes; layer outputs."""
  hidden, outputs = oracles.target_forward(target.params, sequence, target.cfg)
  head = np.asarray(model.head(target.params), np.float64)
  best = np.argmax(hidden[len(sequence) - count :] @ head.T, axis=-1)
  return [int(token) for token in best], outputs


def speculative_greedy(
  target, drafter, prompt, *, limit, stop_tokens
) -> Rounds:
  """One row at temperature 0, every pass over the whole sequence in float64."""
  prompt = [int(token) for token in prompt]
  tokens, lengths, accepted = _greedy_tokens(target, prompt, 1)[0], [], []
  while tokens[-1] not in stop_tokens and len(tokens) < limit:
    sequence = prompt + tokens
    _, outputs = _greedy_tokens(target, sequence, 1)
    drafts = _draft_greedy((target, drafter), sequence, outputs)
    best, _ = _greedy_tokens(target, sequence + drafts, len(drafts) + 1)
    stands = 0
    while stands < len(drafts) and drafts[stands] == best[stands]:
      stands += 1
    new = [*drafts[:stands], best[stands]]
    new = _clip(new, limit - len(tokens), stop_tokens)
    tokens += new
    lengths.append(len(new))
    accepted.append(stands)
  return Rounds(tokens, lengths, accepted)


def rounds_of(result, row: int) -> Rounds:
  """One row of a `DecodeResult` as lists, finished rounds left out."""
  lengths = np.asarray(result.round_lengths[row])
  accepted = np.asarray(result.accepted[row])
  alive = accepted >= 0
  np.testing.assert_array_equal(alive, lengths > 0)
  count = int(result.num_tokens[row])
  return Rounds(
    np.asarray(result.tokens[row, :count]).tolist(),
    lengths[alive].tolist(),
    accepted[alive].tolist(),
  )


def probabilities(logits, cfg: configs.SamplingConfig):
  """One row of logits [V]: temperature, then top-k, then top-p."""
  logits = [float(x) for x in logits]
  if cfg.temperature == 0:
    best = logits.index(max(logits))
    return np.array([float(v == best) for v in range(len(logits))])
  kept = list(range(len(logits)))
  if cfg.top_k:
    edge = sorted(logits, reverse=True)[: cfg.top_k][-1]
    kept = [v for v in kept if logits[v] >= edge]
  largest = max(logits)
  weights = [
    math.exp((x - largest) / cfg.temperature) if v in kept else 0.0
    for v, x in enumerate(logits)
  ]
  probs = [w / sum(weights) for w in weights]
  if cfg.top_p < 1:
    mass, edge = 0.0, 0.0
    for prob in sorted(probs, reverse=True):
      mass, edge = mass + prob, prob
      if mass >= cfg.top_p:
        break
    probs = [prob if prob >= edge else 0.0 for prob in probs]
    probs = [prob / sum(probs) for prob in probs]
  return np.array(probs)


def residual(p, q):
  """max(p - q, 0) normalised; p where p = q."""
  rest = [max(float(a) - float(b), 0.0) for a, b in zip(p, q, strict=True)]
  if sum(rest) == 0:
    return np.asarray(p, np.float64)
  return np.array(rest) / sum(rest)


def sequence_law(target, prompt, count: int, cfg: configs.SamplingConfig):
  """[V] * count, the probability of each next `count` tokens, enumerated."""
  vocab, size = target.cfg.vocab_size, len(prompt)
  prefixes = np.array(
    list(itertools.product(range(vocab), repeat=count - 1)), np.int32
  )
  rows = np.concatenate([np.tile(prompt, (len(prefixes), 1)), prefixes], axis=1)
  out = jax.jit(model.forward, static_argnames="cfg")(
    target.params, jnp.asarray(rows, jnp.int32), cfg=target.cfg
  )
  logits = model.logits(target.params, out.hidden[:, size - 1 :])
  law = np.ones((vocab,) * count)
  for prefix, row in zip(prefixes, np.asarray(logits), strict=True):
    value = 1.0
    for token, one in zip([*prefix, None], row, strict=True):
      probs = probabilities(one, cfg)
      if token is None:
        law[tuple(prefix)] = value * probs
      else:
        value *= probs[token]
  return law


def chi_squared(samples, law) -> float:
  """p-value of samples [N, count] under law [V] * count.

  Cells with an expectation below 5 are pooled; a sample that the law calls
  impossible gives 0.
  """
  samples, law = np.asarray(samples), np.asarray(law, np.float64)
  counts = np.zeros(law.shape)
  np.add.at(counts, tuple(samples.T), 1)
  expected = law / law.sum() * len(samples)
  if counts[expected == 0].any():
    return 0.0
  small = expected < 5
  observed, wanted = counts[~small], expected[~small]
  if expected[small].sum() > 0:
    observed = np.append(observed, counts[small].sum())
    wanted = np.append(wanted, expected[small].sum())
  assert len(wanted) > 1, "nothing to test: one cell holds the whole law"
  return float(scipy.stats.chisquare(observed, wanted).pvalue)


def proposal_law(drafter, head, logits, u, cfg: configs.SamplingConfig, kind):
  """(slot, predecessor) -> [V], the law of one proposed token.

  Args:
    drafter: the drafter.
    head: [V, D].
    logits: [M, V], of the predicting slots.
    u: [M, D], DSpine's states before the last write.
    cfg: how to sample.
    kind: of DFlash or DSpine.
  """
  head = np.asarray(head, np.float64)

  @functools.cache
  def law(slot, predecessor):
    base = probabilities(logits[slot], cfg)
    if kind in ("sampled", "base"):
      return base
    ids = oracles.top_k(logits[slot], drafter.cfg.dspine.top_k)
    refined = oracles.refine(
      drafter.params,
      drafter.buffers["transfer_codes"],
      u[slot],
      predecessor,
      drafter.cfg.rms_norm_eps,
    )
    kept = [token for token in ids if base[token] > 0]
    share = oracles.softmax(head[kept] @ refined / cfg.temperature)
    result = base.copy() if kind == "full_support" else np.zeros_like(base)
    mass = base[kept].sum() if kind == "full_support" else 1.0
    result[kept] = mass * share
    return result

  return law


def joint_law(law, anchor: int, vocab: int, count: int):
  """[V] * count, the law of whole proposals."""
  joint = np.ones((vocab,) * count)
  for tokens in itertools.product(range(vocab), repeat=count):
    for slot, token in enumerate(tokens):
      joint[tokens] *= law(slot, (anchor, *tokens)[slot])[token]
  return joint
