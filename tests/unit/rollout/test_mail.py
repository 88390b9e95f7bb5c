"""Requests that travel together: each gets its own answer, in whatever order, and nobody waits for one that is gone."""

from __future__ import annotations

import asyncio

import numpy as np
import pytest

from strop.errors import RolloutError
from strop.rollout.mail import Asked, Desk, Ended, Mail
from strop.types import Completion, Prompt, SamplingParams
from tests.unit.rollout.test_groups import Recorder

PROMPT = Prompt(np.array([1, 2], np.int32))


class Late(Recorder):
    """Answers with the request's seed, once the test lets it."""

    def __init__(self) -> None:
        super().__init__()
        self.gates: dict[int, asyncio.Event] = {}
        self.given_up: list[int] = []

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        self.gates[params.seed] = asyncio.Event()
        try:
            await self.gates[params.seed].wait()
        except asyncio.CancelledError:
            self.given_up.append(params.seed)
            raise
        if params.seed == 13:
            raise RolloutError("thirteen")
        if params.seed == 14:
            raise KeyError("fourteen")
        return await super().sample(prompt, params)


class Near:
    """A desk that is reached at once, and may go."""

    def __init__(self, desk: Desk) -> None:
        self.desk = desk
        self.messages = 0
        self.gone = asyncio.Event()

    async def take(self, asked: list[Asked]) -> None:
        self.messages += 1
        self.desk.take(asked)

    async def drop(self, numbers: list[int]) -> None:
        self.desk.drop(numbers)

    async def ended(self, had: int) -> list[Ended]:
        self.messages += 1
        lost = asyncio.ensure_future(self.gone.wait())
        answer = asyncio.ensure_future(self.desk.ended(had))
        await asyncio.wait({lost, answer}, return_when=asyncio.FIRST_COMPLETED)
        lost.cancel()
        if answer.done():
            return answer.result()
        raise RolloutError("the desk is gone")


async def settled() -> None:
    for _ in range(12):
        await asyncio.sleep(0)


def asked(mail: Mail, *seeds: int) -> list[asyncio.Task[Completion]]:
    return [asyncio.ensure_future(mail.ask(PROMPT, SamplingParams(max_tokens=1, seed=seed))) for seed in seeds]


def test_what_is_asked_at_once_is_two_messages_and_each_gets_its_own() -> None:
    async def work() -> None:
        sampler = Late()
        way = Near(Desk(sampler))
        mail = Mail(way)
        tasks = asked(mail, *range(100, 200))
        await settled()
        assert way.messages == 2
        for seed in reversed(range(100, 200)):
            sampler.gates[seed].set()
        found = await asyncio.gather(*tasks)
        assert [int(one.tokens[0]) for one in found] == list(range(100, 200))
        assert way.messages < 10
        await settled()
        again = asked(mail, 300)  # after a pause, somebody listens again
        await settled()
        sampler.gates[300].set()
        assert int((await again[0]).tokens[0]) == 300

    asyncio.run(work())


def test_errors_come_back_to_who_asked() -> None:
    async def work() -> None:
        sampler = Late()
        good, bad, worse = asked(Mail(Near(Desk(sampler))), 12, 13, 14)
        await settled()
        sampler.gates[13].set()
        sampler.gates[14].set()
        with pytest.raises(RolloutError, match="KeyError: 'fourteen'"):
            await worse
        with pytest.raises(RolloutError, match="thirteen"):
            await bad
        sampler.gates[12].set()
        assert int((await good).tokens[0]) == 12

    asyncio.run(work())


def test_what_nobody_waits_for_is_not_drawn_further() -> None:
    async def work() -> None:
        sampler = Late()
        mail = Mail(Near(Desk(sampler)))
        never = asked(mail, 3)[0]
        await asyncio.sleep(0)
        never.cancel()
        await settled()
        assert never.cancelled() and not sampler.gates, "it had not even left"
        first, second = asked(mail, 1, 2)
        await settled()
        first.cancel()
        await settled()
        assert first.cancelled() and sampler.given_up == [1]
        sampler.gates[2].set()
        assert int((await second).tokens[0]) == 2

    asyncio.run(work())


def test_everybody_who_waits_hears_that_the_desk_is_gone() -> None:
    async def work() -> None:
        way = Near(Desk(Late()))
        tasks = asked(Mail(way), 1, 2, 3)
        await settled()
        way.gone.set()
        found = await asyncio.gather(*tasks, return_exceptions=True)
        assert [str(error) for error in found] == ["the desk is gone"] * 3

    asyncio.run(work())


def test_a_listener_that_was_cut_off_takes_nothing_from_the_next() -> None:
    """An event loop ends while somebody listens; the next one's answers are not lost with the message before, whether
    it is still there when they are ready or was told them already."""

    sampler = Late()

    async def work() -> None:
        desk = Desk(sampler)
        old = asyncio.ensure_future(desk.ended(0))
        await settled()
        new = asyncio.ensure_future(desk.ended(0))
        await asked_for(desk, 7)
        assert await old == []
        assert [one.number for one in await new] == [7]
        told = asyncio.ensure_future(desk.ended(1))
        await asked_for(desk, 8)
        assert [one.number for one in await told] == [8]
        assert [one.number for one in await desk.ended(1)] == [8]
        last = asyncio.ensure_future(desk.ended(2))
        await asked_for(desk, 9)
        assert [one.number for one in await last] == [9]

    async def asked_for(desk: Desk, number: int) -> None:
        desk.take([Asked(number, PROMPT, SamplingParams(max_tokens=1, seed=13))])  # refused as soon as it is there
        await settled()
        sampler.gates[13].set()
        await settled()

    asyncio.run(work())


def test_a_desk_where_nothing_ends_says_that_it_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    """And nothing is lost by that: what ends later still arrives, once."""
    monkeypatch.setattr("strop.rollout.mail.BEAT_S", 0.02)

    async def work() -> None:
        sampler = Late()
        desk = Desk(sampler)
        assert await desk.ended(0) == []
        way = Near(desk)
        mail = Mail(way)
        tasks = asked(mail, 5)
        while way.messages < 4:
            await asyncio.sleep(0.01)
        assert not tasks[0].done()
        sampler.gates[5].set()
        assert (await tasks[0]).tokens.tolist() == [5]

    asyncio.run(asyncio.wait_for(work(), 30))
