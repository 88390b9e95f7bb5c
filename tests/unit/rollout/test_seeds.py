"""Seeds of attempts: those that numpy's SeedSequence makes one by one."""

from __future__ import annotations

import numpy as np
import pytest

from strop.rollout.seeds import attempt_seeds


@pytest.mark.parametrize("seed", [0, 1, 2**32 - 1, 2**32, 2**63 + 5, 2**130 + 9])
@pytest.mark.parametrize("step", [0, 3, 2**32 + 1])
def test_they_are_the_seeds_of_numpy(seed: int, step: int) -> None:
    tasks = range(2**32 - 3, 2**32)
    expected = [
        [np.random.SeedSequence(seed, spawn_key=(step, p, g)).generate_state(1, np.uint64)[0] for g in range(4)]
        for p in tasks
    ]
    found = attempt_seeds(seed, step, tasks, 4)
    assert found.dtype == np.uint64 and found.tolist() == np.array(expected).tolist()


def test_no_two_are_alike_and_none_are_asked_for() -> None:
    assert len(np.unique(attempt_seeds(3, 1, range(500), 100))) == 50_000
    assert attempt_seeds(3, 1, range(0), 4).shape == (0, 4)


@pytest.mark.parametrize(
    ("seed", "step", "tasks", "attempts"),
    [(-1, 0, range(1), 1), (0, -1, range(1), 1), (0, 0, range(-1, 1), 1), (0, 0, range(2**32, 2**32 + 1), 1)],
)
def test_numbers_that_have_no_place_are_refused(seed: int, step: int, tasks: range, attempts: int) -> None:
    with pytest.raises(ValueError, match="from 0 on"):
        attempt_seeds(seed, step, tasks, attempts)
