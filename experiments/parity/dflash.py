"""DFlash against z-lab's model and decode loop and SpecForge's objective."""

import numpy as np

from experiments.parity import drafter, report


def compare(folder: report.Folder) -> list[report.Record]:
  """Compares every output array of a DFlash folder."""
  check = report.Comparison(folder)
  case = drafter.load(folder)
  drafter.compare_inputs(case, check)
  drafter.compare_layout(case, check)
  for layout, params in drafter.layouts(case.params).items():
    output, logits = _forward(case, params, case.blocks)
    options = {"rows": case.keep, "layout": layout}
    check.value("hidden", output.hidden, **options)
    check.value("logits", logits, **options)
    if layout == "unrolled":
      _compare_tokens(case, check, output, logits)
  block = drafter.single_block(case, check)
  if block is not None:
    output, logits = _forward(case, case.params, block)
    check.value("infer_hidden", np.asarray(output.hidden)[0])
    check.value("infer_logits", np.asarray(logits)[0])
  _compare_loss(case, check)
  drafter.compare_decoding(case, check)
  return check.finish()


def _forward(case, params, blocks):
  return drafter.forward(
    params, case.buffers, case.tables, blocks, cfg=case.cfg
  )


def _compare_tokens(case, check, output, logits):
  proposed = drafter.propose(
    output, case.buffers, case.tables, case.params, case.blocks, cfg=case.cfg
  )
  check.exact("greedy_tokens", proposed, rows=case.keep)
  labels = drafter.labels_of_all_slots(case)
  check.value("token_ce", drafter.token_ce(logits, labels), rows=case.keep)


def _compare_loss(case, check):
  supervision = case.supervision
  # No weight on the anchor's slot, which the reference lists too.
  before = [(0, 0), (0, 0), (1, 0)]
  check.value("weight_mask", np.pad(np.asarray(supervision.valid), before))
  check.value("loss_weights", np.pad(np.asarray(supervision.weights), before))
  (loss, found), grads = drafter.gradient(
    case.params,
    case.buffers,
    case.tables,
    case.blocks,
    supervision,
    np.float32(0),
    cfg=case.cfg,
  )
  check.value("loss_total", loss)
  check.value("loss_numerator", found.sums["ce"])
  check.value("loss_denominator", found.weight)
  check.value("ce_numerator", found.sums["ce"])
  check.value("accuracy", drafter.accuracy(found.hits, found.supervised))
  drafter.compare_gradients(case, check, grads)
