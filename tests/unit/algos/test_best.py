"""Which attempts rejection sampling keeps."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from strop.algos.filters import best

REWARDS = st.sampled_from([0.0, 0.25, 0.5, 1.0, -1.0, float("nan")])


@given(
    rows=st.integers(1, 5).flatmap(
        lambda g: st.lists(st.lists(REWARDS, min_size=g, max_size=g), min_size=1, max_size=4)
    ),
    keep=st.integers(1, 6),
    at_least=st.sampled_from([-2.0, 0.0, 0.25, 1.0, 2.0]),
)
def test_the_best_that_are_good_enough_earlier_ones_first(rows: list[list[float]], keep: int, at_least: float) -> None:
    chosen = best(np.array(rows), keep=keep, at_least=at_least)
    for row, kept in zip(rows, chosen.tolist(), strict=True):
        ranked = sorted((g for g in range(len(row)) if row[g] >= at_least), key=lambda g: (-row[g], g))
        assert [g for g in range(len(row)) if kept[g]] == sorted(ranked[:keep])


def test_a_missing_reward_is_no_small_reward() -> None:
    assert best(np.array([[np.nan, -5.0]]), keep=2, at_least=-np.inf).tolist() == [[False, True]]
    with pytest.raises(ValueError, match="finite"):
        best(np.array([[np.inf]]), keep=1, at_least=0.0)
