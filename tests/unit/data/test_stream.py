"""The stream: whole epochs, no tail dropped, and a restored stream that goes on with exactly the next tasks."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest

from strop.data.stream import TaskStream, shuffled
from strop.data.tasks import Task
from strop.errors import CheckpointError, DataError
from strop.types import Message


def tasks(n: int) -> list[Task]:
    return [
        Task(id=f"t:{i}", messages=[Message(role="user", content=f"{i}?")], answer=str(i), source="jsonl/t", meta={})
        for i in range(n)
    ]


def ids(taken: list[Task]) -> list[str]:
    return [task.id for task in taken]


@pytest.mark.parametrize("n", [1, 3, 4, 10, 25])
def test_every_epoch_holds_every_task_once(n: int) -> None:
    """G03: ten tasks in steps of any size are ten tasks each epoch, the last partial step included."""
    stream = TaskStream(tasks(10), seed=0)
    taken: list[str] = []
    while len(taken) < 30:
        step = ids(stream.take(n))
        assert len(step) == n
        taken += step
    epochs = [taken[i : i + 10] for i in range(0, 30, 10)]
    assert all(sorted(epoch) == sorted(ids(tasks(10))) for epoch in epochs)
    assert epochs[0] != epochs[1] != epochs[2] != ids(tasks(10))


def test_one_task_is_enough() -> None:
    """G03: a single row is taken again and again."""
    assert ids(TaskStream(tasks(1), seed=0).take(3)) == ["t:0"] * 3
    with pytest.raises(DataError, match=r"tasks\.holdout"):
        TaskStream([], seed=0)


@pytest.mark.parametrize("before", range(0, 16))
def test_a_restored_stream_goes_on(before: int) -> None:
    """D02, D03: saved after any step of any epoch, nothing is lost or repeated, and the epoch goes on counting."""
    whole, saved = TaskStream(tasks(6), seed=3), TaskStream(tasks(6), seed=3)
    for _ in range(before):
        whole.take(2)
        saved.take(2)
    state = json.loads(json.dumps(saved.state()))
    assert state["ended"] == []
    resumed = TaskStream(tasks(6), seed=3)
    resumed.take(5)
    resumed.restore(state)
    assert resumed.state() == state
    for _ in range(9):
        assert ids(resumed.take(2)) == ids(whole.take(2))
    assert resumed.state() == whole.state()


def test_the_state_says_which_epoch() -> None:
    """D02: step 4 of two tasks out of three is in the third epoch, two taken."""
    stream = TaskStream(tasks(3), seed=0)
    for _ in range(4):
        stream.take(2)
    assert (stream.state()["epoch"], stream.state()["position"]) == (2, 2)


@pytest.mark.parametrize(
    ("taken", "unfinished"), [(5, {4}), (9, {2, 3, 8}), (13, {1, 7, 12}), (3, {0, 1, 2}), (4, set())]
)
def test_tasks_that_were_not_over_come_again_and_no_other_does(taken: int, unfinished: set[int]) -> None:
    """Each task once: those that were over are skipped, in any epoch, also when the run stops again on the way."""
    whole = dict(TaskStream(tasks(6), seed=3).take_numbered(20))
    stream = TaskStream(tasks(6), seed=3)
    stream.take(taken)
    left = [*sorted(unfinished), *range(taken, taken + 4)]
    for _ in range(3):
        state = json.loads(json.dumps(stream.state(unfinished)))
        stream = TaskStream(tasks(6), seed=3)
        stream.restore(state)
        assert stream.state() == state
        again = TaskStream(tasks(6), seed=3)
        again.restore(state)
        assert again.take_numbered(len(left)) == [(number, whole[number]) for number in left]
        assert stream.take_numbered(1)[0][0] == left.pop(0)  # it ends, and the run stops
        unfinished = {number for number in unfinished if number in left}


@pytest.mark.parametrize("change", ["fewer", "order", "answer", "text"])
def test_other_tasks_are_refused(change: str) -> None:
    state = TaskStream(tasks(4), seed=0).state()
    other = tasks(4)
    match change:
        case "fewer":
            other = other[:3]
        case "order":
            other = other[::-1]
        case "answer":
            other[2] = replace(other[2], answer="7")
        case _:
            other[2] = replace(other[2], messages=[Message(role="user", content="!")])
    with pytest.raises(CheckpointError, match="other tasks"):
        TaskStream(other, seed=0).restore(state)


def test_another_seed_is_refused() -> None:
    with pytest.raises(CheckpointError, match="seed 0, not 1"):
        TaskStream(tasks(4), seed=1).restore(TaskStream(tasks(4), seed=0).state())


def test_the_order_is_that_of_seed_and_epoch_alone() -> None:
    """No global generator takes part, every pair has its own order, and the order is the same in every release."""
    np.random.seed(1)
    first = shuffled(8, seed=5, epoch=1).tolist()
    np.random.seed(2)
    assert shuffled(8, seed=5, epoch=1).tolist() == first
    assert sorted(first) == list(range(8))
    assert len({tuple(shuffled(8, seed, epoch).tolist()) for seed in (-1, 0, 5) for epoch in range(4)}) == 12
    assert shuffled(8, seed=0, epoch=0).tolist() == [0, 2, 1, 5, 4, 3, 6, 7]
