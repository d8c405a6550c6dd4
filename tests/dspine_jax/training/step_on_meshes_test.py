"""Losses and gradients do not depend on the devices that share the rows."""

import functools

import jax
import numpy as np
import optax
import pytest
from jax import numpy as jnp

from dspine_jax import configs, sharding
from dspine_jax.checkpoints import orbax
from dspine_jax.drafters import methods
from dspine_jax.training import anchors as anchors_lib
from dspine_jax.training import step as step_lib
from tests import on_devices, tiny_models

ROWS, STEP, TOTAL = 8, 5, 20
# Of an array's largest element: sums of the same float32 terms, in another
# order and with products of other shapes.
TOLERANCE = 1e-5

# Name: method, options, micro-batches. DSpine takes its alignment scale from
# the batch itself, or with accumulation from a pass before.
CASES = {
  **{method: (method, {}, 1) for method in sorted(methods.DRAFTERS)},
  "d_pace": ("dflash", {"objective": "d_pace"}, 1),
  "dspine": ("dspine", {"alignment_warmup_steps": 10}, 1),
  "dspine_accumulated": ("dspine", {"alignment_warmup_steps": 10}, 2),
}
# On eight devices, in different ways to split them.
EIGHT = {
  "dflash": (8, 1, 1),
  "dflash2": (1, 8, 1),
  "domino": (2, 1, 4),
  "dspark": (1, 4, 2),
  "dspine": (2, 2, 2),
}
# For the slow tests.
ACCUMULATED = [(1, 1, 1), (1, 2, 1), (2, 1, 2)]
TWO_PROCESSES = ("d_pace", "dflash2", "domino", "dspark")


def make_mesh(sizes):
  count = int(np.prod(sizes))
  devices = np.asarray(jax.devices()[:count]).reshape(sizes)
  return jax.sharding.Mesh(devices, sharding.AXES)


def window_of(cfg, accumulation):
  """Host arrays; rows with very different numbers of supervised slots."""
  pairs = accumulation * ROWS // 2
  batches = [tiny_models.train_batch(cfg, seed=seed) for seed in range(pairs)]
  names = ("tokens", "loss_mask", "context_features", "last_hidden")
  window = {
    name: np.concatenate([getattr(batch, name) for batch in batches])
    for name in names
  }
  window = {
    name: x.reshape(accumulation, ROWS, *x.shape[1:])
    for name, x in window.items()
  }
  mask = window["loss_mask"]
  mask[:, 1, 7:] = mask[:, 5, 4:] = mask[-1, 6] = False
  return window


def gradient_on(setup, accumulation, sizes):
  """Leaves of loss, report and gradient; without a mesh if `sizes` is None."""
  train = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(total_steps=TOTAL),
    accumulation=accumulation,
    batch_size=ROWS,
    num_anchors=4,
    chunk_blocks=3,
  )
  window = window_of(setup.cfg, accumulation)
  params, frozen = setup.params, (setup.buffers, setup.tables)
  mesh = None if sizes is None else make_mesh(sizes)
  if mesh is None:
    window = jax.tree.map(jnp.asarray, window)
  else:
    local = sharding.local_rows(mesh, ROWS)
    window = jax.tree.map(lambda x: x[:, local], window)
    where = sharding.shardings(sharding.DRAFTER_RULES, params, mesh)
    params = sharding.place(params, where)
    frozen = sharding.place(frozen, sharding.whole(mesh))
    window = sharding.place_rows(window, mesh)
  run = jax.jit(
    functools.partial(
      step_lib.window_gradient, cfg=setup.cfg, train=train, mesh=mesh
    )
  )
  batches = anchors_lib.TrainBatch(**window)
  found = run(params, *frozen, batches, jax.random.key(0), jnp.asarray(STEP))
  if mesh is not None:
    for got, part in zip(
      jax.tree.leaves(found[2]), jax.tree.leaves(params), strict=True
    ):
      assert got.sharding.is_equivalent_to(part.sharding, got.ndim)
    found = sharding.gathered(found, mesh)
  return [list(map(np.asarray, jax.tree.leaves(part))) for part in found]


def distances(runs):
  """For (case, sizes): farthest leaf from the run without a mesh, by part.

  In units of the leaf's largest element.
  """
  found, alone = [], {}
  for case, sizes in runs:
    method, options, accumulation = CASES[case]
    cfg = tiny_models.drafter_config(method, num_layers=1, **{method: options})
    setup = tiny_models.drafter(cfg)
    together = gradient_on(setup, accumulation, sizes)
    if jax.process_index() > 0:  # Only the first one's word counts.
      continue
    if case not in alone:
      alone[case] = gradient_on(setup, accumulation, None)
    found.append(list(map(farthest, together, alone[case])))
  return found


def farthest(leaves, expected):
  pairs = zip(leaves, expected, strict=True)
  return max(float(np.abs(a - b).max() / np.abs(b).max()) for a, b in pairs)


def measure(runs, **where):
  found = on_devices.call(__name__, "distances", runs=runs, **where)
  keys = [(case, tuple(sizes)) for case, sizes in runs]
  return dict(zip(keys, found, strict=True))


@pytest.fixture(name="on_eight", scope="module")
def fixture_on_eight():
  return measure(list(EIGHT.items()), devices=8)


@pytest.mark.parametrize("case", sorted(EIGHT))
def test_eight_devices_give_the_gradient_of_one(on_eight, case):
  assert max(on_eight[case, EIGHT[case]]) < TOLERANCE


# Checkpoints.


def resume(folder):
  """Saves on eight devices and goes on on eight, on two and without a mesh.

  Returns:
    For each of the three, whether the restored state is the saved one bit by
    bit; and of the last two, how far loss, norms and Adam's first moments of
    the next step are from those of the first.
  """
  setup = tiny_models.drafter(
    tiny_models.drafter_config("dflash", num_layers=1)
  )
  train = configs.TrainConfig(
    optimizer=configs.OptimizerConfig(name="adamw", total_steps=TOTAL),
    batch_size=ROWS,
    num_anchors=4,
  )
  window = window_of(setup.cfg, 1)
  saved, same, after = None, [], []
  with orbax.TrainingCheckpoints(folder) as checkpoints:
    for sizes in ((1, 8, 1), (1, 2, 1), None):
      mesh = None if sizes is None else make_mesh(sizes)
      tables = setup.tables
      if mesh is not None:
        tables = sharding.place(tables, sharding.whole(mesh))
      state, buffers = step_lib.init(setup.cfg, train, tables, mesh=mesh)
      if saved is None:
        # What no fresh state has.
        state = state.replace(step=state.step + 3)
        saved = host(state)
        checkpoints.save(3, state, {})
      where = jax.tree.map(lambda leaf: leaf.sharding, state)
      state, _ = checkpoints.restore(state)
      assert jax.tree.map(lambda leaf: leaf.sharding, state) == where
      same.append(all(map(np.array_equal, host(state), saved)))
      batches = {name: jnp.asarray(x) for name, x in window.items()}
      if mesh is not None:
        batches = sharding.place_rows(window, mesh)
      state, metrics = step_lib.make_train_step(setup.cfg, train, mesh=mesh)(
        state, buffers, tables, anchors_lib.TrainBatch(**batches)
      )
      first_moments = optax.tree.get(state.opt_state, "mu")
      after.append(host((metrics, first_moments)))
  return same, [farthest_but_zeros(leaves, after[0]) for leaves in after[1:]]


def host(tree):
  tree = jax.tree.map(
    lambda x: (
      jax.random.key_data(x)
      if jnp.issubdtype(x.dtype, jax.dtypes.prng_key)
      else x
    ),
    tree,
  )
  return list(map(np.asarray, jax.tree.leaves(tree)))


def farthest_but_zeros(leaves, expected):
  pairs = zip(leaves, expected, strict=True)
  return farthest(*zip(*(pair for pair in pairs if pair[1].any()), strict=True))


def test_a_checkpoint_of_eight_devices_goes_on_on_two_and_on_one(tmp_path):
  same, far = on_devices.call(
    __name__, "resume", devices=8, folder=str(tmp_path)
  )
  assert all(same)
  assert max(far) < TOLERANCE


@pytest.mark.slow
def test_accumulation_gives_the_gradient_of_one_on_any_number_of_devices():
  runs = [("dspine_accumulated", sizes) for sizes in ACCUMULATED]
  for run, found in measure(runs, devices=4).items():
    assert max(found) < TOLERANCE, run


@pytest.mark.slow
def test_two_processes_give_the_gradient_of_one():
  # DSpine's is looked at through the script (`several_processes_test.py`).
  runs = [(case, (1, 2, 1)) for case in TWO_PROCESSES]
  for run, found in measure(runs, devices=1, processes=2).items():
    assert max(found) < TOLERANCE, run


def test_the_draws_that_are_compared_replace_some_blocks():
  cfg = tiny_models.drafter_config("dspine")
  rho = methods.drafter(cfg).schedule(STEP, TOTAL, cfg).replacement
  mask = jnp.ones((ROWS, tiny_models.LENGTH), bool)
  key = jax.random.split(jax.random.key(0), 1)[0]
  replaced = step_lib.draw(key, mask, 4, rho).replace
  assert 0 < replaced.sum() < replaced.size
