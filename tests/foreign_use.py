"""Uses the installed package as other JAX code does; run from another folder.

Prints one line per check; `installed_package_test.py` reads them. Not a test by
itself, since it must run outside of this checkout.
"""

import equinox as eqx
import jax
from flax import linen as nn
from jax import numpy as jnp

import dspine_jax
from dspine_jax import configs
from dspine_jax.checkpoints import drafter_folder, target_folder
from dspine_jax.decoding import generate, sampling, verify
from dspine_jax.drafters import candidates, contract, injection
from dspine_jax.training import losses
from kernels.transition_scores import api as transition_scores

SLOTS, WIDTH, RANK = 6, 16, 8
KEY = jax.random.key(0)
VOCAB = 20
CODES = jax.random.normal(KEY, (VOCAB, RANK)) / RANK**0.5


def weights():
  directions = jnp.linalg.qr(jax.random.normal(KEY, (WIDTH, RANK)))[0]
  tree = injection.init(KEY, 1, directions, 4)
  write = {"kernel": 0.1 * jax.random.normal(KEY, (4, WIDTH))}
  return tree["shared"], tree["layers"][0] | {"write": write}


class FlaxHost(nn.Module):
  """A foreign Linen module that owns the injection's weights."""

  @nn.compact
  def __call__(self, h, tokens):
    shared = self.param("shared", lambda unused: weights()[0])
    layer = self.param("layer", lambda unused: weights()[1])
    return injection.adjacent_injection(
      shared, layer, h, tokens, jnp.asarray(False), CODES
    ).h


class EquinoxHost(eqx.Module):
  """The same as an Equinox module."""

  shared: dict
  layer: dict

  def __call__(self, h, tokens):
    return injection.adjacent_injection(
      self.shared, self.layer, h, tokens, jnp.asarray(False), CODES
    ).h


def check(name: str, ok) -> None:
  print(f"{name}: {'ok' if bool(ok) else 'FAILED'}")


def main() -> None:
  print(f"package: {dspine_jax.__file__}")
  h = jax.random.normal(KEY, (3, SLOTS, WIDTH))
  tokens = jax.random.randint(KEY, (3, SLOTS), 0, VOCAB)
  shared, layer = weights()
  host = EquinoxHost(shared, layer)
  flax_host = FlaxHost()
  params = flax_host.init(KEY, h[0], tokens[0])

  from_equinox = eqx.filter_jit(eqx.filter_vmap(host))(h, tokens)
  from_flax = jax.jit(jax.vmap(lambda h, t: flax_host.apply(params, h, t)))(
    h, tokens
  )
  check("equinox and flax agree", jnp.allclose(from_equinox, from_flax))

  def total(host):
    return jnp.sum(jax.vmap(host)(h, tokens) ** 2)

  gradient = eqx.filter_jit(eqx.filter_grad(total))(host)
  check(
    "gradient through an equinox module",
    all(bool(jnp.isfinite(x).all()) for x in jax.tree.leaves(gradient))
    and jnp.any(gradient.layer["readout"]["kernel"] != 0),
  )

  scores = jax.random.normal(KEY, (2, 5, 4, 4))
  ids = jax.random.randint(KEY, (2, 5, 4), 0, 50)
  walked = jax.jit(candidates.greedy_walk)(scores, ids)
  rows = jnp.stack([candidates.greedy_walk(scores[i], ids[i]) for i in (0, 1)])
  check("walk under jit and row by row", jnp.array_equal(walked, rows))
  check(
    "walk under vmap",
    jnp.array_equal(jax.vmap(candidates.greedy_walk)(scores, ids), walked),
  )

  last = {
    "layer": layer,
    "shared": shared,
    "norm": {"scale": jnp.ones((WIDTH,))},
  }
  head = jax.random.normal(KEY, (VOCAB, WIDTH))
  before, after = jax.random.randint(KEY, (2, 3, SLOTS, 4), 0, VOCAB)

  def score(last, h, before, after):
    weights = injection.weights(last["shared"], last["layer"])
    scale = last["norm"]["scale"]
    return transition_scores.transition_scores(
      h, before, after, CODES, head, weights, scale, eps=1e-6
    )

  scores = jax.jit(score)(last, h, before, after)
  rows = jax.vmap(score, in_axes=(None, 0, 0, 0))(last, h, before, after)
  check("transition scores", jnp.allclose(scores, rows, atol=1e-4))
  slope = jax.grad(lambda last: jnp.sum(score(last, h, before, after)))(last)
  check("their gradient", jnp.any(slope["layer"]["write"]["kernel"] != 0))

  cfg = configs.SamplingConfig(temperature=1.0)
  q = sampling.probabilities(jax.random.normal(KEY, (2, 5, 50)), cfg)
  keys = jax.random.split(KEY, (3, 2))
  proposal = contract.Proposal(tokens=sampling.draw(keys[0], q), probs=q)
  verdict = jax.jit(
    lambda logits, proposal: verify.RULES["rejection"](
      logits,
      proposal,
      sampling_cfg=cfg,
      accept_keys=keys[1],
      replace_keys=keys[2],
    )
  )(jax.random.normal(KEY, (2, 6, 50)), proposal)
  check("verification under jit", jnp.all(verdict.accepted <= 5))

  def row_loss(params, rows, head, labels):
    log_q = jax.nn.log_softmax(rows @ params @ head.T)
    return jnp.sum(losses.cross_entropy(log_q, labels)), {}

  head = jax.random.normal(KEY, (50, WIDTH))

  def chunked(params, rows):
    labels = jnp.arange(SLOTS)
    return losses.chunked_sum(row_loss, 2, params, rows, head, labels)[0]

  slopes = jax.vmap(jax.grad(chunked), in_axes=(None, 0))(jnp.eye(WIDTH), h)
  whole = jax.grad(lambda p: row_loss(p, h[1], head, jnp.arange(SLOTS))[0])(
    jnp.eye(WIDTH)
  )
  check(
    "chunked loss under vmap of grad", jnp.allclose(slopes[1], whole, atol=1e-4)
  )

  assets = dspine_jax.__path__[0] + "/assets"
  target = target_folder.load_target(assets + "/target")
  drafter = drafter_folder.load_drafter(assets + "/drafter")
  prompt = jnp.arange(20)[None] + 300
  arguments = (prompt, jnp.asarray([20]))
  options = {
    "decode": configs.DecodeConfig(max_new_tokens=24),
    "keys": jax.random.split(KEY, 1),
  }
  model = generate.TargetModel(target.params, target.cfg)
  out = generate.generate(
    model, generate.DrafterModel(*drafter), *arguments, **options
  )
  plain = generate.autoregressive(model, *arguments, **options)
  check("embedded models", jnp.array_equal(out.tokens, plain.tokens))


if __name__ == "__main__":
  main()
