"""Texts to an arrangement: which stretch of which text goes into which batch, before any token is moved.

    Texts -> what a group's attempts have in common -> bundles that fit a batch -> bins of equal cost -> Arrangement

S counts texts, and later the sequences made from them; B counts bundles, and later batches; P counts groups.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from strop.data.placement import cost, place
from strop.types import Bools, Int32s

Int64s = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class Texts:
    """Stretches of two long columns: text s is `tokens_T[start_S[s] : start_S[s] + length_S[s]]`.

    The first `num_first` texts are sorted by group; they alone may share a prefix.
    """

    tokens_T: Int32s
    sampled_T: Bools  # where the policy chose the token, or an example wants it learned
    start_S: Int64s
    length_S: Int64s
    opening_S: Int64s  # tokens before the first sampled one
    trained_S: Int64s  # sampled tokens that follow another token of their text: the targets that count
    unit_S: Int64s  # the attempt or example that the text is a part of
    group_S: Int64s
    num_first: int

    def __len__(self) -> int:
        return len(self.start_S)

    def where(self, keep_S: Bools) -> Texts:
        """These texts alone; the columns stay as they are."""
        if keep_S.all():
            return self
        return replace(
            self,
            start_S=self.start_S[keep_S],
            length_S=self.length_S[keep_S],
            opening_S=self.opening_S[keep_S],
            trained_S=self.trained_S[keep_S],
            unit_S=self.unit_S[keep_S],
            group_S=self.group_S[keep_S],
            num_first=int(np.count_nonzero(keep_S[: self.num_first])),
        )


def texts_of(
    tokens_T: Int32s, sampled_T: Bools, length_S: Int64s, *, unit_S: Int64s, group_S: Int64s, num_first: int
) -> Texts:
    """Texts that lie end to end in the columns; empty ones are left out."""
    if not length_S.all():
        full_S = length_S > 0
        length_S, unit_S, group_S = length_S[full_S], unit_S[full_S], group_S[full_S]
        num_first = int(np.count_nonzero(full_S[:num_first]))
    start_S = np.cumsum(length_S) - length_S
    sampled_S = np.add.reduceat(sampled_T.view(np.uint8), start_S, dtype=np.int32) if len(start_S) else start_S
    # Where sampling begins inside a text, and the end, so that every text finds one: far fewer than sampled tokens.
    rises = np.append(np.flatnonzero(sampled_T[1:] > sampled_T[:-1]) + 1, len(sampled_T))
    first_S = np.where(sampled_T[start_S], start_S, rises[np.searchsorted(rises, start_S)])
    return Texts(
        tokens_T=tokens_T,
        sampled_T=sampled_T,
        start_S=start_S,
        length_S=length_S,
        opening_S=np.minimum(first_S - start_S, length_S),
        trained_S=sampled_S.astype(np.int64) - sampled_T[start_S],
        unit_S=unit_S,
        group_S=group_S,
        num_first=num_first,
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Arrangement:
    """What the packed columns hold: sequence s is `length_S[s]` tokens from `start_S[s]` of the texts' columns.

    Batch b holds the sequences `bound_B[b] : bound_B[b + 1]`.
    """

    start_S: Int64s
    length_S: Int64s
    unit_S: Int64s
    parent_S: Int64s  # the prefix's index within the batch, -1 for none
    bound_B: Int64s


def arrange(
    texts: Texts, *, max_tokens: int, share_prefixes: bool, data_parallel: int, whole_groups: bool = False
) -> Arrangement:
    """Batches of at most `max_tokens` tokens and about equal cost, costliest first, a multiple of `data_parallel`.

    Takes one text at least, and none longer than `max_tokens`. Batches that nothing is left for are in the last round
    and hold one token each, the first of the first text: it has no target, so it trains nothing. `whole_groups` keeps
    each group in one batch, with a prefix or without: every text is then a first one, and `group_sizes` are at most
    `max_tokens`.
    """
    prefix_S = _prefixes(texts, share_prefixes)
    own_S = texts.length_S - prefix_S
    if whole_groups:
        opens_S = np.diff(texts.group_S, prepend=-1) != 0
    else:
        opens_S = _opens_bundle(texts, prefix_S, max_tokens=max_tokens, most=-(-len(texts) // data_parallel))
    bundle_S, head_B = np.cumsum(opens_S) - 1, np.flatnonzero(opens_S)
    prefix_B = prefix_S[head_B]
    size_B = prefix_B + np.add.reduceat(own_S, head_B)
    cost_B = cost(prefix_B, np.zeros_like(prefix_B)) + np.add.reduceat(cost(own_S, prefix_S), head_B)
    bin_B, bins = place(cost_B, size_B, capacity=max_tokens, multiple=data_parallel)

    # A prefix is cut from its bundle's first text. Prefixes stand first: a stable sort puts each before its branches.
    heads = head_B[prefix_B > 0]
    bundle_S = np.concatenate([bundle_S[heads], bundle_S])
    rank_B = np.empty_like(bin_B)
    rank_B[np.argsort(bin_B, kind="stable")] = np.arange(len(bin_B))
    order_S = np.argsort(rank_B[bundle_S], kind="stable")
    bundle_S = bundle_S[order_S]
    bound_B = np.searchsorted(bin_B[bundle_S], np.arange(bins + 1))
    prefix_at_S = np.searchsorted(rank_B[bundle_S], rank_B[bundle_S])
    is_branch_S = (prefix_B[bundle_S] > 0) & (prefix_at_S != np.arange(len(order_S)))

    parent_S = np.where(is_branch_S, prefix_at_S - bound_B[bin_B[bundle_S]], -1)

    empty = np.flatnonzero(np.diff(bound_B) == 0)
    at = bound_B[empty]
    return Arrangement(
        start_S=np.insert(_both(texts.start_S[heads], texts.start_S + prefix_S)[order_S], at, texts.start_S[0]),
        length_S=np.insert(_both(prefix_S[heads], own_S)[order_S], at, 1),
        unit_S=np.insert(_both(texts.unit_S[heads], texts.unit_S)[order_S], at, texts.unit_S[0]),
        parent_S=np.insert(parent_S, at, -1),
        bound_B=bound_B + np.searchsorted(empty, np.arange(bins + 1)),
    )


def group_sizes(texts: Texts, *, share_prefixes: bool) -> Int64s:
    """Tokens that each group takes in one batch, its prefix counted once: [P], for texts that are all first ones."""
    prefix_S = _prefixes(texts, share_prefixes)
    heads = np.flatnonzero(np.diff(texts.group_S, prepend=-1))
    if len(heads) == 0:
        return heads
    return prefix_S[heads] + np.add.reduceat(texts.length_S - prefix_S, heads)


def _prefixes(texts: Texts, share_prefixes: bool) -> Int64s:
    return _shared_prefixes(texts) if share_prefixes else np.zeros(len(texts), np.int64)


def _both(head: Int64s, tail: Int64s) -> Int64s:
    return np.concatenate([head, tail])


def _shared_prefixes(texts: Texts) -> Int64s:
    """How many of its tokens each text leaves to a prefix, [S]: what its group's first texts have in common, less one.

    Nothing that was sampled in any of them is shared, and the last common token opens every branch: its target differs.
    """
    first = texts.num_first
    head_P = np.flatnonzero(np.diff(texts.group_S[:first], prepend=-1))
    size_P = np.diff(head_P, append=first)
    if first == 0:
        return np.zeros(len(texts), np.int64)
    common_P = np.where(size_P > 1, np.minimum.reduceat(texts.opening_S[:first], head_P), 0)
    # Compare every text's opening with that of its group's first, token by token, all at once.
    group_S = np.repeat(np.arange(len(head_P)), size_P)
    length_S = common_P[group_S]
    length_S[head_P] = 0
    end_S = np.cumsum(length_S)
    at_T = np.repeat(texts.start_S[:first] - (end_S - length_S), length_S)
    at_T += np.arange(len(at_T))
    own_T = texts.tokens_T[at_T]
    at_T -= np.repeat(texts.start_S[:first] - texts.start_S[head_P][group_S], length_S)
    differ = np.flatnonzero(own_T != texts.tokens_T[at_T])
    s = np.searchsorted(end_S, differ, side="right")
    np.minimum.at(common_P, group_S[s], differ - (end_S - length_S)[s])
    prefix_S = np.zeros(len(texts), np.int64)
    prefix_S[:first] = np.maximum(common_P - 1, 0)[group_S]
    return prefix_S


def _opens_bundle(texts: Texts, prefix_S: Int64s, *, max_tokens: int, most: int) -> Bools:
    """Which texts open a bundle, [S]: texts with a prefix join their group's while it has room and fewer than `most`.

    What one bundle cannot hold takes another copy of the prefix. `most` keeps a few large groups from leaving ranks
    without work.
    """
    opens_S = np.ones(len(texts), np.bool_)
    sharing = np.flatnonzero(prefix_S)
    if len(sharing) == 0:
        return opens_S
    head_P = np.flatnonzero(np.diff(texts.group_S[sharing], prepend=-1))
    size_P = np.diff(head_P, append=len(sharing))
    own_S = texts.length_S - prefix_S
    filled_P, held_P = np.zeros_like(head_P), np.zeros_like(head_P)
    for g in range(int(size_P.max())):  # the g-th attempt of every group at once
        live_P = np.flatnonzero(size_P > g)
        s = sharing[head_P[live_P] + g]
        joins = filled_P[live_P] + own_S[s] <= max_tokens - prefix_S[s]
        joins &= (held_P[live_P] < most) & (g > 0)
        opens_S[s] = ~joins
        filled_P[live_P] = np.where(joins, filled_P[live_P], 0) + own_S[s]
        held_P[live_P] = np.where(joins, held_P[live_P], 0) + 1
    return opens_S
