"""Mosaic GPU kernels: interpreted with race detection, compiled for an H100.

The interpreter checks copies and barriers, but not when a product reads shared
memory; a wait that is missing before one shows as a barrier nobody saw.
"""

import os

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from kernels import hopper, mosaic_resources, shapes
from kernels.adjacent_injection import pallas_mosaic as injection
from kernels.adjacent_injection import reference
from kernels.block_sizes import BlockSizes
from kernels.draft_loss import pallas_mosaic as loss

pytestmark = [
  pytest.mark.hopper,
  pytest.mark.skipif(
    os.environ.get("TRITON_INTERPRET") == "1",
    reason="has an interpreter of its own, and runs in the other process",
  ),
]

needs_plugin = pytest.mark.skipif(
  hopper.unavailable() is not None, reason=hopper.unavailable() or ""
)

INTERPRET = plgpu.InterpretGPUParams(detect_races=True)

# float32 sums of exact products of bfloat16.
FLOAT32 = {"rtol": 1e-5, "atol": 1e-5}

# Half a unit in the last place of the result, and what rounding y and z to
# bfloat16 (2**-9 of each) does to sums of them.
BFLOAT16 = {"rtol": 2**-8, "atol": 2**-7}

# A feature is a rounded y, scaled and rounded once more.
TWICE_ROUNDED = {"rtol": 2**-7, "atol": 1e-3}


@pytest.fixture
def races(capsys):
  """A function that says whether a race was found in any kernel of this test.

  The interpreter's own record begins anew with each kernel.
  """
  return lambda: "RACE DETECTED" in capsys.readouterr().out


def normal(seed, *shape, scale=1.0):
  values = np.random.default_rng(seed).normal(size=shape) * scale
  return jnp.asarray(values, jnp.bfloat16)


def loss_inputs(rows, width, vocab):
  hidden, teacher = normal(0, rows, width), normal(1, rows, width)
  hidden = hidden.at[0].multiply(100)  # Logits of hundreds.
  labels = np.random.default_rng(2).integers(0, vocab, rows)
  head = normal(3, vocab, width, scale=0.1)
  return hidden, teacher, jnp.asarray(labels, jnp.int32), head


def normalise(inputs, groups, monkeypatch):
  monkeypatch.setattr(loss, "groups_of", lambda *tiles: groups)
  sizes = BlockSizes(rows=64, cols=64, inner=64, num_stages=2)
  return loss.normalise(*inputs, ((loss.KERNEL, sizes),), INTERPRET)


def test_normalisers_equal_float64(races, monkeypatch):
  inputs = loss_inputs(130, 128, 296)  # Neither rows nor words are whole tiles.
  got = normalise(inputs, 2, monkeypatch)
  hidden, teacher, labels, head = (np.asarray(x, np.float64) for x in inputs)
  logits = hidden @ head.T
  at_label = logits[np.arange(130), labels.astype(int)]
  for x, expected in zip(
    got,
    (logsumexp(logits), logsumexp(teacher @ head.T), at_label),
    strict=True,
  ):
    np.testing.assert_allclose(x, expected, **FLOAT32)
  assert not races()


def logsumexp(logits):
  top = logits.max(axis=1)
  return top + np.log(np.exp(logits - top[:, None]).sum(axis=1))


def test_missing_wait_is_seen(monkeypatch):
  monkeypatch.setattr(plgpu, "barrier_wait", lambda barrier: None)
  with pytest.raises(jax.errors.JaxRuntimeError, match="no threads observed"):
    jax.block_until_ready(normalise(loss_inputs(64, 256, 64), 1, monkeypatch))


def test_missing_commit_is_seen(races, monkeypatch):
  monkeypatch.setattr(plgpu, "commit_smem", lambda: None)
  jax.block_until_ready(normalise(loss_inputs(64, 64, 64), 1, monkeypatch))
  assert races()


def test_every_core_gets_whole_waves():
  for row_tiles in (1, 2, 32, 60, 64):
    groups = loss.groups_of(row_tiles, 1187)
    blocks = row_tiles * groups
    assert 1 <= groups <= 1187
    assert -(-blocks // loss.CORES) * loss.CORES / blocks < 1.1


def test_loss_says_what_it_cannot():
  hidden, _, _, head = loss_inputs(2, 96, 8)
  assert "multiple of 64" in loss.unsupported(hidden, head)
  assert "float32" in loss.unsupported(hidden.astype(jnp.float32), head)
  assert loss.unsupported(hidden[:, :64], head[:, :64]) is None
  assert "7 rows" in loss.unsupported(hidden[:, :64], head[:7, :64])
  assert "empty" in loss.unsupported(hidden[:0], head)


def injection_inputs(blocks, slots, width=256, rank=128, message=128, vocab=9):
  rng = np.random.default_rng(4)
  codes = rng.normal(size=(vocab, rank))
  codes /= np.linalg.norm(codes, axis=1, keepdims=True)
  weights = reference.Weights(
    normal(5, width, rank, scale=width**-0.5),
    normal(6, message, width, scale=message**-0.5),
    *(normal(seed, rank, message, scale=rank**-0.5) for seed in (7, 8, 9)),
    normal(10, message),
  )
  return (
    normal(11, blocks, slots, width).at[-1].set(0),
    jnp.asarray(rng.integers(0, vocab, (blocks, slots)), jnp.int32),
    jnp.arange(blocks) % 3 == 0,
    jnp.asarray(codes, jnp.bfloat16),
    weights,
  )


def exactly(tree):
  """The same numbers in float32."""
  return jax.tree.map(
    lambda x: x.astype(jnp.float32) if x.dtype == jnp.bfloat16 else x, tree
  )


def check_states(got, inputs):
  expected = reference.adjacent_injection(*exactly(inputs), False).h
  np.testing.assert_allclose(exactly(got.h), expected, **BFLOAT16)


def test_injection_equals_reference(races, monkeypatch):
  # Two tiles of rows, the second not whole; two cores that do two tiles each,
  # whose products have fewer steps than the ring has stages.
  monkeypatch.setattr(injection, "CORES", 2)
  sizes = BlockSizes(rows=128, cols=128, inner=64, num_stages=3)
  kernels = injection.READ, injection.MESSAGE, injection.WRITE
  given = tuple((kernel, sizes) for kernel in kernels)
  inputs = injection_inputs(24, 6)
  got = injection.forward(*inputs, True, given, INTERPRET)
  assert got.h.dtype == got.feature.dtype == jnp.bfloat16
  check_states(got, inputs)
  feature = reference.feature(inputs[-1].readout, exactly(got.h))
  np.testing.assert_allclose(exactly(got.feature), feature, **TWICE_ROUNDED)
  assert not races()

  # The comparison sees a predecessor that is one slot off.
  message = reference.message
  monkeypatch.setattr(
    reference,
    "message",
    lambda weights, receiver, predecessor: message(
      weights, receiver, jnp.roll(predecessor, 1, axis=-2)
    ),
  )
  with pytest.raises(AssertionError, match="Not equal to tolerance"):
    check_states(got, inputs)


def test_injection_says_what_it_cannot():
  h, *_, weights = injection_inputs(2, 4)
  assert injection.unsupported(h, weights) is None
  assert "4 rows" in injection.unsupported(h[:1], weights)
  assert "empty" in injection.unsupported(h[:0], weights)
  assert "D=192" in injection.unsupported(h[..., :192], weights)
  assert "float32" in injection.unsupported(h.astype(jnp.float32), weights)


def struct(*shape, dtype=jnp.bfloat16):
  return jax.ShapeDtypeStruct(shape, dtype)


def check_resources(compiled, names):
  assert sorted(x.kernel for x in compiled.kernels) == names
  for x in compiled.kernels:
    assert x.wgmma and not x.serialised and x.spilled == 0, x
    assert x.registers <= 168 and x.shared <= hopper.SHARED_MEMORY, x


def loss_shapes(rows, width, vocab):
  states = struct(rows, width)
  return states, states, struct(rows, dtype=jnp.int32), struct(vocab, width)


def training_rows(model):
  return shapes.ANCHORS * (shapes.BLOCK - 1), model.width, model.vocab


@needs_plugin
@pytest.mark.parametrize(
  "shape",
  [(130, 192, 296), *map(training_rows, shapes.MODELS)],
  ids=["odd", "8B", "27B"],
)
def test_loss_compiles_without_spills(shape):
  compiled = mosaic_resources.compile_for_h100(
    loss.normalise, *loss_shapes(*shape)
  )
  check_resources(compiled, ["draft_loss_normalise"])


@needs_plugin
def test_too_much_shared_memory_does_not_compile():
  sizes = BlockSizes(rows=128, cols=128, inner=64, num_stages=5)
  with pytest.raises(ValueError, match="exceeds available shared memory"):
    mosaic_resources.compile_for_h100(
      lambda *inputs: loss.normalise(*inputs, ((loss.KERNEL, sizes),)),
      *loss_shapes(*training_rows(shapes.QWEN3_8B)),
    )


def training_blocks(model):
  return shapes.ANCHORS, shapes.BLOCK, model.width, shapes.RANK, shapes.MESSAGE


@needs_plugin
@pytest.mark.parametrize(
  "shape",
  [(24, 6, 256, 128, 128), *map(training_blocks, shapes.MODELS)],
  ids=["odd", "8B", "27B"],
)
def test_injection_compiles_without_spills(shape):
  blocks, slots, width, rank, message = shape
  weights = reference.Weights(
    struct(width, rank),
    struct(message, width),
    *[struct(rank, message)] * 3,
    struct(message),
  )
  compiled = mosaic_resources.compile_for_h100(
    lambda *inputs: injection.forward(*inputs, with_feature=False),
    struct(blocks, slots, width),
    struct(blocks, slots, dtype=jnp.int32),
    struct(blocks, dtype=jnp.bool_),
    struct(shapes.QWEN3_27B.vocab, rank),
    weights,
  )
  kernels = "message", "read", "write"
  check_resources(compiled, [f"adjacent_injection_{x}" for x in kernels])
