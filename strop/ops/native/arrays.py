"""Tensors as the kernels take them: float32 on the CPU, rows of contiguous numbers a fixed stride apart."""

from __future__ import annotations

import torch
from torch import Tensor


def check(*tensors: Tensor) -> None:
    """Raises TypeError unless every tensor is float32 on the CPU: the kernels read raw memory."""
    for tensor in tensors:
        if tensor.dtype is not torch.float32 or not tensor.is_cpu:
            raise TypeError(f"native kernels take float32 tensors on the CPU, not {tensor.dtype} on {tensor.device}")


def rows(x: Tensor) -> Tensor:
    """x [..., D] as [N, D] whose rows are contiguous; a copy only when its memory is laid out otherwise."""
    D = x.shape[-1]
    flat = x if x.dim() == 2 else x.reshape(x.shape[:-1].numel(), D)
    return flat if D <= 1 or flat.stride(1) == 1 else flat.contiguous()


def heads(x: Tensor) -> Tensor:
    """x [..., N, C] as [M, N, C] whose last two axes are contiguous; a copy only when needed."""
    N, C = x.shape[-2:]
    flat = x if x.dim() == 3 else x.reshape(x.shape[:-2].numel(), N, C)
    return flat if flat.stride(2) == 1 and flat.stride(1) == C else flat.contiguous()


def wants_grad(*tensors: Tensor) -> bool:
    """Whether autograd has to know of a call with these inputs."""
    return torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)


def empty(*shape: int) -> Tensor:
    """An uninitialised tensor for a kernel to fill, whatever torch's default dtype and device are."""
    return torch.empty(shape, dtype=torch.float32, device="cpu")


def address(x: Tensor | None) -> int | None:
    return None if x is None else x.data_ptr()
