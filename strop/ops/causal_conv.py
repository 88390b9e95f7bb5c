"""A short causal convolution over packed sequences: each channel by itself, over a token and the W - 1 before it.

    T packed tokens    S sequences    F channels    W taps

What lies before a sequence's first token is its prefix's end, or the `tails` that a cache kept, or zero. A sequence's
first W - 1 rows are computed apart from all others, so no neighbour's number enters its arithmetic.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.types import Layout

Int64s = NDArray[np.int64]


def causal_conv(x_TF: Tensor, weight_FW: Tensor, layout: Layout, tails_SWF: Tensor | None = None) -> Tensor:
    """y_t = sum_d weight[:, W - 1 - d] * x_(t-d) within each text: [T, F] -> [T, F].

    A text is a sequence after its prefix. `tails_SWF` [S, W - 1, F] holds the inputs before each text, newest last;
    those of branches are not read. All in one dtype. Raises ValueError when shapes do not fit.
    """
    F, W = weight_FW.shape
    if x_TF.shape != (layout.num_tokens, F) or W < 2:
        raise ValueError(f"x {tuple(x_TF.shape)} and weight {tuple(weight_FW.shape)} for {layout.num_tokens} tokens")
    if tails_SWF is not None and tails_SWF.shape != (len(layout.lengths), W - 1, F):
        raise ValueError(f"tails {tuple(tails_SWF.shape)}: {(len(layout.lengths), W - 1, F)} are needed")
    return _CausalConv.apply(x_TF, weight_FW, tails_SWF, _edges(layout, W, x_TF.device))


def conv_tails(x_TF: Tensor, layout: Layout, taps: int, tails_SWF: Tensor | None = None) -> Tensor:
    """The last W - 1 inputs of every text [S, W - 1, F], newest last: what a cache keeps. No gradient."""
    S = len(layout.lengths)
    sequence = np.repeat(np.arange(S), taps - 1)
    position = layout.lengths_S[sequence] - (taps - 1) + np.tile(np.arange(taps - 1), S)
    sources = _Sources.of(layout, sequence, position, taps - 1, x_TF.device)
    return sources.read(x_TF.detach(), None if tails_SWF is None else tails_SWF.detach()).view(S, taps - 1, -1)


@dataclass(frozen=True, slots=True, eq=False)
class _Sources:
    """Where B inputs lie: rows of x, rows of the flattened tails, or nowhere (they are 0)."""

    row_B: Tensor
    tail_B: Tensor
    in_x_B: Tensor  # bool
    in_tails_B: Tensor  # bool

    @classmethod
    def of(cls, layout: Layout, sequence_B: Int64s, position_B: Int64s, tail: int, device: torch.device) -> _Sources:
        """Position p of a sequence counts from its own first token; below 0 lies its prefix, then the tail."""
        parents_S = np.asarray(layout.parents, np.int64)
        before_B = (position_B < 0) & (parents_S[sequence_B] >= 0)
        root_B = np.where(before_B, parents_S[sequence_B], sequence_B)
        position_B = np.where(before_B, position_B + layout.lengths_S[root_B], position_B)
        in_x_B, in_tails_B = position_B >= 0, (position_B < 0) & (position_B >= -tail)
        row_B = np.where(in_x_B, layout.starts_S[root_B] + position_B, 0)
        tail_B = np.where(in_tails_B, root_B * tail + tail + position_B, 0)
        with torch.inference_mode(False):  # training may meet the same layout after sampling
            return cls(*(torch.from_numpy(a).to(device) for a in (row_B, tail_B, in_x_B, in_tails_B)))

    def read(self, x_TF: Tensor, tails_SWF: Tensor | None) -> Tensor:
        """The inputs [B, F]."""
        if not len(x_TF):
            read_BF = x_TF.new_zeros((len(self.row_B), x_TF.shape[1]))
        else:
            read_BF = x_TF[self.row_B].masked_fill_(~self.in_x_B[:, None], 0.0)
        if tails_SWF is None:
            return read_BF
        return torch.where(self.in_tails_B[:, None], tails_SWF.flatten(0, 1)[self.tail_B], read_BF)


@dataclass(frozen=True, slots=True, eq=False)
class _Edges:
    """The rows E within W - 1 of a sequence's start, and the sources of their W taps, newest first."""

    rows_E: Tensor
    sources_EW: _Sources


@lru_cache(maxsize=32)
def _edges(layout: Layout, taps: int, device: torch.device) -> _Edges:
    count_S = np.minimum(layout.lengths_S, taps - 1)
    sequence_E = np.repeat(np.arange(len(count_S)), count_S)
    offset_E = np.arange(len(sequence_E)) - np.repeat(np.cumsum(count_S) - count_S, count_S)
    position_EW = offset_E[:, None] - np.arange(taps)
    sources = _Sources.of(layout, np.repeat(sequence_E, taps), position_EW.ravel(), taps - 1, device)
    with torch.inference_mode(False):
        return _Edges(torch.from_numpy(layout.starts_S[sequence_E] + offset_E).to(device), sources)


class _CausalConv(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TF: Tensor, weight_FW: Tensor, tails_SWF: Tensor | None, edges: _Edges) -> Tensor:
        ctx.save_for_backward(x_TF, weight_FW, tails_SWF)
        ctx.edges = edges
        taps_WF = weight_FW.t().flip(0).contiguous()  # newest first
        y_TF = x_TF * taps_WF[0]
        for d in range(1, min(len(taps_WF), len(x_TF))):
            y_TF[d:].addcmul_(x_TF[:-d], taps_WF[d])
        read_EWF = edges.sources_EW.read(x_TF, tails_SWF).view(-1, *taps_WF.shape)
        y_TF[edges.rows_E] = (read_EWF * taps_WF).sum(1)
        return y_TF

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TF, weight_FW, tails_SWF = ctx.saved_tensors
        edges: _Edges = ctx.edges
        sources, taps_WF = edges.sources_EW, weight_FW.t().flip(0).contiguous()
        dy_EF = grads[0][edges.rows_E]
        dy_TF = grads[0].index_fill(0, edges.rows_E, 0.0)  # of rows whose taps all lie in their own sequence
        dread_BF = (dy_EF[:, None] * taps_WF).flatten(0, 1)
        dx_TF = dtails_SWF = dweight_FW = None
        if ctx.needs_input_grad[0]:
            dx_TF = dy_TF * taps_WF[0]
            for d in range(1, min(len(taps_WF), len(x_TF))):
                dx_TF[:-d].addcmul_(dy_TF[d:], taps_WF[d])
            if len(x_TF):
                dx_TF.index_add_(0, sources.row_B[sources.in_x_B], dread_BF[sources.in_x_B])
        if tails_SWF is not None and ctx.needs_input_grad[2]:
            dtails_SWF = torch.zeros_like(tails_SWF)
            dtails_SWF.flatten(0, 1).index_add_(0, sources.tail_B[sources.in_tails_B], dread_BF[sources.in_tails_B])
        if ctx.needs_input_grad[1]:
            read_EWF = sources.read(x_TF, tails_SWF).view(-1, *taps_WF.shape)
            dtaps_WF = (dy_EF[:, None] * read_EWF).sum(0)
            product_TF = torch.empty_like(x_TF)
            for d in range(min(len(taps_WF), len(x_TF))):
                torch.mul(dy_TF[d:], x_TF[: len(x_TF) - d], out=product_TF[d:])
                dtaps_WF[d] += product_TF[d:].sum(0)
            dweight_FW = dtaps_WF.flip(0).t()
        return dx_TF, dweight_FW, dtails_SWF, None
