"""The streaming head: hidden states and weights in, [N] statistics out; the logits are made a tile at a time.

`score` makes every tile twice: autograd keeps the inputs and what is [N], and the backward pass makes the logits again.
There the vocabulary is the outer loop: the gradient of a few rows of the weight is summed over all tokens in float32
and written once, so that no second [V, D] is needed, whatever the weight's number format.

`learn` makes every tile once: the logits of a few rows are held while their loss is differentiated, and gradients are
there when the forward pass ends.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
import torch.distributed as dist
from torch import Tensor

from strop.ops.head import COLUMNS, Ask, Entropy, Shard
from strop.ops.head_tiles import EVERY, Logits, Slope, Statistics, Summary, column_tiles, product, row_tiles


class Kernels(Protocol):
    """The two passes over the vocabulary, which a device may do in its own way."""

    def summarise(self, logits: Logits, picks_NJ: Tensor, ask: Ask, rows: int) -> tuple[Summary, Tensor]:
        """What each row gives, and its logsumexp."""
        ...

    def by_logits(self, logits: Logits, slope: Slope, rows: slice, columns: slice, weights: list[Tensor]) -> Tensor:
        """The loss's derivative by the products of one tile."""
        ...


class TorchKernels:
    """Both passes in plain torch, for every device and number format."""

    def summarise(self, logits: Logits, picks_NJ: Tensor, ask: Ask, rows: int) -> tuple[Summary, Tensor]:
        statistics = Statistics(logits, picks_NJ, ask)
        for columns in column_tiles(logits.width, rows, len(picks_NJ)):
            weights = logits.weights(columns)
            for few in row_tiles(len(picks_NJ), rows):
                statistics.fold(few, columns, logits.tile(few, columns, weights))
        return statistics.summary()

    def by_logits(self, logits: Logits, slope: Slope, rows: slice, columns: slice, weights: list[Tensor]) -> Tensor:
        return slope.by_logits(logits, rows, columns, logits.tile(rows, columns, weights))


@dataclass(frozen=True, slots=True, kw_only=True)
class Inputs:
    """What autograd knows of: hidden states, the head's weight and bias, an adapter's inner states and its B."""

    hidden_ND: Tensor
    weight_VD: Tensor
    bias_V: Tensor | None
    inner_NR: Tensor | None
    b_VR: Tensor | None

    def tensors(self) -> tuple[Tensor | None, ...]:
        return self.hidden_ND, self.weight_VD, self.bias_V, self.inner_NR, self.b_VR


@dataclass(frozen=True, slots=True, kw_only=True)
class Pass:
    """All else about one pass over the head."""

    picks_NJ: Tensor
    temperature: float | Tensor | None
    softcap: float | None
    shard: Shard | None
    ask: Ask
    rows: int
    weight_grad_VD: Tensor | None  # the weight's gradient is added to it, and autograd is told of none

    def logits(self, inputs: Inputs) -> Logits:
        pairs = ((inputs.hidden_ND, inputs.weight_VD),)
        if inputs.inner_NR is not None and inputs.b_VR is not None:
            pairs = (*pairs, (inputs.inner_NR, inputs.b_VR))
        return Logits(
            pairs=pairs, bias_V=inputs.bias_V, softcap=self.softcap, temperature=self.temperature, shard=self.shard
        )


class _Sums:
    """What a backward pass adds up: derivatives by hidden states and inner states, weights and bias."""

    def __init__(self, logits: Logits, needed: tuple[bool, ...], weight_grad_VD: Tensor | None) -> None:
        self.logits, self.weight_grad_VD = logits, weight_grad_VD
        by_hidden, by_weight, by_bias, by_inner, by_b = needed[:5]
        wide = logits.dtype
        (_, weight_VD), *adapter = logits.pairs
        hidden_ND = logits.pairs[0][0]
        self.by_x = [_zeros(hidden_ND, by_hidden, wide), *(_zeros(inner_NR, by_inner, wide) for inner_NR, _ in adapter)]
        self.by_w = [
            weight_grad_VD if by_weight and weight_grad_VD is not None else _zeros(weight_VD, by_weight),
            *(_zeros(b_VR, by_b) for _, b_VR in adapter),
        ]
        self.by_bias_V = None if logits.bias_V is None else _zeros(logits.bias_V, by_bias, wide)

    def wide_weights(self, columns: slice) -> list[Tensor | None]:
        """Where the weights' gradients of some columns are summed: in place where that is wide enough."""
        wide = self.logits.dtype
        return [
            None if w is None else w[columns] if w.dtype == wide else torch.zeros_like(w[columns], dtype=wide)
            for w in self.by_w
        ]

    def add(
        self, grad_z: Tensor, rows: slice, columns: slice, weights: list[Tensor], by_w: list[Tensor | None]
    ) -> None:
        """Take in one tile's derivative by its products."""
        for i, (x, _) in enumerate(self.logits.pairs):
            by_x, into = self.by_x[i], by_w[i]
            if by_x is not None:
                product(grad_z, weights[i], onto=by_x[rows])
            if into is not None:
                product(grad_z.t(), x[rows], onto=into)
        if self.by_bias_V is not None:
            self.by_bias_V[columns] += grad_z.sum(0)

    def write(self, columns: slice, by_w: list[Tensor | None]) -> None:
        """Round what was summed beside a narrow gradient, once; a few columns at a time, since torch widens both."""
        for i, wide in enumerate(by_w):
            narrow = self.by_w[i]
            if narrow is not None and wide is not None and narrow.dtype != wide.dtype:
                for some, sums in zip(narrow[columns].split(COLUMNS), wide.split(COLUMNS), strict=True):
                    some.add_(sums)

    def results(self) -> tuple[Tensor | None, ...]:
        """In the order of `Inputs`."""
        logits = self.logits
        for by_x in self.by_x:
            if by_x is not None and logits.shard is not None:
                dist.all_reduce(by_x, group=logits.shard.group)
        by_x = [None if g is None else g.to(logits.pairs[i][0].dtype) for i, g in enumerate(self.by_x)]
        by_w = [g if g is not self.weight_grad_VD else None for g in self.by_w]
        by_bias = None if self.by_bias_V is None or logits.bias_V is None else self.by_bias_V.to(logits.bias_V.dtype)
        inner = (by_x[1], by_w[1]) if len(by_x) > 1 else (None, None)
        return by_x[0], by_w[0], by_bias, *inner


def _zeros(like: Tensor, needed: bool, dtype: torch.dtype | None = None) -> Tensor | None:
    return like.new_zeros(like.shape, dtype=dtype) if needed else None


def score(inputs: Inputs, run: Pass, kernels: Kernels) -> Summary:
    """Statistics of each row; `picked_NJ`, and the entropy if its gradient is asked for, carry gradients."""
    picked, entropy, squares, ids, best = _Stream.apply(*inputs.tensors(), run, kernels)  # pyright: ignore
    return Summary(picked_NJ=picked, entropy_N=entropy, square_sums_N=squares, top_ids_NK=ids, top_logprobs_NK=best)


class _Stream(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        inner_NR: Tensor | None,
        b_VR: Tensor | None,
        run: Pass,
        kernels: Kernels,
    ) -> tuple[Tensor, ...]:
        inputs = Inputs(hidden_ND=hidden_ND, weight_VD=weight_VD, bias_V=bias_V, inner_NR=inner_NR, b_VR=b_VR)
        seen, lse_N = kernels.summarise(run.logits(inputs), run.picks_NJ, run.ask, run.rows)
        ctx.save_for_backward(*inputs.tensors(), lse_N, seen.entropy_N)
        ctx.run, ctx.kernels = run, kernels
        ctx.set_materialize_grads(False)
        constant = [seen.square_sums_N, seen.top_ids_NK, seen.top_logprobs_NK]
        constant += [] if run.ask.entropy is Entropy.GRADIENT else [seen.entropy_N]
        ctx.mark_non_differentiable(*constant)
        return seen.tensors()

    @staticmethod
    def backward(ctx: Any, *grads: Tensor | None) -> tuple[Tensor | None, ...]:
        hidden_ND, weight_VD, bias_V, inner_NR, b_VR, lse_N, entropy_N = ctx.saved_tensors
        run: Pass = ctx.run
        kernels: Kernels = ctx.kernels
        logits = run.logits(
            Inputs(hidden_ND=hidden_ND, weight_VD=weight_VD, bias_V=bias_V, inner_NR=inner_NR, b_VR=b_VR)
        )
        by_picked, by_entropy = grads[:2]
        slope = Slope(
            picks_NJ=run.picks_NJ,
            by_picked_NJ=lse_N.new_zeros(run.picks_NJ.shape) if by_picked is None else by_picked,
            by_entropy_N=by_entropy,
            lse_N=lse_N,
            entropy_N=entropy_N,
        )
        sums = _Sums(logits, ctx.needs_input_grad, run.weight_grad_VD)
        for columns in column_tiles(logits.width, run.rows, len(hidden_ND)):
            weights, by_w = logits.weights(columns), sums.wide_weights(columns)
            for rows in row_tiles(len(hidden_ND), run.rows):
                sums.add(kernels.by_logits(logits, slope, rows, columns, weights), rows, columns, weights, by_w)
            sums.write(columns, by_w)
        return *sums.results(), None, None


RowLoss = Callable[[slice, Tensor, Tensor], Tensor]
"""From some rows, their picked logprobs [n, J] and entropies [n], both live, to the sum of their losses."""


def learn(inputs: Inputs, run: Pass, loss: RowLoss) -> tuple[Summary, Tensor]:
    """Statistics of each row, without gradients, and the summed loss, whose `backward()` hands on what is known."""
    total, picked, entropy, squares, ids, best = _Fused.apply(*inputs.tensors(), run, loss)  # pyright: ignore
    seen = Summary(picked_NJ=picked, entropy_N=entropy, square_sums_N=squares, top_ids_NK=ids, top_logprobs_NK=best)
    return seen, total


class _Fused(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        bias_V: Tensor | None,
        inner_NR: Tensor | None,
        b_VR: Tensor | None,
        run: Pass,
        loss: RowLoss,
    ) -> tuple[Tensor, ...]:
        inputs = Inputs(hidden_ND=hidden_ND, weight_VD=weight_VD, bias_V=bias_V, inner_NR=inner_NR, b_VR=b_VR)
        logits = run.logits(inputs)
        sums = _Sums(logits, ctx.needs_input_grad, run.weight_grad_VD)
        by_w = sums.wide_weights(EVERY)
        held = hidden_ND.new_empty(min(run.rows, len(hidden_ND)) * logits.width, dtype=logits.dtype)
        total = hidden_ND.new_zeros((), dtype=logits.dtype)
        seen: list[Summary] = []
        for rows in row_tiles(len(hidden_ND), run.rows):
            summary, value = _learn_rows(logits, rows, run, loss, held, sums, by_w=by_w)
            seen.append(summary)
            total += value
        sums.write(EVERY, by_w)
        results = sums.results()
        ctx.given = [result is not None for result in results]
        ctx.save_for_backward(*(result for result in results if result is not None))
        ctx.in_place = run.weight_grad_VD is not None
        if not seen:  # no rows: statistics of nothing, in their shapes
            seen = [Statistics(logits, run.picks_NJ, run.ask).summary()[0]]
        parts = [summary.tensors() for summary in seen]
        joined = [torch.cat([part[i] for part in parts]) for i in range(len(parts[0]))]
        ctx.mark_non_differentiable(*joined)
        return total, *joined

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        scale = float(grads[0])
        if scale != 1.0 and ctx.in_place:
            raise ValueError(
                f"the sum is scaled by {scale}, but the weight's gradient has been added already: scale inside the loss"
            )
        saved = iter(ctx.saved_tensors)
        results = [next(saved) if given else None for given in ctx.given]
        return *(g if g is None or scale == 1.0 else g * scale for g in results), None, None


def _learn_rows(
    logits: Logits,
    rows: slice,
    run: Pass,
    loss: RowLoss,
    held: Tensor,
    sums: _Sums,
    *,
    by_w: list[Tensor | None],
) -> tuple[Summary, Tensor]:
    """One visit to some rows: their logits into `held`, their loss, its derivative into `sums` and `by_w`."""
    few = logits.cut(rows)
    count = rows.stop - rows.start
    columns = column_tiles(logits.width, run.rows, run.rows)
    statistics = Statistics(few, run.picks_NJ[rows], run.ask)
    for span in columns:
        room = held[span.start * count : span.stop * count].view(count, -1)
        statistics.fold(EVERY, span, few.tile(EVERY, span, logits.weights(span), out=room))
    seen, lse_N = statistics.summary()
    value, slope = _differentiate(loss, rows, seen, lse_N, run)
    if slope is not None:
        for span in columns:
            z = held[span.start * count : span.stop * count].view(count, -1)
            grad_z = slope.by_logits(few, EVERY, span, z)
            tile = [None if w is None else w[span] for w in by_w]
            sums.add(grad_z, rows, span, logits.weights(span), tile)
    return seen, value


def _differentiate(loss: RowLoss, rows: slice, seen: Summary, lse_N: Tensor, run: Pass) -> tuple[Tensor, Slope | None]:
    """The summed loss of some rows, and its derivative by what they gave; None where nothing depends on them."""
    with torch.enable_grad():
        picked_NJ = seen.picked_NJ.detach().requires_grad_()
        entropy_N = seen.entropy_N.detach().requires_grad_(run.ask.entropy is Entropy.GRADIENT)
        value = loss(rows, picked_NJ, entropy_N)
        if not value.requires_grad:
            return value.detach(), None
        leaves = [picked_NJ, entropy_N] if entropy_N.requires_grad else [picked_NJ]
        by_picked, *by_entropy = torch.autograd.grad(value, leaves, materialize_grads=True)
    return value.detach(), Slope(
        picks_NJ=run.picks_NJ[rows],
        by_picked_NJ=by_picked,
        by_entropy_N=by_entropy[0] if by_entropy else None,
        lse_N=lse_N,
        entropy_N=seen.entropy_N,
    )
