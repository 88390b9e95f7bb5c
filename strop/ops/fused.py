"""Elementwise passes of a decoder layer, each one function with autograd: norms, gated activation, rotary embedding.

Hidden states [..., D] and heads [..., T, H, C] go in and come out in the same shape and dtype. `Impl.TORCH` is a plain
composition of torch functions, for every device and dtype; `Impl.NATIVE` is one pass over memory in C++, float32 on
the CPU.
Reductions run in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from strop.ops.native import fused as native
from strop.ops.select import Impl


def rms_norm(x: Tensor, weight: Tensor, eps: float, impl: Impl) -> Tensor:
    """y = x / sqrt(mean(x^2) + eps) * weight over the last axis: x [..., D], weight [D] -> [..., D].

    RMSNorm, Zhang and Sennrich 2019, eq. 4, rounded where transformers' LlamaRMSNorm rounds.
    """
    if impl is Impl.NATIVE:
        return native.rms_norm(x, weight, eps)
    wide = x.to(_statistics(x.dtype))
    normed = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return weight * normed.to(x.dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float, impl: Impl) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual), x + residual) in one pass: both [..., D] -> two [..., D]."""
    if impl is Impl.NATIVE:
        return native.add_rms_norm(x, residual, weight, eps)
    total = x + residual
    return rms_norm(total, weight, eps, impl), total


def swiglu(gate: Tensor, up: Tensor, impl: Impl) -> Tensor:
    """silu(gate) * up, elementwise; only the two inputs are kept for the backward pass. Shazeer 2020, eq. 6."""
    if impl is Impl.NATIVE:
        return native.swiglu(gate, up)
    return F.silu(gate) * up


def rope(q_THC: Tensor, k_TJC: Tensor, cos_TC: Tensor, sin_TC: Tensor, impl: Impl) -> tuple[Tensor, Tensor]:
    """Rotate queries [..., T, H, C] and keys [..., T, J, C] by their positions' angles.

    Su et al. 2021, eq. 34, in the rotate-half order of transformers: channel c pairs with c + C/2, and cos and sin
    [..., T, C] hold each angle twice. No gradient flows to cos and sin.
    """
    if impl is Impl.NATIVE:
        return native.rope(q_THC, k_TJC, cos_TC, sin_TC)
    cos_T1C, sin_T1C = cos_TC.detach().unsqueeze(-2), sin_TC.detach().unsqueeze(-2)
    return q_THC * cos_T1C + _rotate_half(q_THC) * sin_T1C, k_TJC * cos_T1C + _rotate_half(k_TJC) * sin_T1C


def norm_rope(
    q_THC: Tensor,
    k_TJC: Tensor,
    q_weight_C: Tensor,
    k_weight_C: Tensor,
    *,
    eps: float,
    cos_TC: Tensor,
    sin_TC: Tensor,
    impl: Impl,
) -> tuple[Tensor, Tensor]:
    """`rms_norm` of every head over its channels, then `rope`, in one pass: what Qwen3 does to queries and keys."""
    if impl is Impl.NATIVE:
        return native.norm_rope(q_THC, k_TJC, q_weight_C, k_weight_C, eps=eps, cos_TC=cos_TC, sin_TC=sin_TC)
    q_normed, k_normed = rms_norm(q_THC, q_weight_C, eps, impl), rms_norm(k_TJC, k_weight_C, eps, impl)
    return rope(q_normed, k_normed, cos_TC, sin_TC, impl)


def _statistics(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _rotate_half(x: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return torch.cat((-second, first), dim=-1)
