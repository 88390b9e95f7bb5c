"""The Sampler contract on the built-in sampler as a Ray actor: the whole conformance suite (`make ray`)."""

# ruff: noqa: F403
from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import pytest
import ray as ray_library

from strop.rollout.base import Sampler
from strop.rollout.ray import RaySampler
from strop.runtime.ray import connect
from tests.conformance.servers import Servers
from tests.conformance.test_sampler import *
from tests.conformance.test_sampler import Factory, Limits, builtin_torch
from tests.ray.test_ray import RUNTIME

ray: Any = ray_library  # its own annotations leave most of it out
AT_ONCE = 4


def start(family: str, seed: int, limits: Limits) -> RaySampler:
    return RaySampler(partial(builtin_torch, family, seed, limits), cpus=0.25, timeout_s=300).started()


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers[RaySampler]]:
    connect(RUNTIME)
    servers = Servers(start, AT_ONCE)
    yield servers
    servers.close()
    ray.shutdown()


@pytest.fixture
def factory(servers: Servers[RaySampler]) -> Iterator[Factory]:
    yield servers.lend
    servers.take_back()


@pytest.fixture
def sampler(factory: Factory) -> Sampler:
    return factory("qwen3", 0, Limits())
