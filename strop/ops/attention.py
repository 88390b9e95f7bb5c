"""Causal attention over packed sequences: queries, keys and values [T] and their `Layout` go in, mixed values come out.

Boundaries come from the layout alone: no mask of T x T exists, nothing is padded, and the cost is the sum of the
sequences' squares. No number of one sequence enters the arithmetic of another, except a prefix's keys and values that
of its branches; so a sequence's outputs and gradients keep every bit when a neighbour's tokens change.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ops.native import attention as native
from strop.ops.select import Impl
from strop.types import Layout


def attention_impl(impl: Impl, window: int | None, softcap: float | None, sinks_H: Tensor | None) -> Impl:
    """The form that attention takes under `impl`: torch's for window, softcap and sinks, which native lacks."""
    return impl if window is None and softcap is None and sinks_H is None else Impl.TORCH


def packed_attention(
    q_THC: Tensor,
    k_TJC: Tensor,
    v_TJC: Tensor,
    layout: Layout,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks_H: Tensor | None = None,
    impl: Impl,
) -> Tensor:
    """softmax(scale * q k^T) v within each sequence and its prefix: [T, H, C], [T, J, C], [T, J, C_v] -> [T, H, C_v].

    Each token attends to its own sequence up to itself, and a branch to all of its prefix too. J divides H; query
    head h reads key head h * J // H (grouped queries, Ainslie et al. 2023). `window`: a token at position p sees
    positions > p - window. `softcap`: scores become softcap * tanh(scores / softcap) (Gemma 2). `sinks_H`: one more
    logit per head in the softmax's denominator (gpt-oss). `attention_impl` says which form runs.

    Raises ValueError when the tensors do not fit the layout or each other.
    """
    _check(q_THC, k_TJC, v_TJC, layout)
    if attention_impl(impl, window, softcap, sinks_H) is Impl.NATIVE:
        return native.packed_attention(q_THC, k_TJC, v_TJC, layout, scale)
    if layout.num_tokens == 0:  # empty, but part of the graph
        nothing = q_THC.sum() + k_TJC.sum() + v_TJC.sum()
        return nothing * q_THC.new_zeros((0, q_THC.shape[1], v_TJC.shape[2]))
    parts: list[Tensor] = []
    for start, length, parent in zip(layout.starts_S.tolist(), layout.lengths, layout.parents, strict=True):
        if length == 0:
            continue
        own = slice(start, start + length)
        keys, values = k_TJC[own], v_TJC[own]
        if parent >= 0:
            first = int(layout.starts_S[parent])
            prefix = slice(first, first + layout.lengths[parent])
            keys, values = torch.cat((k_TJC[prefix], keys)), torch.cat((v_TJC[prefix], values))
        if window is None and softcap is None and sinks_H is None:
            parts.append(_one_sequence(q_THC[own], keys, values, scale))
        else:
            positions = torch.arange(len(keys), device=q_THC.device)
            allowed = causal_window(positions[len(keys) - length :], positions, window)
            parts.append(
                dense_attention(q_THC[own], keys, values, allowed, scale=scale, softcap=softcap, sinks_H=sinks_H)
            )
    return torch.cat(parts)


def causal_window(query_positions: Tensor, key_positions: Tensor, window: int | None) -> Tensor:
    """Which keys [N] each query [M] may see: bool [M, N], or with leading axes alike on both sides."""
    past = key_positions.unsqueeze(-2) <= query_positions.unsqueeze(-1)
    if window is None:
        return past
    return past & (key_positions.unsqueeze(-2) > query_positions.unsqueeze(-1) - window)


def dense_attention(
    q_MHC: Tensor,
    k_NJC: Tensor,
    v_NJC: Tensor,
    allowed_MN: Tensor,
    *,
    scale: float,
    softcap: float | None,
    sinks_H: Tensor | None,
) -> Tensor:
    """Attention of M queries over N keys with everything written out: [..., M, H, C] -> [..., M, H, C_v].

    Every query needs a key that it may see. The softmax runs in float32, or in float64 for float64 inputs.
    """
    *lead, M, H, C = q_MHC.shape
    J, CV = v_NJC.shape[-2:]
    G = H // J
    # a group's heads are rows of one product with their common keys: broadcasting would copy the keys for each head
    q_JRC = q_MHC.reshape(*lead, M, J, G, C).movedim(-4, -2).reshape(*lead, J, G * M, C)
    scores = torch.matmul(q_JRC, k_NJC.movedim(-3, -1)).unflatten(-2, (G, M)) * scale
    if softcap is not None:
        scores = torch.tanh(scores / softcap) * softcap
    scores = scores.masked_fill(~allowed_MN[..., None, None, :, :], float("-inf"))
    wide = scores.to(torch.float64 if scores.dtype == torch.float64 else torch.float32)
    if sinks_H is None:
        weights = torch.softmax(wide, dim=-1)
    else:
        sinks = sinks_H.to(wide.dtype).reshape(J, G, 1, 1).expand(*wide.shape[:-1], 1)
        weights = torch.softmax(torch.cat((wide, sinks), dim=-1), dim=-1)[..., :-1]
    mixed_JRC = torch.matmul(weights.to(v_NJC.dtype).flatten(-3, -2), v_NJC.movedim(-3, -2))
    return mixed_JRC.unflatten(-2, (G, M)).movedim(-2, -4).reshape(*lead, M, H, CV)


def _one_sequence(q_MHC: Tensor, k_NJC: Tensor, v_NJC: Tensor, scale: float) -> Tensor:
    """Causal attention where the M queries are the last of the N positions."""
    M, N = len(q_MHC), len(k_NJC)
    mask = None if M == N else torch.ones(M, N, dtype=torch.bool, device=q_MHC.device).tril(N - M)
    mixed = F.scaled_dot_product_attention(
        q_MHC.transpose(0, 1)[None],
        k_NJC.transpose(0, 1)[None],
        v_NJC.transpose(0, 1)[None],
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=q_MHC.shape[1] != k_NJC.shape[1],
    )
    return mixed[0].transpose(0, 1)


def _check(q_THC: Tensor, k_TJC: Tensor, v_TJC: Tensor, layout: Layout) -> None:
    shapes = f"q {tuple(q_THC.shape)}, k {tuple(k_TJC.shape)}, v {tuple(v_TJC.shape)}"
    if not q_THC.dim() == k_TJC.dim() == v_TJC.dim() == 3:
        raise ValueError(f"packed attention takes [tokens, heads, channels] without a batch axis, not {shapes}")
    if not len(q_THC) == len(k_TJC) == len(v_TJC) == layout.num_tokens:
        raise ValueError(f"the layout holds {layout.num_tokens} tokens, but the tensors are {shapes}")
    if q_THC.shape[2] != k_TJC.shape[2] or k_TJC.shape[1] != v_TJC.shape[1] or q_THC.shape[1] % max(k_TJC.shape[1], 1):
        raise ValueError(f"queries, keys and values do not fit each other: {shapes}")
