"""Which terms a shared law should have, chosen without looking at the answer.

Candidates are all combinations of ways to charge each part of the work. The
figure that counts comes from nested selection: for every model, the law is
chosen by leave-one-model-out among the others, fitted to them, and only then
used on that model. The final law is chosen the same way on all models; its own
leave-one-model-out figure is a little too good and is not quoted alone.

Thousands of small relative least squares are needed, so they are solved by
their normal equations instead of by `fit`, which agrees (a test).
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np
from jax import numpy as jnp

from energy import laws
from energy.architecture import Architecture
from energy.measurements import Measurements


class Term(NamedTuple):
  """A candidate term.

  Attributes:
    name: short.
    part: of `laws.PARTS`.
    meaning: what it physically is.
    value: architecture and request -> what its coefficient multiplies.
  """

  name: str
  part: str
  meaning: str
  value: Callable[[Architecture, laws.Request], Any]


def _weights_of_a_step(sizes: Architecture, request: laws.Request) -> Any:
  share = laws.inverse_concurrency(
    sizes, request, laws.H100_BYTES, laws.MEASURED_REQUESTS
  )
  return sizes.parameters * request.output_tokens * share


TERMS = {
  term.name: term
  for term in (
    Term(
      "d2L I",
      "prefill",
      "matrix products of the input, all widths as d",
      lambda a, r: (
        a.hidden_size**2 * a.num_layers * (r.input_tokens - r.cached_tokens)
      ),
    ),
    Term(
      "N I",
      "prefill",
      "matrix products of the input, by parameters",
      lambda a, r: a.parameters * (r.input_tokens - r.cached_tokens),
    ),
    Term(
      "attention I2",
      "prefill",
      "attention of the prefill",
      lambda a, r: (
        a.num_layers
        * a.attention_width
        * (r.input_tokens**2 - r.cached_tokens**2)
      ),
    ),
    Term(
      "dLR kv",
      "kv_reads",
      "KV reads, heads of width d / heads",
      lambda a, r: (
        a.hidden_size
        * a.num_layers
        * a.kv_ratio
        * laws.kv_positions_read(r.input_tokens, r.output_tokens)
      ),
    ),
    Term(
      "width kv",
      "kv_reads",
      "KV reads, true width of the cache",
      lambda a, r: (
        a.num_layers
        * a.kv_width
        * laws.kv_positions_read(r.input_tokens, r.output_tokens)
      ),
    ),
    Term(
      "weights",
      "next_token",
      "weights of a step, shared by the requests that fit",
      _weights_of_a_step,
    ),
    Term("O", "next_token", "a step", lambda a, r: r.output_tokens),
    Term(
      "dL O",
      "next_token",
      "activations of a token's layers",
      lambda a, r: a.hidden_size * a.num_layers * r.output_tokens,
    ),
    Term(
      "N O",
      "next_token",
      "matrix products of a token",
      lambda a, r: a.parameters * r.output_tokens,
    ),
    Term(
      "1",
      "request",
      "handling of a request",
      lambda a, r: jnp.ones_like(r.input_tokens),
    ),
  )
}

_PREFILL = (("d2L I",), ("N I",))
_PREFILL_ATTENTION = ((), ("attention I2",))
_KV = (("dLR kv",), ("width kv",))
_WEIGHTS = ((), ("weights",))
_TOKEN = (
  (),
  *((name,) for name in ("O", "dL O", "N O")),
  *itertools.combinations(("O", "dL O", "N O"), 2),
)
_REQUEST = ((), ("1",))

NEARLY = 1.05

SIMPLE_TERMS = ("d2L I", "dLR kv", "O", "dL O")
# "With as few coefficients as SIMPLE": the starting point of the search.
PARAMETER_TERMS = ("N I", "width kv", "N O", "1")
CAPACITY_TERMS = ("N I", "width kv", "weights", "dL O", "1")


def candidates() -> Iterator[tuple[str, ...]]:
  """Names of the terms of every candidate law."""
  parts = (_PREFILL, _PREFILL_ATTENTION, _KV, _WEIGHTS, _TOKEN, _REQUEST)
  for chosen in itertools.product(*parts):
    yield tuple(itertools.chain(*chosen))


class Selection:
  """Held-out predictions of candidates, from sums that are made once.

  Relative least squares of any candidate and any set of models needs the inner
  products of all terms for each model, and nothing else of the rows.
  """

  def __init__(self, data: Measurements):
    """Sums of the rows of every model.

    Args:
      data: measured requests.
    """
    self.names = list(TERMS)
    with jax.enable_x64(True):
      sizes = Architecture(*map(jnp.asarray, data.architecture))
      request = laws.Request(
        *(None if x is None else jnp.asarray(x) for x in data.request)
      )
      columns = [
        np.broadcast_to(term.value(sizes, request), data.joules.shape)
        for term in TERMS.values()
      ]
    rows = np.stack(columns, axis=1) / data.joules[:, None]
    self.scale = np.linalg.norm(rows, axis=0)
    self.rows = rows / self.scale
    self.models = np.asarray(data.models)
    self.folds = list(dict.fromkeys(data.models))
    by_fold = [self.rows[self.models == fold] for fold in self.folds]
    self.gram = np.stack([rows.T @ rows for rows in by_fold])
    self.moment = np.stack([rows.sum(axis=0) for rows in by_fold])

  def ratios(
    self, terms: Sequence[str], train: Sequence[int], test: Sequence[int]
  ) -> np.ndarray:
    """Predicted over actual of the rows of folds `test`, fitted on `train`."""
    columns = [self.names.index(term) for term in terms]
    square = np.ix_(columns, columns)
    gram = self.gram[list(train)].sum(axis=0)[square]
    moment = self.moment[list(train)].sum(axis=0)[columns]
    theta = np.linalg.solve(gram, moment)
    kept = np.isin(self.models, [self.folds[i] for i in test])
    return self.rows[kept][:, columns] @ theta

  def held_out_error(self, terms: Sequence[str], folds: Sequence[int]) -> float:
    """MAPE in percent of leave-one-model-out among `folds`."""
    errors = [
      np.abs(self.ratios(terms, [i for i in folds if i != fold], [fold]) - 1)
      for fold in folds
    ]
    return 100 * float(np.mean(np.concatenate(errors)))

  def best(self, folds: Sequence[int]) -> tuple[str, ...]:
    """The candidate with fewest terms that is nearly the best among `folds`.

    Nearly: a held-out error of at most `NEARLY` times the least one; among
    candidates with as many terms, the one of least error.
    """
    errors = {one: self.held_out_error(one, folds) for one in candidates()}
    good = NEARLY * min(errors.values())
    near = [one for one, error in errors.items() if error <= good]
    return min(near, key=lambda one: (len(one), errors[one]))

  def nested(self) -> tuple[float, dict[str, tuple[str, ...]]]:
    """Outer MAPE in percent, and what was chosen without each model."""
    every = range(len(self.folds))
    errors, chosen = [], {}
    for fold in every:
      rest = [i for i in every if i != fold]
      terms = self.best(rest)
      chosen[self.folds[fold]] = terms
      errors.append(np.abs(self.ratios(terms, rest, [fold]) - 1))
    return 100 * float(np.mean(np.concatenate(errors))), chosen


def ablation(data: Measurements) -> dict[str, float]:
  """Leave-one-model-out MAPE of our law, and with single terms changed."""
  selection = Selection(data)
  folds = range(len(selection.folds))

  def without(term: str, *instead: str) -> tuple[str, ...]:
    return (*(one for one in CAPACITY_TERMS if one != term), *instead)

  laws_of = {
    "capacity": CAPACITY_TERMS,
    "prefill by d^2 L": without("N I", "d2L I"),
    "KV reads by d L R": without("width kv", "dLR kv"),
    "no weights of a step": without("weights"),
    "no layers of a token": without("dL O"),
    "no constant": without("1"),
    "and prefill attention": (*CAPACITY_TERMS, "attention I2"),
    "and N O": (*CAPACITY_TERMS, "N O"),
    "N I, KV width, N O, constant": PARAMETER_TERMS,
    "SIMPLE": SIMPLE_TERMS,
  }
  return {
    name: selection.held_out_error(terms, folds)
    for name, terms in laws_of.items()
  }
