"""Placement: nothing over capacity, equal costs, and the same choices as placing one bundle at a time."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from strop.data.placement import TOKEN_COST, cost, place


def one_by_one(costs: list[int], bins: int) -> list[int]:
    """Loads after the plain rule: costliest first, each into the least loaded bin."""
    loads = [0] * bins
    for value in sorted(costs, reverse=True):
        loads[loads.index(min(loads))] += value
    return sorted(loads)


def test_costs_do_not_wrap_around() -> None:
    """A48: 60,000 tokens given as int32; their square alone is past 2^31."""
    lengths_S = np.array([60_000], np.int32)
    assert TOKEN_COST == 24_576
    assert cost(lengths_S, np.zeros(1, np.int32)).tolist() == [5_074_560_000]
    assert cost(lengths_S, np.array([60_000], np.int32)).tolist() == [5_074_560_000 + 2 * 3_600_000_000]


def test_a_prefix_and_its_branch_cost_what_the_whole_text_does() -> None:
    whole = cost(np.array([100]), np.array([0]))
    assert cost(np.array([60]), np.array([0])) + cost(np.array([40]), np.array([60])) == whole


@given(st.lists(st.integers(1, 1000), min_size=1, max_size=60), st.integers(1, 6))
@example([10, 1, 1, 1, 1, 1], 2)
def test_rounds_choose_as_one_by_one_does(sizes: list[int], bins: int) -> None:
    """Where room does not bind, placing many bundles at once gives the loads of the plain rule."""
    size_B = np.array(sizes)
    bin_B, used = place(size_B, size_B, capacity=int(size_B.sum()), multiple=bins)
    assert used == bins
    loads = np.bincount(bin_B, weights=size_B, minlength=used)
    assert sorted(loads.tolist()) == one_by_one(sizes, used)
    assert loads.tolist() == sorted(loads.tolist(), reverse=True)


@given(
    st.lists(st.tuples(st.integers(1, 100), st.integers(1, 10_000)), min_size=1, max_size=60),
    st.integers(100, 400),
    st.integers(1, 5),
)
@example([(50, 100), (50, 99), (10, 50), (60, 49)], 100, 1)
def test_no_bin_overflows_and_every_rank_gets_as_many(
    bundles: list[tuple[int, int]], capacity: int, multiple: int
) -> None:
    """Whatever the costs are: a long shared prefix makes short bundles costly."""
    size_B, cost_B = np.array(bundles).T
    bin_B, bins = place(cost_B, size_B, capacity=capacity, multiple=multiple)
    fill = np.bincount(bin_B, weights=size_B, minlength=bins)
    assert bins % multiple == 0
    assert fill.max() <= capacity
    assert np.count_nonzero(fill == 0) == max(bins - len(bundles), 0)


@pytest.mark.parametrize("count", [64, 1000])
def test_many_alike_are_balanced_closely(count: int) -> None:
    size_B = np.random.default_rng(0).integers(50, 150, count)
    cost_B = cost(size_B, np.zeros_like(size_B))
    bin_B, bins = place(cost_B, size_B, capacity=2048, multiple=8)
    loads = np.bincount(bin_B, weights=cost_B, minlength=bins)
    assert loads.max() / loads.mean() < 1.02
    assert bins <= 8 * -(-int(size_B.sum()) // (0.9 * 2048 * 8))


def test_ranks_sums_are_alike() -> None:
    """What is left uneven in one round is made up for in the next; the costliest bins are in the first."""
    size_B = np.array([50] * 24)
    cost_B = np.array([400, 390, 380, 300, *range(100, 300, 10)])
    bin_B, bins = place(cost_B, size_B, capacity=50, multiple=4)
    assert bins == 24
    load = np.bincount(bin_B, weights=cost_B, minlength=bins).reshape(-1, 4)
    assert all(after.max() <= before.min() for before, after in pairwise(load))
    sums = load.sum(0)
    assert load[0].max() / load[0].mean() > 1.08
    assert sums.max() / sums.mean() < 1.01


def test_late_bins_are_as_full_as_early_ones() -> None:
    """Nine bundles of 60 in bins of 100 need nine bins: two ranks get ten, and none is filled before the others."""
    size_B = np.full(9, 60)
    bin_B, bins = place(size_B, size_B, capacity=100, multiple=2)
    assert bins == 10
    assert sorted(bin_B.tolist()) == list(range(9))


def test_a_bundle_that_no_bin_can_hold_is_refused() -> None:
    size_B = np.array([3, 11])
    with pytest.raises(ValueError, match="a bundle of 11 tokens does not fit a bin of 10"):
        place(size_B, size_B, capacity=10, multiple=1)
