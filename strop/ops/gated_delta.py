"""Linear attention by the gated delta rule over packed sequences: queries, keys, values, decays and write strengths
[T] and their `Layout` go in, mixed values come out, and the state after each sequence when asked.

    T packed tokens    S sequences    N chunks    M positions in a chunk    R rows that decode
    J key heads    H = J * G value heads    C channels of a key    C_v of a value

Each value head keeps a state [C, C_v], a matrix from keys to values. A token fades it, then corrects what it returns
for the token's key (Yang, Kautz and Hatamizadeh 2024, Gated Delta Networks, eq. 10):

    S_t = exp(g_t) S_(t-1);   S_t += k_t b_t (v_t - S_t^T k_t)^T;   o_t = S_t^T q_t

A branch of a shared prefix starts from the state after it. Nothing is padded but the ends of chunks, with zeros.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.ops.chunks import chunk_size, chunks_of
from strop.ops.gated_delta_chunked import GatedDelta
from strop.ops.select import Impl
from strop.types import Layout


def gated_delta_rule(
    q_TJC: Tensor,
    k_TJC: Tensor,
    v_THC: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    layout: Layout,
    *,
    start_SHCC: Tensor | None = None,
    ends: bool = False,
    impl: Impl,
) -> tuple[Tensor, Tensor | None]:
    """Mixed values [T, H, C_v], in chunks, and with `ends` the state after each text [S, H, C, C_v]; differentiable.

    `decay_TH` is g <= 0, the logarithm of what is kept; `beta_TH` is b in [0, 1]. Keys are unit vectors and queries
    scaled by the caller; value head h reads key head h * J // H. `start_SHCC`: the states before each text (zeros
    without it); those of branches are not read. Float32, or float64 if v is. Within a chunk the corrections solve one
    unit triangular system (the same paper, section 3.3).

    Raises ValueError when shapes do not fit the layout or each other.
    """
    _check(q_TJC, k_TJC, v_THC, decay_TH, beta_TH, layout=layout, start_SHCC=start_SHCC)
    wide = torch.float64 if v_THC.dtype == torch.float64 else torch.float32
    start_SHCC = None if start_SHCC is None else start_SHCC.to(wide)
    inputs = (*(x.to(wide) for x in (q_TJC, k_TJC, v_THC, decay_TH, beta_TH)), start_SHCC)
    keep = torch.is_grad_enabled() and any(x is not None and x.requires_grad for x in inputs)
    chunks = chunks_of(layout, chunk_size(layout, k_TJC.shape[2], v_THC.shape[2]), v_THC.device)
    out_THC, ends_SHCC = GatedDelta.apply(*inputs, chunks, ends, keep, impl)
    return out_THC, ends_SHCC


def gated_delta_step(
    q_RJC: Tensor, k_RJC: Tensor, v_RHC: Tensor, decay_RH: Tensor, beta_RH: Tensor, state_RHCC: Tensor
) -> Tensor:
    """One token for each of R rows: mixed values [R, H, C_v]; `state_RHCC` is moved on in place. No gradient."""
    R, H, CV = v_RHC.shape
    G = H // k_RJC.shape[1]
    kq_RH2C = torch.stack((k_RJC, q_RJC), 2).repeat_interleave(G, 1)
    read_RH2C = kq_RH2C @ state_RHCC * decay_RH.exp()[:, :, None, None]
    delta_RHC = beta_RH[:, :, None] * (v_RHC - read_RH2C[:, :, 0])
    meets_RH = (q_RJC * k_RJC).sum(-1).repeat_interleave(G, 1)
    state_RHCC.mul_(decay_RH.exp()[:, :, None, None])
    key_BC1, delta_B1C = kq_RH2C[:, :, 0].reshape(R * H, -1, 1), delta_RHC.reshape(R * H, 1, CV)
    state_RHCC.view(R * H, -1, CV).baddbmm_(key_BC1, delta_B1C)
    return read_RH2C[:, :, 1] + meets_RH[:, :, None] * delta_RHC


def recurrent_gated_delta_rule(
    q_TJC: Tensor,
    k_TJC: Tensor,
    v_THC: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    layout: Layout,
    *,
    start_SHCC: Tensor | None = None,
) -> tuple[Tensor, Tensor]:
    """The definition, token by token, in the dtype of its inputs: what `gated_delta_rule` is held to."""
    _check(q_TJC, k_TJC, v_THC, decay_TH, beta_TH, layout=layout, start_SHCC=start_SHCC)
    G = v_THC.shape[1] // k_TJC.shape[1]
    q_THC, k_THC = q_TJC.repeat_interleave(G, 1), k_TJC.repeat_interleave(G, 1)
    empty_HCC = v_THC.new_zeros((v_THC.shape[1], k_TJC.shape[2], v_THC.shape[2]))
    out: list[Tensor] = []
    ends: list[Tensor] = []
    for s, (first, length, parent) in enumerate(
        zip(layout.starts_S.tolist(), layout.lengths, layout.parents, strict=True)
    ):
        state_HCC = ends[parent] if parent >= 0 else empty_HCC if start_SHCC is None else start_SHCC[s]
        for t in range(first, first + length):
            state_HCC = state_HCC * decay_TH[t].exp()[:, None, None]
            read_HC = (state_HCC * k_THC[t, :, :, None]).sum(1)
            delta_HC = beta_TH[t, :, None] * (v_THC[t] - read_HC)
            state_HCC = state_HCC + k_THC[t, :, :, None] * delta_HC[:, None]
            out.append((state_HCC * q_THC[t, :, :, None]).sum(1))
        ends.append(state_HCC)
    return torch.stack(out) if out else v_THC * 1.0, torch.stack(ends)


def _check(
    q_TJC: Tensor,
    k_TJC: Tensor,
    v_THC: Tensor,
    decay_TH: Tensor,
    beta_TH: Tensor,
    *,
    layout: Layout,
    start_SHCC: Tensor | None,
) -> None:
    T, H = layout.num_tokens, v_THC.shape[1]
    shapes = ", ".join(str(tuple(x.shape)) for x in (q_TJC, k_TJC, v_THC, decay_TH, beta_TH))
    if not q_TJC.dim() == v_THC.dim() == 3 or {len(x) for x in (q_TJC, k_TJC, v_THC, decay_TH, beta_TH)} != {T}:
        raise ValueError(f"the layout holds {T} tokens; queries, keys, values, decays and strengths are {shapes}")
    if q_TJC.shape != k_TJC.shape or H % max(k_TJC.shape[1], 1) or not decay_TH.shape == beta_TH.shape == (T, H):
        raise ValueError(f"queries, keys, values, decays and strengths do not fit each other: {shapes}")
    state = (len(layout.lengths), H, k_TJC.shape[2], v_THC.shape[2])
    if start_SHCC is not None and start_SHCC.shape != state:
        raise ValueError(f"states before the texts of shape {tuple(start_SHCC.shape)}: {state} are needed")
