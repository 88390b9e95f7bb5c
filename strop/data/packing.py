"""Trajectories to packed batches: the one place that shifts targets, masks prompts and writes loss weights.

    groups + advantages -> texts -> an arrangement of them (data/bundles) -> columns [T] -> Batch[PolicyInputs]

Everything is arithmetic on whole columns: Python touches attempts, sequences and batches, never tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from itertools import chain, pairwise
from typing import Generic, TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.algos.losses import PolicyInputs
from strop.algos.weighting import Weighting, token_weights
from strop.config.recipe import TooLong
from strop.data.bundles import Arrangement, Texts, arrange, texts_of
from strop.data.routes import join_texts
from strop.data.trained import TrainedTokens
from strop.errors import DataError
from strop.types import Bools, Float32s, Group, Int32s, Layout, Routes, Trajectory

InputsT = TypeVar("InputsT")
ColumnT = TypeVar("ColumnT", bound=np.generic)
Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[InputsT]):
    """Packed sequences for one forward pass: tensors [T], no padding anywhere. Engines never split a Batch.

    Every token is here; the last target of a text is -1 with its mask off and weight 0. A shared prefix goes on in its
    branches: its last target is the token that they all begin with. `mask_T` says which targets count, `weights_T`
    holds the normalisation and may be zero or negative: neither stands for the other.
    """

    tokens_T: Tensor  # int64
    targets_T: Tensor  # int64, the next token of the same text; -1 where there is none
    mask_T: Tensor  # bool
    weights_T: Tensor  # float32; zero wherever the mask is off
    layout: Layout
    inputs: InputsT  # the loss's own record of [T] tensors
    temperature_T: Tensor | None = None  # float32; None is 1
    ids_TK: Tensor | None = None  # int64; tokens to score at every row beside its target
    routes: Routes | None = None

    def __len__(self) -> int:
        return self.layout.num_tokens


@dataclass(frozen=True, kw_only=True)
class Packed(Generic[InputsT]):
    """The batches of one optimizer step, the costliest first. Rank r of R takes `batches[r::R]`, as many as the others.

    A batch may be there only to make those numbers equal: one token with its mask off. No batches at all means that
    nothing is trained.
    """

    batches: list[Batch[InputsT]]
    dropped: int = 0  # attempts, or examples, left out for being longer than a batch
    find_trained: Callable[[], TrainedTokens] = field(repr=False)

    @cached_property
    def trained(self) -> TrainedTokens:
        """Where each attempt's trained tokens lie in the batches. Found when it is first asked for."""
        return self.find_trained()


@dataclass(frozen=True, slots=True)
class Example:
    """A text to imitate: `tokens` [T], and which of them are `trained` [T], by position."""

    tokens: Int32s
    trained: Bools
    task_id: str


def pack_policy(
    groups: Sequence[Group],
    advantages_PG: NDArray[np.float64],
    *,
    max_tokens: int,
    weighting: str,
    horizon: int | None,
    temperature: float,
    share_prefixes: bool,
    data_parallel: int,
    too_long: TooLong = TooLong.ERROR,
) -> Packed[PolicyInputs]:
    """Every attempt of one optimizer step as balanced batches of at most `max_tokens` tokens.

    An attempt whose advantage is NaN (its episode failed) is left out, and so is a segment in which nothing is trained.
    Advantages and weights belong to the attempt, over all its segments; `token_weights` explains `weighting` and
    `horizon` (tokens). With `share_prefixes` the attempts of a group keep the prompt they have in common once in each
    batch. `data_parallel` is how many ranks the batches are for.

    Inside a batch, bundles keep the order of `groups`: first segments, then later ones; a prefix comes before its
    branches. The result depends on the arguments alone.

    Raises DataError when a segment is longer than `max_tokens` and `too_long` is `error` (`drop` leaves the whole
    attempt out and counts it), ValueError when the advantages' shape is not that of the groups.
    """
    attempts, advantage_N, group_N = _attempts(groups, advantages_PG)
    texts, logprobs_T, routes_T = _policy_texts(attempts, group_N)
    texts, dropped = _fitting(texts, max_tokens, too_long, [group.task_id for group in groups])
    counts_N = _trained_counts(texts, len(attempts))
    if len(texts) == 0:
        return Packed(batches=[], dropped=dropped, find_trained=partial(TrainedTokens.none, len(counts_N)))
    plan = arrange(texts, max_tokens=max_tokens, share_prefixes=share_prefixes, data_parallel=data_parallel)
    columns = Columns(texts, plan, token_weights(Weighting(weighting), counts_N, horizon=horizon))
    behavior_T = columns.next(logprobs_T, 0.0)
    advantages_T = columns.spread(advantage_N[plan.unit_S])
    temperature_T = None if temperature == 1.0 else np.full(len(behavior_T), temperature, np.float32)
    batches = [
        columns.batch(b, _policy_inputs(behavior_T[span], advantages_T[span]), temperature_T)
        for b, span in enumerate(columns.spans)
    ]
    if routes_T is not None:
        experts_TLK = columns.own(routes_T.experts_TLK)
        batches = [
            replace(batch, routes=Routes(routes_T.layers, experts_TLK[span]))
            for batch, span in zip(batches, columns.spans, strict=True)
        ]
    return Packed(batches=batches, dropped=dropped, find_trained=partial(columns.trained, texts, counts_N))


def pack_examples(
    examples: Sequence[Example],
    *,
    max_tokens: int,
    data_parallel: int,
    weighting: str = Weighting.TOKEN_MEAN,
    too_long: TooLong = TooLong.ERROR,
) -> Packed[None]:
    """Supervised examples as balanced batches, by the rules of `pack_policy`; an example is one sequence.

    Raises DataError for an example longer than `max_tokens` (see `too_long`), ValueError when tokens and mask differ in
    length.
    """
    for example in examples:
        if len(example.tokens) != len(example.trained):
            raise ValueError(
                f"task {example.task_id}: {len(example.tokens)} tokens with a mask of {len(example.trained)}"
            )
    texts = texts_of(
        _joined([example.tokens for example in examples], np.int32),
        _joined([example.trained for example in examples], np.bool_),
        np.fromiter((len(example.tokens) for example in examples), np.int64, len(examples)),
        unit_S=np.arange(len(examples)),
        group_S=np.arange(len(examples)),
        num_first=0,
    )
    texts, dropped = _fitting(texts, max_tokens, too_long, [example.task_id for example in examples])
    counts_N = _trained_counts(texts, len(examples))
    if len(texts) == 0:
        return Packed(batches=[], dropped=dropped, find_trained=partial(TrainedTokens.none, len(counts_N)))
    plan = arrange(texts, max_tokens=max_tokens, share_prefixes=False, data_parallel=data_parallel)
    columns = Columns(texts, plan, token_weights(Weighting(weighting), counts_N, horizon=None))
    batches = [columns.batch(b, None, None) for b in range(len(columns.spans))]
    return Packed(batches=batches, dropped=dropped, find_trained=partial(columns.trained, texts, counts_N))


def with_inputs(
    batches: Sequence[Batch[PolicyInputs]],
    *,
    advantages: Sequence[Tensor] | None = None,
    reference_logprobs: Sequence[Tensor] | None = None,
    proximal_logprobs: Sequence[Tensor] | None = None,
    correction: Sequence[Tensor] | None = None,
    selected: Sequence[Tensor] | None = None,
) -> list[Batch[PolicyInputs]]:
    """The batches with other constants for their loss, one tensor [T] for each batch; what is None stays as it is.

    Raises ValueError for tensors of other batches.
    """
    lengths = [len(batch) for batch in batches]
    for columns in (advantages, reference_logprobs, proximal_logprobs, correction, selected):
        if columns is not None and [len(column) for column in columns] != lengths:
            raise ValueError(f"columns of {[len(c) for c in columns]} tokens do not belong to batches of {lengths}")
    changed: list[Batch[PolicyInputs]] = []
    for b, batch in enumerate(batches):
        was = batch.inputs
        inputs = PolicyInputs(
            behavior_logprobs_T=was.behavior_logprobs_T,
            advantages_T=was.advantages_T if advantages is None else advantages[b],
            reference_logprobs_T=was.reference_logprobs_T if reference_logprobs is None else reference_logprobs[b],
            proximal_logprobs_T=was.proximal_logprobs_T if proximal_logprobs is None else proximal_logprobs[b],
            correction_T=was.correction_T if correction is None else correction[b],
            selected_T=was.selected_T if selected is None else selected[b],
            expert_fractions_LE=was.expert_fractions_LE,
        )
        changed.append(replace(batch, inputs=inputs))
    return changed


def unrouted(batches: Sequence[Batch[InputsT]]) -> list[Batch[InputsT]]:
    """The batches for a model that is not the one whose routes they hold, and for that one's free choice."""
    return [batch if batch.routes is None else replace(batch, routes=None) for batch in batches]


def train_only(packed: Packed[InputsT], keep_M: Bools, *, weighting: str, horizon: int | None) -> Packed[InputsT]:
    """The same batches with only the trained tokens `keep_M` [M] trained, weighed as if there had been no others."""
    tokens = packed.trained
    counts_N = np.bincount(tokens.attempt_M[keep_M], minlength=len(tokens.counts_N))
    weight_N = token_weights(Weighting(weighting), counts_N, horizon=horizon)
    masks = tokens.scatter(keep_M)
    weights = tokens.scatter(weight_N[tokens.attempt_M] * keep_M)
    batches = [
        replace(batch, mask_T=mask_T, weights_T=weights_T)
        for batch, mask_T, weights_T in zip(packed.batches, masks, weights, strict=True)
    ]
    kept = replace(tokens, counts_N=counts_N, row_M=tokens.row_M[keep_M])
    return Packed(batches=batches, dropped=packed.dropped, find_trained=lambda: kept)


def _attempts(
    groups: Sequence[Group], advantages_PG: NDArray[np.float64]
) -> tuple[list[Trajectory], NDArray[np.float64], Int64s]:
    """The attempts that have an advantage, with it and the index of their group, each [N]."""
    shape = (len(groups), len(groups[0]) if groups else advantages_PG.shape[-1])
    if advantages_PG.shape != shape or any(len(group) != shape[1] for group in groups):
        raise ValueError(
            f"advantages of shape {advantages_PG.shape} do not fit groups of {[len(g) for g in groups]} attempts: "
            "they must be [groups, attempts], one for each attempt"
        )
    has_PG = ~np.isnan(advantages_PG)
    every = [trajectory for group in groups for trajectory in group.trajectories]
    kept = every if has_PG.all() else [every[n] for n in np.flatnonzero(has_PG)]
    return kept, advantages_PG[has_PG], np.nonzero(has_PG)[0]


def _policy_texts(attempts: list[Trajectory], group_N: Int64s) -> tuple[Texts, Float32s, Routes | None]:
    """The attempts' segments, their logprobs [T] and routes [T]: everybody's first segment, then the later ones."""
    held_N = [attempt.segments for attempt in attempts]
    unit_S = np.repeat(np.arange(len(attempts)), np.fromiter(map(len, held_N), np.int64, len(held_N)))
    segments = list(chain.from_iterable(held_N))
    later_S = np.diff(unit_S, prepend=-1) == 0
    if later_S.any():
        order_S = np.argsort(later_S, kind="stable")
        segments, unit_S = [segments[s] for s in order_S], unit_S[order_S]
    rows = [segment.rows for segment in segments]
    routed = any(segment.routes is not None for segment in segments)
    rows_T3 = np.concatenate(rows) if rows else np.empty((0, 3), np.int32)
    length_S = np.fromiter(map(len, rows), np.int64, len(rows))
    texts = texts_of(
        rows_T3[:, 0],
        rows_T3[:, 2] >= 0,
        length_S,
        unit_S=unit_S,
        group_S=group_N[unit_S],
        num_first=len(rows) - int(np.count_nonzero(later_S)),
    )
    routes_T = join_texts([segment.routes for segment in segments], length_S) if routed else None
    return texts, rows_T3.view(np.float32)[:, 1], routes_T


def _joined(columns: list[NDArray[ColumnT]], dtype: type[ColumnT]) -> NDArray[ColumnT]:
    return np.concatenate(columns).astype(dtype, copy=False) if columns else np.zeros(0, dtype)


def _fitting(texts: Texts, max_tokens: int, too_long: TooLong, task_ids: list[str]) -> tuple[Texts, int]:
    """(the texts that train something, how many units were dropped for a text of more than `max_tokens`)."""
    long_S = texts.length_S > max_tokens
    if not long_S.any():
        return texts.where(texts.trained_S > 0), 0
    units = np.unique(texts.unit_S[long_S])
    if too_long is TooLong.ERROR:
        s = int(np.argmax(texts.length_S))
        which = f", the longest of {len(units)} such," if len(units) > 1 else ""
        raise DataError(
            f"task {task_ids[texts.group_S[s]]}: a sequence of {texts.length_S[s]} tokens{which} does not fit a batch "
            f"of {max_tokens}. Raise engine.pack_tokens, lower draw.max_tokens, or set tasks.too_long to drop, which "
            "leaves such attempts out and counts them"
        )
    return texts.where((texts.trained_S > 0) & ~np.isin(texts.unit_S, units)), len(units)


def _trained_counts(texts: Texts, num_units: int) -> Int64s:
    """The trained tokens of each unit, over all its texts: [N]."""
    counts_N = np.zeros(num_units, np.int64)
    np.add.at(counts_N, texts.unit_S, texts.trained_S)
    return counts_N


class Columns:
    """The packed columns [T] of a whole step, in the arrangement's order; a batch is a slice of each."""

    def __init__(self, texts: Texts, plan: Arrangement, weight_N: NDArray[np.float64]) -> None:
        end_S = np.cumsum(plan.length_S)
        self._start_S, self._length_S = plan.start_S, plan.length_S
        self._lengths, self._parents = plan.length_S.tolist(), plan.parent_S.tolist()
        self._bounds = plan.bound_B.tolist()
        edges = np.append(0, end_S)[plan.bound_B].tolist()
        self.spans = [slice(lo, hi) for lo, hi in pairwise(edges)]
        stop_S = plan.start_S + plan.length_S
        self._stretches = list(zip(plan.start_S.tolist(), stop_S.tolist(), strict=True))
        self._last = np.flatnonzero(stop_S == len(texts.tokens_T)).tolist()
        # A prefix's branches follow it and it goes on in them; every other sequence is the end of its text.
        goes_on_S = np.append((plan.parent_S[:-1] < 0) & (plan.parent_S[1:] >= 0), False)
        self._ends = (end_S - 1)[~goes_on_S]
        self.tokens_T = self.own(texts.tokens_T).astype(np.int64)
        self.targets_T = np.empty_like(self.tokens_T)
        self.targets_T[:-1] = self.tokens_T[1:]  # as `next`: the first of a prefix's branches stands right behind it
        self.targets_T[self._ends] = -1
        self.mask_T = self.next(texts.sampled_T, False)
        self.weights_T = self.spread(weight_N[plan.unit_S])

    def own(self, column_T: NDArray[ColumnT]) -> NDArray[ColumnT]:
        """What a column [T, ...] of the texts says of each row's own token."""
        return np.concatenate([column_T[lo:hi] for lo, hi in self._stretches])

    def next(self, column_T: NDArray[ColumnT], fill: float) -> NDArray[ColumnT]:
        """What a column of the texts says of each row's target; `fill` where there is none."""
        parts = [column_T[lo + 1 : hi + 1] for lo, hi in self._stretches]
        for s in self._last:  # nothing stands behind it
            parts[s] = np.append(parts[s], column_T.dtype.type(fill))
        next_T = np.concatenate(parts)
        next_T[self._ends] = fill
        return next_T

    @property
    def _next_T(self) -> Int64s:
        """Where each row's target stands in the columns of the texts; at their ends, where the row's own token does."""
        end_S = np.cumsum(self._length_S)
        next_T = np.repeat(self._start_S - (end_S - self._length_S) + 1, self._length_S)
        next_T += np.arange(len(next_T))
        next_T[self._ends] -= 1
        return next_T

    def spread(self, value_S: NDArray[np.float64]) -> Float32s:
        """One number for each sequence, at its trained targets; 0 elsewhere."""
        value_T = np.repeat(value_S.astype(np.float32), self._length_S)
        value_T *= self.mask_T
        return value_T

    def trained(self, texts: Texts, counts_N: Int64s) -> TrainedTokens:
        """Which row of which batch holds each unit's trained targets, in time, and its end."""
        order_S = np.argsort(texts.unit_S, kind="stable")
        begin_S = np.empty_like(texts.trained_S)
        begin_S[order_S] = np.cumsum(texts.trained_S[order_S]) - texts.trained_S[order_S]
        is_target_T = texts.sampled_T.copy()
        is_target_T[texts.start_S] = False  # nothing comes before it, so it is nobody's target
        before_T = np.cumsum(is_target_T) - is_target_T
        shift_S = begin_S - before_T[texts.start_S]

        next_T = self._next_T
        rows = np.flatnonzero(self.mask_T)
        column_M = next_T[rows]
        index_M = before_T[column_M] + shift_S[np.searchsorted(texts.start_S, column_M, side="right") - 1]
        row_M = np.empty_like(rows)
        row_M[index_M] = rows

        at_end = np.zeros(len(texts.tokens_T), np.int64)
        at_end[next_T[self._ends]] = self._ends  # there the "next" column is the row's own
        end_N = np.full(len(counts_N), -1)
        end_N[texts.unit_S[order_S]] = at_end[(texts.start_S + texts.length_S - 1)[order_S]]
        return TrainedTokens(
            counts_N=counts_N, row_M=row_M, end_N=end_N, length_B=[s.stop - s.start for s in self.spans]
        )

    def batch(self, b: int, inputs: InputsT, temperature_T: Float32s | None) -> Batch[InputsT]:
        """Batch b; its tensors are views of the columns."""
        span, (lo, hi) = self.spans[b], self._bounds[b : b + 2]
        return Batch(
            tokens_T=torch.from_numpy(self.tokens_T[span]),
            targets_T=torch.from_numpy(self.targets_T[span]),
            mask_T=torch.from_numpy(self.mask_T[span]),
            weights_T=torch.from_numpy(self.weights_T[span]),
            layout=Layout(tuple(self._lengths[lo:hi]), tuple(self._parents[lo:hi])),
            inputs=inputs,
            temperature_T=None if temperature_T is None else torch.from_numpy(temperature_T[span]),
        )


def _policy_inputs(behavior_T: Float32s, advantages_T: Float32s) -> PolicyInputs:
    return PolicyInputs(behavior_logprobs_T=torch.from_numpy(behavior_T), advantages_T=torch.from_numpy(advantages_T))
