"""Samplers that are costly to start, shared by the tests of the contract: any weights of a family, in turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from strop.rollout.base import Sampler
from tests.conformance.test_sampler import Limits
from tests.tiny_models import tiny_model

SamplerT = TypeVar("SamplerT", bound=Sampler)
Start = Callable[[str, int, Limits], SamplerT]


@dataclass(slots=True)
class Servers(Generic[SamplerT]):
    """Started ones by (family, limits), the least lately used first."""

    start: Start[SamplerT]
    at_once: int
    started: list[tuple[tuple[str, Limits], SamplerT]] = field(default_factory=list)
    lent: list[SamplerT] = field(default_factory=list)

    def lend(self, family: str, seed: int, limits: Limits) -> SamplerT:
        """One of its own until `take_back`, with these weights as version 0."""
        for place, (key, sampler) in enumerate(self.started):
            if key == (family, limits) and sampler not in self.lent:
                self.started.append(self.started.pop(place))
                asyncio.run(sampler.wake())
                asyncio.run(sampler.load_weights(tiny_model(family, seed=seed).state(), 0))
                self.lent.append(sampler)
                return sampler
        free = [pair for pair in self.started if pair[1] not in self.lent]
        if len(self.started) >= self.at_once and free:
            self.started.remove(free[0])
            free[0][1].close()
        sampler = self.start(family, seed, limits)
        self.started.append(((family, limits), sampler))
        self.lent.append(sampler)
        return sampler

    def take_back(self) -> None:
        self.lent.clear()

    def forget(self, sampler: SamplerT) -> None:
        """One that is gone."""
        self.started = [pair for pair in self.started if pair[1] is not sampler]

    def close(self) -> None:
        for _, sampler in self.started:
            sampler.close()
