import pytest

from experiments.stages import answers


def test_temperatures_are_numbers():
  assert answers.parse_temperatures(["0", "0.5", "1e0"]) == [0.0, 0.5, 1.0]
  with pytest.raises(ValueError, match="^--temperatures: at least one"):
    answers.parse_temperatures([])


@pytest.mark.parametrize("value", ["hot", "-0.1", "nan", ""])
def test_a_temperature_that_is_none_names_flag_and_values(value):
  with pytest.raises(ValueError, match=f"^--temperatures=1,{value}: "):
    answers.parse_temperatures(["1", value])
