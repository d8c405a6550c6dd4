"""Training rows from files of conversations, kept below the work directory.

Tokenising is done once for the same files, tokenizer, template and lengths; a
run that goes on, or another process of the run, reads what is there. What a
line may hold and what is supervised is `dspine_jax/data/chats.py`'s.
"""

import hashlib
import itertools
import pathlib
from typing import Any, NamedTuple

import jax

from dspine_jax.data import chats
from dspine_jax.data import rows as rows_lib
from experiments import run_io, targets
from experiments.stages import devices

PACKINGS = ("pad", "pack")


class Order(NamedTuple):
  """What rows are made of; the values of flags.

  Attributes:
    paths: JSONL files of conversations.
    max_length: tokens of a document, or of a packed row, at most.
    packing: "pad" for a document a row, "pack" for as many as fit.
    skips_bad_lines: whether lines at fault are left out and counted.
  """

  paths: tuple[str, ...]
  max_length: int
  packing: str
  skips_bad_lines: bool = False


def check(target: targets.NamedTarget, order: Order) -> chats.Format:
  """How the target reads conversations.

  Raises:
    ValueError: no chat template, more tokens than the target has positions, or
      fewer than an anchor needs.
  """
  most = target.model.cfg.max_positions
  if not 2 <= order.max_length <= most:
    raise ValueError(
      f"--max_length={order.max_length}: must be in 2..{most}, the positions of"
      f" --target={target.name}"
    )
  try:
    return targets.chat_format(target)
  except ValueError as error:
    raise ValueError(f"--chats={','.join(order.paths)}: {error}") from None


def origin(form: chats.Format, order: Order) -> str:
  """A digest of all that rows depend on; reads the files once.

  Raises:
    ValueError: a file that cannot be read.
  """
  digest = hashlib.sha256()
  for path in order.paths:
    try:
      with open(path, "rb") as file:
        digest.update(hashlib.file_digest(file, "sha256").digest())
    except OSError as error:
      raise ValueError(f"{path}: cannot be read ({error.strerror})") from None
  made_by = form.tokenizer.to_str(), *form[1:], *order[1:]
  digest.update(repr(made_by).encode())
  return digest.hexdigest()[:16]


def training_rows(
  form: chats.Format, order: Order, folder: pathlib.Path
) -> rows_lib.Rows:
  """Rows of all conversations, memory-mapped, with a table of what they hold.

  With several processes all call it: the first one makes them.

  Args:
    form: of the target.
    order: of the rows.
    folder: of the rows themselves, which all processes see.

  Raises:
    ValueError: naming file and line, as `chats.read` and `chats.tokenize`; or
      what is in the folder is damaged.
  """

  def make():
    if jax.process_index() == 0 and not folder.exists():
      rows_lib.save(folder, *_make(form, order))

  devices.together(make)
  rows, about = devices.together(lambda: rows_lib.load(folder))
  if jax.process_index() == 0:
    print(run_io.table([list(about.values())], list(about)), flush=True)
  return rows


def _make(
  form: chats.Format, order: Order
) -> tuple[rows_lib.Rows, dict[str, Any]]:
  """The rows, and what is told about them."""
  first: ValueError | None = None
  left_out = 0

  def leave_out(error: ValueError) -> None:
    nonlocal first, left_out
    first, left_out = first or error, left_out + 1

  on_bad = leave_out if order.skips_bad_lines else None
  total = sum(pathlib.Path(path).stat().st_size for path in order.paths)
  with run_io.Progress(total, "tokenise", "bytes") as progress:
    conversations = itertools.chain.from_iterable(
      chats.read(path, on_bad=on_bad, progress=progress.update)
      for path in order.paths
    )
    documents, counts = chats.tokenize(
      conversations, form, max_length=order.max_length, on_bad=on_bad
    )
  if first is not None:
    print(f"{left_out} lines left out; the first: {first}", flush=True)
  if order.packing == "pack":
    rows = rows_lib.pack(documents, order.max_length)
  else:
    rows = rows_lib.pad(documents)
  return rows, {
    "conversations": counts.conversations,
    "lines left out": left_out,
    "documents": counts.documents,
    "cut": counts.cut,
    "dropped": counts.dropped,
    "tokens": len(documents.tokens),
    "supervised": float(documents.loss_mask.mean()),
    "rows": len(rows.tokens),
    "row length": rows.tokens.shape[1],
    "fill": rows.fill,
  }
