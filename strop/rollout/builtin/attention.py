"""Attention of one forward pass over the paged cache: new keys and values go in, then tokens attend."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strop.ops.paged import PagedKV


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAttention:
    """An `AttentionContext` for T tokens of R rows.

    A layer writes the keys and values of all T tokens before any of them attends: a row may read pages that another row
    fills in the same pass.
    """

    cache: PagedKV
    tables_RB: Tensor  # int32: each row's pages, in the order of its text
    row_T: Tensor  # int64
    slot_T: Tensor  # int64: where each token's key and value go
    context_T: Tensor  # int64: how many positions each token sees, itself included

    def attend(
        self,
        layer: int,
        q_THC: Tensor,
        k_TJC: Tensor,
        v_TJC: Tensor,
        *,
        scale: float,
        window: int | None,
        softcap: float | None,
        sinks_H: Tensor | None,
    ) -> Tensor:
        self.cache.write(layer, k_TJC, v_TJC, self.slot_T)
        return self.cache.attend(
            layer,
            q_THC,
            self.tables_RB,
            self.row_T,
            self.context_T,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
        )
