"""pass@k and when evaluation is due."""

from __future__ import annotations

from itertools import combinations

import pytest

from strop.loops.evaluate import pass_at_k, powers_of_two


@pytest.mark.parametrize("attempts", [1, 4, 6])
def test_pass_at_k_is_the_chance_that_k_of_the_attempts_hold_a_solution(attempts: int) -> None:
    """Counted by hand over every subset of k attempts."""
    for k in range(1, attempts + 1):
        for solved in range(attempts + 1):
            subsets = list(combinations([i < solved for i in range(attempts)], k))
            assert pass_at_k(attempts, [solved], k) == pytest.approx(sum(map(any, subsets)) / len(subsets))
    assert pass_at_k(4, [0, 4, 2], 1) == pytest.approx((0 + 1 + 0.5) / 3)


def test_ks_are_powers_of_two_up_to_the_attempts() -> None:
    assert [powers_of_two(n) for n in (1, 3, 4, 9)] == [[1], [1, 2], [1, 2, 4], [1, 2, 4, 8]]
