"""The transfer space: whitened token codes of the target's head (dspine, 3).

Row-normalised head rows are centred, projected on their leading principal
directions, whitened and normalised. Codes are frozen; readouts start at the
directions, unwhitened as published or whitened like the codes, and are trained.
Computed once on the host in float64.
"""

from typing import NamedTuple

import jax
import numpy as np
import scipy.linalg

_CHUNK_ROWS = 16384


class TransferSpace(NamedTuple):
  """The space of one head.

  Attributes:
    mean: [D], mean of the row-normalised head.
    covariance: [D, D], centred scatter matrix, not divided by V.
    eigenvalues: [R], the largest, ascending.
    directions: [D, R], their eigenvectors; the sign of a column is arbitrary.
    codes: [V, R], unit-norm whitened codes.
  """

  mean: np.ndarray
  covariance: np.ndarray
  eigenvalues: np.ndarray
  directions: np.ndarray
  codes: np.ndarray


def transfer_space(head: np.ndarray | jax.Array, rank: int) -> TransferSpace:
  """Builds the transfer space of a head.

  Args:
    head: [V, D] rows of the LM head.
    rank: R, at most D.

  Returns:
    Float32 arrays.

  Raises:
    ValueError: rank out of range, a zero row, or fewer than `rank` positive
      eigenvalues.
  """
  vocab, width = head.shape
  if not 0 < rank <= width:
    raise ValueError(f"transfer_rank={rank}: must lie in 1..{width}")
  total = np.zeros(width)
  scatter = np.zeros((width, width))
  for start in range(0, vocab, _CHUNK_ROWS):
    rows = _unit_rows(head[start : start + _CHUNK_ROWS], start)
    total += rows.sum(axis=0)
    scatter += rows.T @ rows
  mean = total / vocab
  scatter -= vocab * np.outer(mean, mean)
  eigenvalues, directions = scipy.linalg.eigh(
    scatter, subset_by_index=(width - rank, width - 1)
  )
  # Rounding leaves null directions slightly off zero, on either side.
  least = width * np.finfo(np.float32).eps * eigenvalues[-1]
  if eigenvalues[0] <= least:
    positive = int((eigenvalues > least).sum())
    raise ValueError(
      f"transfer_rank={rank}: only {positive} of the head's principal"
      " directions have a positive eigenvalue"
    )
  codes = np.empty((vocab, rank), np.float32)
  for start in range(0, vocab, _CHUNK_ROWS):
    rows = _unit_rows(head[start : start + _CHUNK_ROWS], start) - mean
    code = rows @ directions / np.sqrt(eigenvalues)
    code /= np.linalg.norm(code, axis=1, keepdims=True)
    codes[start : start + _CHUNK_ROWS] = code
  return TransferSpace(
    mean=mean.astype(np.float32),
    covariance=scatter.astype(np.float32),
    eigenvalues=np.asarray(eigenvalues, np.float32),
    directions=np.asarray(directions, np.float32),
    codes=codes,
  )


def principal(space: TransferSpace) -> np.ndarray:
  """U [D, R], orthonormal: the published start of the readouts."""
  return space.directions


def whitened(space: TransferSpace) -> np.ndarray:
  """U Lambda^{-1/2} [D, R], whose features are those of the codes.

  Features do not depend on its scale, but how far an optimiser's step turns
  them does: the norm is that of U.
  """
  columns = space.directions / np.sqrt(space.eigenvalues)
  norms = np.linalg.norm(space.directions), np.linalg.norm(columns)
  return columns * (norms[0] / norms[1])


# By `DSpineOptions.readout_init`.
READOUTS = {"principal": principal, "whitened": whitened}


def _unit_rows(rows: np.ndarray | jax.Array, first: int) -> np.ndarray:
  rows = np.asarray(rows, np.float64)
  norms = np.linalg.norm(rows, axis=1, keepdims=True)
  if not (norms > 0).all():
    row = first + int(np.argmin(norms))
    raise ValueError(f"head row {row} is zero: its direction is undefined")
  return rows / norms
