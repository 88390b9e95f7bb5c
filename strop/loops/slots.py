"""Which of the tasks in the making a step may take, so that no token of any of them grows too old.

    begin(number, version) -> end(number) -> choose(step): up to P of those that ended -> late(step): what is too old

A task that is begun at version v can be learned from until step v + max_lag. A step takes, in order of ending, from the
oldest `window` * P tasks, but never so many young ones that an older one could not be taken in time any more.
"""

from __future__ import annotations

from collections import Counter
from itertools import islice

from strop.config.policy import AsyncGRPOConfig


class Slots:
    """Tasks in the making, by their numbers in the stream. What is taken, dropped or given up is closed."""

    def __init__(self, cfg: AsyncGRPOConfig) -> None:
        self._cfg = cfg
        self.due: dict[int, int] = {}  # the last step that may learn from each, oldest task first
        self._ended: dict[int, None] = {}  # in order of ending
        self._due_at: Counter[int] = Counter()  # how many are due at each step

    def begin(self, number: int, version: int) -> None:
        """Begin a task whose first tokens are drawn with weights of this version."""
        self.due[number] = version + self._cfg.max_lag
        self._due_at[self.due[number]] += 1

    def end(self, number: int) -> None:
        """Its attempts have ended, and may be taken."""
        self._ended[number] = None

    def close(self, number: int) -> None:
        """It gives its slot back."""
        self._due_at[self.due.pop(number)] -= 1
        self._ended.pop(number, None)

    def choose(self, step: int, taken: int) -> list[int]:
        """Close what may be taken at `step`, which has taken so many before, and say which."""
        chosen: list[int] = []
        reach = self._cfg.window * self._cfg.tasks_per_step + self._cfg.oversample
        window = set(islice(self.due, reach - taken))
        for number in list(self._ended):
            left = self._cfg.tasks_per_step - taken - len(chosen)
            if left and number in window and self._leaves_time(step, left - 1, self.due[number]):
                chosen.append(number)
                self.close(number)
        return chosen

    def late(self, step: int) -> list[int]:
        """Those that no later step may learn from."""
        return [number for number, due in self.due.items() if due <= step]

    def _leaves_time(self, step: int, left: int, due: int) -> bool:
        """Whether, with a task due at step `due` taken and `left` more at this step, the others can be in time.

        By every step before `due` no more may be due than are taken until then; `oversample` may be given up.
        """
        waiting = 0
        for later in range(step, due):
            waiting += self._due_at[later]
            if waiting > left + (later - step) * self._cfg.tasks_per_step + self._cfg.oversample:
                return False
        return True
