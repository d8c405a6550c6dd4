import signal

import pytest

from experiments.stages import stopping


@pytest.mark.parametrize(
  ("number", "status"), [(signal.SIGTERM, 143), (signal.SIGINT, 130)]
)
def test_a_signal_is_noted_once_and_told_at_the_end(number, status, capsys):
  before = signal.getsignal(number)
  with stopping.StopRequest() as stop:
    assert not stop.requested()
    signal.raise_signal(number)
    assert stop.requested()
    # The next one acts as it would have done.
    assert signal.getsignal(number) is before
    with pytest.raises(SystemExit) as ended:
      stop.end(7)
  assert ended.value.code == status
  line = f"stopped at step 7 after {number.name}; repeat the command to go on\n"
  assert capsys.readouterr().err == line


def test_handlers_are_put_back_without_a_signal():
  before = signal.getsignal(signal.SIGTERM)
  with stopping.StopRequest():
    assert signal.getsignal(signal.SIGTERM) is not before
  assert signal.getsignal(signal.SIGTERM) is before


def test_a_process_that_had_no_signal_itself_ends_like_the_others():
  with pytest.raises(SystemExit) as ended:
    stopping.StopRequest().end(1)
  assert ended.value.code == 143
