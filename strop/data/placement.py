"""Bundles to bins: which sequences share a forward pass, so that every pass costs about the same.

A bundle is what must stay in one batch. Sizes are in tokens and bound by a bin's capacity; costs are in integer units
of work and are what is balanced. Everything is int64: a squared length leaves 32 bits at 46,341 tokens.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Int64s = NDArray[np.int64]

TOKEN_COST = 24_576
"""What a token costs outside attention, in units of one more token to look back at.

A decoder layer multiplies each of n tokens with about 12 D^2 weights, and twice with n / 2 keys of width D: that is
24 D^2 n + 2 D n^2 operations, or 12 D n + n^2 up to a factor. The constant is that of D = 2,048.
"""


def cost(lengths_S: NDArray[np.integer], prefix_lengths_S: NDArray[np.integer]) -> Int64s:
    """Work of sequences of these lengths, each behind its prefix: TOKEN_COST n + n (n + 2 prefix), int64 [S]."""
    n_S = np.asarray(lengths_S).astype(np.int64)
    return n_S * (TOKEN_COST + n_S + 2 * np.asarray(prefix_lengths_S).astype(np.int64))


def place(cost_B: Int64s, size_B: Int64s, *, capacity: int, multiple: int) -> tuple[Int64s, int]:
    """A bin for every bundle: (bin_B, number of bins). Bin b is for rank b % multiple, in round b // multiple.

    The costliest bins are in the first round, and so on, so that ranks that wait for one another in every round lose
    little; within a round the rank with the least so far takes the costliest, so that ranks' sums are alike too.

    Bundles go, costliest first, into the least loaded bin with room for them (Graham's longest-processing-time rule,
    at most 4/3 of the best possible maximum where room does not bind). The number of bins is the smallest multiple of
    `multiple` for which that works; bins are empty only when there are more bins than bundles. Raises ValueError for a
    bundle that no bin can hold.
    """
    if size_B.max(initial=0) > capacity:
        raise ValueError(f"a bundle of {size_B.max()} tokens does not fit a bin of {capacity}")
    bins = _round_up(-(-int(size_B.sum()) // capacity), multiple)
    order_B = np.argsort(-cost_B, kind="stable")
    while True:
        sorted_B, used = _fill(cost_B[order_B], size_B[order_B], capacity, bins)
        if used == bins:
            break
        bins = _round_up(used, multiple)  # again from the start, so that late bins are as full as the first
    bin_B = np.empty_like(sorted_B)
    bin_B[order_B] = sorted_B
    load = np.bincount(bin_B, weights=cost_B.astype(np.float64), minlength=bins)
    by_load = np.argsort(-load, kind="stable").reshape(-1, multiple)
    place_of = np.empty(bins, np.int64)
    sums = np.zeros(multiple)
    for first, dealt in zip(range(0, bins, multiple), by_load, strict=True):
        ranks = np.argsort(sums, kind="stable")
        place_of[dealt] = first + ranks
        sums[ranks] += load[dealt]
    return place_of[bin_B], bins


def _round_up(count: int, multiple: int) -> int:
    return -(-count // multiple) * multiple


def _fill(cost_B: Int64s, size_B: Int64s, capacity: int, bins: int) -> tuple[Int64s, int]:
    """(bin of each bundle, bins used): bundles in the given order, each into the least loaded bin with room.

    Opens a bin beyond `bins` when none has room. A round places as many bundles at once as go to different bins anyway:
    going up the bins by load, while each is at most as loaded as the ones before it have just become.
    """
    bin_B = np.empty(len(cost_B), np.int64)
    load, fill = np.zeros(bins, np.int64), np.zeros(bins, np.int64)
    done = 0
    while done < len(cost_B):
        open_bins = np.flatnonzero(fill + size_B[done] <= capacity)
        if len(open_bins) == 0:
            open_bins = np.array([len(load)])
            load, fill = np.append(load, 0), np.append(fill, 0)
        by_load = open_bins[np.argsort(load[open_bins], kind="stable")][: len(cost_B) - done]
        sizes, costs = size_B[done : done + len(by_load)], cost_B[done : done + len(by_load)]
        goes = fill[by_load] + sizes <= capacity
        goes[1:] &= load[by_load[1:]] <= np.minimum.accumulate(load[by_load] + costs)[:-1]
        run = len(goes) if goes.all() else int(goes.argmin())
        chosen = by_load[:run]
        bin_B[done : done + run] = chosen
        load[chosen] += costs[:run]
        fill[chosen] += sizes[:run]
        done += run
    return bin_B, len(load)
