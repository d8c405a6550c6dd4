"""Where gradients go, and how large the arrays on their way are."""

import functools

import jax
import numpy as np
import pytest
from jax import lax
from jax import numpy as jnp

from dspine_jax.drafters import contract, methods
from dspine_jax.training import anchors as anchors_lib
from dspine_jax.training import losses
from tests import tiny_models

ANCHORS = jnp.asarray(tiny_models.ANCHORS)
KEEP = jnp.asarray(tiny_models.KEEP)
METHODS = sorted(methods.DRAFTERS)
# Objectives whose teacher has vocabulary rows too.
OBJECTIVES = {"forward_kl": "dflash", "ce_l1": "dflash2"}
REPLACE = jnp.array([[True, False, False, False], [False] * 4])


def setup_of(name):
  """Of a method, or of one with the objective of that name."""
  method = OBJECTIVES.get(name, name)
  options = {"objective": name} if name in OBJECTIVES else {}
  return tiny_models.drafter(
    tiny_models.drafter_config(method, **{method: options})
  )


def objective(setup, params, tables, buffers, batch, chunk_size):
  """Context, blocks, labels and loss: one training step's scalar."""
  cfg, method = setup.cfg, setup.method
  inputs = tiny_models.block_inputs(params, batch, ANCHORS, KEEP, REPLACE, cfg)
  output = method.forward(params, buffers, tables, inputs, cfg=cfg)
  supervision = anchors_lib.supervise(
    batch, ANCHORS, KEEP, method.supervised, cfg=cfg
  )
  window = contract.LossWindow(
    denominator=jnp.sum(supervision.weights),
    ce_scale=None,
    scheduled_weight=jnp.asarray(0.3, jnp.float32),
  )
  value, _ = method.loss(
    params,
    buffers,
    tables,
    output,
    supervision,
    cfg=cfg,
    window=window,
    chunk_size=chunk_size,
  )
  return value


@functools.cache
def compiled_grad(method):
  setup = setup_of(method)

  def value(params, embedding, head, buffers, batch):
    tables = contract.TargetTables(embedding=embedding, head=head)
    return objective(setup, params, tables, buffers, batch, 3)

  return jax.jit(jax.value_and_grad(value, argnums=(0, 1, 2, 3)))


def grads_of(method, embedding=None, batch=None, params=None):
  setup = setup_of(method)
  value, grads = compiled_grad(method)(
    setup.params if params is None else params,
    setup.tables.embedding if embedding is None else embedding,
    setup.tables.head,
    setup.buffers,
    tiny_models.train_batch(setup.cfg) if batch is None else batch,
  )
  assert np.isfinite(value)
  return dict(
    zip(("params", "embedding", "head", "buffers"), grads, strict=True)
  )


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("frozen", ["embedding", "head", "buffers"])
def test_no_gradient_reaches_what_is_frozen(method, frozen):
  for leaf in jax.tree.leaves(grads_of(method)[frozen]):
    assert not np.asarray(leaf).any()


@pytest.mark.parametrize("method", METHODS)
def test_every_trainable_parameter_gets_a_finite_gradient(method):
  def check(path, leaf):
    assert np.isfinite(leaf).all(), path
    assert np.abs(leaf).max() > 1e-6, path

  jax.tree_util.tree_map_with_path(check, grads_of(method)["params"])


@pytest.mark.parametrize("method", METHODS)
def test_gradients_are_finite_at_zero_states(method):
  # A zero embedding and zero features: every norm divides by its epsilon.
  setup = setup_of(method)
  batch = tiny_models.train_batch(setup.cfg)
  silent = batch.replace(context_features=0 * batch.context_features)
  grads = grads_of(method, embedding=0 * setup.tables.embedding, batch=silent)
  for leaf in jax.tree.leaves(grads["params"]):
    assert np.isfinite(leaf).all()


def sub_jaxprs(value):
  if hasattr(value, "jaxpr"):
    yield value.jaxpr
  elif hasattr(value, "eqns"):
    yield value
  elif isinstance(value, (tuple, list)):
    for item in value:
      yield from sub_jaxprs(item)


def intermediates(jaxpr):
  """Shapes of everything computed, in loops and calls as well."""
  for equation in jaxpr.eqns:
    for variable in equation.outvars:
      yield getattr(variable.aval, "shape", ())
    for value in equation.params.values():
      for inner in sub_jaxprs(value):
        yield from intermediates(inner)


def most_vocabulary_rows(method, chunk_size):
  """Rows of the largest array with a vocabulary axis, tables aside."""
  setup = setup_of(method)
  batch = tiny_models.train_batch(setup.cfg)
  vocab = setup.cfg.vocab_size

  def value(params):
    return objective(
      setup, params, setup.tables, setup.buffers, batch, chunk_size
    )

  jaxpr = jax.make_jaxpr(jax.value_and_grad(value))(setup.params).jaxpr
  tables = jax.tree.leaves((setup.params, setup.buffers, setup.tables))
  tables = {shape for t in tables for shape in (t.shape, t.shape[::-1])}
  shapes = {shape for shape in intermediates(jaxpr) if vocab in shape}
  assert shapes - tables
  return max(int(np.prod(shape)) // vocab for shape in shapes - tables)


def rows_of(method, blocks):
  """Proposals of so many blocks; the batch has 8."""
  return blocks * setup_of(method).cfg.num_proposals


@pytest.mark.parametrize("method", [*METHODS, *OBJECTIVES])
def test_no_array_holds_more_vocabulary_rows_than_a_chunk(method):
  assert most_vocabulary_rows(method, 2) == rows_of(method, 2)


@pytest.mark.parametrize("method", METHODS)
def test_without_chunks_all_vocabulary_rows_are_there_at_once(method):
  assert most_vocabulary_rows(method, 8) == rows_of(method, 8)


def chunked_but_differentiated_as_usual(
  loss, chunk_size, params, rows, shared, row_constants
):
  """Chunks in a loop, whose backward pass keeps the residuals of all."""
  chunks = jax.tree.map(
    lambda x: x.reshape(-1, chunk_size, *x.shape[1:]), (rows, row_constants)
  )
  values = lax.map(lambda c: loss(params, c[0], shared, c[1]), chunks)
  return jax.tree.map(lambda x: jnp.sum(x, axis=0), values)


@pytest.mark.parametrize("method", METHODS)
def test_an_ordinary_loop_over_chunks_would_keep_them_all(method, monkeypatch):
  monkeypatch.setattr(
    losses, "chunked_sum", chunked_but_differentiated_as_usual
  )
  assert most_vocabulary_rows(method, 2) == rows_of(method, 8)


def all_at_once(loss, chunk_size, params, rows, shared, row_constants):
  """The loss of all rows, differentiated as usual."""
  del chunk_size
  return loss(params, rows, shared, row_constants)


@pytest.mark.parametrize("method", METHODS)
def test_chunks_change_neither_the_loss_nor_any_gradient(method, monkeypatch):
  setup = setup_of(method)
  batch = tiny_models.train_batch(setup.cfg)
  want = grads_of(method)["params"]
  monkeypatch.setattr(losses, "chunked_sum", all_at_once)

  def value(params):
    return objective(setup, params, setup.tables, setup.buffers, batch, 3)

  plain = jax.jit(jax.grad(value))(setup.params)
  for path, got in jax.tree_util.tree_leaves_with_path(want):
    other = functools.reduce(
      lambda tree, key: tree[getattr(key, "key", getattr(key, "idx", None))],
      path,
      plain,
    )
    bound = 2e-5 * np.abs(other).max()
    np.testing.assert_allclose(got, other, rtol=0, atol=bound, err_msg=path)
