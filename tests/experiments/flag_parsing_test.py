"""Mistakes in flags become one plain `ValueError`."""

import pytest
from absl import flags

from experiments import flag_parsing

NAME = "flag_parsing_test_share"


@pytest.fixture(autouse=True)
def a_flag_of_its_own():
  flags.DEFINE_float(NAME, None, "A share.", lower_bound=0.0)
  yield
  delattr(flags.FLAGS, NAME)


@pytest.mark.parametrize("value", ["nan", "inf", "1e999"])
def test_a_value_that_is_not_finite_is_refused_with_its_flag(value):
  shown = value.replace("1e999", "inf")
  with pytest.raises(ValueError, match=f"--{NAME}={shown}: must be a finite"):
    flag_parsing.parse(["script", f"--{NAME}={value}"])
  assert flag_parsing.parse(["script", f"--{NAME}=1e9", "rest"]) == [
    *("script", "rest")
  ]


def test_a_flag_file_that_cannot_be_read_is_told_plainly(tmp_path):
  path = tmp_path / "mine.flags"
  with pytest.raises(ValueError, match="^Unable to open flagfile") as caught:
    flag_parsing.parse(["script", f"--flagfile={path}"])
  assert str(path) in str(caught.value)
  path.write_bytes(b"\xff\xfe\x00")
  with pytest.raises(ValueError, match="^--flagfile: not a text file"):
    flag_parsing.parse(["script", f"--flagfile={path}"])
