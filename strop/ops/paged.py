"""The sampler's key-value cache: pages of 16 tokens that requests own or share, written and read layer by layer.

Keys and values of new tokens are written to slots (page * PAGE + offset); queries then attend over their request's
pages, in order. Slots that no context covers may hold anything, NaN included: they never reach a result.
"""

from __future__ import annotations

import torch
from torch import Tensor

from strop.ops.attention import causal_window, dense_attention
from strop.ops.native import paged as native
from strop.ops.select import Impl

PAGE = 16  # tokens in one page


class PagedKV:
    """Keys [J, C] and values [J, C_v] of `num_pages` pages for each of `num_layers` layers."""

    def __init__(
        self,
        *,
        num_layers: int,
        num_pages: int,
        num_kv_heads: int,
        key_channels: int,
        value_channels: int,
        dtype: torch.dtype,
        device: torch.device,
        impl: Impl,
    ) -> None:
        self.impl = impl
        self.value_channels = value_channels
        rows = (num_layers, num_pages)
        # native keys keep a page's 16 tokens side by side: one vector load takes the same channel of several keys
        keys = (num_kv_heads, key_channels, PAGE) if impl is Impl.NATIVE else (PAGE, num_kv_heads, key_channels)
        padded = -(-value_channels // PAGE) * PAGE  # and values whole vectors
        values = (num_kv_heads, PAGE, padded) if impl is Impl.NATIVE else (PAGE, num_kv_heads, value_channels)
        self._keys = torch.empty(*rows, *keys, dtype=dtype, device=device)
        self._values = torch.empty(*rows, *values, dtype=dtype, device=device)

    @property
    def num_pages(self) -> int:
        return self._keys.shape[1]

    @property
    def num_bytes(self) -> int:
        return self._keys.nbytes + self._values.nbytes

    def write(self, layer: int, k_TJC: Tensor, v_TJC: Tensor, slots_T: Tensor) -> None:
        """Put the keys [T, J, C] and values [T, J, C_v] of T tokens into `slots_T` (int64, each at most once)."""
        keys, values = self._keys[layer], self._values[layer]
        if self.impl is Impl.NATIVE:
            native.write(keys, values, k_TJC, v_TJC, slots_T)
            return
        keys.flatten(0, 1).index_copy_(0, slots_T, k_TJC.detach())
        values.flatten(0, 1).index_copy_(0, slots_T, v_TJC.detach())

    def copy_page(self, src: int, dst: int) -> None:
        """Copy page `src` to `dst` in every layer: what a request does before it writes to a shared page."""
        self._keys[:, dst] = self._keys[:, src]
        self._values[:, dst] = self._values[:, src]

    def attend(
        self,
        layer: int,
        q_THC: Tensor,
        tables_RB: Tensor,
        row_T: Tensor,
        context_T: Tensor,
        *,
        scale: float,
        window: int | None = None,
        softcap: float | None = None,
        sinks_H: Tensor | None = None,
    ) -> Tensor:
        """Attention of T query tokens [T, H, C] over the cache -> [T, H, C_v]. No gradient.

        Token t belongs to request `row_T[t]`, whose pages are `tables_RB[row]` (int32, -1 after the last), and sees its
        first `context_T[t]` >= 1 positions, itself included: its key and value are written before. `window`, `softcap`
        and `sinks_H` are as in `packed_attention`, and take the torch form as there.
        """
        plain = window is None and softcap is None and sinks_H is None
        if self.impl is Impl.NATIVE and plain:
            keys, values = self._keys[layer], self._values[layer]
            return native.attend(
                keys, values, q_THC, tables_RB, row_T, context_T, scale=scale, value_channels=self.value_channels
            )
        out = q_THC.new_empty((*q_THC.shape[:2], self.value_channels))
        for tokens_RM in _tokens_by_row(row_T):
            rows_R = row_T[tokens_RM[:, 0]].long()
            context_RM = context_T[tokens_RM]
            k_RNJC, v_RNJC = self._gather(layer, tables_RB[rows_R], int(context_RM.max()))
            positions_N = torch.arange(k_RNJC.shape[1], device=q_THC.device)
            allowed_RMN = causal_window(context_RM - 1, positions_N, window)
            # the input of the risky product is masked, not its output: 0 * NaN is NaN
            covered_RN = positions_N < context_RM.amax(1, keepdim=True)
            v_RNJC = v_RNJC.masked_fill(~covered_RN[:, :, None, None], 0.0)
            q_RMHC = q_THC.detach()[tokens_RM]
            out[tokens_RM] = dense_attention(
                q_RMHC, k_RNJC, v_RNJC, allowed_RMN, scale=scale, softcap=softcap, sinks_H=sinks_H
            )
        return out

    def _gather(self, layer: int, tables_RB: Tensor, context: int) -> tuple[Tensor, Tensor]:
        """Keys [R, N, J, C] and values [R, N, J, C_v] of the pages with the first `context` positions of R requests."""
        pages_RB = tables_RB[:, : -(-context // PAGE)].clamp(min=0).long()
        k, v = self._keys[layer][pages_RB], self._values[layer][pages_RB]
        if self.impl is Impl.NATIVE:
            k, v = k.permute(0, 1, 4, 2, 3), v[..., : self.value_channels].permute(0, 1, 3, 2, 4)
        return k.flatten(1, 2), v.flatten(1, 2)


def _tokens_by_row(row_T: Tensor) -> list[Tensor]:
    """Indices of tokens [R, M] that can be computed together: one token of each of R requests, or M of one request."""
    rows = row_T.tolist()
    if not rows:
        return []
    if len(set(rows)) == len(rows):
        return [torch.arange(len(rows), device=row_T.device)[:, None]]
    of_row: dict[int, list[int]] = {}
    for token, row in enumerate(rows):
        of_row.setdefault(row, []).append(token)
    return [torch.tensor([tokens], device=row_T.device) for tokens in of_row.values()]
