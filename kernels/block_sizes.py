"""Tile sizes of kernels: an argument, else a tuned file, else a heuristic.

Tuned sizes and measured defaults are one JSON per kind of device, written by
`experiments.gpu_suite`, never while an op runs:

  {"defaults": {op: {dtype: implementation}},
   "block_sizes": {op: {kernel: {bucket: {"rows": 64, ...}}}}}
"""

import contextlib
import contextvars
import dataclasses
import functools
import json
import pathlib
from collections.abc import Callable, Generator, Mapping
from typing import Any, NamedTuple

import jax
from jax import numpy as jnp
from jax.sharding import get_abstract_mesh

FOLDER = pathlib.Path(__file__).resolve().parent / "tuned"

# Kinds of device that the kernels are written for.
HOPPER = ("nvidia_h100", "nvidia_h200", "nvidia_h800", "nvidia_gh200")


@dataclasses.dataclass(frozen=True, kw_only=True)
class BlockSizes:
  """The tile of one kernel; what an axis is, the kernel says.

  Attributes:
    rows: rows of the output tile (slots, queries).
    cols: columns of the output tile (features, keys, vocabulary).
    inner: step along the contracted axis.
    num_warps: warps of a program; four are one warpgroup.
    num_stages: depth of the software pipeline.
  """

  rows: int
  cols: int
  inner: int
  num_warps: int = 4
  num_stages: int = 3

  def __post_init__(self):
    for name in ("rows", "cols", "inner", "num_warps", "num_stages"):
      value = getattr(self, name)
      if not isinstance(value, int):
        raise ValueError(f"{name}={value!r}: must be an integer")
    for name in ("rows", "cols", "inner", "num_warps"):
      value = getattr(self, name)
      if value < 1 or value & (value - 1):
        raise ValueError(f"{name}={value}: must be a power of two")
    if self.num_stages < 1:
      raise ValueError(f"num_stages={self.num_stages}: must be at least 1")


# Sizes of the kernels of one op, in a form that may be a static argument.
Given = tuple[tuple[str, BlockSizes], ...]


class Choice(NamedTuple):
  """What was asked of `choose`, and the answer."""

  op: str
  kernel: str
  bucket: str
  sizes: BlockSizes


_choices: contextvars.ContextVar[list[Choice] | None] = contextvars.ContextVar(
  "choices", default=None
)


@contextlib.contextmanager
def recording() -> Generator[list[Choice]]:
  """The choices that are made while functions are traced in this context."""
  choices: list[Choice] = []
  token = _choices.set(choices)
  try:
    yield choices
  finally:
    _choices.reset(token)


def freeze(given: Mapping[str, BlockSizes] | None, known: tuple) -> Given:
  """A public `block_sizes` argument in hashable form.

  Raises:
    ValueError: it is no mapping of the op's kernels to `BlockSizes`.
  """
  given = {} if given is None else given
  if not isinstance(given, Mapping):
    raise ValueError(f"block_sizes={given!r}: must map kernels to BlockSizes")
  for name, sizes in given.items():
    if not isinstance(sizes, BlockSizes):
      raise ValueError(f"block_sizes[{name!r}]={sizes!r}: must be BlockSizes")
  unknown = sorted(set(given) - set(known))
  if unknown:
    raise ValueError(f"block_sizes: {unknown} are none of the kernels {known}")
  return tuple(sorted(given.items()))


def choose(
  op: str,
  kernel: str,
  bucket: str,
  given: Given,
  heuristic: Callable[[], BlockSizes],
) -> BlockSizes:
  """Sizes from the argument, else the tuned file, else the heuristic.

  Args:
    op: name of the op.
    kernel: name of one of its kernels.
    bucket: what tuned sizes depend on, as `bucket_of` writes it.
    given: from `freeze`.
    heuristic: sizes for a shape and device that nobody tuned.
  """
  sizes = dict(given).get(kernel)
  if sizes is None:
    entries = tuned(device_kind()).get("block_sizes", {})
    entry = entries.get(op, {}).get(kernel, {}).get(bucket)
    sizes = heuristic() if entry is None else _read(entry, op, kernel, bucket)
  choices = _choices.get()
  if choices is not None:
    choices.append(Choice(op, kernel, bucket, sizes))
  return sizes


def bucket_of(dtype: Any, rows: int, **dims: int) -> str:
  """ "bfloat16,rows=256,d=4096": rows as a power of two, the rest exact."""
  rounded = 1 << max(rows - 1, 0).bit_length()
  numbers = {"rows": rounded, **dims}
  name = jnp.dtype(dtype).name
  return ",".join([name, *(f"{k}={v}" for k, v in numbers.items())])


def device_kind() -> str | None:
  """ "nvidia_h100" and the like: what is traced for; None without a GPU."""
  device = get_abstract_mesh().abstract_device
  if device is not None:
    kind = device.device_kind
  elif jax.default_backend() == "gpu":
    kind = jax.devices()[0].device_kind
  else:
    return None
  return "_".join(kind.lower().split()[:2])


def measured_default(op: str, dtype: Any) -> str | None:
  """The implementation that was fastest on this kind of device, if measured."""
  of_op = tuned(device_kind()).get("defaults", {}).get(op, {})
  return of_op.get(jnp.dtype(dtype).name)


@functools.cache
def tuned(kind: str | None) -> dict[str, Any]:
  """What was measured on a kind of device; empty if nothing was.

  Raises:
    ValueError: the file is no JSON object.
  """
  path = FOLDER / f"{kind}.json"
  if kind is None or not path.exists():
    return {}
  try:
    content = json.loads(path.read_text())
  except ValueError as error:
    raise ValueError(f"{path}: is no JSON: {error}") from error
  if not isinstance(content, dict):
    raise ValueError(f"{path}: must be a JSON object")
  for part in ("defaults", "block_sizes"):
    of_ops = content.get(part, {})
    if not isinstance(of_ops, dict) or not all(
      isinstance(of_op, dict) for of_op in of_ops.values()
    ):
      raise ValueError(f"{path}: {part} must be an object of objects")
  return content


def _read(entry: dict[str, int], op: str, kernel: str, bucket: str):
  """An entry of the tuned file."""
  try:
    return BlockSizes(**entry)
  except (TypeError, ValueError) as error:
    path = FOLDER / f"{device_kind()}.json"
    raise ValueError(f"{path}: {op}, {kernel}, {bucket}: {error}") from error
