"""The kernels of the draft's loss: interpreted, and compiled for sm_90."""

import codecs
import functools
import re
import zlib

import jax
import numpy as np
import pytest
from jax import numpy as jnp
from jax.sharding import Mesh, PartitionSpec

from kernels import hopper, shapes, triton_call, triton_resources
from kernels.block_sizes import BlockSizes
from kernels.draft_loss import api
from tests.kernels import triton_interpreter

pytestmark = pytest.mark.hopper
needs_compiler = pytest.mark.skipif(
  triton_interpreter.unavailable() is None,
  reason="compiles kernels: needs Triton without TRITON_INTERPRET",
)

# Small tiles, so that shapes of a few rows have several.
SIZES = {
  "normalise": BlockSizes(rows=16, cols=32, inner=16),
  "distance": BlockSizes(rows=16, cols=64, inner=16),
  "gradient": BlockSizes(rows=16, cols=32, inner=16),
}

# Float32 sums of the same products in another order.
CLOSE = {"rtol": 2e-5, "atol": 2e-6}


def problem(rows=(37,), width=24, vocab=333):
  """Odd everywhere: three row tiles, two groups of vocabulary tiles."""
  rng = np.random.default_rng(1)
  hidden, teacher = (
    jnp.asarray(0.3 * x, jnp.float32)
    for x in rng.normal(size=(2, *rows, width))
  )
  labels = jnp.asarray(rng.integers(vocab, size=rows), jnp.int32)
  # The last row has the last token as its label.
  labels = labels.reshape(-1).at[-1].set(vocab - 1).reshape(rows)
  head = jnp.asarray(rng.normal(size=(vocab, width)), jnp.float32)
  weights = jnp.asarray(rng.normal(size=(2, *rows)), jnp.float32)
  return (hidden, teacher, labels, head), weights


def value_and_grad(implementation, arrays, weights, sizes=None):
  """Terms without a gradient, then terms and gradient."""
  loss = functools.partial(
    api.draft_loss, implementation=implementation, block_sizes=sizes
  )

  def run(hidden, others, weights):
    def weighted(hidden):
      terms = loss(hidden, *others)
      return jnp.sum(weights[0] * terms.ce + weights[1] * terms.l1), terms

    (_, terms), grad = jax.value_and_grad(weighted, has_aux=True)(hidden)
    return jnp.stack(loss(hidden, *others)), jnp.stack(terms), grad

  return jax.jit(run)(arrays[0], arrays[1:], weights)


def compare(arrays, weights, launcher=None):
  """Interpreted kernels against XLA."""
  want = value_and_grad("xla", arrays, weights)
  with triton_call.launching_with(launcher or triton_interpreter.launcher):
    got = value_and_grad("triton", arrays, weights, SIZES)
  for x, y in zip(got, want, strict=True):
    np.testing.assert_allclose(x, y, **CLOSE)


@pytest.fixture
def small_chunks(monkeypatch):
  """Several chunks of the vocabulary and several bands of row tiles."""
  from kernels.draft_loss import triton

  monkeypatch.setattr(triton, "CHUNK", 128)
  monkeypatch.setattr(triton, "BAND", 2)


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize(
  "rows, width, vocab",
  [
    ((37,), 24, 333),  # Two whole chunks and 77 columns.
    ((2, 3), 16, 256),  # Nothing left over.
    ((1,), 5, 7),  # Less than a tile of everything.
  ],
)
def test_kernels_equal_the_reference(rows, width, vocab, small_chunks):
  compare(*problem(rows, width, vocab))


@triton_interpreter.needs_interpreter
def test_a_vocabulary_that_is_one_chunk():
  compare(*problem((5,), 16, 100))


@triton_interpreter.needs_interpreter
def test_huge_logits_and_equal_states():
  (hidden, teacher, labels, head), weights = problem((6,), 16, 70)
  hidden = hidden.at[:2].multiply(300.0).at[4].set(0.0)
  teacher = teacher.at[1:3].multiply(-300.0)
  # Rows 3 on have no distance. Row 0's cotangents are zero.
  teacher = teacher.at[3:].set(hidden[3:])
  weights = weights.at[:, 0].set(0.0)
  compare((hidden, teacher, labels, head), weights)


@triton_interpreter.needs_interpreter
def test_vmap_makes_rows_of_the_mapped_axis(small_chunks):
  """Of the value and of the gradient, with one launch for the whole batch."""
  (hidden, teacher, labels, head), weights = problem((3, 4), 16, 150)
  launched = []

  def launcher(launch, arrays, out_shape):
    launched.append(launch.constants["ROWS"])
    return triton_interpreter.launcher(launch, arrays, out_shape)

  def run(implementation, sizes):
    def of_row(hidden, teacher, labels, weights):
      arrays = hidden, teacher, labels, head
      return value_and_grad(implementation, arrays, weights, sizes)[1:]

    over_rows = jax.vmap(of_row, in_axes=(0, 0, 0, 1))
    return over_rows(hidden, teacher, labels, weights)

  with triton_call.launching_with(launcher):
    got = run("triton", SIZES)
  for x, y in zip(got, run("xla", None), strict=True):
    np.testing.assert_allclose(x, y, **CLOSE)
  assert 12 in launched


@triton_interpreter.needs_interpreter
def test_rows_may_be_those_of_a_shard(small_chunks):
  arrays, weights = problem((5,), 16, 200)
  split, whole = PartitionSpec("data"), PartitionSpec()

  def grad(hidden, teacher, labels, head, weights):
    arrays = hidden, teacher, labels, head
    return value_and_grad("triton", arrays, weights, SIZES)[2]

  sharded = jax.shard_map(
    grad,
    mesh=Mesh(np.asarray(jax.devices()[:1]), ("data",)),
    in_specs=(split, split, split, whole, PartitionSpec(None, "data")),
    out_specs=split,
  )
  with triton_interpreter.interpreting():
    got = jax.jit(sharded)(*arrays, weights)
  want = value_and_grad("xla", arrays, weights)[2]
  np.testing.assert_allclose(got, want, **CLOSE)


def skips_a_tile(launch):
  if "GROUP" in launch.constants:
    launch.constants["GROUP"] -= 1


def packs_no_signs(launch):
  if "WITH_SIGNS" in launch.constants:
    launch.constants["WITH_SIGNS"] = False


@triton_interpreter.needs_interpreter
@pytest.mark.parametrize("breaks", [skips_a_tile, packs_no_signs])
def test_a_broken_launch_is_seen(breaks):
  def launcher(launch, arrays, out_shape):
    breaks(launch)
    return triton_interpreter.launcher(launch, arrays, out_shape)

  with pytest.raises(AssertionError, match="Not equal to tolerance"):
    compare(*problem((5,), 16, 512), launcher)


@triton_interpreter.needs_interpreter
def test_the_chunk_of_the_gradient_is_the_one_asked_for(small_chunks):
  """A chunk of dz that begins elsewhere must show."""

  def launcher(launch, arrays, out_shape):
    if "CHUNK" in launch.constants:
      arrays = (*arrays[:-1], jnp.maximum(arrays[-1] - 32, 0))
    return triton_interpreter.launcher(launch, arrays, out_shape)

  with pytest.raises(AssertionError, match="Not equal to tolerance"):
    compare(*problem((5,), 16, 200), launcher)


@triton_interpreter.needs_interpreter
def test_narrow_tiles_are_refused():
  arrays, _ = problem((5,), 16, 100)
  sizes = {"distance": BlockSizes(rows=16, cols=16, inner=16)}
  with triton_interpreter.interpreting():
    with pytest.raises(ValueError, match="distance: cols=16 is below 32"):
      api.draft_loss(*arrays, implementation="triton", block_sizes=sizes)


def described(model):
  """Arguments of a training step over one sequence."""
  rows = 15 * shapes.ANCHORS
  states = jax.ShapeDtypeStruct((rows, model.width), jnp.bfloat16)
  labels = jax.ShapeDtypeStruct((rows,), jnp.int32)
  head = jax.ShapeDtypeStruct((model.vocab, model.width), jnp.bfloat16)
  return states, states, labels, head


def training_loss(hidden, teacher, labels, head, implementation="triton"):
  terms = api.draft_loss(
    hidden, teacher, labels, head, implementation=implementation
  )
  return jnp.sum(0.1 * terms.ce + 0.9 * terms.l1)


@needs_compiler
def test_a_training_step_launches_each_kernel():
  found = triton_resources.launches(
    jax.value_and_grad(training_loss), *described(shapes.QWEN3_27B)
  )
  # The gradient is launched in a loop and once for what is left over.
  names = [x.launch.kernel.__name__ for x in found]
  assert [name.removeprefix("draft_loss_") for name in names] == [
    "normalise",
    "distance",
    "gradient",
    "gradient",
  ]


@needs_compiler
@pytest.mark.skipif(
  hopper.unavailable() is not None, reason=hopper.unavailable() or ""
)
def test_a_training_step_compiles_and_holds_no_rows_of_logits():
  model = shapes.QWEN3_8B

  def both(*arrays):
    of_triton = jax.value_and_grad(training_loss)(*arrays)
    # Pallas's first pass, and one of Triton's after it.
    terms = api.draft_loss(*arrays, implementation="pallas")
    return of_triton, terms

  compiled = hopper.compile_for_h100(both, *described(model))
  text, memory = compiled.as_text(), compiled.memory_analysis()
  assert text is not None and memory is not None
  names = kernels_of(text)
  for name in ("normalise", "distance", "gradient"):
    assert f"draft_loss_{name}" in names
  assert "mosaic_gpu" in text
  # 0.5 GB where a byte a logit would be 1.2.
  assert memory.temp_size_in_bytes < 0.5 * 15 * shapes.ANCHORS * model.vocab


def kernels_of(text):
  """What is legible in the packed descriptions of Triton's launches."""
  packed = re.findall(
    r'target="triton_kernel_call".*?backend_config="((?:[^"\\]|\\.)*)"', text
  )
  unpacked = [zlib.decompress(codecs.escape_decode(x)[0]) for x in packed]
  return "\n".join(x.decode("latin-1") for x in unpacked)
