"""Tiles of logits: a few rows by a few columns of the vocabulary are made, folded into [N] statistics, and forgotten.

Online softmax (arXiv 1805.02867): a running maximum m, and sums of e = exp(z - m), e (z - m) and e^2 that are scaled
whenever the maximum grows. Given the statistics, any tile made again is turned into the loss's derivative by its
logits. Sums run in float32, or in float64 for float64 inputs.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from strop.ops.head import COLUMNS, Ask, Entropy, Shard
from strop.ops.native.halves import half_product, has_tiles

HALVES = (torch.bfloat16, torch.float16)
EVERY = slice(None)
BANNED = -1e30  # stands for -inf where 0 * -inf would be NaN


@dataclass(frozen=True, slots=True, kw_only=True)
class Logits:
    """All that a tile is made of, and how: z = softcap(sum of x @ w.T over `pairs` + bias) / temperature."""

    pairs: tuple[tuple[Tensor, Tensor], ...]  # (hidden [N, D], weight [V, D]), then an adapter's ([N, R], [V, R])
    bias_V: Tensor | None
    softcap: float | None
    temperature: float | Tensor | None  # a tensor is [N]
    shard: Shard | None

    @property
    def dtype(self) -> torch.dtype:
        """Of logits, statistics and sums."""
        return torch.float64 if self.pairs[0][0].dtype == torch.float64 else torch.float32

    @property
    def width(self) -> int:
        """Tokens of the vocabulary that are here."""
        return len(self.pairs[0][1])

    @property
    def first_token(self) -> int:
        return 0 if self.shard is None else self.shard.start

    def tile(self, rows: slice, columns: slice, weights: list[Tensor], out: Tensor | None = None) -> Tensor:
        """z [rows, columns]. `weights` are those of `pairs`, cut to the columns."""
        z = product(self.pairs[0][0][rows], weights[0].t(), out=out)
        if len(self.pairs) > 1:
            product(self.pairs[1][0][rows], weights[1].t(), onto=z)
        if self.bias_V is not None:
            z.add_(self.bias_V[columns]).clamp_(min=BANNED)
        if self.softcap is not None:
            z.div_(self.softcap).tanh_().mul_(self.softcap)
        return z if self.temperature is None else z.div_(self.divisor(rows))

    def cut(self, rows: slice, columns: slice | None = None) -> Logits:
        """The same for some rows, and some columns, only."""
        columns = slice(None) if columns is None else columns
        return replace(
            self,
            pairs=tuple((x[rows], w[columns]) for x, w in self.pairs),
            bias_V=None if self.bias_V is None else self.bias_V[columns],
            temperature=self.temperature[rows] if isinstance(self.temperature, Tensor) else self.temperature,
        )

    def divisor(self, rows: slice) -> float | Tensor:
        """The temperature of some rows, shaped to divide their tile."""
        if isinstance(self.temperature, Tensor):
            return self.temperature[rows, None].to(self.dtype)
        return 1.0 if self.temperature is None else self.temperature

    def weights(self, columns: slice) -> list[Tensor]:
        """The weights of some columns, as a tile's products take them: half precision as it is where there is
        arithmetic for it, and in float32 on a processor that has none."""
        cut = [w[columns] for _, w in self.pairs]
        return [w if w.device.type != "cpu" or _on_tiles(w) else w.to(self.dtype) for w in cut]


def _on_tiles(half: Tensor) -> bool:
    """Whether a processor multiplies such numbers as they are."""
    return half.device.type == "cpu" and half.dtype is torch.bfloat16 and has_tiles()


def product(a: Tensor, b: Tensor, *, onto: Tensor | None = None, out: Tensor | None = None) -> Tensor:
    """a @ b with sums in float32 (float64 for float64): added to `onto`, written to `out`, or new."""
    if _on_tiles(b) and a.dtype in (torch.bfloat16, torch.float32):
        into = onto if onto is not None else out
        into = a.new_empty((len(a), b.shape[1]), dtype=torch.float32) if into is None else into
        half_product(a, b, into, add=onto is not None)
        return into
    half = a.dtype if a.dtype in HALVES else b.dtype if b.dtype in HALVES else None
    if half is not None and a.device.type != "cpu":
        part = torch.mm(a.to(half), b.to(half), out_dtype=torch.float32)
        if onto is not None:
            return onto.add_(part)
        return part if out is None else out.copy_(part)
    wide = torch.float64 if torch.float64 in (a.dtype, b.dtype) else torch.float32
    a, b = a.to(wide), b.to(wide)
    if onto is not None:
        return onto.addmm_(a, b)
    return torch.mm(a, b, out=out)


def row_tiles(total: int, rows: int) -> list[slice]:
    return [slice(i, min(i + rows, total)) for i in range(0, total, rows)]


def column_tiles(vocabulary: int, rows: int, total: int) -> list[slice]:
    """As many columns as make a tile of `rows` x COLUMNS logits when there are fewer rows than that."""
    width = COLUMNS * max(1, rows // max(1, total))
    return [slice(i, min(i + width, vocabulary)) for i in range(0, vocabulary, width)]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """What is known of each row once every tile has been seen. `picked` are logprobs of the tokens asked for."""

    picked_NJ: Tensor
    entropy_N: Tensor  # 0 unless asked for
    square_sums_N: Tensor  # 0 unless asked for
    top_ids_NK: Tensor
    top_logprobs_NK: Tensor

    def tensors(self) -> tuple[Tensor, ...]:
        """What may carry gradients first."""
        return self.picked_NJ, self.entropy_N, self.square_sums_N, self.top_ids_NK, self.top_logprobs_NK


class Statistics:
    """Running sums over the vocabulary for N rows."""

    def __init__(self, logits: Logits, picks_NJ: Tensor, ask: Ask) -> None:
        self.picks_NJ, self.ask = picks_NJ, ask
        self.shard, self.first_token = logits.shard, logits.first_token
        rows = len(picks_NJ)
        lowest = torch.finfo(logits.dtype).min
        self.max_N = picks_NJ.new_full((rows,), lowest, dtype=logits.dtype)
        self.sum_N, self.weighted_N, self.squares_N = (torch.zeros_like(self.max_N) for _ in range(3))
        self.picked_NJ = self.max_N.new_zeros(picks_NJ.shape)
        self.top_NK = self.max_N.new_full((rows, ask.top_k), lowest)
        self.top_ids_NK = picks_NJ.new_zeros((rows, ask.top_k))

    def fold(self, rows: slice, columns: slice, z: Tensor) -> None:
        """Take in the tile `z`, which stays as it is."""
        inside, local = within(self.picks_NJ[rows], columns, self.first_token)
        self.picked_NJ[rows] += torch.where(inside, z.gather(1, local), 0.0)
        if self.ask.top_k:
            self.keep_best(rows, columns, z)
        highest = torch.maximum(self.max_N[rows], z.amax(1))
        self._rescale(highest, rows)
        shifted = z - highest[:, None]
        e = shifted.exp()
        self.sum_N[rows] += e.sum(1)
        if self.ask.entropy is not Entropy.NONE:
            self.weighted_N[rows] += shifted.mul_(e).sum(1)
        if self.ask.square_sums:
            self.squares_N[rows] += e.square_().sum(1)

    def merge(self, max_N: Tensor, sum_N: Tensor, weighted_N: Tensor, squares_N: Tensor) -> None:
        """Take in the sums of other columns, which refer to a maximum of their own."""
        highest = torch.maximum(self.max_N, max_N)
        self._rescale(highest)
        shift = max_N - highest
        scale = shift.exp()
        self.weighted_N += (weighted_N + sum_N * shift) * scale
        self.sum_N += sum_N * scale
        self.squares_N += squares_N * scale.square()

    def keep_best(self, rows: slice, columns: slice, z: Tensor) -> None:
        """Of the likeliest tokens held and those of the tile `z`, the likeliest."""
        best = z.topk(min(self.ask.top_k, z.shape[1]))
        self._keep(rows, best.values, best.indices + columns.start + self.first_token)

    def _keep(self, rows: slice, values_NK: Tensor, ids_NK: Tensor) -> None:
        best = torch.cat([self.top_NK[rows], values_NK], 1).topk(self.ask.top_k)
        self.top_ids_NK[rows] = torch.cat([self.top_ids_NK[rows], ids_NK], 1).gather(1, best.indices)
        self.top_NK[rows] = best.values

    def _rescale(self, highest: Tensor, rows: slice = EVERY) -> None:
        """Refer the sums to a maximum that is as large or larger."""
        lowest = torch.finfo(highest.dtype).min
        shift = (self.max_N[rows] - highest).clamp_(min=lowest)  # finite, so that it times a sum of 0 is 0
        scale = shift.exp()
        self.weighted_N[rows] = (self.weighted_N[rows] + self.sum_N[rows] * shift) * scale
        self.sum_N[rows] *= scale
        self.squares_N[rows] *= scale.square()
        self.max_N[rows] = highest

    def _reduce(self, shard: Shard) -> None:
        """Put the ranks' shares of the vocabulary together."""
        highest = self.max_N.clone()
        dist.all_reduce(highest, dist.ReduceOp.MAX, group=shard.group)
        self._rescale(highest)
        sums = torch.cat([torch.stack([self.sum_N, self.weighted_N, self.squares_N], 1), self.picked_NJ], 1)
        dist.all_reduce(sums, group=shard.group)
        self.sum_N, self.weighted_N, self.squares_N = sums[:, :3].unbind(1)
        self.picked_NJ = sums[:, 3:]
        if self.ask.top_k:
            ranks = dist.get_world_size(shard.group)
            values, ids = ([torch.empty_like(t) for _ in range(ranks)] for t in (self.top_NK, self.top_ids_NK))
            dist.all_gather(values, self.top_NK, group=shard.group)
            dist.all_gather(ids, self.top_ids_NK, group=shard.group)
            self.top_NK.fill_(torch.finfo(self.top_NK.dtype).min)
            self._keep(EVERY, torch.cat(values, 1), torch.cat(ids, 1))

    def summary(self) -> tuple[Summary, Tensor]:
        """The result and the logsumexp [N], over all ranks that hold a share of the vocabulary."""
        if self.shard is not None:
            self._reduce(self.shard)
        log_sum_N = self.sum_N.log()
        found = Summary(
            picked_NJ=self.picked_NJ - self.max_N[:, None] - log_sum_N[:, None],
            entropy_N=log_sum_N - self.weighted_N / self.sum_N,
            square_sums_N=self.squares_N / self.sum_N.square(),
            top_ids_NK=self.top_ids_NK,
            top_logprobs_NK=self.top_NK - self.max_N[:, None] - log_sum_N[:, None],
        )
        return found, self.max_N + log_sum_N


def within(picks_NJ: Tensor, columns: slice, first_token: int) -> tuple[Tensor, Tensor]:
    """Which of the tokens lie in a tile's columns, and at which of them (somewhere, for those that do not)."""
    local_NJ = picks_NJ - (first_token + columns.start)
    width = columns.stop - columns.start
    return (local_NJ >= 0) & (local_NJ < width), local_NJ.clamp(0, width - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Slope:
    """How the loss changes with what each row gave: its derivative by `picked` [N, J] and by the entropy [N]."""

    picks_NJ: Tensor
    by_picked_NJ: Tensor
    by_entropy_N: Tensor | None
    lse_N: Tensor
    entropy_N: Tensor

    def by_logits(self, logits: Logits, rows: slice, columns: slice, z: Tensor) -> Tensor:
        """The loss's derivative by the products in a tile (before bias, cap and temperature); `z` is spent.

        d picked_j / dz = [v = j] - p, d entropy / dz = -p (log p + entropy), d softcap(x) / dx = 1 - (softcap / cap)^2.
        """
        temperature = logits.divisor(rows)
        bend = None
        if logits.softcap is not None:
            bend = (z * temperature).div_(logits.softcap).square_().neg_().add_(1.0)
        z.sub_(self.lse_N[rows, None])
        constant_N = self.by_picked_NJ[rows].sum(1)
        if self.by_entropy_N is None:
            z.exp_().mul_(-constant_N[:, None])
        else:
            by_entropy_N = self.by_entropy_N[rows]
            constant_N = constant_N + by_entropy_N * self.entropy_N[rows]
            p = z.exp()
            z.mul_(-by_entropy_N[:, None]).sub_(constant_N[:, None]).mul_(p)
        inside, local = within(self.picks_NJ[rows], columns, logits.first_token)
        z.scatter_add_(1, local, torch.where(inside, self.by_picked_NJ[rows], 0.0))
        z.div_(temperature)
        return z if bend is None else z.mul_(bend)
