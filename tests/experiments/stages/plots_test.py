import matplotlib.image
import pytest

from experiments.stages import plots


def picture(path):
  return matplotlib.image.imread(path)[..., :3]


def test_pictures_show_their_values(tmp_path):
  shown = []
  for name, high in (("low", 0.2), ("high", 0.9)):
    plots.acceptance_by_position(
      tmp_path / f"{name}.png", {"dflash": [high, 0.1]}, "A title"
    )
    shown.append(picture(tmp_path / f"{name}.png"))
  assert shown[0].shape == shown[1].shape
  assert (shown[0] != shown[1]).any()


def test_horizontal_bars_show_values_groups_and_gaps(tmp_path):
  def interval(mean):
    return {"mean": mean, "low": mean - 1, "high": mean + 1}

  absent = dict.fromkeys(("mean", "low", "high"), float("nan"))
  shown = []
  for name, value in (("near", -2.0), ("far", -9.0)):
    first = {"a": interval(value), "b": interval(3.0)}
    groups = {"one": first, "two": first | {"b": absent}}
    plots.intervals(tmp_path / f"{name}.png", groups, "change, %", "A title")
    shown.append(picture(tmp_path / f"{name}.png"))
  assert shown[0].shape == shown[1].shape
  assert (shown[0] != shown[1]).any()


# What NaN becomes in a JSON file.
@pytest.mark.parametrize("empty", [None, float("nan")])
def test_values_that_are_not_there_leave_a_readable_picture(tmp_path, empty):
  plots.acceptance_by_position(
    tmp_path / "a.png", {"dflash": [0.5, 0.2], "dspine": [empty, empty]}, "A"
  )
  plots.advancement_and_speed(
    tmp_path / "b.png",
    {"dflash": 2.0, "dspine": empty},
    {"autoregressive": 10.0, "dflash": 20.0, "dspine": 30.0},
    "B",
  )
  for name in "ab":
    assert picture(tmp_path / f"{name}.png").std() > 0.01
