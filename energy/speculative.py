"""A model of what speculative decoding costs in joules and in time.

It is a model: nothing of it was measured. It takes the capacity law's prices,
which were fitted to autoregressive serving, and counts what a round of draft
and verification does with them. What it assumes:

  1. A pass reads the weights once for all requests of the batch, and each
     request's cache once, however many tokens the pass verifies.
  2. The first token of a pass costs what a token of autoregressive decoding
     costs; each further one the price of an input token (`prefill`), since it
     adds matrix products and nothing that has to be read.
  3. The drafter is one parallel pass over the block in front of its own layers'
     cache of the context, at the same prices, and reads the head once more.
     Its walk over candidates and the host's work are free.
  4. All requests of the batch have the same context and advance alike; a
     rejected token's work is lost.
  5. Time is that of a roofline: a pass takes the longer of its bytes over the
     memory's rate and its FLOPs over the peak, each at a stated efficiency, and
     a fixed overhead.

With verify width 1 and no drafter both reduce to autoregressive decoding.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp

from energy import laws
from energy.architecture import Architecture, Number


class Prices(NamedTuple):
  """Coefficients of the capacity law: joules per unit of its terms."""

  prefill: Any
  kv: Any
  weights: Any
  layers: Any
  request: Any


class Drafter(NamedTuple):
  """What a draft pass reads and computes.

  Attributes:
    architecture: its layers; `parameters` are what a pass reads: its own
      weights and the target's head.
    block_size: slots of a block, the anchor's included.
  """

  architecture: Architecture
  block_size: Any


class Operation(NamedTuple):
  """One operating point; numbers or arrays that broadcast.

  Attributes:
    context_tokens: positions before the block.
    concurrency: requests in a pass.
    verify_width: tokens of a request in a verification, the anchor included.
  """

  context_tokens: Any
  concurrency: Any
  verify_width: Any


class Hardware(NamedTuple):
  """A GPU for the roofline; the default is an H100 SXM in BF16.

  Attributes:
    bytes_per_second: of the memory.
    flops_per_second: dense peak.
    memory_efficiency: share of the former that a pass reaches.
    compute_efficiency: share of the latter.
    pass_seconds: overhead of a target pass (launches, sampling, host).
    draft_seconds: the same of a draft pass.
  """

  bytes_per_second: float = 3.35e12
  flops_per_second: float = 989e12
  memory_efficiency: float = 0.8
  compute_efficiency: float = 0.6
  pass_seconds: float = 3e-4
  draft_seconds: float = 2e-4


def block_drafter(
  target: Architecture,
  *,
  vocab_size: int,
  num_layers: int = 5,
  block_size: int = 16,
  intermediate_size: int,
  extra_parameters: Number = 0,
) -> Drafter:
  """A DFlash-style drafter in the widths of its target.

  Args:
    target: whose widths and head it has.
    vocab_size: rows of the head that it reads.
    num_layers: draft layers, as many as there are tapped target layers.
    block_size: slots.
    intermediate_size: of its MLP.
    extra_parameters: of the method: 33.0e6 for DSpine beside Qwen3-8B.
  """
  d = target.hidden_size
  attention = 2 * d * (target.attention_width + target.kv_width)
  layer = attention + 3 * d * intermediate_size
  fusion = num_layers * d * d
  own = num_layers * layer + fusion + extra_parameters
  return Drafter(
    architecture=target._replace(
      num_layers=num_layers, parameters=own + vocab_size * d
    ),
    block_size=block_size,
  )


def pass_joules(
  prices: Prices,
  sizes: Architecture,
  context_tokens: Any,
  concurrency: Any,
  tokens: Any,
) -> jax.Array:
  """One request's share of a pass over `tokens` tokens after the context."""
  sizes = Architecture(*map(laws.floating, sizes))
  context_tokens, concurrency, tokens = map(
    laws.floating, (context_tokens, concurrency, tokens)
  )
  kv_numbers = sizes.num_layers * sizes.kv_width
  return (
    prices.kv * kv_numbers * context_tokens
    + prices.weights * sizes.parameters / concurrency
    + prices.layers * sizes.hidden_size * sizes.num_layers
    + prices.prefill * sizes.parameters * (tokens - 1)
  )


def pass_seconds(
  hardware: Hardware,
  sizes: Architecture,
  context_tokens: Any,
  concurrency: Any,
  tokens: Any,
  overhead: Any,
) -> jax.Array:
  """Wall clock of a pass of the whole batch: a roofline and an overhead."""
  sizes = Architecture(*map(laws.floating, sizes))
  context_tokens, concurrency, tokens = map(
    laws.floating, (context_tokens, concurrency, tokens)
  )
  caches = concurrency * laws.cache_bytes(sizes, context_tokens)
  read = laws.weight_bytes(sizes) + caches
  products = 2 * sizes.parameters * tokens * concurrency
  attention = (
    4
    * sizes.num_layers
    * sizes.attention_width
    * context_tokens
    * tokens
    * concurrency
  )
  by_memory = read / (hardware.bytes_per_second * hardware.memory_efficiency)
  by_compute = (products + attention) / (
    hardware.flops_per_second * hardware.compute_efficiency
  )
  return jnp.maximum(by_memory, by_compute) + overhead


def round_joules(
  prices: Prices, target: Architecture, drafter: Drafter | None, at: Operation
) -> dict[str, jax.Array]:
  """Joules of one request's round: `verify` and `draft`."""
  verify = pass_joules(
    prices, target, at.context_tokens, at.concurrency, at.verify_width
  )
  draft = jnp.zeros_like(verify)
  if drafter is not None:
    draft = pass_joules(
      prices,
      drafter.architecture,
      at.context_tokens,
      at.concurrency,
      drafter.block_size,
    )
  return {"verify": verify, "draft": draft}


def round_seconds(
  hardware: Hardware,
  target: Architecture,
  drafter: Drafter | None,
  at: Operation,
) -> dict[str, jax.Array]:
  """Seconds of a round of the whole batch: `verify` and `draft`."""
  verify = pass_seconds(
    hardware,
    target,
    at.context_tokens,
    at.concurrency,
    at.verify_width,
    hardware.pass_seconds,
  )
  draft = jnp.zeros_like(verify)
  if drafter is not None:
    draft = pass_seconds(
      hardware,
      drafter.architecture,
      at.context_tokens,
      at.concurrency,
      drafter.block_size,
      hardware.draft_seconds,
    )
  return {"verify": verify, "draft": draft}


def joules_per_token(
  prices: Prices,
  target: Architecture,
  drafter: Drafter | None,
  at: Operation,
  advancement: Any,
) -> jax.Array:
  """Joules of an emitted token; advancement 1 without drafter is decoding."""
  parts = round_joules(prices, target, drafter, at)
  return (parts["verify"] + parts["draft"]) / advancement


def seconds_per_token(
  hardware: Hardware,
  target: Architecture,
  drafter: Drafter | None,
  at: Operation,
  advancement: Any,
) -> jax.Array:
  """Seconds between emitted tokens of one request."""
  parts = round_seconds(hardware, target, drafter, at)
  return (parts["verify"] + parts["draft"]) / advancement


def autoregressive(at: Operation) -> Operation:
  """The same point, one token a pass."""
  return at._replace(verify_width=1.0)


def break_even_joules(
  prices: Prices, target: Architecture, drafter: Drafter | None, at: Operation
) -> jax.Array:
  """Mean advancement above which a round costs fewer joules than its tokens."""
  one = joules_per_token(prices, target, None, autoregressive(at), 1.0)
  return joules_per_token(prices, target, drafter, at, 1.0) / one


def break_even_seconds(
  hardware: Hardware,
  target: Architecture,
  drafter: Drafter | None,
  at: Operation,
) -> jax.Array:
  """Mean advancement above which a round is faster than its tokens."""
  one = seconds_per_token(hardware, target, None, autoregressive(at), 1.0)
  return seconds_per_token(hardware, target, drafter, at, 1.0) / one


class Crossing(NamedTuple):
  """Where a drafter begins or ceases to pay.

  Attributes:
    pays: "everywhere", "nowhere", "below" the crossing, or "above" it.
    at: the crossing, None if there is none between the two ends.
  """

  pays: str
  at: float | None


def where_it_pays(
  break_even: Callable[[jax.Array], jax.Array],
  advancement: Number,
  low: Number,
  high: Number,
) -> Crossing:
  """Where the break-even advancement crosses `advancement`, between two ends.

  Bisection over the logarithm of the quantity (concurrency, or context), for a
  break-even that crosses once at most.

  Args:
    break_even: the quantity -> break-even advancement.
    advancement: what the drafter reaches.
    low: least value looked at, > 0.
    high: greatest.
  """
  x_low, x_high = (jnp.log(laws.floating(x)) for x in (low, high))
  pays_low = bool(break_even(jnp.exp(x_low)) < advancement)
  pays_high = bool(break_even(jnp.exp(x_high)) < advancement)
  if pays_low == pays_high:
    return Crossing("everywhere" if pays_low else "nowhere", None)
  for _ in range(40):
    middle = (x_low + x_high) / 2
    if bool(break_even(jnp.exp(middle)) < advancement) == pays_low:
      x_low = middle
    else:
      x_high = middle
  at = float(jnp.exp((x_low + x_high) / 2))
  return Crossing("below" if pays_low else "above", at)


def prices_of(theta: Any, law: laws.Law) -> Prices:
  """Theta of the capacity law by name.

  Raises:
    ValueError: another law, or a coefficient below zero, which is no price.
  """
  if law.name != "capacity":
    raise ValueError(
      f"law {law.name!r} does not tell weights from tokens: 'capacity' is"
      " needed"
    )
  negative = [
    one.name
    for one, value in zip(law.coefficients, theta, strict=True)
    if not value >= 0
  ]
  if negative:
    raise ValueError(
      f"law {law.name!r}: {', '.join(negative)} below zero, which is no price"
      " (fit with --non_negative)"
    )
  return Prices(*theta)
