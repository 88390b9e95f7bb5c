"""The Sampler contract on a real vLLM (`make vllm VLLM_PYTHON=...`): the whole conformance suite, and what is vLLM's
own."""

# ruff: noqa: F403
from __future__ import annotations

from collections.abc import Iterator

import pytest

from strop.rollout.base import Sampler
from tests import tiny_models
from tests.conformance.test_sampler import *
from tests.conformance.test_sampler import Factory, Limits
from tests.vllm.servers import FAMILIES, PYTHON, Servers, wider

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs VLLM_PYTHON, the Python of an environment that has vLLM")


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers]:
    servers = Servers()
    with pytest.MonkeyPatch.context() as patch:
        for family in FAMILIES:
            patch.setitem(tiny_models.FAMILIES, family, wider(family))
        yield servers
    servers.close()


@pytest.fixture
def factory(servers: Servers) -> Iterator[Factory]:
    def lend(family: str, seed: int, limits: Limits) -> Sampler:
        if family not in FAMILIES:
            pytest.skip(f"{family}: one vLLM start each for {', '.join(FAMILIES)} only")
        return servers.lend(family, seed, limits)

    yield lend
    servers.take_back()


@pytest.fixture
def sampler(factory: Factory) -> Sampler:
    return factory("qwen3", 0, Limits())
