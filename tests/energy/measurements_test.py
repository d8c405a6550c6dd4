"""CSV files of many tools, and the reconstructed grid."""

import csv

import numpy as np
import pytest

from energy import architecture, measurements

MODELS = architecture.shipped_models()
HEADER = "model,input_tokens,output_tokens,joules"


def write(path, text, encoding="utf-8"):
  path.write_bytes(text.encode(encoding))
  return path


def test_byte_order_mark_crlf_separators_and_blank_rows(tmp_path):
  text = (
    f"{HEADER}\r\n\r\n"
    'Llama 3.1 8B,"1,024",64,"2,500.5"\r\n'
    ",,,\r\n"
    'OPT 1.3B, 64 ,"1,000",3e1\r\n'
  )
  data = measurements.read_csv(
    write(tmp_path / "a.csv", text, "utf-8-sig"), MODELS
  )
  assert data.models == ("Llama 3.1 8B", "OPT 1.3B")
  assert data.families == ("Llama", "OPT")
  assert data.input_tokens.tolist() == [1024, 64]
  assert data.output_tokens.tolist() == [64, 1000]
  assert data.joules.tolist() == [2500.5, 30.0]
  assert data.cached_tokens.tolist() == [0, 0]
  assert data.concurrency is None
  assert data.architecture.hidden_size.tolist() == [4096, 2048]


@pytest.mark.parametrize(
  ("unit", "joules"), [("J", 2.0), ("kJ", 2e3), ("mJ", 2e-3), ("Wh", 7200.0)]
)
def test_units(tmp_path, unit, joules):
  path = write(tmp_path / "a.csv", f"{HEADER}\nOPT 1.3B,10,4,2\n")
  data = measurements.read_csv(path, MODELS, unit=unit)
  assert data.joules[0] == pytest.approx(joules)
  per_token = measurements.read_csv(path, MODELS, unit=unit, per_token=True)
  assert per_token.joules[0] == pytest.approx(4 * joules)


def test_columns_rows_and_constants(tmp_path):
  path = write(
    tmp_path / "a.csv",
    "Name,out,E (J),batch,GPU\nOPT 1.3B,4,2,8,H100\nOPT 1.3B,4,3,8,A100\n"
    "unknown,4,3,8,H100\n",
  )
  columns = {
    "model": "Name",
    "output_tokens": "out",
    "energy": "E (J)",
    "concurrency": "batch",
  }
  data = measurements.read_csv(
    path,
    MODELS,
    columns=columns,
    where={"GPU": "H100"},
    input_tokens=300,
    skip_unknown_models=True,
  )
  assert data.joules.tolist() == [2]
  assert data.input_tokens.tolist() == [300]
  assert data.concurrency.tolist() == [8]
  with pytest.raises(ValueError, match="no column 'input_tokens'"):
    measurements.read_csv(path, MODELS, columns=columns)
  with pytest.raises(ValueError, match=r"line 4: model 'unknown' has no arch"):
    measurements.read_csv(path, MODELS, columns=columns, input_tokens=1)
  with pytest.raises(ValueError, match="no column 'TP'"):
    measurements.read_csv(
      path, MODELS, columns=columns, input_tokens=1, where={"TP": "1"}
    )


@pytest.mark.parametrize(
  ("text", "message"),
  [
    ("", "empty file"),
    (HEADER + "\n", "no rows of measurements"),
    ("model,input_tokens,joules\n", "no column 'output_tokens'"),
    (f"{HEADER}\nOPT 1.3B,1,2,x\n", "line 2: joules='x': not a number"),
    (f'{HEADER}\nOPT 1.3B,1,2,"1,5"\n', "line 2: joules='1,5': not a number"),
    (f"{HEADER}\nOPT 1.3B,1,2,\n", "line 2: joules='': not a number"),
    (f"{HEADER}\nOPT 1.3B,1,2,nan\n", "line 2: joules='nan': must be finite"),
    (f"{HEADER}\nOPT 1.3B,1,2,-3\n", "line 2: energy -3: must be positive"),
    (f"{HEADER}\nOPT 1.3B,-1,2,3\n", "line 2: input_tokens=-1.0: must not"),
    (f"{HEADER}\nOPT 1.3B,1,2\n", "line 2: not 4 cells"),
    (f"{HEADER}\nOPT 1.3B,1,2,3,4\n", "line 2: not 4 cells"),
    (
      f"{HEADER},cached_tokens\nOPT 1.3B,1,2,3,4\n",
      "line 2: cached_tokens=4.0: more than input_tokens=1.0",
    ),
    (
      f"{HEADER},concurrency\nOPT 1.3B,1,2,3,0\n",
      "line 2: concurrency 0: must be positive",
    ),
  ],
)
def test_bad_files_name_place_and_reason(tmp_path, text, message):
  path = write(tmp_path / "bad.csv", text)
  with pytest.raises(ValueError) as error:
    measurements.read_csv(path, MODELS)
  assert str(error.value).startswith(f"{path}: ")
  assert message in str(error.value)


def test_what_flags_contradict(tmp_path):
  path = write(tmp_path / "a.csv", f"{HEADER}\nOPT 1.3B,1,0,2\n")
  with pytest.raises(ValueError, match="a constant would override it"):
    measurements.read_csv(path, MODELS, input_tokens=3)
  with pytest.raises(ValueError, match="line 2: joules per output token with"):
    measurements.read_csv(path, MODELS, per_token=True)


def test_a_missing_file_and_an_unknown_unit(tmp_path):
  with pytest.raises(ValueError, match="no such file"):
    measurements.read_csv(tmp_path / "none.csv", MODELS)
  with pytest.raises(ValueError, match="unit='BTU'"):
    measurements.read_csv(tmp_path / "none.csv", MODELS, unit="BTU")


def test_the_grid_is_the_published_formula():
  data = measurements.reconstructed_grid()
  assert len(data.joules) == 637
  assert len(set(data.models)) == 13
  path = architecture.DATASETS / "sweetspot_reconstructed_grid_637.csv"
  with path.open() as file:
    rows = list(csv.DictReader(file))
  printed = [float(row["energy_J_per_request_reconstructed"]) for row in rows]
  np.testing.assert_allclose(data.joules, printed, rtol=1e-5)
  for name, column in (("hidden", 0), ("layers", 1), ("kv_heads", 3)):
    listed = [float(row[name]) for row in rows]
    np.testing.assert_array_equal(data.architecture[column], listed)
