"""DSpark's Markov head: a low-rank bias by the token before (baselines, 6.1).

With e = W1[predecessor] and h the slot's final-normed state, the bias of the
logits is W2 f, where

  vanilla  f = e, a factorised bigram
  gated    f = sigmoid(W_g [h; e] + b) * e
  rnn      (g, c, o) = split(W_j [s; e; h] + b)
           s' = sigmoid(g) s + (1 - sigmoid(g)) tanh(c),  f = tanh(o)

and s is zero before a block's first slot. Not here: W2 itself, the loss and the
walk, see `dspark.py`.
"""

import jax
from jax import lax
from jax import numpy as jnp
from jaxtyping import Array, Float

from dspine_jax import configs, layers
from dspine_jax.checkpoints import names
from dspine_jax.typing import Key, Params

_INIT_STD = 0.02


def init(
  key: Key, cfg: configs.DrafterConfig, options: configs.DSparkOptions
) -> Params:
  """A head without effect yet: W2 is zero, all else small.

  Returns:
    `w1` and `w2` [V, R]; and for the type, `gate` or `joint` with `kernel`
    [in, out] and `bias`.
  """
  table_key, mixer_key = jax.random.split(key)
  rank, kind = options.markov_rank, options.markov_head_type
  table = (cfg.vocab_size, rank)
  params: Params = {
    "w1": _INIT_STD * jax.random.normal(table_key, table),
    "w2": jnp.zeros(table),
  }
  if kind != "vanilla":
    name, shape = _mixer(kind, cfg.hidden_size, rank)
    kernel = _INIT_STD * jax.random.normal(mixer_key, shape)
    params[name] = {"kernel": kernel, "bias": jnp.zeros(shape[1:])}
  return params


def _mixer(kind: str, width: int, rank: int) -> tuple[str, tuple[int, int]]:
  """Our name and the kernel's shape of what a type adds."""
  if kind == "gated":
    return "gate", (width + rank, rank)
  return "joint", (2 * rank + width, 3 * rank)


def step(
  head: Params,
  kind: str,
  state: Float[Array, "*b r"],
  before: Float[Array, "*b r"],
  hidden: Float[Array, "*b d"],
) -> tuple[Float[Array, "*b r"], Float[Array, "*b r"]]:
  """(state, f) of one slot; only the rnn type changes its state.

  Args:
    head: parameters.
    kind: "vanilla", "gated" or "rnn".
    state: s; zero at the block's start.
    before: e, the predecessor's row of W1.
    hidden: h.
  """
  if kind == "vanilla":
    return state, before
  if kind == "gated":
    gate = _affine(head["gate"], jnp.concatenate([hidden, before], axis=-1))
    return state, jax.nn.sigmoid(gate) * before
  joint = jnp.concatenate([state, before, hidden], axis=-1)
  gate, candidate, out = jnp.split(_affine(head["joint"], joint), 3, axis=-1)
  keep = jax.nn.sigmoid(gate)
  state = keep * state + (1 - keep) * jnp.tanh(candidate)
  return state, jnp.tanh(out)


def _affine(weights: Params, x: jax.Array) -> jax.Array:
  product = layers.matmul(x, weights["kernel"])
  bias = weights["bias"].reshape((1,) * (x.ndim - 1) + (-1,))
  return product + bias.astype(x.dtype)


def teacher_forced(
  head: Params,
  kind: str,
  before: Float[Array, "*b p r"],
  hidden: Float[Array, "*b p d"],
) -> Float[Array, "*b p r"]:
  """f of all slots of blocks whose predecessors are known."""
  if kind != "rnn":
    return step(head, kind, before, before, hidden)[1]
  by_slot = jax.tree.map(lambda x: jnp.moveaxis(x, -2, 0), (before, hidden))

  def one_slot(state, at_slot):
    return step(head, kind, state, *at_slot)

  start = jnp.zeros_like(by_slot[0][0])
  return jnp.moveaxis(lax.scan(one_slot, start, by_slot)[1], 0, -2)


def entries(
  cfg: configs.DrafterConfig, options: configs.DSparkOptions
) -> list[names.Entry]:
  """Released names; older files say `logit_head` instead of `markov_head`."""
  root = ("params", "markov")
  rank, kind = options.markov_rank, options.markov_head_type

  def entry(name, path, shape, transposed=False):
    return names.Entry(
      f"markov_head.{name}",
      (*root, *path),
      shape,
      transposed,
      legacy=f"logit_head.{name}",
    )

  table = (cfg.vocab_size, rank)
  found = [
    entry("markov_w1.weight", ("w1",), table),
    entry("markov_w2.weight", ("w2",), table),
  ]
  if kind != "vanilla":
    name, shape = _mixer(kind, cfg.hidden_size, rank)
    found += [
      entry(f"{name}_proj.weight", (name, "kernel"), shape, True),
      entry(f"{name}_proj.bias", (name, "bias"), shape[1:]),
    ]
  return found
