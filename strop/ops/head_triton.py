"""The head's two passes over the vocabulary as one Triton kernel each: tiles of logits live in registers only.

Forward: a program holds some rows, goes over a span of columns, and leaves that span's sums and the logits that were
asked for. Backward: a program makes one tile of logits again and leaves the loss's derivative by its products, which
two matrix products then turn into gradients. Runs on a GPU, or on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

# pyright: basic, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.ops.head import Ask, Entropy
from strop.ops.head_tiles import BANNED, HALVES, Logits, Slope, Statistics, Summary, column_tiles, row_tiles

BLOCK_N, BLOCK_V, BLOCK_D = 64, 128, 64  # a tile's rows and columns, and the hidden channels multiplied at once
SPAN = 16  # tiles of columns that one program of the forward pass visits
LOWEST = tl.constexpr(-1e37)  # a running maximum before the first tile: 0 times a difference from it is 0
BAN = tl.constexpr(BANNED)


class TritonKernels:
    """What `head_stream` asks of a device, by Triton."""

    def summarise(self, logits: Logits, picks_NJ: Tensor, ask: Ask, rows: int) -> tuple[Summary, Tensor]:
        statistics = Statistics(logits, picks_NJ, ask)
        count, width = len(picks_NJ), logits.width
        if count:
            spans = triton.cdiv(width, BLOCK_V * SPAN)
            sums_4SN = statistics.max_N.new_empty((4, spans, count))
            _sums[(triton.cdiv(count, BLOCK_N), spans)](
                *_operands(logits),
                picks_NJ.contiguous(),
                logits.first_token,
                statistics.picked_NJ,
                sums_4SN,
                spans,
                SPAN=SPAN,
                HAS_ENTROPY=ask.entropy is not Entropy.NONE,
                HAS_SQUARES=ask.square_sums,
                **_constants(logits, picks_NJ),
            )
            for span in range(spans):
                statistics.merge(*sums_4SN[:, span])
        if ask.top_k:  # sorting is no work for such a kernel
            for columns in column_tiles(width, rows, count):
                weights = logits.weights(columns)
                for few in row_tiles(count, rows):
                    statistics.keep_best(few, columns, logits.tile(few, columns, weights))
        return statistics.summary()

    def by_logits(self, logits: Logits, slope: Slope, rows: slice, columns: slice, weights: list[Tensor]) -> Tensor:
        part = logits.cut(rows, columns)
        picks_NJ = slope.picks_NJ[rows].contiguous()
        grad_z = slope.lse_N.new_empty((len(picks_NJ), part.width))
        by_entropy_N = slope.by_entropy_N
        _slopes[(triton.cdiv(len(picks_NJ), BLOCK_N), triton.cdiv(part.width, BLOCK_V))](
            *_operands(part),
            picks_NJ,
            logits.first_token + columns.start,
            slope.by_picked_NJ[rows].contiguous(),
            (slope.lse_N if by_entropy_N is None else by_entropy_N)[rows].contiguous(),
            slope.lse_N[rows].contiguous(),
            slope.entropy_N[rows].contiguous(),
            grad_z,
            HAS_ENTROPY=by_entropy_N is not None,
            **_constants(part, picks_NJ),
        )
        return grad_z


def _operands(logits: Logits) -> tuple[Any, ...]:
    """What makes the logits, with strides: (x, w) and an adapter's (x, w) if there is one, bias, temperature, sizes."""
    (x, w), (u, b) = logits.pairs[0], logits.pairs[-1]
    divisor = logits.divisor(slice(None))
    temperature_N = torch.ones((len(x), 1), dtype=logits.dtype, device=x.device) * divisor
    strides = [t.stride(i) for t in (x, w, u, b) for i in (0, 1)]
    bias_V = w if logits.bias_V is None else logits.bias_V.contiguous()
    cap = 1.0 if logits.softcap is None else logits.softcap
    return x, w, u, b, *strides, bias_V, temperature_N, cap, len(x), len(w), x.shape[1], u.shape[1]


def _constants(logits: Logits, picks_NJ: Tensor) -> dict[str, Any]:
    interpreted = not logits.pairs[0][0].is_cuda
    return {
        "J": picks_NJ.shape[1],
        "HAS_ADAPTER": len(logits.pairs) > 1,
        "HAS_BIAS": logits.bias_V is not None,
        "HAS_CAP": logits.softcap is not None,
        "WIDEN": interpreted and logits.pairs[0][0].dtype in HALVES,  # the interpreter's dot misreads half precision
        "WIDE": tl.float64 if logits.dtype == torch.float64 else tl.float32,
        "BLOCK_N": BLOCK_N,
        "BLOCK_V": BLOCK_V,
        "BLOCK_D": BLOCK_D,
    }


@triton.jit
def _dot(
    x, w, row, column, sx0, sx1, sw0, sw1, N, V, D, z,
    WIDEN: tl.constexpr, WIDE: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """z + x[row] @ w[column].T, where rows and columns beyond N and V count as 0."""
    for start in range(0, D, BLOCK_D):
        d = start + tl.arange(0, BLOCK_D)
        x_at = x + row[:, None] * sx0 + d[None, :] * sx1
        w_at = w + column[:, None] * sw0 + d[None, :] * sw1
        x_tile = tl.load(x_at, mask=(row[:, None] < N) & (d[None, :] < D), other=0.0)
        w_tile = tl.load(w_at, mask=(column[:, None] < V) & (d[None, :] < D), other=0.0)
        if WIDEN:
            x_tile, w_tile = x_tile.to(WIDE), w_tile.to(WIDE)
        z = tl.dot(x_tile, tl.trans(w_tile), z, input_precision="ieee", out_dtype=WIDE)
    return z


@triton.jit
def _logits(
    x, w, u, b, sx0, sx1, sw0, sw1, su0, su1, sb0, sb1, bias, cap, N, V, D, R, row, column, temperature,
    HAS_ADAPTER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    WIDEN: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One tile [BLOCK_N, BLOCK_V] of logits."""
    z = tl.zeros((BLOCK_N, BLOCK_V), WIDE)
    z = _dot(x, w, row, column, sx0, sx1, sw0, sw1, N, V, D, z, WIDEN, WIDE, BLOCK_D)
    if HAS_ADAPTER:
        z = _dot(u, b, row, column, su0, su1, sb0, sb1, N, V, R, z, WIDEN, WIDE, BLOCK_D)
    if HAS_BIAS:
        z += tl.load(bias + column, mask=column < V, other=0.0).to(WIDE)[None, :]
        z = tl.maximum(z, BAN)
    if HAS_CAP:
        e = tl.exp(-2.0 * tl.abs(z) / cap)
        z = tl.where(z < 0, -cap, cap) * (1.0 - e) / (1.0 + e)  # cap * tanh(z / cap)
    return z / temperature[:, None]


@triton.jit
def _sums(
    x, w, u, b, sx0, sx1, sw0, sw1, su0, su1, sb0, sb1, bias, temperatures, cap, N, V, D, R,
    picks, first, picked, sums, spans,
    SPAN: tl.constexpr, HAS_ENTROPY: tl.constexpr, HAS_SQUARES: tl.constexpr, J: tl.constexpr,
    HAS_ADAPTER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    WIDEN: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """Online softmax over one span of columns: its maximum, and its sums of e, e (z - maximum) and e^2."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    span = tl.program_id(1)
    temperature = tl.load(temperatures + row, mask=row < N, other=1.0)
    highest = tl.zeros((BLOCK_N,), WIDE) + LOWEST
    total, weighted, squares = tl.zeros((BLOCK_N,), WIDE), tl.zeros((BLOCK_N,), WIDE), tl.zeros((BLOCK_N,), WIDE)
    for tile in range(0, SPAN):
        column = ((span * SPAN + tile) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
        here = column[None, :] < V
        z = _logits(
            x, w, u, b, sx0, sx1, sw0, sw1, su0, su1, sb0, sb1, bias, cap, N, V, D, R, row, column, temperature,
            HAS_ADAPTER, HAS_BIAS, HAS_CAP, WIDEN, WIDE, BLOCK_N, BLOCK_V, BLOCK_D,
        )  # fmt: skip
        for j in range(J):
            pick = tl.load(picks + row * J + j, mask=row < N, other=-1) - first
            hit = (column[None, :] == pick[:, None]) & here
            found = (pick >= (span * SPAN + tile) * BLOCK_V) & (pick < (span * SPAN + tile + 1) * BLOCK_V) & (pick < V)
            tl.store(picked + row * J + j, tl.sum(tl.where(hit, z, 0.0), 1), mask=(row < N) & found)
        above = tl.maximum(highest, tl.max(tl.where(here, z, LOWEST), 1))
        shift = highest - above
        scale = tl.exp(shift)
        shifted = tl.where(here, z - above[:, None], 0.0)
        e = tl.where(here, tl.exp(shifted), 0.0)
        if HAS_ENTROPY:
            weighted = (weighted + total * shift) * scale + tl.sum(e * shifted, 1)
        if HAS_SQUARES:
            squares = squares * scale * scale + tl.sum(e * e, 1)
        total = total * scale + tl.sum(e, 1)
        highest = above
    at = sums + span.to(tl.int64) * N + row
    size = spans.to(tl.int64) * N
    tl.store(at, highest, mask=row < N)
    tl.store(at + size, total, mask=row < N)
    tl.store(at + 2 * size, weighted, mask=row < N)
    tl.store(at + 3 * size, squares, mask=row < N)


@triton.jit
def _slopes(
    x, w, u, b, sx0, sx1, sw0, sw1, su0, su1, sb0, sb1, bias, temperatures, cap, N, V, D, R,
    picks, first, by_picked, by_entropy, lse, entropy, grad_z,
    HAS_ENTROPY: tl.constexpr, J: tl.constexpr,
    HAS_ADAPTER: tl.constexpr, HAS_BIAS: tl.constexpr, HAS_CAP: tl.constexpr,
    WIDEN: tl.constexpr, WIDE: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The loss's derivative by one tile's products, as `head_tiles.Slope.by_logits` has it."""
    row = (tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)).to(tl.int64)
    column = (tl.program_id(1) * BLOCK_V + tl.arange(0, BLOCK_V)).to(tl.int64)
    there = row < N
    temperature = tl.load(temperatures + row, mask=there, other=1.0)
    z = _logits(
        x, w, u, b, sx0, sx1, sw0, sw1, su0, su1, sb0, sb1, bias, cap, N, V, D, R, row, column, temperature,
        HAS_ADAPTER, HAS_BIAS, HAS_CAP, WIDEN, WIDE, BLOCK_N, BLOCK_V, BLOCK_D,
    )  # fmt: skip
    logp = z - tl.load(lse + row, mask=there, other=0.0)[:, None]
    constant = tl.zeros((BLOCK_N,), WIDE)
    hits = tl.zeros((BLOCK_N, BLOCK_V), WIDE)
    for j in range(J):
        pick = tl.load(picks + row * J + j, mask=there, other=-1) - first
        g = tl.load(by_picked + row * J + j, mask=there, other=0.0)
        constant += g
        hits += tl.where(column[None, :] == pick[:, None], g[:, None], 0.0)
    slope = tl.zeros((BLOCK_N, BLOCK_V), WIDE) + constant[:, None]
    if HAS_ENTROPY:
        g = tl.load(by_entropy + row, mask=there, other=0.0)
        slope += g[:, None] * (logp + tl.load(entropy + row, mask=there, other=0.0)[:, None])
    result = (hits - tl.exp(logp) * slope) / temperature[:, None]
    if HAS_CAP:
        bend = z * temperature[:, None] / cap
        result = result * (1.0 - bend * bend)
    tl.store(grad_z + row[:, None] * V + column[None, :], result, mask=there[:, None] & (column[None, :] < V))
