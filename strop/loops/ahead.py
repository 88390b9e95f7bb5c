"""Attempts drawn ahead of the step that learns from them: opened in order, waited for in order.

open_until(s + max_lag) -> each step's tasks taken from the stream and played, concurrently -> attempts_of(s)
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

from strop.config.policy import AsyncGRPOConfig
from strop.data.attempts import Attempts
from strop.data.stream import TaskStream
from strop.loops.collect import collect
from strop.rollout.groups import Player
from strop.types import Group, SamplingParams


class Position:
    """Where a task stream stood before a step took from it."""

    def __init__(self, state: dict[str, int]) -> None:
        self._state = state

    def state(self) -> dict[str, int]:
        return self._state

    def restore(self, state: dict[str, int]) -> None:
        raise NotImplementedError("a noted position is only written down; restore the stream itself")


class Ahead:
    """The steps whose attempts are being drawn. An error in one of them is raised where its attempts are waited for."""

    def __init__(
        self, cfg: AsyncGRPOConfig, tasks: TaskStream, player: Player, params: SamplingParams, *, first: int
    ) -> None:
        self._cfg, self._tasks, self._player, self._params = cfg, tasks, player, params
        self._next = first  # the step to open next
        self._open: dict[int, asyncio.Task[Attempts]] = {}
        self._before: dict[int, dict[str, int]] = {}

    def open_until(self, last: int) -> None:
        """Begin to play every step up to `last` that has not begun."""
        while self._next <= last:
            self._open[self._next] = asyncio.ensure_future(self._play(self._next))
            self._next += 1

    async def attempts_of(self, step: int) -> Attempts:
        """A step's attempts, when all of them have ended. When it fails, the others are given up too."""
        ended = False
        try:
            attempts = await self._open.pop(step)
            ended = True
        finally:
            if not ended:
                for other in self._open.values():
                    other.cancel()
                await asyncio.gather(*self._open.values(), return_exceptions=True)
        return attempts

    def position_of(self, step: int) -> Position:
        """Where the stream stood before `step` took its tasks: a resumed run takes the same ones again."""
        return Position(self._before.pop(step, self._tasks.state()))

    async def _play(self, step: int) -> Attempts:
        self._before[step] = self._tasks.state()
        return await collect(
            self._cfg,
            self._tasks,
            self._player,
            self._params,
            step=step,
            drop_uniform=self._cfg.drop_uniform_groups,
            refills=self._cfg.refills,
            greedy=self._cfg.advantage.kind == "remax",
        )


def oldest_lag(groups: Iterable[Group], step: int) -> int:
    """How many versions behind `step` the oldest sampled token is; 0 when nothing was sampled."""
    oldest = [t.oldest_version for group in groups for t in group if t.oldest_version is not None]
    return step - min(oldest, default=step)
