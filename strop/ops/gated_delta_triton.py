"""The forward pass of the chunked gated delta rule as two Triton kernels; the backward pass is torch's, from what they
leave.

One program inverts I + B of one chunk and head, for all chunks at once. Then one program carries the state of one
sequence and head, and some of its value channels, from chunk to chunk: first of sequences without a prefix, then of the
branches, which start where their prefix ended. The equations are in `strop.ops.gated_delta_chunked`. Runs on a GPU, or
on a CPU in Triton's interpreter (TRITON_INTERPRET=1).
"""

# pyright: basic, reportIndexIssue=false, reportCallIssue=false, reportArgumentType=false, reportOperatorIssue=false

from __future__ import annotations

import numpy as np
import torch
import triton
import triton.language as tl
from torch import Tensor

from strop.ops.chunks import Chunks

VALUES = 64  # value channels of one program, at most
LEAST = 16  # a side of a matrix product in Triton


def forward(
    q_TJC: Tensor,
    k_TJC: Tensor,
    v_THC: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    start_SHCC: Tensor | None,
    *,
    chunks: Chunks,
    keep: bool,
) -> tuple[Tensor, Tensor, Tensor | None, Tensor, Tensor]:
    """Outputs [T, H, C_v], final states [S, H, C, C_v], states before each chunk [N, J, C, G * C_v] if kept,
    corrections [N, J, G, M, C_v] and inverses [N, J, G, M, M]. ValueError for other than float32."""
    if v_THC.dtype != torch.float32:
        raise ValueError(f"the Triton form computes in float32, not in {v_THC.dtype}: take the torch form")
    q, k, v, decay, beta = (x.contiguous() for x in (q_TJC, k_TJC, v_THC, decay_TH, beta_TH))
    (_, J, C), (_, H, CV) = k.shape, v.shape
    G, M, N, S = H // J, chunks.size, chunks.num_chunks, chunks.num_sequences
    token_N, valid_N, order_N = (_index(a, v) for a in (chunks.token_N, chunks.valid_N, chunks.order_N))
    inverse = v.new_empty((N, J, G, M, M))
    block_C = max(LEAST, triton.next_power_of_2(C))
    if N:
        _invert[(N, H)](k, decay, beta, token_N, valid_N, inverse, J, G, C, M=M, BLOCK_C=block_C)
    out, ends = torch.empty_like(v), v.new_zeros((S, H, C, CV))
    w = v.new_empty((N, J, G, M, CV))
    states = v.new_empty((N, J, C, G * CV)) if keep else None
    block_V = min(VALUES, max(LEAST, triton.next_power_of_2(CV)))
    first_S, count_S = _index(chunks.first_S, v), _index(chunks.count_S, v)
    start = ends if start_SHCC is None else start_SHCC.contiguous()
    branch_S = chunks.parents_S >= 0
    for chosen_S, source, known in ((~branch_S, start, start_SHCC is not None), (branch_S, ends, True)):
        sequences = np.flatnonzero(chosen_S)
        if not len(sequences):
            continue
        whose = np.where(branch_S, chunks.parents_S, np.arange(S))[sequences]
        _scan[(len(sequences), H, triton.cdiv(CV, block_V))](
            q,
            k,
            v,
            decay,
            beta,
            inverse,
            token_N,
            valid_N,
            order_N,
            first_S,
            count_S,
            _index(sequences, v),
            _index(whose, v),
            source,
            out,
            w,
            out if states is None else states,
            ends,
            J,
            G,
            C,
            CV,
            HAS_START=known,
            KEEP=keep,
            M=M,
            BLOCK_C=block_C,
            BLOCK_V=block_V,
        )
    return out, ends, states, w, inverse


def _index(array: np.ndarray, like: Tensor) -> Tensor:
    return torch.from_numpy(np.ascontiguousarray(array, np.int64)).to(like.device)


@triton.jit
def _decays(decay, t_M, real_M, H, h):
    """G, the running sum of g in one chunk and head; constant over padding."""
    return tl.cumsum(tl.load(decay + t_M * H + h, mask=real_M, other=0.0), 0)


@triton.jit
def _invert(k, decay, beta, token_N, valid_N, inverse, J, G, C, M: tl.constexpr, BLOCK_C: tl.constexpr):
    n, h = tl.program_id(0).to(tl.int64), tl.program_id(1)
    H = J * G
    m, c = tl.arange(0, M), tl.arange(0, BLOCK_C)
    t_M, real_M = tl.load(token_N + n) + m, m < tl.load(valid_N + n)
    k_MC = tl.load(k + (t_M[:, None] * J + h // G) * C + c[None, :], mask=real_M[:, None] & (c[None, :] < C), other=0.0)
    sum_M = _decays(decay, t_M, real_M, H, h)
    beta_M = tl.load(beta + t_M * H + h, mask=real_M, other=0.0)
    before = m[:, None] > m[None, :]
    between = tl.exp(tl.where(before, sum_M[:, None] - sum_M[None, :], 0.0))
    kk = tl.dot(k_MC, tl.trans(k_MC), input_precision="ieee")
    B = tl.where(before, kk * between * beta_M[None, :], 0.0)
    solved = tl.where(m[:, None] == m[None, :], 1.0, 0.0)
    for i in range(1, M):  # row i of the inverse from those above it
        row_M = tl.sum(tl.where(m[:, None] == i, B, 0.0), 0)
        taken_M = tl.sum(row_M[:, None] * solved, 0)
        solved = tl.where(m[:, None] == i, solved - taken_M[None, :], solved)
    tl.store(inverse + ((n * H + h) * M + m[:, None]) * M + m[None, :], solved)


@triton.jit
def _scan(
    q,
    k,
    v,
    decay,
    beta,
    inverse,
    token_N,
    valid_N,
    order_N,
    first_S,
    count_S,
    sequence_P,
    source_P,
    start,
    out,
    w,
    states,
    ends,
    J,
    G,
    C,
    CV,
    HAS_START: tl.constexpr,
    KEEP: tl.constexpr,
    M: tl.constexpr,
    BLOCK_C: tl.constexpr,
    BLOCK_V: tl.constexpr,
):
    s, h = tl.load(sequence_P + tl.program_id(0)), tl.program_id(1)
    H, j, g = J * G, h // G, h % G
    m, c, x = tl.arange(0, M), tl.arange(0, BLOCK_C), tl.program_id(2) * BLOCK_V + tl.arange(0, BLOCK_V)
    cell = (c[:, None] < C) & (x[None, :] < CV)
    state = tl.zeros((BLOCK_C, BLOCK_V), tl.float32)
    if HAS_START:
        source = tl.load(source_P + tl.program_id(0))
        state = tl.load(start + ((source * H + h) * C + c[:, None]) * CV + x[None, :], mask=cell, other=0.0)
    first = tl.load(first_S + s)
    for i in range(0, tl.load(count_S + s)):
        n = tl.load(order_N + first + i)
        t_M, real_M = tl.load(token_N + n) + m, m < tl.load(valid_N + n)
        wide = real_M[:, None] & (c[None, :] < C)
        q_MC = tl.load(q + (t_M[:, None] * J + j) * C + c[None, :], mask=wide, other=0.0)
        k_MC = tl.load(k + (t_M[:, None] * J + j) * C + c[None, :], mask=wide, other=0.0)
        own = real_M[:, None] & (x[None, :] < CV)
        v_MX = tl.load(v + (t_M[:, None] * H + h) * CV + x[None, :], mask=own, other=0.0)
        sum_M = _decays(decay, t_M, real_M, H, h)
        beta_M = tl.load(beta + t_M * H + h, mask=real_M, other=0.0)
        fade_M = tl.exp(sum_M)
        if KEEP:
            at = ((n * J + j) * C + c[:, None]) * G * CV + g * CV + x[None, :]
            tl.store(states + at, state, mask=cell)
        wanted = v_MX - fade_M[:, None] * tl.dot(k_MC, state, input_precision="ieee")
        solved = tl.load(inverse + ((n * H + h) * M + m[:, None]) * M + m[None, :])
        w_MX = tl.dot(solved, wanted, input_precision="ieee")
        tl.store(w + ((n * H + h) * M + m[:, None]) * CV + x[None, :], w_MX, mask=x[None, :] < CV)
        past = m[:, None] >= m[None, :]
        between = tl.exp(tl.where(past, sum_M[:, None] - sum_M[None, :], 0.0))
        P = tl.where(past, tl.dot(q_MC, tl.trans(k_MC), input_precision="ieee") * between, 0.0)
        written = beta_M[:, None] * w_MX
        mixed = fade_M[:, None] * tl.dot(q_MC, state, input_precision="ieee")
        mixed += tl.dot(P, written, input_precision="ieee")
        tl.store(out + (t_M[:, None] * H + h) * CV + x[None, :], mixed, mask=own)
        last = tl.sum(tl.where(m == M - 1, sum_M, 0.0), 0)
        kept = tl.exp(last - sum_M)[:, None] * written
        state = tl.exp(last) * state + tl.dot(tl.trans(k_MC), kept, input_precision="ieee")
    tl.store(ends + ((s * H + h) * C + c[:, None]) * CV + x[None, :], state, mask=cell)
