"""Attempts drawn ahead of the step that learns from them: a bounded number of tasks is in the making.

slots full of tasks -> groups end, in any order -> take(step): P of them -> what is too old is given up
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace

import numpy as np

from strop.algos import filters
from strop.config.policy import AsyncGRPOConfig
from strop.data.attempts import Attempts, rewards_of
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.loops.collect import attempts_of, greedy_rewards
from strop.loops.slots import Slots
from strop.rollout.groups import Failures, Player
from strop.types import Group, Metric, Reduction, SamplingParams, StreamState, merge_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of a task."""

    number: int  # in the stream
    group: Group
    kept: bool  # False: its attempts all scored alike
    greedy: float  # the reward of a greedy attempt; NaN where none was asked for


class Ahead:
    """The tasks in the making. An error in one of them is raised by the `take` that waits, and all are given up."""

    def __init__(self, cfg: AsyncGRPOConfig, tasks: TaskStream, player: Player, params: SamplingParams) -> None:
        self._cfg, self._tasks, self._player = cfg, tasks, player
        self._params = replace(params, routes=cfg.router_replay == "rollout")
        self._slots = Slots(cfg)
        self._playing: dict[int, asyncio.Task[Played]] = {}  # by number: those in a slot
        self._replaced: list[Played] = []  # dropped, and another task was begun in its slot, since the last take
        self._failures: dict[int, Failures] = {}  # by the step that a task was begun for
        self._refills: Counter[int] = Counter()  # tasks begun in place of dropped ones, by the same
        self._version = 0
        self._begun = 0  # tasks begun at this version
        self._error: BaseException | None = None
        self._change = asyncio.Event()

    async def take(self, step: int) -> Attempts:
        """The attempts that `step` learns from, once version `step` of the weights is published.

        Raises RolloutError when more than `cfg.max_failures` episodes failed of the tasks begun for one step.
        """
        self._fill(step)
        taken: list[Played] = []
        try:
            while len(taken) < self._cfg.tasks_per_step:
                self._change.clear()
                if self._error is not None:
                    raise self._error
                chosen = self._slots.choose(step, len(taken))
                taken += [self._playing.pop(number).result() for number in chosen]
                if not chosen:
                    await self._change.wait()
        finally:
            complete = len(taken) == self._cfg.tasks_per_step
            late = self._slots.late(step) if complete else list(self._playing)
            await self._give_up(late)
        return self._attempts(step, taken, given_up=len(late))

    def state(self) -> StreamState:
        """Where the stream stands: a resumed run plays again what is in the making now."""
        return self._tasks.state(unfinished=self._playing.keys())

    def _fill(self, step: int) -> None:
        """Begin tasks until every slot that the rest of the run has a use for is full."""
        self._version, self._begun = step, 0
        steps_ahead = min(self._cfg.max_lag + 1, self._cfg.steps - step)
        for _ in range(steps_ahead * self._cfg.tasks_per_step + self._cfg.oversample - len(self._playing)):
            self._begin(step)

    def _begin(self, origin: int) -> None:
        ((number, task),) = self._tasks.take_numbered(1)
        self._slots.begin(number, self._version)
        playing = asyncio.ensure_future(self._play(number, task, origin, self._version, self._begun))
        self._playing[number] = playing
        self._begun += 1
        playing.add_done_callback(lambda playing: self._end(number, origin, playing))

    async def _play(self, number: int, task: Task, origin: int, version: int, index: int) -> Played:
        failures = self._failures.setdefault(origin, Failures(origin, self._cfg.max_failures))
        (group,) = await self._player.play(
            [task], self._cfg.group_size, self._params, step=version, failures=failures, first=index
        )
        kept = not self._cfg.drop_uniform_groups or bool(filters.informative(rewards_of([group]))[0])
        greedy = float("nan")
        if kept and self._cfg.advantage.kind == "remax":
            greedy = float((await greedy_rewards(self._player, [task], self._params, version))[0])
        return Played(number=number, group=group, kept=kept, greedy=greedy)

    def _end(self, number: int, origin: int, playing: asyncio.Task[Played]) -> None:
        """A dropped group's slot goes to another task at once, as long as refills last; then the step goes without."""
        if playing.cancelled():
            return
        self._change.set()
        if (error := playing.exception()) is not None:
            self._error = self._error or error
        elif playing.result().kept or self._refills[origin] == self._cfg.refills * self._cfg.tasks_per_step:
            self._slots.end(number)
        else:
            self._slots.close(number)
            self._replaced.append(self._playing.pop(number).result())
            self._refills[origin] += 1
            self._begin(origin)

    async def _give_up(self, numbers: list[int]) -> None:
        given_up = [self._playing.pop(number) for number in numbers]
        for number, playing in zip(numbers, given_up, strict=True):
            self._slots.close(number)
            playing.cancel()
        await asyncio.gather(*given_up, return_exceptions=True)

    def _attempts(self, step: int, taken: list[Played], given_up: int) -> Attempts:
        played = sorted([*taken, *self._replaced], key=lambda one: one.number)
        self._replaced = []
        kept = [one for one in played if one.kept]
        greedy_P = np.array([one.greedy for one in kept]) if self._cfg.advantage.kind == "remax" else None
        groups = [one.group for one in kept]
        attempts = attempts_of(
            self._cfg, self._player, self._params, played=[p.group for p in played], kept=groups, greedy_P=greedy_P
        )
        lag = {
            "async/lag_max": Metric(Reduction.MAX, oldest_lag(groups, step)),
            "async/given_up": Metric(Reduction.SUM, given_up),
        }
        return replace(attempts, metrics=merge_metrics([attempts.metrics, lag]))


def oldest_lag(groups: Iterable[Group], step: int) -> int:
    """How many versions behind `step` the oldest sampled token is; 0 when nothing was sampled."""
    oldest = [t.oldest_version for group in groups for t in group if t.oldest_version is not None]
    return step - min(oldest, default=step)
