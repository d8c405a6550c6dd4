"""Tensors of a Hugging Face folder: one or several safetensors shards.

`Reader` gives slices of mapped shards as they are asked for, and says clearly
what is wrong with a folder; `write_tensors` writes shards and their index.
Names and layouts of a model are in `names.py`, the replacement of a whole
folder in `folders.py`, not here.
"""

import math
import pathlib
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import jax
import ml_dtypes
import numpy as np
import safetensors
import safetensors.numpy

from dspine_jax.checkpoints import folders, hf_config

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"

# Of the format, those that NumPy and we can compute with.
_STORED = {
  "BF16": ml_dtypes.bfloat16,
  "F16": np.float16,
  "F32": np.float32,
  "F64": np.float64,
  "I8": np.int8,
  "I16": np.int16,
  "I32": np.int32,
  "I64": np.int64,
  "U8": np.uint8,
  "U16": np.uint16,
  "U32": np.uint32,
  "U64": np.uint64,
  "BOOL": np.bool_,
}
FLOATING = {
  "float32": np.float32,
  "bfloat16": ml_dtypes.bfloat16,
  "float16": np.float16,
}
# What is converted at a time, and what of a file is mapped at a time: large
# enough for the disk, small beside a layer.
_PIECE_BYTES = 8 * 2**20
_MAPPED_BYTES = 4 * _PIECE_BYTES
MAX_SHARD_BYTES = 5 * 10**9

type Index = tuple[slice, ...]
type ArrayLike = np.ndarray | jax.Array
type Source = ArrayLike | Callable[[], ArrayLike]


class _Record(NamedTuple):
  """One tensor.

  Attributes:
    shard: the file that holds it.
    position: its place in that file, counted in tensors.
    shape: as stored.
    kind: the format's name of its dtype.
  """

  shard: pathlib.Path
  position: int
  shape: tuple[int, ...]
  kind: str


class Reader:
  """Tensors of a folder, read when they are asked for.

  The headers of all shards are read at once, so that a damaged folder is
  refused before anything is loaded. Shards are mapped while they are read from,
  a part at a time, and nothing of them stays in memory.

  Attributes:
    folder: as given.

  Raises:
    ValueError: naming the file: no weights, a missing, truncated or unreadable
      shard, or a tensor that the index names and its shard lacks.
  """

  def __init__(self, folder: pathlib.Path | str):
    self.folder = pathlib.Path(folder)
    self._records: dict[str, _Record] = {}
    for path, expected in _shards(self.folder).items():
      shard = _open(path)
      positions = {name: i for i, name in enumerate(shard.offset_keys())}
      missing = sorted(set(expected or ()) - set(positions))
      if missing:
        raise ValueError(
          f"{path}: lacks tensors that {INDEX} puts there: {missing[:4]}; the"
          " shards and the index are of different models: fetch them again"
        )
      for name in positions if expected is None else expected:
        view = shard.get_slice(name)
        self._records[name] = _Record(
          path, positions[name], tuple(view.get_shape()), view.get_dtype()
        )

  def names(self) -> list[str]:
    """All tensors, sorted."""
    return sorted(self._records)

  def shape(self, name: str) -> tuple[int, ...]:
    """The shape as stored."""
    return self._records[name].shape

  def dtype(self, name: str) -> np.dtype:
    """The stored dtype.

    Raises:
      ValueError: fp8 and other kinds that nothing here can read.
    """
    record = self._records[name]
    if record.kind not in _STORED:
      raise ValueError(
        f"{record.shard}: tensor {name!r} is stored as {record.kind}, which is"
        f" not supported ({', '.join(_STORED)}); take the unquantised model or"
        " convert it to BF16"
      )
    return np.dtype(_STORED[record.kind])

  def in_shard_order(self, names: list[str]) -> list[str]:
    """The names in the order in which the disk is read without jumps."""
    return sorted(names, key=lambda name: self._records[name][:2])

  def read(
    self,
    name: str,
    index: Index = (),
    *,
    dtype: Any = None,
    transposed: bool = False,
  ) -> np.ndarray:
    """One tensor, or the part of it that `index` names.

    Args:
      name: one of `names()`.
      index: slices of step 1, of the leading axes or of all.
      dtype: of the result; None keeps the stored one.
      transposed: result and index are those of the transposed matrix.

    Returns:
      A new array. Besides it, at most `_MAPPED_BYTES` of the file and a piece
      of `_PIECE_BYTES` are in memory.

    Raises:
      ValueError: the part holds NaN or infinity, or `dtype(name)` raises.
    """
    stored = self.dtype(name)
    record = self._records[name]
    shape = record.shape[::-1] if transposed else record.shape
    bounds = _bounds(index, shape)
    out = _aligned(
      [stop - start for start, stop in bounds],
      np.dtype(stored if dtype is None else dtype),
    )
    into = out.T if transposed else out
    for piece, place in self._pieces(name, bounds[:: -1 if transposed else 1]):
      check_finite(piece, record.shard, name)
      _copy(piece, into[place])
    return out

  def _pieces(
    self, name: str, bounds: list[tuple[int, int]]
  ) -> Iterator[tuple[np.ndarray, tuple[Any, ...]]]:
    """Parts of a tensor along its first axis, with their place in the whole."""
    record = self._records[name]
    if not record.shape:  # The library slices no scalars,
      yield _open(record.shard).get_tensor(name), (...,)
      return
    if any(start == stop for start, stop in bounds):  # nor empty arrays.
      return
    (first, last), *rest = bounds
    # What is mapped is counted in whole rows: pages hold more than a slice.
    row_bytes = self.dtype(name).itemsize * math.prod(record.shape[1:])
    rows = max(1, _PIECE_BYTES // row_bytes)
    view: Any = None
    for count, start in enumerate(range(first, last, rows)):
      if count % (_MAPPED_BYTES // _PIECE_BYTES) == 0:
        view = None  # Unmaps what has been read.
        view = _open(record.shard).get_slice(name)
      stop = min(start + rows, last)
      index = (slice(start, stop), *(slice(*bound) for bound in rest))
      yield view[index], (slice(start - first, stop - first),)


def _aligned(shape: list[int], dtype: np.dtype) -> np.ndarray:
  """An empty array that JAX's CPU backend takes over without a copy."""
  size = math.prod(shape) * dtype.itemsize
  memory = np.empty(size + 64, np.uint8)
  start = -memory.ctypes.data % 64
  return memory[start : start + size].view(dtype).reshape(shape)


def _open(path: pathlib.Path) -> Any:
  """A shard, mapped for as long as the result lives."""
  try:
    return safetensors.safe_open(path, framework="numpy")
  except (safetensors.SafetensorError, OSError) as error:
    raise ValueError(
      f"{path}: truncated or not a safetensors file ({error}); fetch or export"
      " it again"
    ) from None


def _shards(folder: pathlib.Path) -> dict[pathlib.Path, list[str] | None]:
  """Shard -> names that the index puts there; None where there is no index.

  Raises:
    ValueError: no safetensors file, or a shard of the index is missing.
  """
  index = folder / INDEX
  if not index.exists():
    if not (folder / SINGLE).exists():
      raise ValueError(f"{folder}: neither {SINGLE} nor {INDEX} is there")
    return {folder / SINGLE: None}
  table = hf_config.require_key(hf_config.read_json(index), "weight_map", index)
  shards: dict[pathlib.Path, list[str] | None] = {}
  for file in sorted(set(table.values())):
    shards[folder / file] = [name for name in table if table[name] == file]
  missing = [path.name for path in shards if not path.exists()]
  if missing:
    raise ValueError(
      f"{index}: missing shards {missing}; fetch or export them again"
    )
  return shards


def _bounds(index: Index, shape: tuple[int, ...]) -> list[tuple[int, int]]:
  """(start, stop) of every axis."""
  full = (*index, *(slice(None),) * (len(shape) - len(index)))
  bounds = []
  for part, size in zip(full, shape, strict=True):
    start, stop, step = part.indices(size)
    if step != 1:
      raise ValueError(f"index={index}: steps must be 1")
    bounds.append((start, max(start, stop)))
  return bounds


def _copy(piece: np.ndarray, into: np.ndarray) -> None:
  """into[...] = piece. Two-byte floats move as integers, which is faster."""
  if piece.dtype == into.dtype and piece.dtype.itemsize == 2:
    piece, into = piece.view(np.uint16), into.view(np.uint16)
  into[...] = piece


def is_floating(dtype: Any) -> bool:
  """Whether it is a float of NumPy or bfloat16."""
  return np.issubdtype(dtype, np.floating) or dtype == ml_dtypes.bfloat16


def check_finite(array: np.ndarray, path: pathlib.Path, name: str) -> None:
  """ValueError naming a tensor that holds NaN or infinity."""
  if is_floating(array.dtype) and not np.isfinite(array).all():
    raise ValueError(f"{path}: tensor {name!r} holds NaN or infinity")


def write_tensors(
  folder: pathlib.Path | str,
  arrays: Mapping[str, Source],
  *,
  dtype: str | None = "float32",
  max_shard_bytes: int = MAX_SHARD_BYTES,
) -> list[pathlib.Path]:
  """Writes `model.safetensors`, or several shards and their index.

  Weights that lie there already are replaced one file after the other; inside
  `replacing` the folder as a whole is.

  Args:
    folder: made where it does not exist.
    arrays: name -> array, or a function that gives it when it is its turn. One
      shard is in memory at a time.
    dtype: of floating tensors, key of `FLOATING`; None keeps each as it is.
    max_shard_bytes: of the tensors of one file, unless one alone is larger.

  Returns:
    The shards.

  Raises:
    ValueError: an unknown dtype, or a file that cannot be written (full disk).
  """
  if dtype is not None and dtype not in FLOATING:
    raise ValueError(f"dtype={dtype!r}: must be one of {sorted(FLOATING)}")
  folder = pathlib.Path(folder)
  folder.mkdir(parents=True, exist_ok=True)
  shard: dict[str, np.ndarray] = {}
  written: list[tuple[pathlib.Path, list[str]]] = []
  total = held = 0

  def flush() -> None:
    path = folder / f".{SINGLE}.{len(written) + 1:05}.partial"
    _save(path, shard)
    written.append((path, list(shard)))
    shard.clear()

  for name, source in arrays.items():
    array = _stored(source() if callable(source) else source, dtype)
    if shard and held + array.nbytes > max_shard_bytes:
      flush()
      held = 0
    shard[name] = array
    held += array.nbytes
    total += array.nbytes
    del array
  flush()
  return _name_shards(folder, written, total)


def _stored(array: ArrayLike, dtype: str | None) -> np.ndarray:
  """The array on the host, contiguous, floating ones in `dtype`."""
  array = np.asarray(array)
  if dtype is not None and is_floating(array.dtype):
    array = array.astype(FLOATING[dtype], copy=False)
  # Of a scalar, ascontiguousarray would make a vector.
  return np.ascontiguousarray(array) if array.ndim else array


def _save(path: pathlib.Path, arrays: Mapping[str, np.ndarray]) -> None:
  """One file, on the disk when this returns."""
  try:
    safetensors.numpy.save_file(dict(arrays), path, metadata={"format": "pt"})
    # The library writes for the owner alone; a model is an ordinary file.
    path.chmod(0o644)
    folders.sync(path)
  except (safetensors.SafetensorError, OSError) as error:
    raise ValueError(
      f"{path.parent}: tensors cannot be written ({error}); free disk space or"
      " choose another folder, and export again"
    ) from None


def _name_shards(
  folder: pathlib.Path,
  written: list[tuple[pathlib.Path, list[str]]],
  total: int,
) -> list[pathlib.Path]:
  """Gives shards their names, writes the index, removes older weights."""
  count = len(written)
  paths = [folder / SINGLE]
  if count > 1:
    paths = [
      folder / f"model-{number:05}-of-{count:05}.safetensors"
      for number in range(1, count + 1)
    ]
  for (partial, _), path in zip(written, paths, strict=True):
    partial.replace(path)
  if count > 1:
    weight_map = {
      name: path.name
      for (_, tensor_names), path in zip(written, paths, strict=True)
      for name in tensor_names
    }
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    hf_config.write_json(folder / INDEX, index)
    folders.sync(folder / INDEX)
  else:
    (folder / INDEX).unlink(missing_ok=True)
  stale = {folder / SINGLE, *folder.glob("model-*-of-*.safetensors")}
  for path in stale - set(paths):
    path.unlink(missing_ok=True)
  return paths
