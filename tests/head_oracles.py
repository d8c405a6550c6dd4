"""What the heads of DFlash2, Domino and DSpark do, in float64 NumPy.

Loops over slots, taps and gates, written from the description of the methods;
nothing here imports the library. Parameter trees are the library's.
"""

import numpy as np

from tests import oracles


def array(x):
  return np.asarray(x, np.float64)


def sigmoid(x):
  return 1 / (1 + np.exp(-x))


# DFlash2.


def convolution(v, base, dynamic, group):
  """One side over a block: v [K, D], base [taps, D], dynamic [K, taps, G]."""
  out = np.zeros(np.shape(v))
  for slot, channel in np.ndindex(*np.shape(v)):
    for tap in range(len(base)):
      if slot - tap < 0:
        continue
      kernel = base[tap][channel] + dynamic[slot][tap][channel // group]
      out[slot, channel] += kernel * v[slot - tap][channel]
  return out


def around(weights, sublayer, x, group):
  """conv_1(sublayer(conv_0(x))) of one block, both kernels from x."""
  base = array(weights["base_kernel"])
  sides, taps, width = base.shape
  projection = array(weights["kernel_projection"]["kernel"])
  dynamic = (array(x) @ projection).reshape(-1, sides, taps, width // group)
  inner = convolution(x, base[0], dynamic[:, 0], group)
  return convolution(sublayer(inner), base[1], dynamic[:, 1], group)


def selector_scores(selector, hidden, unary, predecessor, ids):
  """S(a, b) of one slot for one predecessor a and all candidates b."""
  projected = array(hidden) @ array(selector["hidden_projection"]["kernel"])
  query = array(selector["predecessor_codebook"])[predecessor] * projected
  successors = array(selector["successor_codebook"])
  return np.array([unary[b] + query @ successors[b] for b in ids])


# Domino.


def gru_step(gru, state, token):
  """PyTorch's GRU cell without biases; token is the embedding."""
  size = len(state)
  gates_in = array(token) @ array(gru["input"]["kernel"])
  gates_state = array(state) @ array(gru["state"]["kernel"])
  r_in, z_in, n_in = (gates_in[i * size : (i + 1) * size] for i in range(3))
  r_s, z_s, n_s = (gates_state[i * size : (i + 1) * size] for i in range(3))
  r, z = sigmoid(r_in + r_s), sigmoid(z_in + z_s)
  n = np.tanh(n_in + r * n_s)
  return (1 - z) * n + z * state


def domino_logits(params, embedding, base, hidden, before, prefix):
  """[P, V] corrected logits, given the token before each slot.

  Args:
    params: of the drafter.
    embedding: [V, D].
    base: [P, V].
    hidden: [P, D].
    before: [P].
    prefix: first proposals without a correction.
  """
  gru, correction = params["prefix_gru"], params["correction"]
  state = np.zeros(np.shape(gru["state"]["kernel"])[0])
  down, up = array(correction["down"]["kernel"]), array(correction["up"])
  rows = []
  for slot, token in enumerate(before):
    state = gru_step(gru, state, array(embedding)[token])
    joint = np.concatenate([array(hidden)[slot], state]) @ down
    correct = up @ (joint * sigmoid(joint))
    rows.append(array(base)[slot] + (correct if slot >= prefix else 0))
  return np.array(rows)


# DSpark.


def markov_logits(params, kind, base, hidden, before):
  """[P, V] biased logits, given the token before each slot."""
  head = params["markov"]
  w1, w2 = array(head["w1"]), array(head["w2"])
  state, rows = np.zeros(w1.shape[1]), []
  for slot, token in enumerate(before):
    e, h = w1[token], array(hidden)[slot]
    feature = e
    if kind == "gated":
      mixed = np.concatenate([h, e]) @ array(head["gate"]["kernel"])
      feature = sigmoid(mixed + array(head["gate"]["bias"])) * e
    elif kind == "rnn":
      joint = np.concatenate([state, e, h]) @ array(head["joint"]["kernel"])
      g, c, o = np.split(joint + array(head["joint"]["bias"]), 3)
      state = sigmoid(g) * state + (1 - sigmoid(g)) * np.tanh(c)
      feature = np.tanh(o)
    rows.append(array(base)[slot] + w2 @ feature)
  return np.array(rows)


def confidence(params, hidden, before):
  """[P] confidences of slots whose predecessors are given."""
  kernel = array(params["confidence"]["kernel"])[:, 0]
  w1, bias = array(params["markov"]["w1"]), array(params["confidence"]["bias"])
  found = []
  for h, token in zip(array(hidden), before, strict=True):
    seen = np.concatenate([h, w1[token]])[: len(kernel)]
    found.append(sigmoid(seen @ kernel + bias[0]))
  return np.array(found)


def dspark_slot(logits, teacher_logits, label, confident):
  """(CE, L1, acceptance, confidence term) of one slot."""
  q, p = oracles.softmax(array(logits)), oracles.softmax(array(teacher_logits))
  l1 = np.abs(q - p).sum()
  accept = 1 - l1 / 2
  bce = -accept * np.log(confident) - (1 - accept) * np.log(1 - confident)
  return -np.log(q[label]), l1, accept, bce


# Walks.


def greedy_path(logits_of, anchor, count):
  """Slot after slot the argmax, given all tokens before.

  `logits_of` maps the tokens before slots 0..t, the anchor first, to [t+1, V].
  """
  before = [int(anchor)]
  for _ in range(count):
    before.append(int(np.argmax(logits_of(before)[-1])))
  return before[1:]
