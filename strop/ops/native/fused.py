"""The elementwise kernels with autograd. Shapes and meanings are those of `strop.ops.fused`."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from strop.ops.native.arrays import address, check, empty, heads, rows, wants_grad
from strop.ops.native.build import kernel


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    check(x, weight)
    if wants_grad(x, weight):
        return _RMSNorm.apply(x, weight, eps)
    return _rms_norm(x, None, weight, eps)[0]


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    check(x, residual, weight)
    if x.shape != residual.shape:
        raise ValueError(f"x {tuple(x.shape)} and its residual {tuple(residual.shape)} differ in shape")
    if wants_grad(x, residual, weight):
        return _AddRMSNorm.apply(x, residual, weight, eps)
    return _rms_norm(x, residual, weight, eps)[:2]


def swiglu(gate: Tensor, up: Tensor) -> Tensor:
    check(gate, up)
    if gate.shape != up.shape:
        raise ValueError(f"gate {tuple(gate.shape)} and up {tuple(up.shape)} differ in shape")
    return _SwiGLU.apply(gate, up) if wants_grad(gate, up) else _swiglu(gate, up)


def rope(q_THC: Tensor, k_TJC: Tensor, cos_TC: Tensor, sin_TC: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = _angles(q_THC, cos_TC), _angles(q_THC, sin_TC)
    return _heads(q_THC, None, 0.0, cos, sin), _heads(k_TJC, None, 0.0, cos, sin)


def norm_rope(
    q_THC: Tensor,
    k_TJC: Tensor,
    q_weight_C: Tensor,
    k_weight_C: Tensor,
    *,
    eps: float,
    cos_TC: Tensor,
    sin_TC: Tensor,
) -> tuple[Tensor, Tensor]:
    cos, sin = _angles(q_THC, cos_TC), _angles(q_THC, sin_TC)
    return _heads(q_THC, q_weight_C, eps, cos, sin), _heads(k_TJC, k_weight_C, eps, cos, sin)


def _rms_norm(x: Tensor, residual: Tensor | None, weight: Tensor, eps: float) -> tuple[Tensor, Tensor, Tensor]:
    """The normed rows, x + residual (x itself without a residual), and each row's 1 / root mean square."""
    from_, weight = rows(x), weight.detach().contiguous()
    N, D = from_.shape
    _check_weight(weight, D)
    y, rstd = empty(*x.shape), empty(N)
    more = None if residual is None else rows(residual)
    total = x if residual is None else empty(*x.shape)
    kernel("rms_norm")(
        from_.data_ptr(),
        from_.stride(0),
        address(more),
        0 if more is None else more.stride(0),
        weight.data_ptr(),
        y.data_ptr(),
        None if more is None else total.data_ptr(),
        rstd.data_ptr(),
        N,
        D,
        eps,
        torch.get_num_threads(),
    )
    return y, total, rstd


def _rms_norm_backward(
    dy: Tensor, x: Tensor, weight: Tensor, rstd: Tensor, more: Tensor | None, needs: tuple[bool, bool]
) -> tuple[Tensor | None, Tensor | None]:
    """Gradients of x (plus `more`) and of the weight, where they are needed."""
    if not any(needs):
        return None, None
    dy_rows, x_rows, weight = rows(dy), rows(x), weight.detach().contiguous()
    N, D = x_rows.shape
    more_rows = None if more is None else rows(more)
    dx = empty(*x.shape) if needs[0] else None
    dw = empty(D) if needs[1] else None
    kernel("rms_norm_backward")(
        dy_rows.data_ptr(),
        dy_rows.stride(0),
        x_rows.data_ptr(),
        x_rows.stride(0),
        weight.data_ptr(),
        rstd.data_ptr(),
        address(more_rows),
        0 if more_rows is None else more_rows.stride(0),
        address(dx),
        address(dw),
        N,
        D,
        torch.get_num_threads(),
    )
    return dx, dw


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, eps: float) -> Tensor:
        y, _, rstd = _rms_norm(x, None, weight, eps)
        ctx.save_for_backward(x, weight, rstd)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x, weight, rstd = ctx.saved_tensors
        needs_x, needs_weight, _ = ctx.needs_input_grad
        return *_rms_norm_backward(grads[0], x, weight, rstd, None, (needs_x, needs_weight)), None


class _AddRMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
        y, total, rstd = _rms_norm(x, residual, weight, eps)
        ctx.save_for_backward(total, weight, rstd)
        ctx.set_materialize_grads(False)
        return y, total

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor | None) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        total, weight, rstd = ctx.saved_tensors
        needs_x, needs_residual, needs_weight, _ = ctx.needs_input_grad
        dy, dtotal = grads
        if dy is None:
            return dtotal if needs_x else None, dtotal if needs_residual else None, None, None
        needs = (needs_x or needs_residual, needs_weight)
        dx, dw = _rms_norm_backward(dy, total, weight, rstd, dtotal, needs)
        return dx if needs_x else None, dx if needs_residual else None, dw, None


def _swiglu(gate: Tensor, up: Tensor) -> Tensor:
    g, u = rows(gate), rows(up)
    y = empty(*gate.shape)
    kernel("swiglu")(
        g.data_ptr(), g.stride(0), u.data_ptr(), u.stride(0), y.data_ptr(), *g.shape, torch.get_num_threads()
    )
    return y


class _SwiGLU(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, gate: Tensor, up: Tensor) -> Tensor:
        ctx.save_for_backward(gate, up)
        return _swiglu(gate, up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        gate, up = ctx.saved_tensors
        dy, g, u = rows(grads[0]), rows(gate), rows(up)
        dgate, dup = empty(*gate.shape), empty(*up.shape)
        kernel("swiglu_backward")(
            dy.data_ptr(),
            dy.stride(0),
            g.data_ptr(),
            g.stride(0),
            u.data_ptr(),
            u.stride(0),
            dgate.data_ptr(),
            dup.data_ptr(),
            *g.shape,
            torch.get_num_threads(),
        )
        return tuple(grad if needed else None for grad, needed in zip((dgate, dup), ctx.needs_input_grad, strict=True))


def _angles(heads_THC: Tensor, angles_TC: Tensor) -> Tensor:
    """cos or sin as dense [M, C], one row for each token."""
    check(angles_TC)
    if heads_THC.dim() == 3 and angles_TC.shape == (len(heads_THC), heads_THC.shape[2]) and angles_TC.is_contiguous():
        return angles_TC
    return angles_TC.detach().expand(*heads_THC.shape[:-2], heads_THC.shape[-1]).reshape(-1, heads_THC.shape[-1])


def _heads(x_TNC: Tensor, weight_C: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """Heads normed (with a weight) and rotated."""
    C = x_TNC.shape[-1]
    if C % 2:
        raise ValueError(f"a rotary embedding pairs channels: {C} is odd")
    if weight_C is not None:
        check(x_TNC, weight_C)
        _check_weight(weight_C, C)
        if wants_grad(x_TNC, weight_C):
            return _NormRope.apply(x_TNC, weight_C, eps, cos, sin)
        return _heads_forward(x_TNC, weight_C, eps, cos, sin)[0]
    check(x_TNC)
    return _Rope.apply(x_TNC, cos, sin) if wants_grad(x_TNC) else _heads_forward(x_TNC, None, eps, cos, sin)[0]


def _heads_forward(
    x_TNC: Tensor, weight_C: Tensor | None, eps: float, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor | None]:
    x = heads(x_TNC)
    y = empty(*x_TNC.shape)
    rstd = None if weight_C is None else empty(*x.shape[:2])
    weight = None if weight_C is None else weight_C.detach().contiguous()
    kernel("heads")(
        x.data_ptr(),
        x.stride(0),
        address(weight),
        eps,
        cos.data_ptr(),
        sin.data_ptr(),
        y.data_ptr(),
        address(rstd),
        *x.shape,
        torch.get_num_threads(),
    )
    return y, rstd


class _Rope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TNC: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _heads_forward(x_TNC, None, 0.0, cos, sin)[0]

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        cos, sin = ctx.saved_tensors
        dy = heads(grads[0])
        dx = empty(*grads[0].shape)
        kernel("heads_backward")(
            dy.data_ptr(),
            dy.stride(0),
            None,
            0,
            None,
            None,
            cos.data_ptr(),
            sin.data_ptr(),
            dx.data_ptr(),
            None,
            *dy.shape,
            torch.get_num_threads(),
        )
        return dx, None, None


class _NormRope(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x_TNC: Tensor, weight_C: Tensor, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        y, rstd = _heads_forward(x_TNC, weight_C, eps, cos, sin)
        ctx.save_for_backward(x_TNC, weight_C, rstd, cos, sin)
        return y

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Tensor) -> Any:  # pyright: ignore[reportIncompatibleMethodOverride]
        x_TNC, weight_C, rstd, cos, sin = ctx.saved_tensors
        needs_x, needs_weight, *_ = ctx.needs_input_grad
        dy, x, weight = heads(grads[0]), heads(x_TNC), weight_C.detach().contiguous()
        dx = empty(*x_TNC.shape) if needs_x else None
        dw = empty(*weight_C.shape) if needs_weight else None
        kernel("heads_backward")(
            dy.data_ptr(),
            dy.stride(0),
            x.data_ptr(),
            x.stride(0),
            weight.data_ptr(),
            rstd.data_ptr(),
            cos.data_ptr(),
            sin.data_ptr(),
            address(dx),
            address(dw),
            *x.shape,
            torch.get_num_threads(),
        )
        return dx, dw, None, None, None


def _check_weight(weight: Tensor, width: int) -> None:
    if weight.shape != (width,):
        raise ValueError(f"a norm over {width} channels needs a weight of that size, not {tuple(weight.shape)}")
