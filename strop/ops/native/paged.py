"""The paged cache's kernels: keys [pages, J, C, PAGE], values [pages, J, PAGE, C_v], C_v padded to whole vectors."""

from __future__ import annotations

import torch
from torch import Tensor

from strop.ops.native.arrays import check, empty, heads
from strop.ops.native.build import kernel


def write(keys: Tensor, values: Tensor, k_TJC: Tensor, v_TJC: Tensor, slots_T: Tensor) -> None:
    """Put each token's key and value into its slot. Raises IndexError for a slot outside the cache."""
    check(keys, values, k_TJC, v_TJC)
    k, v, slots = heads(k_TJC), heads(v_TJC), slots_T.to(torch.int64).contiguous()
    wrong = kernel("paged_write")(
        k.data_ptr(),
        k.stride(0),
        v.data_ptr(),
        v.stride(0),
        slots.data_ptr(),
        len(slots),
        keys.shape[0],
        keys.data_ptr(),
        values.data_ptr(),
        *k.shape[1:],
        v.shape[2],
    )
    if wrong >= 0:
        raise IndexError(f"token {wrong} goes to slot {int(slots[wrong])} of a cache of {keys.shape[0]} pages")


def attend(
    keys: Tensor,
    values: Tensor,
    q_THC: Tensor,
    tables_RB: Tensor,
    row_T: Tensor,
    context_T: Tensor,
    *,
    scale: float,
    value_channels: int,
) -> Tensor:
    """`PagedKV.attend` for one layer. Raises IndexError for a request, context or page that cannot be."""
    check(keys, values, q_THC)
    q = heads(q_THC)
    tables, row, context = (x.to(torch.int32).contiguous() for x in (tables_RB, row_T, context_T))
    out = empty(*q.shape[:2], value_channels)
    wrong = kernel("paged_attention")(
        q.data_ptr(),
        q.stride(0),
        keys.data_ptr(),
        values.data_ptr(),
        tables.data_ptr(),
        *tables.shape,
        row.data_ptr(),
        context.data_ptr(),
        len(q),
        keys.shape[0],
        scale,
        out.data_ptr(),
        q.shape[1],
        keys.shape[1],
        q.shape[2],
        value_channels,
        torch.get_num_threads(),
    )
    if wrong >= 0:
        raise IndexError(
            f"query token {wrong}: request {int(row[wrong])} with context {int(context[wrong])} does not fit "
            f"{tables.shape[0]} tables of {tables.shape[1]} pages, or names a page outside the cache of {keys.shape[0]}"
        )
    return out
