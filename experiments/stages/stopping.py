"""SIGTERM, and Ctrl-C once, as a wish to stop at the next step.

Schedulers send SIGTERM some time before they kill a job; a run that saves its
state then loses nothing.
"""

import signal
import sys
from typing import NoReturn

_SIGNALS = (signal.SIGTERM, signal.SIGINT)


class StopRequest:
  """Notes the signals inside a `with` block; a second one acts as usual."""

  def __init__(self):
    self._received: signal.Signals | None = None
    self._before: dict[signal.Signals, object] = {}

  def __enter__(self) -> "StopRequest":
    self._before = {one: signal.signal(one, self._note) for one in _SIGNALS}
    return self

  def __exit__(self, *unused: object) -> None:
    self._restore()

  def requested(self) -> bool:
    """Whether a signal has come."""
    return self._received is not None

  def end(self, step: int) -> NoReturn:
    """Says where the run stopped, and exits as the signal would have done.

    Status 128 + signal; that of SIGTERM where another process had the signal.
    """
    number = self._received or signal.SIGTERM
    print(
      f"stopped at step {step} after {number.name}; repeat the command to go"
      " on",
      file=sys.stderr,
    )
    sys.exit(128 + number)

  def _note(self, number, unused_frame):
    self._received = signal.Signals(number)
    self._restore()

  def _restore(self):
    for one, handler in self._before.items():
      signal.signal(one, handler)  # pyrefly: ignore[bad-argument-type]
    self._before = {}
