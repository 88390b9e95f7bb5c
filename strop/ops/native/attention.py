"""The packed attention kernel with autograd. Shapes and meanings are those of `strop.ops.attention`."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.ops.native.arrays import address, check, empty, heads, wants_grad
from strop.ops.native.build import kernel
from strop.types import Layout


def packed_attention(q_THC: Tensor, k_TJC: Tensor, v_TJC: Tensor, layout: Layout, scale: float) -> Tensor:
    check(q_THC, k_TJC, v_TJC)
    if wants_grad(q_THC, k_TJC, v_TJC):
        return _Attention.apply(q_THC, k_TJC, v_TJC, layout, scale)
    return _forward(q_THC, k_TJC, v_TJC, layout, scale, None)


def _forward(
    q_THC: Tensor, k_TJC: Tensor, v_TJC: Tensor, layout: Layout, scale: float, lse_TH: Tensor | None
) -> Tensor:
    q, k, v = heads(q_THC), heads(k_TJC), heads(v_TJC)
    out = empty(*q.shape[:2], v.shape[2])
    parents = np.asarray(layout.parents, np.int64)
    kernel("attention")(
        q.data_ptr(),
        q.stride(0),
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        layout.starts_S.ctypes.data,
        layout.lengths_S.ctypes.data,
        parents.ctypes.data,
        len(parents),
        scale,
        out.data_ptr(),
        address(lse_TH),
        q.shape[1],
        k.shape[1],
        q.shape[2],
        v.shape[2],
        torch.get_num_threads(),
    )
    return out


class _Attention(torch.autograd.Function):
    """Keeps the inputs, the output and each row's log-sum-exp; the backward pass makes the weights again."""

    @staticmethod
    def forward(ctx: Any, q_THC: Tensor, k_TJC: Tensor, v_TJC: Tensor, layout: Layout, scale: float) -> Tensor:
        lse_TH = empty(*q_THC.shape[:2])
        out = _forward(q_THC, k_TJC, v_TJC, layout, scale, lse_TH)
        ctx.save_for_backward(q_THC, k_TJC, v_TJC, out, lse_TH)
        ctx.layout, ctx.scale = layout, scale
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        q_THC, k_TJC, v_TJC, out, lse_TH = ctx.saved_tensors
        layout: Layout = ctx.layout
        q, k, v, dout = heads(q_THC), heads(k_TJC), heads(v_TJC), grads[0].contiguous()
        dq, dk, dv = empty(*q.shape), empty(*k.shape), empty(*v.shape)
        parents = np.asarray(layout.parents, np.int64)
        kernel("attention_backward")(
            q.data_ptr(),
            q.stride(0),
            k.data_ptr(),
            k.stride(0),
            v.data_ptr(),
            v.stride(0),
            layout.starts_S.ctypes.data,
            layout.lengths_S.ctypes.data,
            parents.ctypes.data,
            len(parents),
            ctx.scale,
            out.data_ptr(),
            lse_TH.data_ptr(),
            dout.data_ptr(),
            dq.data_ptr(),
            dk.data_ptr(),
            dv.data_ptr(),
            q.shape[1],
            k.shape[1],
            q.shape[2],
            v.shape[2],
            torch.get_num_threads(),
        )
        needed = zip((dq, dk, dv), ctx.needs_input_grad, strict=False)
        return *(grad if wanted else None for grad, wanted in needed), None, None
