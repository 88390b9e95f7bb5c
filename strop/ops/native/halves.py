"""Products of bfloat16 with sums in float32, on the tile registers of processors that have them (Intel's AMX)."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor

from strop.ops.native.build import NativeUnavailable, kernel

_WIDE = (torch.float32, torch.bfloat16, torch.float32)
_KINDS = (_WIDE, (torch.bfloat16, torch.bfloat16, torch.float32))


@cache
def has_tiles() -> bool:
    """Whether this processor and system have the registers, and the kernels are built."""
    try:
        return bool(kernel("has_tiles")())
    except NativeUnavailable:
        return False


def half_product(a_MK: Tensor, b_KN: Tensor, c_MN: Tensor, *, add: bool, tiles: bool = True) -> None:
    """Write a @ b to `c_MN`, float32 with rows of contiguous numbers, or add it; sums are float32.

    b is bfloat16. So is a, or it is float32, of which the upper 16 bits of each number count. Without `tiles` any
    processor does it, slowly. Raises TypeError and ValueError for other tensors, RuntimeError where there are no tiles.
    """
    kinds = (a_MK.dtype, b_KN.dtype, c_MN.dtype)
    if kinds not in _KINDS or not (a_MK.is_cpu and b_KN.is_cpu and c_MN.is_cpu):
        raise TypeError(f"{kinds[0]} @ {kinds[1]} into {kinds[2]} on {a_MK.device}, {b_KN.device}, {c_MN.device}")
    (M, K), (inner, N) = a_MK.shape, b_KN.shape
    if inner != K or c_MN.shape != (M, N) or (N > 1 and c_MN.stride(1) != 1):
        raise ValueError(f"[{M}, {K}] @ [{inner}, {N}] into {list(c_MN.shape)} with strides {list(c_MN.stride())}")
    a, (a_row, a_k) = _in_lines(a_MK)
    b, (b_k, b_column) = _in_lines(b_KN)
    done = kernel("half_product")(
        a.data_ptr(),
        a_row,
        a_k,
        a.dtype is torch.float32,
        b.data_ptr(),
        b_k,
        b_column,
        c_MN.data_ptr(),
        c_MN.stride(0),
        add,
        M,
        N,
        K,
        tiles,
        torch.get_num_threads(),
    )
    if not done:
        raise RuntimeError("this processor has no tile registers, or the system does not hand them out")


def _in_lines(x: Tensor) -> tuple[Tensor, tuple[int, int]]:
    """Its rows or its columns contiguous; strides that say so where an axis of one element has any."""
    if x.stride(1) == 1 or (x.shape[1] <= 1 and x.stride(0) != 1):
        return x, (x.stride(0), 1)
    if x.stride(0) == 1:
        return x, (1, x.stride(1))
    x = x.contiguous()
    return x, (x.stride(0), 1)
