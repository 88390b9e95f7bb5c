"""Packed sequences cut into chunks of equal size: a `Layout` goes in, the order of computation comes out.

    N chunks    M positions in a chunk    J heads that share a key

A chunk never crosses a sequence's end; what is left of its last chunk is padding, which holds zeros. Chunks are ordered
by level: every chunk of level l goes on from one of level l - 1, the one before it in its sequence, or the last one of
its prefix. So all chunks of a level are one batch, whichever sequences they belong to.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.types import Layout

SIZES = (16, 32, 64)
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, eq=False)
class Chunks:
    """The chunks of one layout, as index tensors on one device."""

    size: int
    num_sequences: int
    num_chunks: int
    token_N: Int64s  # each chunk's first token
    valid_N: Int64s  # how many of its positions are tokens
    previous_N: Int64s  # the chunk before it; -1 at the start of a text
    order_N: Int64s  # the chunks of the first sequence in order, then those of the second, ...
    first_S: Int64s  # where each sequence's begin in that list
    count_S: Int64s  # and how many there are
    parents_S: Int64s
    levels: tuple[Level, ...]
    unread: tuple[Tensor, Tensor]  # sequences whose text has no token, and those whose start they end with
    rows: Tensor  # [N * M] token at each position; 0 for padding
    padding: Tensor  # positions of [N * M] that are padding
    slots: Tensor  # [T] where in [N * M] each token went

    def rows_of(self, heads: int) -> Tensor:
        """Index [N * J * M] into [T * J]: heads outside positions."""
        inner = torch.arange(heads, device=self.rows.device)
        return (self.rows.view(-1, 1, self.size) * heads + inner[:, None]).flatten()

    def padding_of(self, heads: int) -> Tensor:
        """Positions of [N * J * M] that are padding."""
        chunk, position = self.padding // self.size, self.padding % self.size
        inner = torch.arange(heads, device=self.rows.device)
        return ((chunk[:, None] * heads + inner) * self.size + position[:, None]).flatten()

    def slots_of(self, heads: int) -> Tensor:
        """Index [T * J] into [N * J * M]."""
        chunk, position = self.slots // self.size, self.slots % self.size
        inner = torch.arange(heads, device=self.rows.device)
        return ((chunk[:, None] * heads + inner) * self.size + position[:, None]).flatten()


@dataclass(frozen=True, slots=True, eq=False)
class Level:
    """Chunks `first` to `end` - 1, and where in the level before each one's state comes from.

    `source` is None where chunk i goes on from chunk i of the level before. In the first level `root` names the
    sequence whose start a chunk takes. `ends`: which of these chunks (by place in the level) end which sequences.
    """

    first: int
    end: int
    source: Tensor | None
    root: Tensor | None
    ends: tuple[Tensor, Tensor] | None

    def takes_all(self, before: Level) -> bool:
        """Whether chunk i goes on from chunk i of the level before, for all of those."""
        return self.source is None and self.end - self.first == before.end - before.first


def chunk_size(layout: Layout, key_channels: int, value_channels: int) -> int:
    """The size of chunk that costs least arithmetic, padding counted: short sequences take short chunks.

    A chunk of M positions costs 3 M C C_v for what meets its state and M M (2 C + 2 C_v) inside; and the passes over
    the state itself, which are bound by memory, take as long as 128 C C_v (measured).
    """
    lengths_S = layout.lengths_S

    def cost(size: int) -> int:
        chunks = int((-(-lengths_S // size)).sum())
        outside = (3 * size + 128) * key_channels * value_channels
        return chunks * (outside + 2 * size * size * (key_channels + value_channels))

    return min(SIZES, key=cost)


@lru_cache(maxsize=32)
def chunks_of(layout: Layout, size: int, device: torch.device) -> Chunks:
    """Cut a layout into chunks of `size` positions. Layers of one pass share the result."""
    lengths_S, parents_S = layout.lengths_S, np.asarray(layout.parents, np.int64).reshape(len(layout.lengths))
    count_S = -(-lengths_S // size)
    base_S = np.where(parents_S >= 0, count_S[parents_S], 0) if len(parents_S) else count_S
    sequence_N = np.repeat(np.arange(len(count_S)), count_S)
    first_S = np.cumsum(count_S) - count_S
    part_N = np.arange(len(sequence_N)) - first_S[sequence_N]
    level_N = base_S[sequence_N] + part_N
    # longest first: those that go on are then the first of the level before, and keep their places
    order = np.lexsort((sequence_N, -(base_S + count_S)[sequence_N], level_N))
    place = np.empty_like(order)
    place[order] = np.arange(len(order))
    sequence_N, part_N, level_N = sequence_N[order], part_N[order], level_N[order]

    owner_S = np.where(count_S > 0, np.arange(len(count_S)), parents_S)  # whose last chunk ends the text
    known_S = (owner_S >= 0) & (count_S[owner_S] > 0)
    last_S = np.full(len(count_S), -1, np.int64)
    last_S[known_S] = place[(first_S + count_S - 1)[owner_S[known_S]]]
    root_S = np.where(parents_S >= 0, parents_S, np.arange(len(count_S)))
    opens_N = part_N == 0
    parent_N = parents_S[sequence_N]
    previous_N = np.full(len(order), -1, np.int64)
    previous_N[~opens_N] = place[(first_S[sequence_N] + part_N - 1)[~opens_N]]
    previous_N[opens_N & (parent_N >= 0)] = last_S[parent_N[opens_N & (parent_N >= 0)]]

    token_N = layout.starts_S[sequence_N] + part_N * size
    valid_N = np.minimum(lengths_S[sequence_N] - part_N * size, size)
    offset_M = np.arange(size)
    padding_NM = offset_M >= valid_N[:, None]
    rows_NM = np.where(padding_NM, 0, token_N[:, None] + offset_M)
    slots_T = np.empty(layout.num_tokens, np.int64)
    slots_T[rows_NM[~padding_NM]] = np.flatnonzero(~padding_NM)
    with torch.inference_mode(False):  # training may meet the same layout after sampling
        return Chunks(
            size=size,
            num_sequences=len(count_S),
            num_chunks=len(order),
            token_N=token_N,
            valid_N=valid_N,
            previous_N=previous_N,
            order_N=place,
            first_S=first_S,
            count_S=count_S,
            parents_S=parents_S,
            levels=tuple(_levels(level_N, previous_N, root_S[sequence_N], last_S, device)),
            unread=(
                torch.from_numpy(np.flatnonzero(last_S < 0)).to(device),
                torch.from_numpy(root_S[last_S < 0]).to(device),
            ),
            rows=torch.from_numpy(rows_NM.ravel()).to(device),
            padding=torch.from_numpy(np.flatnonzero(padding_NM)).to(device),
            slots=torch.from_numpy(slots_T).to(device),
        )


def _levels(level_N: Int64s, previous_N: Int64s, root_N: Int64s, last_S: Int64s, device: torch.device) -> list[Level]:
    bounds = np.searchsorted(level_N, np.arange(int(level_N[-1]) + 2 if len(level_N) else 1))
    levels: list[Level] = []
    before = 0
    for level, (first, end) in enumerate(zip(bounds[:-1].tolist(), bounds[1:].tolist(), strict=True)):
        source_n = previous_N[first:end] - before
        kept = np.array_equal(source_n, np.arange(end - first))
        ending_S = np.flatnonzero((last_S >= first) & (last_S < end))
        levels.append(
            Level(
                first=first,
                end=end,
                source=None if level == 0 or kept else torch.from_numpy(source_n).to(device),
                root=torch.from_numpy(root_N[first:end].copy()).to(device) if level == 0 else None,
                ends=(torch.from_numpy(last_S[ending_S] - first).to(device), torch.from_numpy(ending_S).to(device))
                if len(ending_S)
                else None,
            )
        )
        before = first
    return levels
