"""The Sampler contract over HTTP, with a stand-in at the other end: the whole conformance suite. No sglang is there."""

# ruff: noqa: F403
from __future__ import annotations

from collections.abc import Iterator

import pytest

from strop.config.sglang import SglangConfig
from strop.rollout.base import Sampler
from strop.rollout.sglang import SglangSampler
from tests.conformance import test_sampler as contract
from tests.conformance.test_sampler import *
from tests.conformance.test_sampler import Factory, Limits, decode
from tests.sglang.sglang_server import StandIn
from tests.tiny_models import tiny_model


def start(family: str, seed: int, limits: Limits, steps: int | None = None) -> tuple[StandIn, SglangSampler]:
    """A server whose own weights are others, so that what is drawn shows that the right ones came."""
    server = StandIn(
        tiny_model(family, seed=7),
        max_running=limits.max_running,
        cache_tokens=limits.cache_tokens,
        decode=decode,
    )
    sampler = SglangSampler.start(
        tiny_model(family, seed=seed),
        SglangConfig(address=server.address),
        max_running=limits.max_running,
        decode=decode,
    )
    server.sampler.steps_left = steps
    return server, sampler


@pytest.fixture
def factory() -> Iterator[Factory]:
    started: list[tuple[StandIn, SglangSampler]] = []

    def make(family: str, seed: int, limits: Limits) -> Sampler:
        started.append(start(family, seed, limits))
        return started[-1][1]

    yield make
    for server, sampler in started:
        sampler.close()
        server.close()


@pytest.fixture
def sampler(request: pytest.FixtureRequest) -> Iterator[Sampler]:
    """Where weights must arrive while requests run, the server stops after 30 steps until they have, however long the
    folder takes to be written."""
    waits = request.function is contract.test_running_requests_go_on_with_new_weights
    server, sampler = start("qwen3", 0, Limits(), steps=30 if waits else None)
    yield sampler
    assert server.sampler.steps_left is None
    sampler.close()
    server.close()
