"""What the tests of the scripts share."""

import pytest

from tests import tiny_folder


@pytest.fixture(name="tiny", scope="session")
def fixture_tiny(tmp_path_factory) -> tiny_folder.Folders:
  """Folders that no test writes to."""
  return tiny_folder.write_all(tmp_path_factory.mktemp("tiny"))
