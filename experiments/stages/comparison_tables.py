"""The results of compare_drafters as Markdown tables."""

import itertools

import numpy as np

from experiments import run_io
from experiments.stages import comparison, published


def markdown(results, batches, temperatures) -> str:
  """All tables as text."""
  prompts = results["prompts"].values()
  parts = [
    f"Target {results['target']}, {results['steps']} steps,"
    f" {results['training_answers']} answers,"
    f" {sum(one['all'] for one in prompts)} prompts"
    f" ({sum(one['looping'] for one in prompts)} looping);"
    " mean advancement with 95 % intervals over seeds and prompts."
  ]
  for table in results["tables"]:
    lines = table["methods"]
    seeds = ", ".join(map(str, table["seeds"]))
    parts.append(f"## {table['title']}, seeds {seeds}")
    parts.append(advancement_table(lines, temperatures))
    correlations = ", ".join(
      f"{r:.3f} at {key}" for key, r in table["proxy_correlation"].items()
    )
    parts.append(
      "Expected: the teacher-forced proxy. Its correlation with the measured"
      f" advancement over methods and seeds is {correlations}."
    )
    if batches:
      parts.append(speed_table(lines, batches))
    parts.append(gain_table(table["gains"], lines, temperatures))
    if len(results["prompts"]) > 1:
      parts.append(benchmark_table(lines, results["prompts"], temperatures))
  return "\n\n".join(parts) + "\n"


def advancement_table(lines, temperatures) -> str:
  """Advancement of each method, its groups, and its own rule's."""
  headers = ["method", "proposals"]
  for temperature in temperatures:
    headers += [f"T={temperature:g}", "expected"]
    if temperature == 0:
      headers += ["non-looping", "looping", "equal outputs"]
    else:
      headers.append(f"own rule at T={temperature:g} (*)")
  rows = []
  for line in lines:
    row = [line["method"], line["proposals"]]
    for temperature in temperatures:
      key = f"T={temperature:g}"
      groups = line["advancement"][key]
      row += [
        comparison.interval_text(groups["all"]),
        f"{np.mean(line['proxy'][key]):.2f}",
      ]
      if temperature == 0:
        row += [
          comparison.interval_text(groups["non_looping"]),
          comparison.interval_text(groups["looping"]),
        ]
        row.append(f"{line['lossless']['equal']}/{line['lossless']['prompts']}")
      else:
        own = line["own_rule"]["advancement"].get(key)
        row.append(
          "as left" if own is None else comparison.interval_text(own["all"])
        )
    rows.append(row)
  table = run_io.markdown_table(rows, headers)
  if max(temperatures) == 0:
    return table
  rules = "; ".join(
    f"{method}: {rule['rule'].replace('_', ' ')}, {rule['proposal']} draft"
    for method, rule in published.RULES.items()
  )
  return (
    f"{table}\n\n(*) {rules}. Columns T > 0: rejection sampling with the"
    " default proposal."
  )


def speed_table(lines, batches) -> str:
  """Parameters, milliseconds of a round, tokens/s over autoregressive."""
  headers = ["method", "backbone, M", "own part, M", "draft, ms", "round, ms"]
  headers += [f"tokens/s over autoregressive, batch {b}" for b in batches]
  rows = []
  for line in lines:
    counts = line["parameters"]
    own = sum(n for part, n in counts.items() if part != "backbone")
    parts = line["speed"].get("1", {}).get("part_seconds", {})
    draft = sum(
      parts[name] for name in parts if name not in ("verify", "commit", "round")
    )
    rows.append(
      [
        line["method"],
        f"{counts['backbone'] / 1e6:.2f}",
        f"{own / 1e6:.2f}",
        f"{1e3 * draft:.2f}" if parts else "-",
        f"{1e3 * parts['round']:.2f}" if parts else "-",
        *(f"{line['speed'][str(batch)]['ratio']:.2f}" for batch in batches),
      ]
    )
  return run_io.markdown_table(rows, headers)


def gain_table(gains, lines, temperatures) -> str:
  """The last method over the others, the paper's figure beside."""
  headers = [f"{lines[-1]['method']} over"]
  headers += [f"T={temperature:g}" for temperature in temperatures]
  if 0 in temperatures:
    headers.append("T=0, non-looping")
  headers.append("paper, T=0")
  rows = []
  for line, by_temperature in zip(lines[:-1], gains.values(), strict=True):
    row = [line["method"]]
    row += [
      comparison.interval_text(by_temperature[f"T={temperature:g}"]["all"])
      for temperature in temperatures
    ]
    if 0 in temperatures:
      row.append(comparison.interval_text(by_temperature["T=0"]["non_looping"]))
    paper = published.DSPINE_OVER.get(line["method"])
    is_published = lines[-1]["method"] == "dspine" and paper is not None
    rows.append([*row, f"{paper:.3f}" if is_published else "-"])
  return run_io.markdown_table(rows, headers)


def benchmark_table(lines, prompts, temperatures) -> str:
  """One column a benchmark, one row a method and temperature."""
  headers = ["mean advancement", *prompts, "mean"]
  rows = []
  for temperature, line in itertools.product(temperatures, lines):
    key = f"T={temperature:g}"
    cells = [line["benchmarks"][key][name]["mean"] for name in prompts]
    cells.append(line["advancement"][key]["all"]["mean"])
    rows.append([f"{line['method']} {key}", *(f"{cell:.2f}" for cell in cells)])
  return run_io.markdown_table(rows, headers)
