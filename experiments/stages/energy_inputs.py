"""What the energy scripts take: token counts, models, fitted laws, tables."""

from collections.abc import Sequence

from absl import flags

from energy import architecture, prediction

_SUFFIXES = {"k": 1e3, "m": 1e6}


def tokens(flag: flags.FlagHolder) -> float:
  """A number of tokens: 68000, 68k or 1.5M; ValueError names the flag."""
  return parse_tokens(flag.value, flag.name)


def parse_tokens(text: str, name: str) -> float:
  """`tokens` of a text; `name` of its flag begins the error."""
  found = text.strip().replace(",", "").replace("_", "").lower()
  factor = _SUFFIXES.get(found[-1:], 1.0)
  try:
    value = float(found.rstrip("km")) * factor
  except ValueError:
    raise ValueError(
      f"--{name}={text}: a number of tokens is needed, such as 68000 or 68k"
    ) from None
  if not 0 <= value < 1e12:
    raise ValueError(f"--{name}={text}: must be finite and not negative")
  return value


def model(
  name: flags.FlagHolder, config: flags.FlagHolder
) -> architecture.Model:
  """The model of --model or --config, exactly one of which is given."""
  if (name.value is None) == (config.value is None):
    raise ValueError("one of --model and --config is needed")
  if config.value is not None:
    return architecture.from_file(config.value)
  return shipped_model(name.value, "--model")


def shipped_model(name: str, where: str) -> architecture.Model:
  """A shipped model; ValueError with the list begins with `where`."""
  models = architecture.shipped_models()
  if name not in models:
    raise ValueError(f"{where}={name}: not among {', '.join(sorted(models))}")
  return models[name]


def models_with(configs: Sequence[str]) -> dict[str, architecture.Model]:
  """The shipped models and those of --configs: NAME=FILE each."""
  models = architecture.shipped_models()
  for entry in configs:
    name, equals, path = entry.partition("=")
    if not equals:
      raise ValueError(f"--configs={entry}: NAME=FILE is needed")
    models[name] = architecture.from_file(path)._replace(name=name)
  return models


def mapping(flag: flags.FlagHolder) -> dict[str, str]:
  """KEY=VALUE,... of a flag that is a list or may be given several times."""
  found = {}
  for pair in ",".join(flag.value).split(",") if flag.value else ():
    key, equals, value = pair.partition("=")
    if not equals:
      raise ValueError(f"--{flag.name}={pair}: KEY=VALUE is needed")
    found[key.strip()] = value.strip()
  return found


def fitted_law(
  file: flags.FlagHolder, name: flags.FlagHolder
) -> prediction.FittedLaw:
  """The law --law of the file --coefficients, or of the shipped ones."""
  shipped = file.value is None
  found = prediction.shipped() if shipped else prediction.read(file.value)
  chosen = name.value
  if not shipped and not name.present and len(found) == 1:
    chosen = next(iter(found))
  if chosen not in found:
    raise ValueError(f"--{name.name}={chosen}: not among {sorted(found)}")
  return found[chosen]
