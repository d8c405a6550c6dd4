"""One file of a feature cache: the features of consecutive rows.

A safetensors file, which any reader of that format can map. The positions of
all its rows lie end to end, without padding; then the rows' lengths and a
CRC-32 of each row. Where everything lies follows from the lengths, so a file is
written row by row in any order and a row is read without the others. Which
files there are, and whose features they hold, is `feature_cache`'s matter.
"""

import dataclasses
import json
import os
import pathlib
import threading
import zlib
from typing import Any

import numpy as np
from jax import numpy as jnp

from dspine_jax.checkpoints import folders

# Names of the safetensors format.
_DTYPES = {"bfloat16": "BF16", "float32": "F32"}
DTYPES = tuple(_DTYPES)


@dataclasses.dataclass(frozen=True, kw_only=True)
class Layout:
  """What a position of a row holds.

  Attributes:
    dtype: of the states, one of `DTYPES`.
    context_width: numbers of the tapped layers together.
    hidden_width: numbers of the last hidden state.
  """

  dtype: str
  context_width: int
  hidden_width: int

  def __post_init__(self):
    if self.dtype not in _DTYPES:
      raise ValueError(f"dtype={self.dtype!r}: not in {DTYPES}")

  @property
  def widths(self) -> dict[str, int]:
    """Name of each tensor of states and its width."""
    return {
      "context_features": self.context_width,
      "last_hidden": self.hidden_width,
    }

  @property
  def position_bytes(self) -> int:
    """Bytes of one position of a row."""
    size = jnp.dtype(self.dtype).itemsize
    return size * (self.context_width + self.hidden_width)


class Places:
  """Where things lie in a file; a function of its rows' lengths.

  Attributes:
    lengths: [n] int32.
    header: the first bytes of the file.
    tail: offset of lengths and checksums, 4 n bytes each.
    total: bytes of the file.
  """

  def __init__(self, layout: Layout, lengths: np.ndarray, origin: str):
    self.lengths = np.ascontiguousarray(lengths, np.int32)
    self._starts = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
    count, positions = len(lengths), int(self._starts[-1])
    size = jnp.dtype(layout.dtype).itemsize
    shapes = {
      name: (_DTYPES[layout.dtype], [positions, width], size)
      for name, width in layout.widths.items()
    }
    shapes |= {"lengths": ("I32", [count], 4), "checksums": ("U32", [count], 4)}
    entries: dict[str, Any] = {"__metadata__": {"origin": origin}}
    end = 0
    for name, (dtype, shape, itemsize) in shapes.items():
      begin, end = end, end + itemsize * int(np.prod(shape, dtype=np.int64))
      entries[name] = {
        "dtype": dtype,
        "shape": shape,
        "data_offsets": [begin, end],
      }
    text = json.dumps(entries, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    self.header = len(text).to_bytes(8, "little") + text
    self._row_bytes = {name: size * w for name, w in layout.widths.items()}
    self._offsets = {
      name: len(self.header) + entries[name]["data_offsets"][0]
      for name in shapes
    }
    self.tail = self._offsets["lengths"]
    self.total = len(self.header) + end

  def offset(self, name: str, row: int) -> int:
    """Of a row's first byte in the tensor `name`."""
    return self._offsets[name] + int(self._starts[row]) * self._row_bytes[name]


def _bytes(array: np.ndarray) -> memoryview:
  return memoryview(np.ascontiguousarray(array).reshape(-1).view(np.uint8))


def _checksum(parts: list[memoryview]) -> int:
  found = 0
  for part in parts:
    found = zlib.crc32(part, found)
  return found


class Writer:
  """Writes one file; only `finish` gives it its name."""

  def __init__(
    self,
    path: pathlib.Path,
    layout: Layout,
    lengths: np.ndarray,
    origin: str,
  ):
    """Takes the whole file's space from the disk; OSError if it is full."""
    self._path, self._layout = path, layout
    self._places = Places(layout, lengths, origin)
    self._checksums = np.zeros((len(lengths),), np.uint32)
    self._partial = path.with_name(f"{path.name}.partial")
    self._file = open(self._partial, "wb", buffering=0)
    try:
      os.posix_fallocate(self._file.fileno(), 0, self._places.total)
      self._put(memoryview(self._places.header), 0)
    except BaseException:
      self.close()
      raise

  def write(self, row: int, states: dict[str, np.ndarray]) -> None:
    """One row: [T, width] arrays of which its length is taken."""
    length = self._places.lengths[row]
    parts = {
      name: _bytes(states[name][:length]) for name in self._layout.widths
    }
    for name, part in parts.items():
      self._put(part, self._places.offset(name, row))
    self._checksums[row] = _checksum(list(parts.values()))

  def finish(self) -> dict[str, int]:
    """Syncs and names the file; its size and checksum, for the index."""
    tail = [_bytes(self._places.lengths), _bytes(self._checksums)]
    self._put(memoryview(b"".join(tail)), self._places.tail)
    os.fsync(self._file.fileno())
    self._file.close()
    self._partial.replace(self._path)
    folders.sync(self._path.parent)
    return {"bytes": self._places.total, "checksum": _checksum(tail)}

  def close(self) -> None:
    """Drops what was not finished."""
    self._file.close()
    self._partial.unlink(missing_ok=True)

  def _put(self, data: memoryview, offset: int) -> None:
    while data:
      count = os.pwrite(self._file.fileno(), data, offset)
      data, offset = data[count:], offset + count


class Reader:
  """Reads rows of one finished file, from any thread.

  A row is compared with its checksum when it is first read.
  """

  def __init__(
    self,
    path: pathlib.Path,
    layout: Layout,
    lengths: np.ndarray,
    origin: str,
    *,
    size: int,
    checksum: int,
  ):
    """Looks at the file's size; what the index says of it is given.

    Raises:
      ValueError: it is not there, or has another size.
    """
    self._path, self._layout = path, layout
    self._places = Places(layout, lengths, origin)
    self._checksum = checksum
    self._row_checksums: np.ndarray | None = None
    self._verified = np.zeros((len(lengths),), bool)
    self._lock = threading.Lock()
    found = path.stat().st_size if path.exists() else None
    if found != size or size != self._places.total:
      raise self._damaged(
        "it is missing"
        if found is None
        else f"{found} bytes where {size} were written"
      )

  def read(self, row: int, out: dict[str, np.ndarray]) -> None:
    """Fills contiguous [length, width] arrays with a row.

    Raises:
      ValueError: the file is damaged; names it and what to do.
    """
    parts = {name: _bytes(out[name]) for name in self._layout.widths}
    try:
      with open(self._path, "rb", buffering=0) as file:
        if self._row_checksums is None:
          self._open(file.fileno())
        for name, part in parts.items():
          self._get(file.fileno(), part, self._places.offset(name, row))
    except OSError as error:
      raise self._damaged(str(error)) from None
    if not self._verified[row]:
      assert self._row_checksums is not None
      if _checksum(list(parts.values())) != self._row_checksums[row]:
        raise self._damaged(f"row {row} of it has another checksum")
      self._verified[row] = True

  def _open(self, descriptor: int) -> None:
    """Compares the header and reads the checksums."""
    with self._lock:
      if self._row_checksums is not None:
        return
      header = bytearray(len(self._places.header))
      self._get(descriptor, memoryview(header), 0)
      if header != self._places.header:
        raise self._damaged("its header describes other rows")
      tail = np.empty((2, len(self._places.lengths)), np.uint32)
      self._get(descriptor, _bytes(tail), self._places.tail)
      if _checksum([_bytes(tail)]) != self._checksum:
        raise self._damaged("its list of checksums has another checksum")
      self._row_checksums = tail[1]

  def _get(self, descriptor: int, out: memoryview, offset: int) -> None:
    while out:
      count = os.preadv(descriptor, [out], offset)
      if count == 0:
        raise self._damaged("it is cut off")
      out, offset = out[count:], offset + count

  def _damaged(self, why: str) -> ValueError:
    return ValueError(
      f"{self._path}: features are damaged ({why}); delete this file and"
      " repeat the command, which computes only this file again"
    )
