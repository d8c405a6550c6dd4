"""What the specification says, in plain Python and float64 NumPy.

Loops over rows, slots, heads and tokens; nothing here imports the library. Each
function is written from the description of the method, so that an error must be
made twice, in two styles, to stay unseen. Parameter trees are those of the
library (linear maps are [in, out]); a layer is one dict.
"""

import math

import numpy as np


def rms_norm(x, scale, eps):
  x = np.asarray(x, np.float64)
  mean_square = (x * x).mean(axis=-1, keepdims=True)
  return x / np.sqrt(mean_square + eps) * np.asarray(scale, np.float64)


def llama3_frequency(frequency, scaling):
  """One inverse frequency after Llama 3.1's scaling."""
  wavelength = 2 * math.pi / frequency
  original = scaling.original_max_positions
  low, high = scaling.low_freq_factor, scaling.high_freq_factor
  if wavelength < original / high:
    return frequency
  if wavelength > original / low:
    return frequency / scaling.factor
  smooth = (original / wavelength - low) / (high - low)
  return (1 - smooth) * frequency / scaling.factor + smooth * frequency


def rope_frequencies(head_dim, theta, scaling=None):
  plain = [theta ** (-2 * i / head_dim) for i in range(head_dim // 2)]
  if scaling is None:
    return np.array(plain)
  if hasattr(scaling, "beta_fast"):
    return yarn_frequencies(plain, theta, scaling)
  if hasattr(scaling, "low_freq_factor"):
    return np.array([llama3_frequency(f, scaling) for f in plain])
  return np.array([f / scaling.factor for f in plain])


def yarn_frequencies(plain, theta, scaling):
  """YaRN: pair i is divided by the factor, kept, or in between."""
  features = 2 * len(plain)
  bounds = []
  for turns in (scaling.beta_fast, scaling.beta_slow):
    # The (real) index of the pair that turns so often in the old length.
    wavelength = scaling.original_max_positions / turns
    exponent = math.log(wavelength / (2 * math.pi)) / math.log(theta)
    bounds.append(exponent * features / 2)
  first, last = bounds
  if scaling.truncate:
    first, last = math.floor(first), math.ceil(last)
  first, last = max(first, 0), min(last, features - 1)
  result = []
  for i, frequency in enumerate(plain):
    if i <= first:
      share = 0.0
    elif i >= last:
      share = 1.0
    else:
      share = (i - first) / (last - first)
    divided = frequency / scaling.factor
    result.append(share * divided + (1 - share) * frequency)
  return np.array(result)


def rope_amplitude(scaling):
  if not hasattr(scaling, "beta_fast"):
    return 1.0
  if scaling.attention_factor is not None:
    return scaling.attention_factor
  log = math.log(scaling.factor)
  if scaling.mscale and scaling.mscale_all_dim:
    top, bottom = scaling.mscale, scaling.mscale_all_dim
    return (1 + 0.1 * top * log) / (1 + 0.1 * bottom * log)
  return 1 + 0.1 * log


def rope(x, positions, theta, scaling=None):
  """x [T, heads, H]: pairs (i, i + H/2) turned by position * frequency."""
  x = np.asarray(x, np.float64)
  out = np.empty_like(x)
  half = x.shape[-1] // 2
  frequencies = rope_frequencies(x.shape[-1], theta, scaling)
  for t, position in enumerate(positions):
    for i, frequency in enumerate(frequencies):
      angle, size = position * frequency, rope_amplitude(scaling)
      cos, sin = size * math.cos(angle), size * math.sin(angle)
      first, second = x[t, :, i], x[t, :, i + half]
      out[t, :, i] = first * cos - second * sin
      out[t, :, i + half] = second * cos + first * sin
  return out


def softmax(scores):
  scores = np.asarray(scores, np.float64)
  weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
  return weights / weights.sum(axis=-1, keepdims=True)


def attention(q, k, v, mask):
  """q [T, N, H]; k, v [S, G, H]; mask [T, S]. Rows that see nothing give 0."""
  queries, heads, head_dim = q.shape
  repeat = heads // k.shape[1]
  out = np.zeros((queries, heads, head_dim))
  for t in range(queries):
    seen = [s for s in range(k.shape[0]) if mask[t][s]]
    if not seen:
      continue
    for n in range(heads):
      g = n // repeat
      scores = [float(q[t, n] @ k[s, g]) / math.sqrt(head_dim) for s in seen]
      weights = softmax(scores)
      out[t, n] = sum(w * v[s, g] for w, s in zip(weights, seen, strict=True))
  return out


def _project(attn, x, positions, cfg, names):
  """The named projections of x [T, D]; q and k normed and turned."""
  outputs = []
  for name in names:
    kernel = np.asarray(attn[f"{name}_proj"]["kernel"], np.float64)
    y = x @ kernel + np.asarray(attn[f"{name}_proj"].get("bias", 0.0))
    y = y.reshape(x.shape[0], -1, cfg.head_dim)
    if name != "v":
      if cfg.qk_norm:
        y = rms_norm(y, attn[f"{name}_norm"]["scale"], cfg.rms_norm_eps)
      y = rope(y, positions, cfg.rope_theta, cfg.rope_scaling)
    outputs.append(y)
  return outputs


def layer(params, x, positions, mask, cfg, context=None):
  """One decoder layer over x [T, D] at `positions`.

  `context` [S, D], at positions 0..S-1, adds keys and values in front of the
  layer's own; `mask` is [T, S + T].
  """
  x = np.asarray(x, np.float64)
  attn = params["self_attn"]
  normed = rms_norm(x, params["input_layernorm"]["scale"], cfg.rms_norm_eps)
  q, k, v = _project(attn, normed, positions, cfg, "qkv")
  if context is not None:
    at = range(context.shape[0])
    more_k, more_v = _project(attn, context, at, cfg, "kv")
    k, v = np.concatenate([more_k, k]), np.concatenate([more_v, v])
  heads = attention(q, k, v, mask).reshape(x.shape[0], -1)
  x = x + heads @ np.asarray(attn["o_proj"]["kernel"], np.float64)
  x = x + np.asarray(attn["o_proj"].get("bias", 0.0))
  scale = params["post_attention_layernorm"]["scale"]
  normed = rms_norm(x, scale, cfg.rms_norm_eps)
  return x + swiglu(params["mlp"], normed)


def swiglu(mlp, x):
  kernels = {n: np.asarray(mlp[n]["kernel"], np.float64) for n in mlp}
  gate = x @ kernels["gate_proj"]
  silu = gate / (1 + np.exp(-gate))
  return (silu * (x @ kernels["up_proj"])) @ kernels["down_proj"]


def target_forward(params, tokens, cfg):
  """tokens [T] -> final-normed states [T, D] and every layer's output."""
  count = len(tokens)
  mask = [[s <= t for s in range(count)] for t in range(count)]
  x = np.asarray(params["embed_tokens"], np.float64)[np.asarray(tokens)]
  outputs = []
  for layer_params in params["layers"]:
    x = layer(layer_params, x, range(count), mask, cfg)
    outputs.append(x)
  return rms_norm(x, params["norm"]["scale"], cfg.rms_norm_eps), outputs


def in_window(t, anchor, slot, window, convention):
  """Whether a slot's window reaches back to context position t."""
  if window is None:
    return True
  if convention in ("automodel", "specforge"):
    return anchor + slot - t < window
  return t >= anchor - window


def anchor_block_mask(
  anchors,
  keep,
  *,
  context_length,
  block_size,
  is_causal,
  padding_sees_itself,
  window=None,
  convention=None,
):
  """One row's rule in a full layer, or a sliding one: [N * K, S + N * K]."""
  count = len(anchors) * block_size
  if window is not None and convention in ("specforge", "speculators"):
    is_causal = True
  mask = np.zeros((count, context_length + count), bool)
  for b, anchor in enumerate(anchors):
    for slot in range(block_size):
      row = mask[b * block_size + slot]
      for t in range(context_length):
        seen = t < anchor and in_window(t, anchor, slot, window, convention)
        row[t] = bool(keep[b]) and seen
      for other in range(len(anchors)):
        for key in range(block_size):
          allowed = other == b and (key <= slot or not is_causal)
          allowed = allowed and (bool(keep[b]) or padding_sees_itself)
          row[context_length + other * block_size + key] = allowed
  return mask


def context_states(backbone, features, cfg):
  fused = np.asarray(features, np.float64) @ np.asarray(
    backbone["fc"]["kernel"], np.float64
  )
  return rms_norm(fused, backbone["hidden_norm"]["scale"], cfg.rms_norm_eps)


def feature(layer_params, h):
  """sqrt(R) R_l h / |R_l h|."""
  read = h @ np.asarray(layer_params["readout"]["kernel"], np.float64)
  return math.sqrt(read.shape[-1]) * read / np.linalg.norm(read)


def message(shared, receiver, predecessor):
  w = {
    n: np.asarray(shared[n]["kernel"], np.float64)
    for n in shared
    if n[0] in "mrp"
  }
  gate = receiver @ w["receiver_gate"] + predecessor @ w["predecessor_gate"]
  gate = 1 / (1 + np.exp(-(gate + np.asarray(shared["bias"], np.float64))))
  return gate * (predecessor @ w["message"])


def written(layer_params, h, z):
  """h + rms(h) O z."""
  rms = np.linalg.norm(h) / math.sqrt(h.shape[-1])
  return h + rms * (z @ np.asarray(layer_params["write"]["kernel"], np.float64))


def inject(shared, layer_params, h, block_codes, replaced):
  """The adjacent write of one layer and block, slot by slot; h [K, D]."""
  h = np.asarray(h, np.float64)
  codes = np.asarray(block_codes, np.float64)
  scale = math.sqrt(codes.shape[-1])
  out = h.copy()
  for t in range(1, h.shape[0]):
    if t == 1 or replaced:
      predecessor = scale * codes[t - 1]
    else:
      predecessor = feature(layer_params, h[t - 1])
    z = message(shared, feature(layer_params, h[t]), predecessor)
    out[t] = written(layer_params, h[t], z)
  return out


def draft_row(
  params,
  embedding,
  features,
  block_tokens,
  anchors,
  keep,
  cfg,
  *,
  codes=None,
  replace=None,
):
  """All blocks of one row by one dense mask; the training layout.

  Args:
    params: of the drafter.
    embedding: [V, D].
    features: [S, taps * D].
    block_tokens: [N, K] true tokens.
    anchors: [N].
    keep: [N].
    cfg: the drafter's configuration.
    codes: [V, R] for DSpine, None for the plain backbone.
    replace: [N] blocks that read true predecessors.

  Returns:
    hidden [N, K, D]; with codes also pre_injection [N, K, D] and
    layer_features, a list of [N, K, R].
  """
  backbone, size = params["backbone"], cfg.block_size
  count = len(anchors)
  full, sliding = (
    anchor_block_mask(
      anchors,
      keep,
      context_length=len(features),
      block_size=size,
      is_causal=cfg.is_causal,
      padding_sees_itself=True,
      window=window,
      convention=cfg.sliding_window_convention,
    )
    for window in (None, cfg.sliding_window)
  )
  types = cfg.layer_types or ("full_attention",) * cfg.num_layers
  embedding = np.asarray(embedding, np.float64)
  ids = [
    int(block_tokens[b][0]) if slot == 0 and keep[b] else cfg.mask_token_id
    for b in range(count)
    for slot in range(size)
  ]
  positions = [int(a) + slot for a in anchors for slot in range(size)]
  context = context_states(backbone, features, cfg)
  x = embedding[np.asarray(ids)]
  result = {"layer_features": []}
  for index, layer_params in enumerate(backbone["layers"]):
    mask = sliding if types[index] == "sliding_attention" else full
    x = layer(layer_params, x, positions, mask, cfg, context)
    if codes is None:
      continue
    own = params["injection"]["layers"][index]
    h = x.reshape(count, size, -1)
    result["pre_injection"] = h
    after = [
      inject(
        params["injection"]["shared"],
        own,
        h[b],
        np.asarray(codes)[np.asarray(block_tokens[b])],
        replace is not None
        and replace[b]
        and index < cfg.dspine.replacement_layers,
      )
      for b in range(count)
    ]
    x = np.stack(after).reshape(count * size, -1)
    post = [[feature(own, state) for state in block] for block in after]
    result["layer_features"].append(np.array(post))
  hidden = rms_norm(x, backbone["norm"]["scale"], cfg.rms_norm_eps)
  return result | {"hidden": hidden.reshape(count, size, -1)}


def refine(params, codes, u, predecessor, eps):
  """q(a): the last write of state u [D] redone for one actual token."""
  shared = params["injection"]["shared"]
  last = params["injection"]["layers"][-1]
  u = np.asarray(u, np.float64)
  code = np.asarray(codes, np.float64)[predecessor]
  z = message(shared, feature(last, u), math.sqrt(len(code)) * code)
  h = written(last, u, z)
  return rms_norm(h, params["backbone"]["norm"]["scale"], eps)


def sequential_refinement(params, codes, head, u, candidates, anchor, eps):
  """Slot after slot: refine with the token just chosen, take the argmax."""
  head = np.asarray(head, np.float64)
  token, chosen = int(anchor), []
  for state, ids in zip(u, candidates, strict=True):
    scores = head[np.asarray(ids)] @ refine(params, codes, state, token, eps)
    token = int(ids[int(np.argmax(scores))])
    chosen.append(token)
  return chosen


def greedy_walk(scores, candidates):
  """scores [M, P, C], candidates [M, C]: follow the best of each row."""
  row, tokens = 0, []
  for table, ids in zip(scores, candidates, strict=True):
    best = 0
    for c in range(len(ids)):
      if table[row][c] > table[row][best]:
        best = c
    row = best
    tokens.append(int(ids[best]))
  return tokens


def top_k(logits, k):
  """Ids of the k largest, descending; of equal ones the smaller id first."""
  return sorted(range(len(logits)), key=lambda i: (-logits[i], i))[:k]


def supervision(
  tokens, loss_mask, anchors, keep, *, num_proposals, gamma, stop_at_hole
):
  """Labels, validity and weights of one row's slots, [N, P] each."""
  length = len(tokens)
  labels, valid, weights = [], [], []
  for anchor, kept in zip(anchors, keep, strict=True):
    alive = True
    for target in (labels, valid, weights):
      target.append([])
    for k in range(1, num_proposals + 1):
      position = anchor + k
      inside = position < length
      label = int(tokens[position]) if inside else int(tokens[length - 1])
      counts = bool(kept) and inside and bool(loss_mask[position])
      alive = alive and counts
      counts = alive if stop_at_hole else counts
      labels[-1].append(label)
      valid[-1].append(counts)
      weights[-1].append(counts * math.exp(-(k - 1) / gamma))
  return np.array(labels), np.array(valid), np.array(weights)


def cross_entropy(logits, label):
  return -math.log(softmax(logits)[label])


def d_pace_weights(ce, valid, alpha):
  """[P] weights of one block: for each slot the sum of P_m from it on."""
  reached, chance = [], 1.0
  for value, counts in zip(ce, valid, strict=True):
    if counts:
      chance *= (1 - alpha) * math.exp(-value) + alpha
    reached.append(chance if counts else 0.0)
  return np.array(
    [sum(reached[j:]) if valid[j] else 0.0 for j in range(len(reached))]
  )


def dspine_slot(
  params, codes, head, hidden, u, teacher, label, predecessor, cfg
):
  """Loss terms of one slot: ce, l1, refinement, teacher mass, covered."""
  options, head = cfg.dspine, np.asarray(head, np.float64)
  logits = head @ np.asarray(hidden, np.float64)
  p, q = softmax(head @ np.asarray(teacher, np.float64)), softmax(logits)
  ids = top_k(logits, options.top_k)
  refined = refine(params, codes, u, predecessor, cfg.rms_norm_eps)
  r = softmax([float(head[i] @ refined) for i in ids])
  mass = sum(p[i] for i in ids)
  ce = -math.log(r[ids.index(label)]) if label in ids else 0.0
  l1 = 0.0
  if mass > options.candidate_mass_threshold:
    l1 = sum(abs(r[c] - p[i] / mass) for c, i in enumerate(ids))
  return {
    "ce": cross_entropy(logits, label),
    "l1": sum(abs(q[v] - p[v]) for v in range(len(p))),
    "refinement": options.ce_weight * ce + (1 - options.ce_weight) * l1,
    "teacher_mass": mass,
    "covered": label in ids,
    "hit": ids[int(np.argmax(r))] == label,
    "base_hit": int(np.argmax(logits)) == label,
  }


def transfer_codes(head, rank):
  """Codes [V, rank] and directions [D, rank] by the six steps of the paper."""
  rows = np.asarray(head, np.float64)
  rows = np.array([row / math.sqrt(float(row @ row)) for row in rows])
  mean = rows.mean(axis=0)
  scatter = sum(np.outer(row - mean, row - mean) for row in rows)
  values, vectors = np.linalg.eigh(scatter)
  order = sorted(range(len(values)), key=lambda i: values[i])[-rank:]
  directions = vectors[:, order]
  codes = []
  for row in rows:
    code = [(row - mean) @ vectors[:, i] / math.sqrt(values[i]) for i in order]
    codes.append(np.array(code) / np.linalg.norm(code))
  return np.array(codes), directions


def alignment_weight(step, options):
  warmup = options.alignment_warmup_steps
  return options.alignment_weight * min(step / warmup, 1.0)


def replacement_probability(step, total, options):
  done = step / total
  hold, end = options.replacement_hold_ratio, options.replacement_end_ratio
  if done <= hold:
    return options.replacement_probability
  if done >= end:
    return 0.0
  return options.replacement_probability * (end - done) / (end - hold)


def learning_rate(step, cfg):
  """Warm-up, then cosine to the end, or constant and a linear tail."""
  peak, total = cfg.learning_rate, cfg.total_steps
  final = peak * cfg.final_lr_ratio
  warmup = max(1, round(cfg.warmup_ratio * total))
  if step < warmup:
    return peak * step / warmup
  if cfg.schedule == "cosine":
    done = min(1.0, (step - warmup) / (total - warmup))
    return final + (peak - final) * (1 + math.cos(math.pi * done)) / 2
  tail = max(1, round(cfg.decay_ratio * total))
  left = max(0, min(1.0, (total - step) / tail))
  return final + (peak - final) * left
