"""Many samplers as one: least load, conversations that stay, samplers that are lost."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable

import numpy as np
import pytest
from torch import Tensor

from strop.errors import RolloutError
from strop.rollout.router import SLACK, NoSampler, Router, SamplerLost
from strop.types import Completion, Float32s, Prompt, SamplingParams, Stop


class Slow:
    """A sampler that answers when it is told to, and notes what it was asked."""

    serves_adapter = False

    def __init__(self, name: int) -> None:
        self.name = name
        self.version = 0
        self.asked: list[tuple[int, ...]] = []
        self.fails: Exception | None = None
        self.gate = asyncio.Event()
        self.loaded: list[list[str]] = []

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        self.asked.append(tuple(prompt.tokens.tolist()))
        await self.gate.wait()
        if self.fails is not None:
            raise self.fails
        one = np.ones(1, np.float32)
        return Completion(
            tokens=np.array([self.name], np.int32),
            logprobs=one,
            sampling_logprobs=one,
            versions=np.array([self.version], np.int32),
            stop=Stop.TOKEN,
        )

    async def score(self, prompt: Prompt) -> Float32s:
        return np.zeros(len(prompt.tokens), np.float32)

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        if self.fails is not None:
            raise self.fails
        self.loaded.append([name for name, _ in weights])
        self.version = version

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def close(self) -> None: ...


def prompt(*tokens: int) -> Prompt:
    return Prompt(np.array(tokens, np.int32))


PARAMS = SamplingParams(max_tokens=1)


def test_new_texts_go_where_there_is_least_to_do() -> None:
    async def work() -> list[int]:
        samplers = [Slow(i) for i in range(3)]
        router = Router(samplers)
        asked = [asyncio.ensure_future(router.sample(prompt(i), PARAMS)) for i in range(9)]
        await asyncio.sleep(0)
        for sampler in samplers:
            sampler.gate.set()
        await asyncio.gather(*asked)
        return [len(sampler.asked) for sampler in samplers]

    assert asyncio.run(work()) == [3, 3, 3]


def test_texts_that_begin_alike_stay_together_until_it_is_too_much() -> None:
    """One conversation, or one group, has its keys and values on one sampler; a long queue there is worse."""

    async def work() -> tuple[list[int], list[int]]:
        samplers = [Slow(0), Slow(1)]
        router = Router(samplers)
        few = [asyncio.ensure_future(router.sample(prompt(*range(64), i), PARAMS)) for i in range(SLACK)]
        await asyncio.sleep(0)
        together = [len(sampler.asked) for sampler in samplers]
        more = [asyncio.ensure_future(router.sample(prompt(*range(64), i), PARAMS)) for i in range(2 * SLACK)]
        await asyncio.sleep(0)
        spread = [len(sampler.asked) for sampler in samplers]
        for sampler in samplers:
            sampler.gate.set()
        await asyncio.gather(*few, *more)
        return together, spread

    together, spread = asyncio.run(work())
    assert together == [SLACK, 0]
    assert min(spread) > 0 and sum(spread) == 3 * SLACK


def test_what_a_lost_sampler_was_drawing_is_drawn_elsewhere_once() -> None:
    """B22: what is drawn again is drawn from its prompt on, and nothing of the first try is in it."""

    async def work() -> None:
        samplers = [Slow(0), Slow(1)]
        router = Router(samplers)
        samplers[0].fails = SamplerLost("its process died")
        asked = [asyncio.ensure_future(router.sample(prompt(i), PARAMS)) for i in range(6)]
        await asyncio.sleep(0)
        for sampler in samplers:
            sampler.gate.set()
        drawn = await asyncio.gather(*asked)
        assert [int(c.tokens[0]) for c in drawn] == [1] * 6
        assert sorted(samplers[1].asked) == [(i,) for i in range(6)]
        assert router.lost == {0: "its process died"}
        await router.load_weights([("w", Tensor())], 1)
        assert samplers[0].loaded == [] and samplers[1].loaded == [["w"]] and router.version == 1
        samplers[1].fails = SamplerLost("so did this one")
        with pytest.raises(NoSampler, match="no sampler is left: 0: its process died; 1: so did this one"):
            await router.sample(prompt(9), PARAMS)

    asyncio.run(work())


def test_a_request_s_own_fault_is_raised_as_it_is() -> None:
    async def work() -> None:
        samplers = [Slow(0), Slow(1)]
        router = Router(samplers)
        samplers[0].fails = RolloutError("too long")
        samplers[0].gate.set()
        with pytest.raises(RolloutError, match="too long"):
            await router.sample(prompt(1), PARAMS)
        assert router.lost == {} and samplers[1].asked == []

    asyncio.run(work())


def test_every_sampler_gets_all_weights_of_a_version() -> None:
    async def work() -> None:
        samplers = [Slow(0), Slow(1)]
        router = Router(samplers)
        await router.load_weights(iter([("a", Tensor()), ("b", Tensor())]), 4)
        assert [sampler.loaded for sampler in samplers] == [[["a", "b"]], [["a", "b"]]]
        assert router.version == 4
        samplers[1].fails = RolloutError("unknown weight b")
        with pytest.raises(RolloutError, match="unknown weight b"):
            await router.load_weights([("a", Tensor())], 5)

    asyncio.run(work())


def test_nobody_is_no_router() -> None:
    with pytest.raises(RolloutError, match="at least one"):
        Router([])


def test_the_idlest_is_found_among_many_as_a_full_search_would() -> None:
    """Whatever ends in whatever order, and whoever is lost."""

    async def work() -> None:
        rng, count = np.random.default_rng(0), 50
        samplers = [Slow(i) for i in range(count)]
        router = Router(samplers)
        loads, lost = [0] * count, set[int]()
        for n in range(5000):
            chosen = router._choose(-1)
            assert loads[chosen] == min(load for i, load in enumerate(loads) if i not in lost), n
            router._add_load(chosen, 1)
            loads[chosen] += 1
            while sum(loads) > 80:
                done = int(rng.choice(np.flatnonzero(loads)))
                router._add_load(done, -1)
                loads[done] -= 1
            if n % 500 == 499:
                lost.add(chosen)
                router._lose(chosen, SamplerLost("gone"))
        assert len(router._idlest) < 9 * count + 64

    asyncio.run(work())
