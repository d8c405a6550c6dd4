"""Flags from words, with every mistake in them as one `ValueError`.

Beside what absl refuses: NaN and infinity, which pass the bounds of any flag
and are never meant. What a script's own values must fit is the script's.
"""

import math
from collections.abc import Sequence

from absl import flags


def parse(argv: Sequence[str]) -> list[str]:
  """Sets the flags that `argv` gives; returns the other words.

  Args:
    argv: the program's name, then flags, `--flagfile=FILE` among them.

  Raises:
    ValueError: a flag that does not exist, a value that it cannot have, or a
      flag file that cannot be read.
  """
  try:
    rest = flags.FLAGS(argv)
  except flags.Error as error:
    # absl puts its own "ERROR:: " before what it says of flag files.
    told = str(error).removeprefix("ERROR:: ")
    raise ValueError(f"{told} (--help lists the flags)") from None
  except UnicodeDecodeError as error:
    raise ValueError(f"--flagfile: not a text file ({error})") from None
  for name in flags.FLAGS:
    value = flags.FLAGS[name].value
    if isinstance(value, float) and not math.isfinite(value):
      raise ValueError(f"--{name}={value}: must be a finite number")
  return rest
