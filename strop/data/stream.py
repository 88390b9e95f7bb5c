"""An endless, shuffled, resumable stream of tasks.

    tasks -> an order for every epoch, from (seed, epoch) alone -> take(n) -> state() -> restore(state) -> take goes on

A task has a number: how many were taken before it. What is saved is the number of the first task that is not over, and
those of later tasks that are: a loop that plays tasks at once may end them in any order.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from functools import cached_property
from hashlib import blake2b

import numpy as np
from numpy.typing import NDArray

from strop.data.tasks import Task
from strop.errors import CheckpointError, DataError
from strop.types import StreamState


class TaskStream:
    """Every task once an epoch, in a new order each epoch. Tails are never dropped: `take` goes on into the next epoch.

    Raises DataError when there are no tasks.
    """

    def __init__(self, tasks: Sequence[Task], seed: int) -> None:
        if not tasks:
            raise DataError("there are no tasks to train on: check tasks.path, tasks.limit and tasks.holdout")
        self._tasks = tasks
        self._seed = seed
        self._next = 0  # the number of the task to take next
        self._ended: set[int] = set()  # numbers from there on that are over
        self._epoch = 0
        self._order = shuffled(len(tasks), seed, 0)

    def __len__(self) -> int:
        """Tasks in one epoch."""
        return len(self._tasks)

    def take(self, n: int) -> list[Task]:
        """The next n tasks."""
        return [task for _, task in self.take_numbered(n)]

    def take_numbered(self, n: int) -> list[tuple[int, Task]]:
        """The next n tasks, each with its number in the stream."""
        taken: list[tuple[int, Task]] = []
        while len(taken) < n:
            if self._next not in self._ended:
                taken.append((self._next, self._tasks[self._index(self._next)]))
            self._ended.discard(self._next)
            self._next += 1
        return taken

    def state(self, unfinished: Collection[int] = ()) -> StreamState:
        """Where the stream stands, for JSON; `restore` of it gives exactly the tasks that would have come next.

        With the numbers of tasks that were taken and are not over, those come first.
        """
        first = min(unfinished, default=self._next)
        epoch, position = divmod(first, len(self._tasks))
        return {
            "seed": self._seed,
            "epoch": epoch,
            "position": position,
            "ended": sorted((set(range(first, self._next)) | self._ended) - set(unfinished)),
            "fingerprint": self._fingerprint,
        }

    def restore(self, state: StreamState) -> None:
        """Go to where `state` was taken. Raises CheckpointError when it is of other tasks, or of another seed."""
        if state["fingerprint"] != self._fingerprint:
            raise CheckpointError(
                f"the checkpoint was written while training on other tasks than the {len(self._tasks)} given now: "
                "resume with the same task files, tasks.limit and tasks.holdout, or start a new run"
            )
        if state["seed"] != self._seed:
            raise CheckpointError(
                f"the checkpoint drew its tasks with seed {state['seed']}, not {self._seed}: resume with that seed, or "
                "start a new run"
            )
        self._next = state["epoch"] * len(self._tasks) + state["position"]
        self._ended = set(state["ended"])

    @cached_property
    def _fingerprint(self) -> int:
        return fingerprint(self._tasks)

    def _index(self, number: int) -> int:
        epoch, position = divmod(number, len(self._tasks))
        if epoch != self._epoch:
            self._epoch, self._order = epoch, shuffled(len(self._tasks), self._seed, epoch)
        return int(self._order[position])


def shuffled(n: int, seed: int, epoch: int) -> NDArray[np.int64]:
    """A permutation of n from (seed, epoch) alone.

    It sorts raw Philox words rather than asking a Generator to shuffle: NumPy keeps only the former stable over its
    versions, and a run may be resumed with a newer one.
    """
    bits = np.random.Philox(key=np.array([seed % 2**64, epoch], np.uint64))
    return np.argsort(bits.random_raw(n), kind="stable")


def fingerprint(tasks: Sequence[Task]) -> int:
    """A 48-bit number that differs when the ids, texts, answers, preferences or order of tasks do."""
    digest = blake2b(digest_size=6)
    for task in tasks:
        compared = task.chosen is not None or task.rejected is not None
        preference = [task.chosen, task.rejected, task.margin] if compared else []
        digest.update(json.dumps([task.id, task.messages, task.answer, *preference], sort_keys=True).encode())
    return int.from_bytes(digest.digest(), "big")
