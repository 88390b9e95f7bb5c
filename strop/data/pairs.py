"""Preferences to packed batches: the two texts of a pair always in one batch, their prompt computed once if wanted.

    tasks -> preferences -> texts -> an arrangement that keeps pairs whole (data/bundles) -> columns [T]
          -> Batch[PairInputs]

N counts texts, chosen before rejected, pair by pair; P counts pairs.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import pairwise

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.algos.preference_losses import PairInputs
from strop.algos.weighting import Weighting, token_weights
from strop.config.recipe import TooLong
from strop.data.bundles import Arrangement, Texts, arrange, group_sizes, texts_of
from strop.data.packing import Batch, Columns, Example, Packed
from strop.data.tasks import Task
from strop.data.trained import TrainedTokens
from strop.errors import DataError
from strop.tokens.base import Renderer
from strop.tokens.example import encode_example

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Preference:
    """Two replies to one task as texts, the better one and the other; either may be missing where only KTO learns."""

    task_id: str
    chosen: Example | None
    rejected: Example | None
    margin: float = 0.0  # by how much the chosen one is better, for a reward model

    @property
    def examples(self) -> list[tuple[Example, bool]]:
        """The texts that are there, each with whether it is the chosen one."""
        both = ((self.chosen, True), (self.rejected, False))
        return [(example, chosen) for example, chosen in both if example is not None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fit:
    """What the batches of a step must fit."""

    max_tokens: int  # tokens of one batch at the most
    share_prefixes: bool  # compute a pair's prompt once
    data_parallel: int  # ranks that the batches are for
    too_long: TooLong


def preference_of(renderer: Renderer, task: Task) -> Preference:
    """A task's better and worse replies as texts. Raises DataError for a reply that cannot be rendered."""
    return Preference(
        task_id=task.id,
        chosen=None if task.chosen is None else _reply(renderer, task, task.chosen),
        rejected=None if task.rejected is None else _reply(renderer, task, task.rejected),
        margin=task.margin,
    )


def elsewhere(renderer: Renderer, tasks: Sequence[Task]) -> list[Example]:
    """Each task's replies at the prompt of the task before it (the first one's at the last's): replies that fit ill."""
    return [
        _reply(renderer, task, reply)
        for task, other in zip(tasks, [*tasks[1:], *tasks[:1]], strict=True)
        for reply in (other.chosen, other.rejected)
        if reply is not None
    ]


def _reply(renderer: Renderer, task: Task, reply: str) -> Example:
    tokens, trained = encode_example(renderer, task.messages, reply)
    return Example(tokens, trained, task.id)


def pack_pairs(preferences: Sequence[Preference], fit: Fit) -> Packed[PairInputs]:
    """Pairs as balanced batches in which the weighted sum of a pair's loss, told to its tokens, is a mean over pairs.

    A pair's trained tokens have equal weights that sum to 1 / P. `Packed.trained` counts texts as its attempts. Raises
    DataError for a pair that lacks a text or trains nothing, and for one longer than `fit.max_tokens` when
    `fit.too_long` is `error`; `drop` leaves such pairs out and counts them.
    """
    return _packed(_whole(preferences), fit, alone=False)


def pack_alone(preferences: Sequence[Preference], fit: Fit) -> Packed[PairInputs]:
    """The same, each text counted for itself: the weighted sum is a mean over texts, and `pair_T` counts texts. KTO."""
    return _packed(preferences, fit, alone=True)


def pack_scored(preferences: Sequence[Preference], fit: Fit) -> Packed[PairInputs]:
    """Pairs whose texts are scored at their last tokens: the mask names those alone, each with weight 1 / (2 P).

    There is nothing to predict at a last token, so no row has both its mask on and a target. `Packed.trained` holds the
    last tokens, text by text. Raises as `pack_pairs` does.
    """
    return _packed(_whole(preferences), fit, alone=False, scored=True)


def with_reference_logprobs(
    batches: Sequence[Batch[PairInputs]], reference_logprobs: Sequence[Tensor]
) -> list[Batch[PairInputs]]:
    """The batches with another engine's logprobs, one tensor [T] for each. Raises ValueError for other batches'."""
    lengths, given = [len(batch) for batch in batches], [len(column) for column in reference_logprobs]
    if lengths != given:
        raise ValueError(f"columns of {given} tokens do not belong to batches of {lengths}")
    return [
        replace(batch, inputs=replace(batch.inputs, reference_logprobs_T=logprobs_T))
        for batch, logprobs_T in zip(batches, reference_logprobs, strict=True)
    ]


def _whole(preferences: Sequence[Preference]) -> Sequence[Preference]:
    for preference in preferences:
        if len(preference.examples) < 2:
            raise DataError(
                f"task {preference.task_id} has no two replies to compare: give its row a chosen and a rejected text "
                "(tasks.chosen_key, tasks.rejected_key), or learn from single replies with dpo.kind kto"
            )
    return preferences


def _packed(preferences: Sequence[Preference], fit: Fit, *, alone: bool, scored: bool = False) -> Packed[PairInputs]:
    texts, kept = _fitting(preferences, fit)
    dropped = len(preferences) - len(kept)
    if len(texts) == 0:
        return Packed(batches=[], dropped=dropped, find_trained=partial(TrainedTokens.none, 0))
    plan = arrange(
        texts,
        max_tokens=fit.max_tokens,
        share_prefixes=fit.share_prefixes,
        data_parallel=fit.data_parallel,
        whole_groups=True,
    )
    pair_N = texts.unit_S if alone else texts.group_S  # every text is a unit, and they are in order
    counts_P = np.bincount(pair_N, weights=texts.trained_S).astype(np.int64)
    weight_P = token_weights(Weighting.SEQUENCE_MEAN_TOKEN_MEAN, counts_P, horizon=None)
    columns = Columns(texts, plan, weight_P[pair_N])
    find_trained = partial(columns.trained, texts, texts.trained_S)
    ends = _at_ends(columns, find_trained().end_N) if scored else None
    return Packed(
        batches=_batches(columns, plan, pair_N[plan.unit_S], kept, with_margins=scored),
        dropped=dropped,
        find_trained=find_trained if ends is None else lambda: ends,
    )


def _at_ends(columns: Columns, end_N: Int64s) -> TrainedTokens:
    """Let the mask name the texts' last tokens alone, with equal weights that sum to 1."""
    columns.mask_T = np.zeros_like(columns.mask_T)
    columns.mask_T[end_N] = True
    columns.weights_T = columns.mask_T.astype(np.float32) / np.float32(len(end_N))
    lengths = [span.stop - span.start for span in columns.spans]
    return TrainedTokens(counts_N=np.ones_like(end_N), row_M=end_N, end_N=end_N, length_B=lengths)


def _batches(
    columns: Columns, plan: Arrangement, pair_S: Int64s, kept: Sequence[Preference], *, with_margins: bool
) -> list[Batch[PairInputs]]:
    texts = [(chosen, preference.margin) for preference in kept for _, chosen in preference.examples]
    chosen_T = np.repeat(np.array([chosen for chosen, _ in texts])[plan.unit_S], plan.length_S)
    margin_T = np.repeat(np.array([margin for _, margin in texts], np.float32)[plan.unit_S], plan.length_S)
    batches: list[Batch[PairInputs]] = []
    for b, (span, (lo, hi)) in enumerate(zip(columns.spans, pairwise(plan.bound_B.tolist()), strict=True)):
        pair_S_here = np.unique(pair_S[lo:hi], return_inverse=True)[1]  # counted from 0 in each batch
        inputs = PairInputs(
            pair_T=torch.from_numpy(np.repeat(pair_S_here, plan.length_S[lo:hi])),
            chosen_T=torch.from_numpy(chosen_T[span]),
            margin_T=torch.from_numpy(margin_T[span]) if with_margins else None,
        )
        batches.append(columns.batch(b, inputs, None))
    return batches


def _fitting(preferences: Sequence[Preference], fit: Fit) -> tuple[Texts, Sequence[Preference]]:
    """(their texts, the preferences that fit a batch)."""
    texts = _texts(preferences)
    size_P = group_sizes(texts, share_prefixes=fit.share_prefixes)
    if not (size_P > fit.max_tokens).any():
        return texts, preferences
    if fit.too_long is TooLong.ERROR:
        p, count = int(np.argmax(size_P)), int(np.count_nonzero(size_P > fit.max_tokens))
        which = f", the most of {count} such," if count > 1 else ""
        raise DataError(
            f"task {preferences[p].task_id}: its replies take {size_P[p]} tokens together{which} and a batch has "
            f"{fit.max_tokens}. Raise engine.pack_tokens, or set tasks.too_long to drop, which leaves such tasks out "
            "and counts them"
        )
    kept = [preference for preference, size in zip(preferences, size_P, strict=True) if size <= fit.max_tokens]
    return _texts(kept), kept


def _texts(preferences: Sequence[Preference]) -> Texts:
    """Every text a unit of its own, and every preference a group."""
    for preference in preferences:
        for example, _ in preference.examples:
            if len(example.tokens) != len(example.trained):
                raise ValueError(
                    f"task {example.task_id}: {len(example.tokens)} tokens with a mask of {len(example.trained)}"
                )
            if not example.trained[1:].any():
                raise DataError(f"task {example.task_id}: a reply of {len(example.tokens)} tokens trains none of them")
        if not preference.examples:
            raise DataError(f"task {preference.task_id} has no reply to learn from")
    examples = [example for preference in preferences for example, _ in preference.examples]
    count_P = np.array([len(preference.examples) for preference in preferences], np.int64)
    return texts_of(
        np.concatenate([np.zeros(0, np.int32), *(example.tokens for example in examples)]),
        np.concatenate([np.zeros(0, np.bool_), *(example.trained for example in examples)]),
        np.array([len(example.tokens) for example in examples], np.int64),
        unit_S=np.arange(len(examples)),
        group_S=np.repeat(np.arange(len(preferences)), count_P),
        num_first=len(examples),
    )
