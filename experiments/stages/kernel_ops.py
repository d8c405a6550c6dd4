"""The ops of `kernels` at real shapes, as cases to count, time and check.

In decoding, by the number of requests, and over the blocks of a training
sequence, there with the gradient. Nothing here loads a kernel; naming an
implementation that cannot run raises what the op raises.
"""

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
from jax import numpy as jnp

from experiments.stages import kernel_cases
from kernels import shapes
from kernels.adjacent_injection import api as injection_api
from kernels.adjacent_injection import cost as injection_cost
from kernels.adjacent_injection import reference as injection
from kernels.block_attention import api as attention_api
from kernels.block_attention import cost as attention_cost
from kernels.block_attention import heuristics as attention_sizes
from kernels.draft_loss import api as loss_api
from kernels.draft_loss import cost as loss_cost
from kernels.transition_scores import api as scores_api
from kernels.transition_scores import cost as scores_cost

Case, Spec = kernel_cases.Case, kernel_cases.Spec

EPS = 1e-6
# As `kernels.dispatch` names them.
OPS = (
  *("adjacent_injection", "greedy_draft", "transition_scores"),
  *("block_attention", "draft_loss"),
)
# Rows whose vocabulary rows XLA holds together in the loss.
LOSS_CHUNK = 480


@dataclasses.dataclass(frozen=True, kw_only=True)
class Sizes:
  """A model's widths with the recipe of its drafter; see `kernels.shapes`."""

  model: shapes.Model
  rank: int = shapes.RANK
  message: int = shapes.MESSAGE
  block: int = shapes.BLOCK
  candidates: int = shapes.CANDIDATES
  anchors: int = shapes.ANCHORS
  context: int = shapes.CONTEXT
  decode_context: int = shapes.DECODE_CONTEXT
  batches: tuple[int, ...] = shapes.BATCHES

  @property
  def slots(self) -> int:
    """Slots of a block that propose."""
    return self.block - 1


_TINY = shapes.Model(
  "tiny", width=64, vocab=128, heads=4, kv_heads=2, head_dim=16, layers=2
)
SIZES = {
  **{model.name: Sizes(model=model) for model in shapes.MODELS},
  "tiny": Sizes(
    model=_TINY,
    rank=32,
    message=16,
    block=4,
    candidates=4,
    anchors=8,
    context=48,
    decode_context=64,
    batches=(1, 2),
  ),
}


def cases(
  sizes: Sizes, ops: Sequence[str] = OPS, dtype: Any = jnp.bfloat16
) -> list[Case]:
  """All cases of the given ops: decoding by batch, then training."""
  made = {
    "adjacent_injection": _injection_cases,
    "greedy_draft": _draft_cases,
    "transition_scores": _scores_cases,
    "block_attention": _attention_cases,
    "draft_loss": _loss_cases,
  }
  return [case for op in ops for case in made[op](sizes, jnp.dtype(dtype))]


def chosen(
  shapes_flag: Sequence[str],
  ops_flag: Sequence[str],
  dtype: Any = jnp.bfloat16,
) -> list[Case]:
  """Cases of a script's flags --shapes and --ops; ValueError for others."""
  check_names("shapes", shapes_flag, SIZES)
  check_names("ops", ops_flag, OPS)
  return [
    case for name in shapes_flag for case in cases(SIZES[name], ops_flag, dtype)
  ]


def check_names(flag: str, given: Sequence[str], known: Any) -> None:
  """ValueError unless a list flag has names, all of them known."""
  if not given or set(given) - set(known):
    raise ValueError(
      f"--{flag}={','.join(given)}: choose from {', '.join(known)}"
    )


def _caller(function: Callable, **options: Any) -> Callable[..., Callable]:
  def call(implementation, block_sizes):
    return functools.partial(
      function,
      implementation=implementation,
      block_sizes=block_sizes,
      **options,
    )

  return call


def _weights(sizes: Sizes, dtype) -> Any:
  """`Weights` of specs in the place of arrays."""
  weights: Any = injection.Weights
  width, rank, size = sizes.model.width, sizes.rank, sizes.message

  def kernel(rows, cols):
    return Spec((rows, cols), dtype, rows**-0.5)

  return weights(
    readout=kernel(width, rank),
    write=kernel(size, width),
    message=kernel(rank, size),
    receiver_gate=kernel(rank, size),
    predecessor_gate=kernel(rank, size),
    bias=Spec((size,), dtype, 0.1),
  )


def _codes(sizes: Sizes, dtype) -> Spec:
  return Spec((sizes.model.vocab, sizes.rank), dtype, sizes.rank**-0.5)


def _head(sizes: Sizes, dtype) -> Spec:
  shape = (sizes.model.vocab, sizes.model.width)
  return Spec(shape, dtype, sizes.model.width**-0.5)


def _ids(sizes: Sizes, *shape: int) -> Spec:
  return Spec(shape, jnp.int32, high=sizes.model.vocab)


def _where(sizes: Sizes, batch: int | None) -> str:
  if batch is None:
    return f"{sizes.model.name} training"
  return f"{sizes.model.name} decode {batch}"


def _injection_cases(sizes: Sizes, dtype) -> list[Case]:
  def case(blocks, batch):
    training = batch is None
    rows = (blocks, sizes.block)
    return Case(
      op="adjacent_injection",
      name=f"adjacent_injection {_where(sizes, batch)}",
      call=_caller(injection_api.adjacent_injection, with_feature=training),
      arguments=(
        Spec((*rows, sizes.model.width), dtype),
        _ids(sizes, *rows),
        Spec((blocks,), jnp.bool_),
        _codes(sizes, dtype),
        _weights(sizes, dtype),
      ),
      differentiable=(0, 4) if training else (),
      cost=injection_cost.cost(
        blocks * sizes.block,
        sizes.model.width,
        sizes.rank,
        sizes.message,
        with_feature=training,
        backward=training,
        itemsize=dtype.itemsize,
      ),
    )

  decode = [case(batch, batch) for batch in sizes.batches]
  return [*decode, case(sizes.anchors, None)]


def _draft_cases(sizes: Sizes, dtype) -> list[Case]:
  return [
    _scores_case(
      scores_api.greedy_draft,
      sizes,
      dtype,
      batch,
      sizes.candidates,
      _ids(sizes, batch),
    )
    for batch in sizes.batches
  ]


def _scores_cases(sizes: Sizes, dtype) -> list[Case]:
  # As in sampling: the predecessors are the candidates and one token more.
  count = sizes.candidates + 1
  return [
    _scores_case(
      scores_api.transition_scores,
      sizes,
      dtype,
      batch,
      count,
      _ids(sizes, batch, sizes.slots, count),
    )
    for batch in sizes.batches
  ]


def _scores_case(function, sizes, dtype, batch, count, before) -> Case:
  slots, width = sizes.slots, sizes.model.width
  return Case(
    op=function.__name__,
    name=f"{function.__name__} {_where(sizes, batch)}",
    call=_caller(function, eps=EPS),
    arguments=(
      Spec((batch, slots, width), dtype),
      before,
      _ids(sizes, batch, slots, sizes.candidates),
      *(_codes(sizes, dtype), _head(sizes, dtype), _weights(sizes, dtype)),
      Spec((width,), dtype),
    ),
    differentiable=(),
    cost=scores_cost.cost(
      batch,
      slots,
      count,
      sizes.candidates,
      width,
      sizes.rank,
      sizes.message,
      dtype.itemsize,
      draft=function is scores_api.greedy_draft,
    ),
  )


def _attention_cases(sizes: Sizes, dtype) -> list[Case]:
  model = sizes.model

  def case(batch, blocks, context, visible, where):
    own = (batch, blocks, sizes.block, model.kv_heads, model.head_dim)
    cache = (batch, model.kv_heads, context, model.head_dim)
    cache_spec = Spec(cache, dtype)
    queries_spec = Spec((*own[:3], model.heads, model.head_dim), dtype)
    mask = jnp.asarray(np.tril(np.ones((sizes.block, sizes.block), bool)))
    training = where is None

    def call(implementation, block_sizes):
      def attend(q, own_k, own_v, context_k, context_v, visible):
        return attention_api.block_attention(
          *(q, own_k, own_v, context_k, context_v, visible, None, mask),
          implementation=implementation,
          block_sizes=block_sizes,
        )

      return attend

    return Case(
      op="block_attention",
      name=f"block_attention {_where(sizes, where)}",
      call=call,
      arguments=(
        *(queries_spec, Spec(own, dtype), Spec(own, dtype)),
        *(cache_spec, cache_spec, visible),
      ),
      differentiable=(0, 1, 2, 3, 4) if training else (),
      cost=attention_cost.of_shape(
        attention_sizes.Shape(
          batch=batch,
          blocks=blocks,
          slots=sizes.block,
          groups=model.kv_heads,
          repeat=model.heads // model.kv_heads,
          width=model.head_dim,
          context=context,
          itemsize=dtype.itemsize,
        ),
        backward=training,
      ),
    )

  decode = [
    case(
      batch,
      1,
      sizes.decode_context,
      Spec(
        (batch, 1),
        jnp.int32,
        low=sizes.decode_context - 1,
        high=sizes.decode_context,
      ),
      batch,
    )
    for batch in sizes.batches
  ]
  anchors = Spec(
    (1, sizes.anchors), jnp.int32, low=1, high=sizes.context, is_sorted=True
  )
  return [*decode, case(1, sizes.anchors, sizes.context, anchors, None)]


def _loss_cases(sizes: Sizes, dtype) -> list[Case]:
  rows, width = sizes.anchors * sizes.slots, sizes.model.width
  chunks = max(1, rows // LOSS_CHUNK)
  states = Spec((rows, width), dtype)
  return [
    Case(
      op="draft_loss",
      name=f"draft_loss {_where(sizes, None)}",
      call=_caller(loss_api.draft_loss),
      arguments=(states, states, _ids(sizes, rows), _head(sizes, dtype)),
      differentiable=(0,),
      cost=loss_cost.cost(
        rows,
        width,
        sizes.model.vocab,
        backward=True,
        chunk_rows=rows // chunks,
        itemsize=dtype.itemsize,
      ),
      chunks=chunks,
    )
  ]
