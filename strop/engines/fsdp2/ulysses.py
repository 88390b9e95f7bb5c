"""Sequence parallelism: each rank holds a slice of a batch's tokens, and inside attention a slice of the heads instead.

    [T / R, H, ...] on every rank -> exchange -> [T, H / R, ...] -> attention of whole sequences -> exchange -> back

DeepSpeed-Ulysses, arXiv 2309.14509. R ranks, of which rank r holds tokens r T / R to (r + 1) T / R.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import ProcessGroup

from strop.errors import EngineError
from strop.models.attention import AttentionContext


class _Exchange(torch.autograd.Function):
    """Axis 0 of length R, chunk r to rank r; the received chunks in order of their ranks. Its own inverse."""

    @staticmethod
    def forward(ctx: Any, chunks_R: Tensor, group: ProcessGroup) -> Tensor:
        ctx.group = group
        received_R = torch.empty_like(chunks_R)
        dist.all_to_all_single(received_R, chunks_R.contiguous(), group=group)
        return received_R

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        return _Exchange.apply(grads[0].contiguous(), ctx.group), None


class _Gather(torch.autograd.Function):
    """Every rank's rows, end to end, on every rank; the gradient of a rank's own rows alone comes back.

    What follows is computed alike on every rank, so each has the whole gradient already: summing would count it R
    times.
    """

    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: ProcessGroup) -> Tensor:
        size, ctx.rank = dist.get_world_size(group), dist.get_rank(group)
        ctx.count = len(rows)
        parts = [torch.empty_like(rows) for _ in range(size)]
        dist.all_gather(parts, rows.contiguous(), group=group)
        return torch.cat(parts)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor, None]:
        lo = ctx.rank * ctx.count
        return grads[0][lo : lo + ctx.count], None


def gather_rows(rows: Tensor, group: ProcessGroup) -> Tensor:
    """Rows of all ranks, [R n, ...] from [n, ...]."""
    return _Gather.apply(rows, group)  # pyright: ignore[reportReturnType]


@dataclass(frozen=True, slots=True)
class UlyssesAttention:
    """An `AttentionContext` of a slice of the tokens, over one of all of them."""

    inner: AttentionContext
    group: ProcessGroup

    @property
    def size(self) -> int:
        return dist.get_world_size(self.group)

    @property
    def rank(self) -> int:
        return dist.get_rank(self.group)

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
        heads = q_THC.shape[1]
        k_TJC, v_TJC = (self._enough(x, heads) for x in (k_TJC, v_TJC))
        out_THC = self.inner.attend(
            layer,
            self._to_heads(q_THC),
            self._to_heads(k_TJC),
            self._to_heads(v_TJC),
            scale=scale,
            window=window,
            softcap=softcap,
            sinks_H=None if sinks_H is None else self._own(sinks_H),
        )
        return self._to_tokens(out_THC)

    def convolve(self, layer: int, x_TF: Tensor, weight_FW: Tensor) -> Tensor:
        return self._to_tokens(self.inner.convolve(layer, self._to_heads(x_TF), self._own(weight_FW)))

    def delta_rule(
        self, layer: int, q_TJC: Tensor, k_TJC: Tensor, v_THC: Tensor, decay_TH: Tensor, beta_TH: Tensor
    ) -> Tensor:
        heads = v_THC.shape[1]
        q_TJC, k_TJC = (self._enough(x, heads) for x in (q_TJC, k_TJC))
        columns = (self._to_heads(x) for x in (q_TJC, k_TJC, v_THC, decay_TH, beta_TH))
        return self._to_tokens(self.inner.delta_rule(layer, *columns))

    def _enough(self, x_TJC: Tensor, heads: int) -> Tensor:
        """Keys whose heads can be dealt to the ranks, so that each rank has those of its query heads."""
        if x_TJC.shape[1] % self.size == 0:
            return x_TJC
        return x_TJC.repeat_interleave(heads // x_TJC.shape[1], dim=1)

    def _to_heads(self, x_TH: Tensor) -> Tensor:
        """[T / R, H, ...] -> [T, H / R, ...]"""
        tokens, heads, size = x_TH.shape[0], x_TH.shape[1], self.size
        if heads % size:
            raise EngineError(
                f"{heads} heads cannot be dealt to {size} ranks: engine.parallel.sequence must divide the model's heads"
            )
        chunks = x_TH.unflatten(1, (size, heads // size)).transpose(0, 1)  # [R, T / R, H / R, ...]
        return _Exchange.apply(chunks.contiguous(), self.group).flatten(0, 1)[: size * tokens]

    def _to_tokens(self, x_TH: Tensor) -> Tensor:
        """[T, H / R, ...] -> [T / R, H, ...]"""
        size = self.size
        received = _Exchange.apply(x_TH.unflatten(0, (size, -1)).contiguous(), self.group)  # [R, T / R, H / R, ...]
        return received.transpose(0, 1).flatten(1, 2)

    def _own(self, per_head: Tensor) -> Tensor:
        """This rank's heads of something that each head has; the gradient is of those alone."""
        share = len(per_head) // self.size
        return per_head[self.rank * share : (self.rank + 1) * share]
