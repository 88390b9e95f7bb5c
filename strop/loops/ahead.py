"""Attempts drawn ahead of the step that learns from them: a bounded number of tasks is in the making, and no token of
them grows too old.

    slots full of tasks -> groups end, in any order -> take(step): P of those that may be taken -> too old: given up

A task that is begun at version v can be learned from until step v + max_lag. A step takes, in order of ending, from the
oldest `window` * P tasks, but never so many young ones that an older one could not be taken in time any more.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, replace
from itertools import islice

import numpy as np

from strop.algos import filters
from strop.config.policy import AsyncGRPOConfig
from strop.data.attempts import Attempts, rewards_of
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.loops.collect import attempts_of, greedy_rewards
from strop.rollout.groups import Failures, Player
from strop.types import Group, Metric, Reduction, SamplingParams, StreamState, merge_metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class Begun:
    """A task in the making."""

    number: int  # in the stream
    version: int  # of the weights that its first tokens are drawn with
    origin: int  # the step it was begun for, or the one that the group it replaces was
    playing: asyncio.Task[Played]


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """What became of it."""

    number: int
    group: Group
    kept: bool  # False: its attempts all scored alike
    greedy: float  # the reward of a greedy attempt; NaN where none was asked for


class Ahead:
    """The tasks in the making. An error in one of them is raised by the `take` that waits, and all are given up."""

    def __init__(self, cfg: AsyncGRPOConfig, tasks: TaskStream, player: Player, params: SamplingParams) -> None:
        self._cfg, self._tasks, self._player = cfg, tasks, player
        self._params = replace(params, routes=cfg.router_replay == "rollout")
        self._open: dict[int, Begun] = {}  # by number, in order
        self._ended: dict[int, Played] = {}  # those of them that may be taken, in order of ending
        self._replaced: list[Played] = []  # dropped, and another task was begun in its slot, since the last take
        self._failures: dict[int, Failures] = {}  # by origin
        self._refills: Counter[int] = Counter()  # tasks begun in place of dropped ones, by origin
        self._due: Counter[int] = Counter()  # open tasks, by the last step that may learn from them
        self._version = 0
        self._begun = 0  # tasks begun at this version
        self._error: BaseException | None = None
        self._change = asyncio.Event()

    async def take(self, step: int) -> Attempts:
        """The attempts that `step` learns from, once version `step` of the weights is published.

        Raises RolloutError when more than `cfg.max_failures` episodes failed of the tasks begun for one step.
        """
        taken: list[Played] = []
        try:
            self._fill(step)
            while len(taken) < self._cfg.tasks_per_step:
                self._change.clear()
                if self._error is not None:
                    raise self._error
                if not self._choose(step, taken):
                    await self._change.wait()
        except BaseException:
            await self._give_up(list(self._open.values()))
            raise
        late = [begun for begun in self._open.values() if begun.version + self._cfg.max_lag <= step]
        await self._give_up(late)
        return self._attempts(step, taken, given_up=len(late))

    def state(self) -> StreamState:
        """Where the stream stands: a resumed run plays again what is in the making now."""
        return self._tasks.state(unfinished=self._open.keys())

    def _fill(self, step: int) -> None:
        """Begin tasks until every slot that the rest of the run has a use for is full."""
        self._version, self._begun = step, 0
        steps_ahead = min(self._cfg.max_lag + 1, self._cfg.steps - step)
        for _ in range(steps_ahead * self._cfg.tasks_per_step + self._cfg.oversample - len(self._open)):
            self._begin(origin=step)

    def _begin(self, origin: int) -> None:
        ((number, task),) = self._tasks.take_numbered(1)
        playing = asyncio.ensure_future(self._play(number, task, origin, self._version, self._begun))
        begun = Begun(number=number, version=self._version, origin=origin, playing=playing)
        self._open[number] = begun
        self._due[begun.version + self._cfg.max_lag] += 1
        self._begun += 1
        playing.add_done_callback(lambda playing: self._end(begun, playing))

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

    def _end(self, begun: Begun, playing: asyncio.Task[Played]) -> None:
        """A dropped group's slot goes to another task at once, as long as refills last; then the step goes without."""
        if playing.cancelled():
            return
        self._change.set()
        if (error := playing.exception()) is not None:
            self._error = self._error or error
        elif playing.result().kept or self._refills[begun.origin] == self._cfg.refills * self._cfg.tasks_per_step:
            self._ended[begun.number] = playing.result()
        else:
            self._close(begun)
            self._replaced.append(playing.result())
            self._refills[begun.origin] += 1
            self._begin(begun.origin)

    def _choose(self, step: int, taken: list[Played]) -> bool:
        """Take what may be taken; False when nothing could be."""
        before = len(taken)
        reach = self._cfg.window * self._cfg.tasks_per_step + self._cfg.oversample
        window = set(islice(self._open, reach - before))
        for number in list(self._ended):
            begun = self._open[number]
            left = self._cfg.tasks_per_step - len(taken)
            if left and number in window and self._leaves_time(step, left - 1, begun.version + self._cfg.max_lag):
                taken.append(self._ended[number])
                self._close(begun)
        return len(taken) > before

    def _leaves_time(self, step: int, left: int, due: int) -> bool:
        """Whether, with a task due at step `due` taken and `left` more at this step, the others can be in time.

        By every step before `due` no more may be due than are taken until then; `oversample` may be given up.
        """
        waiting = 0
        for day in range(step, due):
            waiting += self._due[day]
            if waiting > left + (day - step) * self._cfg.tasks_per_step + self._cfg.oversample:
                return False
        return True

    async def _give_up(self, late: list[Begun]) -> None:
        for begun in late:
            self._close(begun)
            begun.playing.cancel()
        await asyncio.gather(*(begun.playing for begun in late), return_exceptions=True)

    def _close(self, begun: Begun) -> None:
        del self._open[begun.number]
        self._ended.pop(begun.number, None)
        self._due[begun.version + self._cfg.max_lag] -= 1

    def _attempts(self, step: int, taken: list[Played], given_up: int) -> Attempts:
        played = sorted([*taken, *self._replaced], key=lambda one: one.number)
        self._replaced = []
        kept = [one for one in played if one.kept]
        attempts = attempts_of(
            self._cfg,
            self._player,
            self._params,
            played=[one.group for one in played],
            kept=[one.group for one in kept],
            greedy_P=np.array([one.greedy for one in kept]) if self._cfg.advantage.kind == "remax" else None,
        )
        lag = {
            "async/lag_max": Metric(Reduction.MAX, oldest_lag(attempts.groups, step)),
            "async/given_up": Metric(Reduction.SUM, given_up),
        }
        return replace(attempts, metrics=merge_metrics([attempts.metrics, lag]))


def oldest_lag(groups: Iterable[Group], step: int) -> int:
    """How many versions behind `step` the oldest sampled token is; 0 when nothing was sampled."""
    oldest = [t.oldest_version for group in groups for t in group if t.oldest_version is not None]
    return step - min(oldest, default=step)
