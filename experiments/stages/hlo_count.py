"""Kernels, bytes and FLOPs of a compiled GPU program, counted from its text.

Every instruction that XLA launches by itself is a kernel: fusions, library and
custom calls, copies, sorts. Its bytes are those of what it reads and writes
once; of an array that it only slices or gathers from, and of one that it
updates in place, the part that it touches. A loop counts its body as often as
XLA knows that it runs, a conditional its largest branch. Caches and launch
gaps are not counted. FLOPs are those of matrix products.

The program is as XLA compiles it without the device: where it would try several
forms of a kernel on the device, it takes its default.
"""

import re
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from experiments.stages import hlo_text

_FREE = {
  *("parameter", "constant", "tuple", "get-tuple-element", "bitcast"),
  *("after-all", "opt-barrier", "domain", "partition-id", "replica-id"),
  "add-dependency",
}
# One argument, each element of it read where its own result is.
_ELEMENTWISE = {
  *("bitcast", "reshape", "convert", "copy", "transpose", "negate", "abs"),
  *("exponential", "log", "tanh", "sqrt", "rsqrt", "logistic", "not"),
}
_READS_PART = ("dynamic-slice", "slice", "gather")
# Targets of custom calls that are kernels of this package.
_CUSTOM = ("triton_kernel_call", "mosaic_gpu_v2")
_UPDATES = {"dynamic-update-slice": 1, "scatter": 2}


class Kernel(NamedTuple):
  """A kernel of the program.

  Attributes:
    name: of its instruction, or of the custom kernel.
    kind: opcode; for fusions and custom calls what they are.
    op_name: JAX's path of scopes, or that of the loop around it.
    launches: how often it runs.
    bytes: read and written by one launch.
    flops: of one launch.
  """

  name: str
  kind: str
  op_name: str
  launches: int
  bytes: float
  flops: float


class Program(NamedTuple):
  """What a program launches, and what could not be counted exactly."""

  kernels: list[Kernel]
  notes: list[str]


class Count(NamedTuple):
  """Sums over launches."""

  kernels: int
  bytes: float
  flops: float


def count(text: str, gathers: Mapping[str, float] | None = None) -> Program:
  """Counts `Compiled.as_text()` of a program compiled for a GPU.

  Args:
    text: what `hlo_text.parse` takes.
    gathers: custom kernels that gather from a table, by name -> bytes that a
      launch reads of its largest operand; the text does not tell.
  """
  return _Counter(hlo_text.parse(text), gathers or {}).program()


def total(kernels: Sequence[Kernel]) -> Count:
  """Sums over all launches."""
  return Count(
    kernels=sum(k.launches for k in kernels),
    bytes=sum(k.launches * k.bytes for k in kernels),
    flops=sum(k.launches * k.flops for k in kernels),
  )


def by_part(
  kernels: Sequence[Kernel], parts: Sequence[str]
) -> dict[str, list[Kernel]]:
  """Kernels by the innermost of the named scopes that they were traced in.

  Those outside all of them are "other". Parts without kernels are left out.
  """
  groups: dict[str, list[Kernel]] = {name: [] for name in (*parts, "other")}
  for kernel in kernels:
    groups[part_of(kernel.op_name, parts)].append(kernel)
  return {name: group for name, group in groups.items() if group}


def part_of(op_name: str, parts: Sequence[str]) -> str:
  """The innermost of `parts`: "jit(f)/transpose(jvp(draft))/dot" -> "draft"."""
  names = [re.findall(r"[\w.-]*", step)[0] for step in _steps(op_name)]
  return next((name for name in reversed(names) if name in parts), "other")


def _steps(op_name: str) -> list[str]:
  # What wraps a scope: jvp(draft), transpose(jvp(draft)), vmap(draft).
  return [step.rsplit("(", 1)[-1] for step in op_name.split("/")]


class _Counter:
  """Walks a module from its entry."""

  def __init__(self, module: hlo_text.Module, gathers: Mapping[str, float]):
    self._module, self._gathers = module, gathers
    self._notes: list[str] = []

  def program(self) -> Program:
    kernels = self._computation(self._module.entry, "")
    custom = sum(k.launches for k in kernels if k.kind in _CUSTOM)
    if custom:
      self._notes.append(f"FLOPs of {custom} custom kernels are not counted")
    return Program(kernels, self._notes)

  def _computation(self, name: str, around: str) -> list[Kernel]:
    computation = self._module.computations[name]
    kernels = []
    for instruction in computation.instructions.values():
      kernels += self._instruction(computation, instruction, around)
    return kernels

  def _instruction(self, computation, instruction, around) -> list[Kernel]:
    opcode = instruction.opcode
    if opcode in _FREE or opcode.endswith("-done"):
      return []
    op_name = self._op_name(computation, instruction) or around
    if opcode == "while":
      return self._loop(instruction, op_name)
    if opcode == "conditional":
      branches = instruction.called("branch_computations") or (
        *instruction.called("true_computation"),
        *instruction.called("false_computation"),
      )
      counted = [self._computation(name, op_name) for name in branches]
      return max(counted, key=lambda kernels: total(kernels).bytes)
    if opcode in ("call", "async-start"):
      (called,) = instruction.called("to_apply") or instruction.called("calls")
      return self._computation(called, op_name)
    return [self._kernel(computation, instruction, op_name)]

  def _op_name(self, computation, instruction) -> str:
    """Its own, else of what is fused in it, of a user, or of an operand.

    What XLA puts together or copies has none; it belongs to where it is used.
    """
    if instruction.op_name:
      return instruction.op_name
    inside = [
      x.op_name
      for name in instruction.called("calls")
      for x in self._module.computations[name].instructions.values()
    ]
    users = computation.users(instruction.name)
    for user in users:  # It grows: through tuples and bitcasts.
      if not user.op_name and len(users) < 64:
        users += computation.users(user.name)
    operands = [computation.instructions[x] for x in instruction.operands]
    found = (
      *reversed(inside),
      *(x.op_name for x in (*users, *operands) if x.opcode != "parameter"),
    )
    return next((name for name in found if name), "")

  def _loop(self, instruction, op_name) -> list[Kernel]:
    (body,) = instruction.called("body")
    kernels = self._computation(body, op_name)
    found = re.search(r'"known_trip_count":\{"n":"(\d+)"\}', instruction.rest)
    if found is None:
      self._notes.append(
        f"%{instruction.name} ({op_name}): a loop of unknown length,"
        " counted once"
      )
    trips = int(found.group(1)) if found else 1
    return [k._replace(launches=trips * k.launches) for k in kernels]

  def _kernel(self, computation, instruction, op_name) -> Kernel:
    name, kind = instruction.name, _kind(instruction)
    flops, size = 0.0, None
    if instruction.opcode in ("fusion", "fusion-start"):
      (called,) = instruction.called("calls")
      flops = self._flops(called)
      size = self._fusion_bytes(called)
    elif instruction.opcode == "custom-call":
      name = _custom_name(kind, op_name) or name
      flops = _library_flops(computation, instruction)
      if name in self._gathers:
        operands = [computation.instructions[x] for x in instruction.operands]
        size = self._plain_bytes(computation, instruction)
        size += self._gathers[name] - max(x.bytes for x in operands)
    elif instruction.opcode == "dot":
      flops = _dot_flops(computation, instruction)
    if size is None:
      size = self._plain_bytes(computation, instruction)
    return Kernel(name, kind, op_name, 1, size, flops)

  def _plain_bytes(self, computation, instruction) -> float:
    operands = [
      computation.instructions[x] for x in dict.fromkeys(instruction.operands)
    ]
    result = instruction.bytes
    if instruction.opcode.endswith("-start"):
      # (operands, result, context): the copy is read once and written once.
      return 2 * sum(x.bytes for x in operands)
    if instruction.opcode in _READS_PART:
      return 2 * result + sum(x.bytes for x in operands[1:])
    if instruction.opcode in _UPDATES:
      update = instruction.operands[_UPDATES[instruction.opcode]]
      update = computation.instructions[update]
      rest = [x.bytes for x in operands[1:]]
      return sum(rest) + update.bytes
    if _is_library(instruction):
      result = instruction.shapes[0].bytes  # The others are its workspace.
    return result + sum(x.bytes for x in operands)

  def _fusion_bytes(self, name: str) -> float:
    computation = self._module.computations[name]
    read = sum(
      self._read(computation, x, x.shapes[0]) if len(x.shapes) == 1 else x.bytes
      for x in computation.parameters()
    )
    return read + self._written(computation, computation.root)

  def _read(self, computation, value, whole: hlo_text.Shape) -> float:
    """Bytes that a fusion reads of a parameter, through `value`."""
    touched = 0.0
    for user in computation.users(value.name):
      first = user.operands[0] == value.name
      if user.opcode in _READS_PART and first:
        touched += user.shapes[0].size * whole.itemsize
      elif user.opcode == "dynamic-update-slice" and first:
        continue  # In place: the rest of it stays where it is.
      elif user.opcode == "scatter" and first:
        update = computation.instructions[user.operands[2]]
        touched += update.shapes[0].size * whole.itemsize
      elif user.opcode in _ELEMENTWISE and user.name != computation.root:
        touched += self._read(computation, user, whole)
      elif user.opcode == "fusion":
        touched += self._read_inside(user, value, whole)
      else:
        return whole.bytes
    return min(touched, whole.bytes)

  def _read_inside(self, fusion, value, whole) -> float:
    (called,) = fusion.called("calls")
    inner = self._module.computations[called]
    parameters = inner.parameters()
    return sum(
      self._read(inner, parameters[i], whole)
      for i, name in enumerate(fusion.operands)
      if name == value.name
    )

  def _written(self, computation, name: str) -> float:
    """Bytes that a fusion writes of the value `name`, which it returns."""
    value = computation.instructions[name]
    if value.opcode == "tuple":
      return sum(self._written(computation, x) for x in value.operands)
    if value.opcode in _UPDATES:
      update = computation.instructions[value.operands[_UPDATES[value.opcode]]]
      return update.shapes[0].size * value.shapes[0].itemsize
    if value.opcode in ("bitcast", "reshape"):
      return self._written(computation, value.operands[0])
    if value.opcode == "parameter":
      return 0.0
    if value.opcode == "get-tuple-element":
      of = computation.instructions[value.operands[0]]
      if _is_library(of) and "index=0" not in value.rest:
        return 0.0  # Its workspace.
    if _is_library(value):
      return value.shapes[0].bytes
    return value.bytes

  def _flops(self, name: str) -> float:
    computation = self._module.computations[name]
    flops = 0.0
    for instruction in computation.instructions.values():
      if instruction.opcode == "dot":
        flops += _dot_flops(computation, instruction)
      elif instruction.opcode == "custom-call":
        flops += _library_flops(computation, instruction)
      elif instruction.opcode == "fusion":
        flops += sum(map(self._flops, instruction.called("calls")))
    return flops


def _kind(instruction: hlo_text.Instruction) -> str:
  if instruction.opcode == "custom-call":
    found = re.search(r'custom_call_target="([^"]*)"', instruction.rest)
    return found.group(1) if found else "custom-call"
  if instruction.opcode in ("fusion", "fusion-start"):
    found = re.search(r'"kind":"(__[^"]*)"', instruction.rest)
    if found:
      return found.group(1).strip("_")
    found = re.search(r"\bkind=k(\w+)", instruction.rest)
    return f"{found.group(1).lower()} fusion" if found else "fusion"
  return instruction.opcode.removesuffix("-start")


def _custom_name(kind: str, op_name: str) -> str | None:
  """Name of a Triton kernel, which `triton_call` makes the innermost scope."""
  steps = op_name.split("/")
  if kind != "triton_kernel_call" or len(steps) < 2:
    return None
  return steps[-2]


def _is_library(instruction: hlo_text.Instruction) -> bool:
  return bool(re.search(r'custom_call_target="__cu', instruction.rest))


def _dot_flops(computation, instruction) -> float:
  lhs = computation.instructions[instruction.operands[0]].shapes[0]
  contracted = instruction.dims("lhs_contracting_dims")
  return 2.0 * instruction.shapes[0].size * _product(lhs, contracted)


def _library_flops(computation, instruction) -> float:
  """FLOPs of a library's matrix product; 0 of other custom calls."""
  found = re.search(
    r'"lhs_contracting_dimensions":\[([^\]]*)\]', instruction.rest
  )
  if not found:
    return 0.0
  contracted = tuple(map(int, re.findall(r"\d+", found.group(1))))
  lhs = computation.instructions[instruction.operands[0]].shapes[0]
  return 2.0 * instruction.shapes[0].size * _product(lhs, contracted)


def _product(shape: hlo_text.Shape, axes: Sequence[int]) -> int:
  size = 1
  for axis in axes:
    size *= shape.dims[axis]
  return size
