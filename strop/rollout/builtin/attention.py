"""Attention of one forward pass over the caches: new keys and values go in, then tokens attend; and states move on."""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from strop.errors import EngineError
from strop.ops.paged import PagedKV
from strop.rollout.builtin.states import StatePass


@dataclass(frozen=True, slots=True, kw_only=True)
class CachedAttention:
    """An `AttentionContext` for T tokens of R rows.

    A layer writes the keys and values of all T tokens before any of them attends: a row may read pages that another row
    fills in the same pass.
    """

    cache: PagedKV
    place: dict[int, int]  # decoder layer -> its place in the cache
    states: StatePass | None  # None for a model without linear attention
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
        self.cache.write(self.place[layer], k_TJC, v_TJC, self.slot_T)
        return self.cache.attend(
            self.place[layer],
            q_THC,
            self.tables_RB,
            self.row_T,
            self.context_T,
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_H=sinks_H,
        )

    def convolve(self, layer: int, x_TF: Tensor, weight_FW: Tensor) -> Tensor:
        return self._states.convolve(layer, x_TF, weight_FW)

    def delta_rule(
        self, layer: int, q_TJC: Tensor, k_TJC: Tensor, v_THC: Tensor, decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        return self._states.delta_rule(layer, q_TJC, k_TJC, v_THC, decay_TH, beta_TH)

    @property
    def _states(self) -> StatePass:
        if self.states is None:
            raise EngineError("a linear attention layer runs, but none ran when the model was loaded")
        return self.states
