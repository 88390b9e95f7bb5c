"""From the batches of a step to its attempts, and back: numbers along each attempt, whatever batch a token lies in.

one tensor [T] for each batch -> gather -> [M], attempt by attempt, in time -> scatter -> one tensor [T] for each batch
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainedTokens:
    """The trained tokens of a step: attempt by attempt, each in time, whatever batches they lie in.

    N counts the attempts that were packed (those with an advantage, group by group), M their trained tokens. What
    looks at a whole step or along an attempt (returns, generalised advantages, covariances) works on arrays [M], and
    `scatter` brings its result back to the batches. Rows are counted over all batches, end to end.
    """

    counts_N: Int64s  # trained tokens of each attempt; they sum to M
    row_M: Int64s
    end_N: Int64s  # the row of its last token; -1: left out
    length_B: list[int]  # rows of each batch

    @classmethod
    def none(cls, num_attempts: int) -> TrainedTokens:
        """Of attempts that left nothing to train, and so no batch."""
        zeros_N = np.zeros(num_attempts, np.int64)
        return cls(counts_N=zeros_N, row_M=zeros_N[:0], end_N=zeros_N - 1, length_B=[])

    def __len__(self) -> int:
        return len(self.row_M)

    @property
    def attempt_M(self) -> Int64s:
        """The attempt that each token belongs to."""
        return np.repeat(np.arange(len(self.counts_N)), self.counts_N)

    def gather(self, columns: Sequence[Tensor]) -> NDArray[np.float64]:
        """One tensor [T] for each batch -> its values at the trained tokens, float64 [M]."""
        return _end_to_end(columns)[self.row_M]

    def ends(self, columns: Sequence[Tensor]) -> NDArray[np.float64]:
        """One tensor [T] for each batch -> its values at the attempts' last tokens, float64 [N]; NaN where left out."""
        return np.where(self.end_N >= 0, np.append(_end_to_end(columns), np.nan)[self.end_N], np.nan)

    def scatter(self, value_M: NDArray[np.generic]) -> list[Tensor]:
        """Values [M] -> one tensor [T] for each batch, 0 (False) elsewhere: float32, or bool for bools."""
        kind = np.bool_ if value_M.dtype == np.bool_ else np.float32
        value_T = np.zeros(sum(self.length_B), kind)
        value_T[self.row_M] = value_M
        return list(torch.from_numpy(value_T).split(self.length_B)) if self.length_B else []


def _end_to_end(columns: Sequence[Tensor]) -> NDArray[np.float64]:
    if not columns:
        return np.zeros(0)
    return torch.cat([column.detach().to("cpu", torch.float64) for column in columns]).numpy()
