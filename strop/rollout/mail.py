"""Many requests to a sampler elsewhere, in few messages: what is asked at once travels at once, and so do the answers.

    ask(prompt) x 512 -> take([...]) -> the sampler draws them -> ended() -> [those that have] -> 512 awaited results

A message to another process costs a millisecond or more, which is what a small model takes to draw a whole reply.
"""

from __future__ import annotations

import asyncio
import traceback
from collections.abc import Coroutine, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Protocol

from strop.errors import RolloutError, StropError
from strop.rollout.base import Sampler
from strop.types import Completion, Prompt, SamplingParams

BEAT_S = 5.0


@dataclass(frozen=True, slots=True)
class Asked:
    """A request, and its number at the one who asks."""

    number: int
    prompt: Prompt
    params: SamplingParams


@dataclass(frozen=True, slots=True)
class Ended:
    """What became of a request."""

    number: int
    found: Completion | StropError


class Desk:
    """Beside the sampler: takes requests, and tells what has ended."""

    def __init__(self, sampler: Sampler) -> None:
        self._sampler = sampler
        self._running: dict[int, asyncio.Task[Completion]] = {}
        self._ended: list[Ended] = []  # that nobody is known to have
        self._had = 0  # how many were before these
        self._change = asyncio.Event()
        self._listener = 0

    def take(self, asked: Iterable[Asked]) -> None:
        """Begin to draw."""
        for one in asked:
            drawing = asyncio.ensure_future(self._sampler.sample(one.prompt, one.params))
            drawing.add_done_callback(partial(self._note, one.number))
            self._running[one.number] = drawing

    def drop(self, numbers: Iterable[int]) -> None:
        """Nobody waits for these any more."""
        for number in numbers:
            if number in self._running:
                self._running.pop(number).cancel()

    async def ended(self, had: int) -> list[Ended]:
        """Wait until more than the first `had` have ended; all of those, or none after BEAT_S, which says that the desk
        is there. They are told again to whoever asks again, since an answer may be lost with the one who asked. Whoever
        asks later takes over: an earlier call gets nothing."""
        self._listener += 1
        me = self._listener
        self._change.set()
        self._ended = self._ended[had - self._had :]
        self._had = had
        with suppress(TimeoutError):
            async with asyncio.timeout(BEAT_S):
                while me == self._listener and not self._ended:
                    self._change.clear()
                    await self._change.wait()
        return list(self._ended) if me == self._listener else []

    def _note(self, number: int, drawing: asyncio.Task[Completion]) -> None:
        """Put in the tray what became of a request. Whatever went wrong must reach who waits for it."""
        self._running.pop(number, None)
        if drawing.cancelled():
            return
        error = drawing.exception()
        if error is None:
            found: Completion | StropError = drawing.result()
        elif isinstance(error, StropError):
            found = error
        else:
            found = RolloutError(f"a sampler failed:\n{''.join(traceback.format_exception(error))}")
        self._ended.append(Ended(number, found))
        self._change.set()


class Way(Protocol):
    """How messages get to a `Desk`, and back. All raise StropError when the desk is gone."""

    async def take(self, asked: list[Asked]) -> None: ...

    async def drop(self, numbers: list[int]) -> None: ...

    async def ended(self, had: int) -> list[Ended]: ...


class Mail:
    """At the one who asks."""

    def __init__(self, way: Way) -> None:
        self._way = way
        self._number = 0
        self._had = 0  # how many have ended, that this end knows of
        self._leaving: list[Asked] = []
        self._waiting: dict[int, asyncio.Future[Completion]] = {}
        self._listening: asyncio.Task[None] | None = None
        self._travelling: set[asyncio.Task[None]] = set()

    async def ask(self, prompt: Prompt, params: SamplingParams) -> Completion:
        """Draw one completion. Raises what the sampler does, or what the way does when the desk is gone."""
        self._number += 1
        number = self._number
        self._waiting[number] = asyncio.get_running_loop().create_future()
        if not self._leaving:
            asyncio.get_running_loop().call_soon(self._send)
        self._leaving.append(Asked(number, prompt, params))
        try:
            return await self._waiting[number]
        except asyncio.CancelledError:
            kept = [one for one in self._leaving if one.number != number]
            if len(kept) == len(self._leaving):
                self._travel(self._way.drop([number]))
            self._leaving = kept
            raise
        finally:
            del self._waiting[number]

    def _send(self) -> None:
        asked, self._leaving = self._leaving, []
        if not asked:  # all were given up at once
            return
        self._travel(self._way.take(asked))
        if self._listening is None or self._listening.done():
            self._listening = asyncio.ensure_future(self._listen())

    def _travel(self, message: Coroutine[None, None, None]) -> None:
        """Send it, and wait for it in nobody's way."""
        task = asyncio.ensure_future(self._sent(message))
        self._travelling.add(task)  # or nobody would hold it
        task.add_done_callback(self._travelling.discard)

    async def _sent(self, message: Coroutine[None, None, None]) -> None:
        try:
            await message
        except StropError as error:
            self._fail(error)

    async def _listen(self) -> None:
        """Hand out what has ended, as long as anybody waits."""
        while self._waiting:
            try:
                arrived = await self._way.ended(self._had)
            except StropError as error:
                self._fail(error)
                return
            self._had += len(arrived)
            for one in arrived:
                future = self._waiting.get(one.number)
                if future is None or future.done():  # given up meanwhile
                    continue
                if isinstance(one.found, StropError):
                    future.set_exception(one.found)
                else:
                    future.set_result(one.found)

    def _fail(self, error: StropError) -> None:
        """Messages are lost for one reason only: nothing that was asked will come."""
        for future in self._waiting.values():
            if not future.done():
                future.set_exception(error)
