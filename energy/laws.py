"""Energy laws: coefficients, architecture and lengths -> joules of a request.

Every law is linear in its coefficients theta: joules = sum_i theta_i term_i.
`LAWS` names them all:

  simple      SIMPLE (arXiv 2611.03330): four coefficients for all models.
  capacity    ours: SIMPLE's prefill by parameters and KV reads by their true
              width, and the weights that every step reads, shared by as many
              requests as fit into the memory of the GPU.
  sweetspot   SweetSpot (arXiv 2602.05695): six coefficients for each model.
  flops, baseline1 ... baseline4
              what that paper compares with, for each model as well.

I, O, C are input, output and cached tokens, U = I - C what is prefilled. A
cached prefix removes work of the prefill and nothing else: later tokens still
read its keys and values. All functions broadcast, work under jit, grad and
vmap, and compute in float64 where JAX has it enabled. They check nothing, so
that they can be traced: `check_lengths` does, for concrete numbers.

Not here: how theta is found (`fit`) and how wrong it is (`validation`).
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from energy.architecture import Architecture, Number

PARTS = ("prefill", "kv_reads", "next_token", "request")

# The GPU of the SweetSpot measurements, and its requests per point.
H100_BYTES = 80e9
MEASURED_REQUESTS = 1000.0
_BYTES_PER_NUMBER = 2  # BF16 weights and cache.


class Request(NamedTuple):
  """Lengths in tokens, and how many requests run at once.

  Attributes:
    input_tokens: I, the cached ones included.
    output_tokens: O.
    cached_tokens: C, a prefix of the input whose keys and values exist.
    concurrency: requests that share a decoding step; None leaves it to the law.
  """

  input_tokens: Any
  output_tokens: Any
  cached_tokens: Any
  concurrency: Any


class Coefficient(NamedTuple):
  """One theta.

  Attributes:
    name: as in the paper, or a word.
    unit: joules per what.
    part: one of `PARTS`.
    meaning: what it pays for.
  """

  name: str
  unit: str
  part: str
  meaning: str


@dataclasses.dataclass(frozen=True)
class Law:
  """A law, callable: joules of a request.

  Attributes:
    name: key of `LAWS`.
    coefficients: of theta, in order.
    terms: architecture and request -> what each coefficient multiplies.
    shared: one theta serves all models; otherwise each model needs its own.
  """

  name: str
  coefficients: tuple[Coefficient, ...]
  terms: Callable[[Architecture, Request], tuple[Any, ...]]
  shared: bool

  def design(
    self,
    architecture: Architecture,
    input_tokens: Any,
    output_tokens: Any,
    cached_tokens: Any = 0,
    concurrency: Any = None,
  ) -> jax.Array:
    """What theta is multiplied with: [..., coefficients]."""
    lengths = [input_tokens, output_tokens, cached_tokens]
    given = lengths if concurrency is None else [*lengths, concurrency]
    arrays = jnp.broadcast_arrays(*map(floating, (*architecture, *given)))
    sizes = Architecture(*arrays[: len(architecture)])
    inputs, outputs, cached, *rest = arrays[len(architecture) :]
    request = Request(inputs, outputs, cached, rest[0] if rest else None)
    return jnp.stack(self.terms(sizes, request), axis=-1)

  def __call__(
    self,
    theta: Any,
    architecture: Architecture,
    input_tokens: Any,
    output_tokens: Any,
    cached_tokens: Any = 0,
    concurrency: Any = None,
  ) -> jax.Array:
    """Joules of a request.

    Args:
      theta: [coefficients].
      architecture: sizes, numbers or arrays; not read by laws of one model.
      input_tokens: I, whole numbers or not; arrays broadcast.
      output_tokens: O.
      cached_tokens: C.
      concurrency: requests in a decoding step, read by `capacity` alone.
    """
    design = self.design(
      architecture, input_tokens, output_tokens, cached_tokens, concurrency
    )
    return jnp.sum(design * _aligned(theta, design), axis=-1)

  def parts(
    self,
    theta: Any,
    architecture: Architecture,
    input_tokens: Any,
    output_tokens: Any,
    cached_tokens: Any = 0,
    concurrency: Any = None,
  ) -> dict[str, jax.Array]:
    """Joules by part of the work; the parts of `PARTS` add up to the law.

    `prefill` is the uncached input, `kv_reads` the reading of earlier tokens,
    `next_token` what every output token costs anyway, `request` a constant.
    """
    design = self.design(
      architecture, input_tokens, output_tokens, cached_tokens, concurrency
    )
    joules = design * _aligned(theta, design)
    zero = jnp.zeros(joules.shape[:-1], joules.dtype)
    found = dict.fromkeys(PARTS, zero)
    for index, coefficient in enumerate(self.coefficients):
      found[coefficient.part] += joules[..., index]
    return found


def floating(x: Any) -> jax.Array:
  """`x` in JAX's widest enabled float: whole numbers would overflow."""
  if not isinstance(x, jax.Array):
    x = np.asarray(x, np.float64)
  return jnp.asarray(x, jnp.result_type(float))


def _aligned(theta: Any, design: jax.Array) -> jax.Array:
  """Theta [k], or one for each entry, in the shape of the design."""
  return jnp.broadcast_to(floating(theta), design.shape)


def check_lengths(
  input_tokens: Any, output_tokens: Any, cached_tokens: Any = 0
) -> None:
  """ValueError for lengths that no request has; for concrete numbers only."""
  named = {
    "input_tokens": input_tokens,
    "output_tokens": output_tokens,
    "cached_tokens": cached_tokens,
  }
  for name, value in named.items():
    values = np.asarray(value, np.float64)
    if not np.all(np.isfinite(values)):
      raise ValueError(f"{name}={value}: must be finite")
    if np.any(values < 0):
      raise ValueError(f"{name}={value}: must not be negative")
  if np.any(np.asarray(cached_tokens) > np.asarray(input_tokens)):
    raise ValueError(
      f"cached_tokens={cached_tokens}: more than input_tokens={input_tokens}"
    )


def kv_positions_read(input_tokens: Any, output_tokens: Any) -> Any:
  """I O + O^2 / 2: positions that the output tokens look back on, summed."""
  return input_tokens * output_tokens + output_tokens**2 / 2


def _simple_terms(sizes: Architecture, request: Request) -> tuple[Any, ...]:
  d, layers = sizes.hidden_size, sizes.num_layers
  inputs, outputs = request.input_tokens, request.output_tokens
  return (
    outputs,
    d**2 * layers * (inputs - request.cached_tokens),
    d * layers * sizes.kv_ratio * kv_positions_read(inputs, outputs),
    d * layers * outputs,
  )


SIMPLE = Law(
  name="simple",
  coefficients=(
    Coefficient("theta0", "J/token", "next_token", "an output token"),
    Coefficient("theta1", "J/token/(d^2 L)", "prefill", "matrix products"),
    Coefficient("theta2", "J/token^2/(d L R)", "kv_reads", "keys and values"),
    Coefficient("theta3", "J/token/(d L)", "next_token", "its layers"),
  ),
  terms=_simple_terms,
  shared=True,
)


def weight_bytes(sizes: Architecture) -> Any:
  """Bytes of the weights."""
  return _BYTES_PER_NUMBER * sizes.parameters


def cache_bytes(sizes: Architecture, tokens: Any) -> Any:
  """Bytes of the keys and values of so many tokens."""
  return _BYTES_PER_NUMBER * 2 * sizes.num_layers * sizes.kv_width * tokens


def inverse_concurrency(
  sizes: Architecture,
  request: Request,
  memory_bytes: Number,
  max_requests: Number,
) -> jax.Array:
  """1 / requests in a decoding step of a saturated engine.

  As many as the memory beside the weights holds caches of I + O tokens for
  (an engine that never evicts reserves them), and at most `max_requests`.
  Infinite where the weights alone do not fit.
  """
  if request.concurrency is not None:
    return 1 / request.concurrency
  free = memory_bytes - weight_bytes(sizes)
  needed = cache_bytes(sizes, request.input_tokens + request.output_tokens)
  fits = free > 0
  by_memory = jnp.where(fits, needed / jnp.where(fits, free, 1.0), jnp.inf)
  return jnp.maximum(by_memory, 1 / max_requests)


def _capacity_terms(
  sizes: Architecture,
  request: Request,
  memory_bytes: Number,
  max_requests: Number,
) -> tuple[Any, ...]:
  inputs, outputs = request.input_tokens, request.output_tokens
  share = inverse_concurrency(sizes, request, memory_bytes, max_requests)
  kv_numbers = sizes.num_layers * sizes.kv_width
  return (
    sizes.parameters * (inputs - request.cached_tokens),
    kv_numbers * kv_positions_read(inputs, outputs),
    sizes.parameters * outputs * share,
    sizes.hidden_size * sizes.num_layers * outputs,
    jnp.ones_like(inputs),
  )


def capacity_law(
  memory_bytes: Number = H100_BYTES, max_requests: Number = MEASURED_REQUESTS
) -> Law:
  """Our law for a GPU of `memory_bytes` and an engine's `max_requests`.

  A decoding step reads all weights once for all requests in it. How many there
  are is given as `concurrency`, or else bounded by the memory: long requests
  of models with a wide cache share a step with few others. SIMPLE has no such
  term; its error on wide and on grouped caches is what this one explains.
  """
  return Law(
    name="capacity",
    coefficients=(
      Coefficient("prefill", "J/token/N", "prefill", "matrix products"),
      Coefficient("kv", "J/token^2/(L n_kv h)", "kv_reads", "keys and values"),
      Coefficient("weights", "J/token/N", "next_token", "weights of a step"),
      Coefficient("layers", "J/token/(d L)", "next_token", "its layers"),
      Coefficient("request", "J", "request", "a request"),
    ),
    terms=functools.partial(
      _capacity_terms, memory_bytes=memory_bytes, max_requests=max_requests
    ),
    shared=True,
  )


def _sweetspot_terms(sizes: Architecture, request: Request) -> tuple[Any, ...]:
  del sizes
  inputs, outputs = request.input_tokens, request.output_tokens
  cached = request.cached_tokens
  return (
    outputs,
    inputs**2 - cached**2,  # Attention of the suffix to all before it.
    inputs * outputs,
    inputs - cached,
    outputs**2,
    jnp.ones_like(inputs),
  )


_SWEETSPOT = (
  Coefficient("theta0", "J/token", "next_token", "an output token"),
  Coefficient("theta1", "J/token^2", "prefill", "attention of the prefill"),
  Coefficient("theta2", "J/token^2", "kv_reads", "keys of the input"),
  Coefficient("theta3", "J/token", "prefill", "matrix products"),
  Coefficient("theta4", "J/token^2", "kv_reads", "keys of the output"),
  Coefficient("theta5", "J", "request", "weights read for the prefill"),
)
SWEETSPOT = Law("sweetspot", _SWEETSPOT, _sweetspot_terms, shared=False)
FLOPS = Law(
  "flops",
  _SWEETSPOT[:5],
  lambda sizes, request: _sweetspot_terms(sizes, request)[:5],
  shared=False,
)

_TOKEN = Coefficient("theta0", "J/token", "next_token", "an output token")
BASELINES = (
  # Niu 2025, twice; Wilhelm 2025; Wilkins 2024 (SweetSpot, section of models).
  Law(
    "baseline1",
    (_TOKEN,),
    lambda sizes, request: (request.output_tokens,),
    shared=False,
  ),
  Law(
    "baseline2",
    (_TOKEN, Coefficient("theta1", "J", "request", "a request")),
    lambda sizes, request: (
      request.output_tokens,
      jnp.ones_like(request.output_tokens),
    ),
    shared=False,
  ),
  Law(
    "baseline3",
    (_TOKEN, Coefficient("theta1", "J", "request", "times O / (I + O)")),
    lambda sizes, request: (
      request.output_tokens,
      _share_of_output(request.input_tokens, request.output_tokens),
    ),
    shared=False,
  ),
  Law(
    "baseline4",
    (
      _TOKEN,
      Coefficient("theta1", "J/token", "prefill", "an input token"),
      Coefficient("theta2", "J/token^2", "kv_reads", "input times output"),
    ),
    lambda sizes, request: (
      request.output_tokens,
      request.input_tokens - request.cached_tokens,
      request.input_tokens * request.output_tokens,
    ),
    shared=False,
  ),
)


def _share_of_output(inputs: jax.Array, outputs: jax.Array) -> jax.Array:
  """O / (I + O), 0 without any token."""
  total = inputs + outputs
  return outputs / jnp.where(total > 0, total, 1.0)


LAWS = {
  law.name: law
  for law in (SIMPLE, capacity_law(), SWEETSPOT, FLOPS, *BASELINES)
}

# Solved from the three energies of the paper's worked example (Llama 3.1 8B,
# O = 247). One model cannot split theta0 from theta3: the split, theta0 =
# -1.5e-3, is the one that fits the reconstructed grid best.
SIMPLE_OF_THE_PAPER = (-1.5e-3, 3.30841257e-11, 1.04059038e-9, 2.01073794e-7)
