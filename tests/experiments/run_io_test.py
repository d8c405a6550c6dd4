import dataclasses
import enum
import io
import json
import os
import pathlib
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import provenance, run_io

ROOT = pathlib.Path(run_io.__file__).resolve().parent.parent
CONFIG = {"method": "dspine", "model": {"size": 64, "layers": [0, 2]}}


def open_dir(path, *, config=None, argv=("train", "--steps=3"), resume=False):
  config = CONFIG if config is None else config
  return run_io.open_work_dir(
    str(path), config=config, argv=argv, resume=resume
  )


def read_json(path):
  return json.loads(path.read_text())


class Clock:
  """A clock that moves only when told to."""

  def __init__(self):
    self.now_s = 0.0

  def __call__(self):
    return self.now_s


class Terminal(io.StringIO):
  def isatty(self):
    return True


class Color(enum.Enum):
  RED = "red"


@dataclasses.dataclass(frozen=True)
class Point:
  x: int
  where: pathlib.Path


@pytest.mark.parametrize(
  ("value", "expected"),
  [
    (np.float32(0.5), 0.5),
    (np.int64(3), 3),
    (np.bool_(True), True),
    (np.arange(4).reshape(2, 2), [[0, 1], [2, 3]]),
    (np.array([1.0, np.nan, np.inf]), [1.0, None, None]),
    (np.float32(-np.inf), None),
    (float("nan"), None),
    ((1, (2, None)), [1, [2, None]]),
    ({3: {"b": 1}, True: 0}, {"3": {"b": 1}, "True": 0}),
    ({2, 1}, [1, 2]),
    (Point(1, pathlib.Path("a/b")), {"x": 1, "where": "a/b"}),
    (Color.RED, "red"),
    (np.dtype("int32"), "int32"),
    (jnp.bfloat16, "bfloat16"),
  ],
)
def test_to_json_turns_arrays_and_configs_into_plain_values(value, expected):
  actual = run_io.to_json(value)
  assert actual == expected
  assert type(actual) is type(expected)


@pytest.mark.parametrize("dtype", [jnp.float32, jnp.bfloat16, jnp.int32])
def test_to_json_takes_jax_arrays_of_any_real_dtype(dtype):
  assert run_io.to_json({"x": jnp.ones((2, 1), dtype)}) == {"x": [[1], [1]]}
  assert run_io.to_json(jnp.asarray(2, dtype)) == 2


def test_to_json_names_what_it_cannot_write():
  with pytest.raises(TypeError, match="no JSON for object"):
    run_io.to_json({"a": [object()]})
  with pytest.raises(TypeError, match="no JSON for type"):
    run_io.to_json(Point)
  shape = jax.ShapeDtypeStruct((2,), jnp.float32)  # Has a dtype, is none.
  with pytest.raises(TypeError, match="no JSON for ShapeDtypeStruct"):
    run_io.to_json(shape)


def test_write_json_keeps_key_order_and_indents(tmp_path):
  path = tmp_path / "x.json"
  run_io.write_json(path, {"b": 1, "a": float("nan")})
  assert path.read_text() == '{\n  "b": 1,\n  "a": null\n}\n'


def test_write_json_leaves_the_old_file_when_writing_fails(
  tmp_path, monkeypatch
):
  path = tmp_path / "x.json"
  run_io.write_json(path, {"a": 1})
  with pytest.raises(TypeError):
    run_io.write_json(path, {"a": object()})

  def fail(descriptor):
    raise OSError(28, "No space left on device")

  monkeypatch.setattr(os, "fsync", fail)
  with pytest.raises(OSError, match="No space"):
    run_io.write_json(path, {"a": 2})
  assert read_json(path) == {"a": 1}
  assert os.listdir(tmp_path) == ["x.json"]


def test_a_reader_never_sees_half_a_file(tmp_path):
  path = tmp_path / "x.json"
  run_io.write_json(path, {"a": 1})
  with path.open() as reader:
    run_io.write_json(path, {"a": 2})
    assert json.load(reader) == {"a": 1}
  assert read_json(path) == {"a": 2}


def test_written_files_are_as_readable_as_any_other_file(tmp_path):
  (tmp_path / "plain").touch()
  run_io.write_json(tmp_path / "x.json", 1)
  plain = (tmp_path / "plain").stat().st_mode
  assert (tmp_path / "x.json").stat().st_mode == plain


# The work directory.


def test_work_dir_records_config_command_and_provenance(tmp_path):
  argv = ("train.py", "--note=two words", "--steps=3")
  work_dir = open_dir(tmp_path / "a" / "b", argv=argv)
  assert work_dir.path == tmp_path / "a" / "b"
  assert read_json(work_dir.config) == CONFIG
  assert (
    work_dir.command.read_text() == "train.py '--note=two words' --steps=3\n"
  )
  provenance = read_json(work_dir.provenance)
  assert provenance["date"].endswith("+00:00")
  assert provenance["platform"] == jax.devices()[0].platform
  assert provenance["versions"]["jax"] == jax.__version__
  assert set(provenance["versions"]) == {
    *("python", "jax", "jaxlib", "flax", "optax", "numpy")
  }
  assert set(provenance) >= {"git", "device_kind", "device_count", "cpu_count"}


def make_checkout(path):
  def git(*args):
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    command = ["git", "-C", str(path), *identity, *args]
    subprocess.run(command, check=True, capture_output=True)

  path.mkdir()
  git("init")
  assert provenance.git_state(path) is None  # No commit yet.
  git("commit", "--allow-empty", "--message=first")


def test_git_state_knows_the_revision_and_whether_it_is_dirty(tmp_path):
  checkout = tmp_path / "checkout"
  make_checkout(checkout)
  state = provenance.git_state(checkout)
  assert state is not None
  assert len(state["revision"]) == 40
  assert state["dirty"] is False
  (checkout / "new.py").touch()
  state = provenance.git_state(checkout)
  assert state is not None and state["dirty"] is True


def test_git_state_is_none_outside_and_inside_another_checkout(tmp_path):
  assert provenance.git_state(tmp_path) is None
  make_checkout(tmp_path / "other")
  installed = tmp_path / "other" / "site-packages"
  installed.mkdir()
  assert provenance.git_state(installed) is None


# Tests may run as root, for whom no permission bit forbids writing.
@pytest.mark.parametrize("name", ["file", "file/under"])
def test_work_dir_that_cannot_be_made_names_flag_and_path(tmp_path, name):
  (tmp_path / "file").write_text("not a directory")
  with pytest.raises(ValueError, match="--work_dir=.*cannot make") as caught:
    open_dir(tmp_path / name)
  assert str(tmp_path / name) in str(caught.value)


def test_work_dir_that_cannot_be_written_names_flag_and_path():
  readonly = "/proc/self"  # Exists, and takes no new file from anyone.
  if not os.path.isdir(readonly):
    pytest.skip("no file system here refuses everyone")
  with pytest.raises(ValueError, match=f"--work_dir={readonly}: cannot"):
    open_dir(readonly)


def test_work_dir_must_be_named():
  with pytest.raises(ValueError, match="--work_dir must name"):
    open_dir("")


def test_resume_with_the_same_config_adds_its_command(tmp_path):
  open_dir(tmp_path)
  same = {"model": {"layers": (0, 2), "size": np.int32(64)}, "method": "dspine"}
  work_dir = open_dir(tmp_path, config=same, argv=["train", "-r"], resume=True)
  assert work_dir.command.read_text() == "train --steps=3\ntrain -r\n"


def test_resume_of_an_empty_directory_is_a_first_start(tmp_path):
  work_dir = open_dir(tmp_path, resume=True)
  assert read_json(work_dir.config) == CONFIG


def test_resume_with_an_unreadable_config_says_so(tmp_path):
  (tmp_path / "config.json").write_text("{")
  with pytest.raises(ValueError, match=r"--work_dir=.*config\.json"):
    open_dir(tmp_path, resume=True)


def test_a_new_start_may_change_the_config(tmp_path):
  open_dir(tmp_path)
  work_dir = open_dir(tmp_path, config={"seed": 1})
  assert read_json(work_dir.config) == {"seed": 1}
  assert work_dir.command.read_text().count("\n") == 1


def steps(path):
  return [row["step"] for row in run_io.read_metrics(path)]


def test_metrics_are_on_disk_before_the_writer_is_closed(tmp_path):
  work_dir = open_dir(tmp_path)
  with run_io.MetricsWriter(work_dir) as writer:
    writer.write(0, {"loss": jnp.float32(0.5), "lr": 1e-3})
    writer.write(1, {"loss": np.nan})
    assert run_io.read_metrics(work_dir.metrics) == [
      {"step": 0, "loss": 0.5, "lr": 1e-3},
      {"step": 1, "loss": None},
    ]
  writer.close()
  events = list((tmp_path / "tensorboard").glob("events*"))
  assert len(events) == 1 and b"loss" in events[0].read_bytes()


def test_resuming_drops_the_steps_that_will_come_again(tmp_path):
  work_dir = open_dir(tmp_path)
  with run_io.MetricsWriter(work_dir) as writer:
    for step in range(5):
      writer.write(step, {"loss": step})
  with run_io.MetricsWriter(work_dir, start_step=3) as writer:
    assert steps(work_dir.metrics) == [0, 1, 2]
    writer.write(3, {"loss": 30.0})
  assert steps(work_dir.metrics) == [0, 1, 2, 3]
  assert run_io.read_metrics(work_dir.metrics)[-1]["loss"] == 30.0
  with run_io.MetricsWriter(work_dir):
    assert steps(work_dir.metrics) == []


@pytest.mark.parametrize("tail", ['{"step": 2, "lo', '{"step": 2, "x": 1.0}'])
def test_resuming_after_a_torn_last_line_keeps_every_line_whole(tmp_path, tail):
  work_dir = open_dir(tmp_path)
  work_dir.metrics.write_text('{"step": 0}\n{"step": 1}\n' + tail)
  whole = [0, 1, 2] if tail.endswith("}") else [0, 1]
  assert steps(work_dir.metrics) == whole
  with run_io.MetricsWriter(work_dir, start_step=4) as writer:
    writer.write(4, {"loss": 1.0})
  assert steps(work_dir.metrics) == [*whole, 4]
  assert work_dir.metrics.read_text().endswith("\n")


def test_a_damaged_line_in_the_middle_is_no_torn_line(tmp_path):
  path = tmp_path / "metrics.jsonl"
  path.write_text('{"step": 0}\n{"st\n{"step": 2}\n')
  with pytest.raises(ValueError, match="line 2"):
    run_io.read_metrics(path)
  with run_io.MetricsWriter(run_io.WorkDir(path=tmp_path)):
    assert steps(path) == []  # A new start needs nothing of it.


def test_metrics_refuse_arrays_and_the_name_step(tmp_path):
  with run_io.MetricsWriter(open_dir(tmp_path)) as writer:
    with pytest.raises(ValueError, match="'loss' is no scalar"):
      writer.write(0, {"loss": np.ones(2)})
    with pytest.raises(ValueError, match="'step'"):
      writer.write(0, {"step": 1.0})
  assert steps(tmp_path / "metrics.jsonl") == []


def test_progress_in_a_log_prints_first_then_sparsely_then_last():
  clock, stream = Clock(), io.StringIO()
  with run_io.Progress(100, "train", "steps", stream, clock=clock) as progress:
    for step in range(100):
      clock.now_s += 5.0 if step == 0 else 1.0
      progress.update(1, loss=1.0 / (step + 1))
    assert "100/100" in stream.getvalue()  # Not only when it is closed.
  lines = stream.getvalue().splitlines()
  done = [int(line.split()[1].split("/")[0]) for line in lines]
  assert done == [1, 11, 21, 31, 41, 51, 61, 71, 81, 91, 100]
  assert "\r" not in stream.getvalue()
  # The first update took 5 s (as a compilation would), the others 1 s each.
  assert lines[1] == (
    "train: 11/100 steps  11.0%  1 steps/s"
    "  elapsed 0:15  ETA 1:29  loss=0.09091"
  )
  assert lines[-1].startswith("train: 100/100 steps  100.0%")
  assert "ETA 0:00" in lines[-1]


def test_progress_of_a_run_that_stops_early_still_prints_its_last_state():
  clock, stream = Clock(), io.StringIO()
  progress = run_io.Progress(100, "eval", "rows", stream, clock=clock)
  for _ in range(3):
    clock.now_s += 1.0
    progress.update(2)
  progress.close()
  progress.close()
  lines = stream.getvalue().splitlines()
  assert [line.split()[1] for line in lines] == ["2/100", "6/100"]


def test_progress_of_a_resumed_run_rates_only_its_own_units():
  clock, stream = Clock(), io.StringIO()
  progress = run_io.Progress(
    1000, "train", "steps", stream, start=900, clock=clock
  )
  clock.now_s += 10.0
  progress.update(20)
  assert "920/1000 steps  92.0%  2 steps/s" in stream.getvalue()
  assert "ETA 0:40" in stream.getvalue()


def test_progress_on_a_terminal_rewrites_one_line_ten_times_a_second():
  clock, stream = Clock(), Terminal()
  with run_io.Progress(1000, "train", "steps", stream, clock=clock) as progress:
    for _ in range(1000):
      clock.now_s += 0.001
      progress.update()
  text = stream.getvalue()
  assert text.count("\n") == 1 and text.endswith("\n")
  assert 9 <= text.count("\r") <= 12
  assert "1000/1000" in text


def test_progress_without_updates_or_units_prints_nothing_or_no_error():
  clock, stream = Clock(), Terminal()
  run_io.Progress(10, "a", "b", stream, clock=clock).close()
  assert stream.getvalue() == ""
  with run_io.Progress(0, "a", "b", stream, clock=clock) as progress:
    progress.update(0)
  assert "0/0 b" in stream.getvalue()


@pytest.mark.parametrize(
  ("seconds", "text"), [(0, "0:00"), (59.7, "1:00"), (3661, "1:01:01")]
)
def test_durations_read_as_clock_times(seconds, text):
  assert run_io._duration(seconds) == text


# Tables.

ROWS = [["dspine", 3.14159, 12], ["a|b", None, jnp.int32(7)]]
HEADERS = ["method", "tau", "n"]


def test_table_aligns_text_left_and_numbers_right():
  assert run_io.table(ROWS, HEADERS).split("\n") == [
    "method    tau   n",
    "------  -----  --",
    "dspine  3.142  12",
    "a|b         -   7",
  ]
  assert run_io.table([], HEADERS) == "method  tau  n\n------  ---  -"


def test_markdown_table_escapes_bars_and_marks_numbers():
  assert run_io.markdown_table(ROWS, HEADERS).split("\n") == [
    "| method | tau | n |",
    "| --- | ---: | ---: |",
    "| dspine | 3.142 | 12 |",
    "| a\\|b | - | 7 |",
  ]


@pytest.mark.parametrize("make", [run_io.table, run_io.markdown_table])
def test_tables_refuse_a_row_of_another_length(make):
  with pytest.raises(ValueError, match="one cell for each"):
    make([["a", 1]], HEADERS)


# The entry point.

SCRIPT = """
from absl import flags
from experiments import provenance, run_io

_STEPS = flags.DEFINE_integer("steps", 1, "How many.", lower_bound=1)


def main(argv):
  del argv  # Unused.
  if _STEPS.value == 13:
    raise ValueError("--steps=13 is\\nunlucky")
  print("ran", _STEPS.value)


if __name__ == "__main__":
  run_io.run_app(main)
"""


@pytest.fixture(name="run_script", scope="module")
def fixture_run_script(tmp_path_factory):
  path = tmp_path_factory.mktemp("script") / "script.py"
  path.write_text(SCRIPT)

  def run(*args, **environment):
    return subprocess.run(
      [sys.executable, "-W", "error", str(path), *args],
      env=os.environ | {"PYTHONPATH": str(ROOT)} | environment,
      capture_output=True,
      text=True,
      timeout=120,
    )

  return run


def test_app_that_succeeds_exits_with_zero(run_script):
  done = run_script("--steps=3")
  assert (done.returncode, done.stdout, done.stderr) == (0, "ran 3\n", "")


@pytest.mark.parametrize(
  ("argument", "words"),
  [
    ("--steps=13", "--steps=13 is unlucky"),
    ("--steps=0", "steps"),
    ("--steps=many", "steps"),
    ("--stepz=3", "stepz"),
    ("stray", "unexpected arguments: stray"),
  ],
)
def test_app_tells_a_mistake_in_one_line_and_exits_with_one(
  run_script, argument, words
):
  done = run_script(argument)
  assert done.returncode == 1
  assert done.stdout == ""
  assert done.stderr.startswith("error: ")
  assert done.stderr.count("\n") == 1
  assert words in done.stderr


def test_app_shows_the_traceback_on_request(run_script):
  done = run_script("--steps=13", DSPINE_TRACEBACK="1")
  assert done.returncode == 1
  assert "Traceback" in done.stderr and "ValueError" in done.stderr


def test_importing_run_io_touches_no_device():
  code = (
    "import experiments.run_io\n"
    "from jax._src import xla_bridge\n"
    "assert not xla_bridge._backends, xla_bridge._backends\n"
  )
  subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)
