"""The processes of a run and their devices, from the values of flags.

One process a host or, as under SLURM, one a device calls `start` before
anything else touches a device; JAX connects them, and all their devices make
one mesh, the innermost axis within a host. `together` lets an error of one
process end all of them with a message instead of a hang. Not here: what lies
where (`dspine_jax/sharding.py`).
"""

from collections.abc import Callable, Sequence

import jax
import numpy as np
from jax.experimental import multihost_utils

from dspine_jax import sharding

DISTRIBUTED = ("off", "auto")


def start(
  *,
  mesh: Sequence[str] | None,
  batch_size: int,
  distributed: str = "off",
  coordinator: str | None = None,
  num_processes: int | None = None,
  process_id: int | None = None,
) -> jax.sharding.Mesh | None:
  """Connects the processes of a run and makes its mesh.

  Args:
    mesh: sizes of `sharding.AXES` as the flag has them; None splits everything
      over "fsdp", or needs no mesh where there is one device.
    batch_size: rows of a micro-batch, of all devices together.
    distributed: "auto" lets JAX find the other processes (SLURM, Open MPI,
      Kubernetes, cloud TPU).
    coordinator: HOST:PORT of the first process, instead; then the next two are
      needed, too.
    num_processes: of the run.
    process_id: of this one, from 0.

  Raises:
    ValueError: flags that do not fit each other, the devices or the batch; no
      other processes found.
  """
  _connect(distributed, coordinator, num_processes, process_id)
  count = jax.device_count()
  if mesh is None:
    if count == 1:
      return None
    sizes = [1, count, 1]
  else:
    sizes = _sizes(mesh)
    if np.prod(sizes) != count:
      raise ValueError(
        f"--mesh={','.join(mesh)}: {np.prod(sizes)} devices, but there are"
        f" {count} of kind {jax.devices()[0].device_kind!r}"
      )
  if batch_size % count:
    raise ValueError(
      f"--batch_size={batch_size}: must be a multiple of the {count} devices,"
      " each of which takes its rows"
    )
  # In the order of processes, so that rows and inner axes stay within a host.
  devices = np.asarray(jax.devices()).reshape(sizes)
  return jax.sharding.Mesh(devices, sharding.AXES)


def _connect(distributed, coordinator, num_processes, process_id) -> None:
  given = [x is not None for x in (coordinator, num_processes, process_id)]
  if any(given) and not all(given):
    raise ValueError(
      "--coordinator, --num_processes and --process_id: all three are needed,"
      " or none of them"
    )
  if all(given):
    if not 0 <= process_id < num_processes:
      raise ValueError(
        f"--process_id={process_id}: not in 0..{num_processes - 1}"
        f" (--num_processes={num_processes})"
      )
  elif distributed == "off":
    return
  # JAX's own handler of SIGTERM would take the place of ours.
  jax.config.update("jax_enable_preemption_service", False)
  try:
    jax.distributed.initialize(coordinator, num_processes, process_id)
  except (ValueError, RuntimeError) as error:
    if all(given):
      flag = f"--coordinator={coordinator}"
    else:
      flag = "--distributed=auto"
    reason = str(error).strip().splitlines()[0]
    raise ValueError(
      f"{flag}: the processes of the run do not find each other ({reason})"
    ) from error


def _sizes(mesh: Sequence[str]) -> list[int]:
  try:
    sizes = [int(size) for size in mesh]
  except ValueError:
    sizes = []
  if len(sizes) != len(sharding.AXES) or min(sizes) < 1:
    raise ValueError(
      f"--mesh={','.join(mesh)}: must be three positive sizes,"
      f" {','.join(sharding.AXES)}"
    )
  return sizes


def together[T](action: Callable[[], T]) -> T:
  """What `action` returns in this process; fails if it fails in any.

  It must not itself wait for other processes.

  Raises:
    ValueError: this process's own, or that of another was the first.
  """
  if jax.process_count() == 1:
    return action()
  result, error = None, None
  try:
    result = action()
  except ValueError as own:
    error = own
  failed = multihost_utils.process_allgather(np.asarray(error is not None))
  if error is not None:
    raise error
  if failed.any():
    raise ValueError(
      f"process {int(np.argmax(failed))} of the run cannot go on; its own"
      " message says why"
    )
  return result  # pyrefly: ignore[bad-return]
