"""XLA's text of a compiled program as computations and instructions.

Only what `hlo_count` needs is kept: names, result shapes, opcodes, operands and
attributes. It reads the format of JAX 0.11's `Compiled.as_text()`; it is no
general HLO parser and checks nothing.
"""

import dataclasses
import math
import re
from typing import NamedTuple

_ITEMSIZE = {
  **dict.fromkeys(("pred", "s8", "u8"), 1),
  **dict.fromkeys(("s4", "u4", "s2", "u2"), 0.5),
  **dict.fromkeys(("f64", "s64", "u64", "c64"), 8),
  **dict.fromkeys(("f32", "s32", "u32"), 4),
  **dict.fromkeys(("f16", "bf16", "s16", "u16"), 2),
  **dict.fromkeys(("token", "opaque"), 0),
  "c128": 16,
}
_ARRAY = re.compile(r"\b([a-z]+\d*[a-z0-9]*)\[([\d,<=]*)\]")
_HEADER = re.compile(r"^(ENTRY )?%?(\S+) \(.*\{\s*$")
_INSTRUCTION = re.compile(r"^\s+(ROOT )?%(\S+) = (.*)$")
_OPCODE = re.compile(r"^([a-z][\w-]*)\(")


class Shape(NamedTuple):
  """One array: dtype as XLA writes it, and dimensions."""

  dtype: str
  dims: tuple[int, ...]

  @property
  def size(self) -> int:
    return math.prod(self.dims)

  @property
  def itemsize(self) -> float:
    if self.dtype.startswith("f8"):
      return 1
    return _ITEMSIZE[self.dtype]

  @property
  def bytes(self) -> float:
    return self.size * self.itemsize


@dataclasses.dataclass(frozen=True)
class Instruction:
  """One instruction.

  Attributes:
    name: without the percent sign.
    shapes: arrays of the result, those of a tuple one after another.
    opcode: such as "fusion".
    operands: names, in order.
    rest: everything behind the operands: attributes as text.
  """

  name: str
  shapes: tuple[Shape, ...]
  opcode: str
  operands: tuple[str, ...]
  rest: str

  @property
  def bytes(self) -> float:
    return sum(shape.bytes for shape in self.shapes)

  @property
  def op_name(self) -> str:
    """Where JAX traced it, as a path of scopes; "" if XLA made it itself."""
    found = re.search(r'op_name="((?:[^"\\]|\\.)*)"', self.rest)
    return found.group(1) if found else ""

  def dims(self, attribute: str) -> tuple[int, ...]:
    """An attribute such as lhs_contracting_dims={2}; () where it is absent."""
    found = re.search(rf"\b{attribute}={{([\d,]*)}}", self.rest)
    return tuple(map(int, re.findall(r"\d+", found.group(1) if found else "")))

  def called(self, attribute: str) -> tuple[str, ...]:
    """Computations that an attribute such as calls= names."""
    found = re.search(rf"\b{attribute}=({{[^}}]*}}|%[^\s,]+)", self.rest)
    return tuple(re.findall(r"%([^\s,}]+)", found.group(1))) if found else ()


@dataclasses.dataclass
class Computation:
  """Instructions by name in their order; the last root, and the users."""

  instructions: dict[str, Instruction] = dataclasses.field(default_factory=dict)
  root: str = ""

  def users(self, name: str) -> list[Instruction]:
    return [x for x in self.instructions.values() if name in x.operands]

  def parameters(self) -> list[Instruction]:
    """Those that are parameters, by their number."""
    found = [x for x in self.instructions.values() if x.opcode == "parameter"]
    return sorted(found, key=lambda x: int(x.rest.split(")")[0]))


@dataclasses.dataclass
class Module:
  """All computations by name, and the name of the entry."""

  computations: dict[str, Computation]
  entry: str


def parse(text: str) -> Module:
  """Reads `Compiled.as_text()`.

  Raises:
    ValueError: it has no entry computation.
  """
  computations: dict[str, Computation] = {}
  current, entry = Computation(), ""
  for line in text.splitlines():
    instruction = _INSTRUCTION.match(line)
    if instruction:
      is_root, name, definition = instruction.groups()
      current.instructions[name] = _instruction(name, definition)
      if is_root:
        current.root = name
      continue
    header = _HEADER.match(line)
    if header:
      current = computations.setdefault(header.group(2), Computation())
      entry = header.group(2) if header.group(1) else entry
  if not entry:
    raise ValueError("no ENTRY computation: this is not the text of a program")
  return Module(computations, entry)


def _instruction(name: str, definition: str) -> Instruction:
  shape, rest = _split_shape(definition)
  opcode = _OPCODE.match(rest)
  assert opcode is not None, f"%{name}: cannot read {definition[:120]!r}"
  end = _closing(rest, opcode.end() - 1)
  inside = rest[opcode.end() : end]
  is_leaf = opcode.group(1) in ("parameter", "constant")
  return Instruction(
    name=name,
    shapes=_shapes(shape),
    opcode=opcode.group(1),
    operands=() if is_leaf else tuple(re.findall(r"%([^\s,)]+)", inside)),
    rest=inside + rest[end:] if is_leaf else rest[end + 1 :],
  )


def _split_shape(definition: str) -> tuple[str, str]:
  """ "f32[2]{0} add(...)" or "(f32[], s32[]) tuple(...)" at the opcode."""
  if definition.startswith("("):
    end = _closing(definition, 0) + 1
  else:
    end = definition.index(" ")
  return definition[:end], definition[end:].lstrip()


def _closing(text: str, start: int) -> int:
  """Position of the bracket that closes the one at `start`."""
  depth = 0
  for match in re.finditer(r"[()]", text[start:]):
    depth += 1 if match.group() == "(" else -1
    if depth == 0:
      return start + match.start()
  raise ValueError(f"unclosed bracket: {text[start : start + 80]!r}")


def _shapes(text: str) -> tuple[Shape, ...]:
  return tuple(
    Shape(dtype, tuple(int(x.strip("<=")) for x in dims.split(",") if x))
    for dtype, dims in _ARRAY.findall(text)
  )
