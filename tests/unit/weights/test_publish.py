"""Publishing inside one process: which way, all of it, and nothing shared afterwards."""

from __future__ import annotations

import asyncio

import numpy as np
import torch

from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig, SamplerConfig
from strop.engines.build import build_engine
from strop.rollout.build import build_sampler
from strop.types import Prompt, SamplingParams
from strop.weights.publish import publish
from tests.tiny_models import tiny_model


def test_the_sampler_gets_the_engines_weights_and_the_engine_keeps_its_own() -> None:
    """E18: A goes to B, and A is unchanged. E02: what the engine then does to its weights, the sampler does not see."""
    trained, drawn = tiny_model("qwen3"), tiny_model("qwen3")
    with torch.no_grad():
        for _, tensor in trained.state():
            tensor.add_(0.01)
    before = {name: tensor.clone() for name, tensor in trained.state()}
    engine = build_engine(EngineConfig(), trained)
    sampler = build_sampler(SamplerConfig(max_running=4, cache_tokens=4096), drawn, str)
    asyncio.run(publish(engine, sampler, 5))
    assert sampler.version == 5
    with torch.no_grad():
        for name, tensor in trained.state():
            assert torch.equal(tensor, before[name])
            tensor.zero_()
    assert all(torch.equal(tensor, before[name]) for name, tensor in drawn.state())


def test_what_was_cached_before_an_update_is_not_used_after_it() -> None:
    """E14: a prompt that was drawn from before is drawn from as by a sampler that never had the old weights."""
    model = tiny_model("qwen3")
    engine = build_engine(EngineConfig(), model)
    with torch.no_grad():
        for _, tensor in model.state():
            tensor.mul_(1.1)
    used, fresh = (
        build_sampler(SamplerConfig(max_running=4, cache_tokens=4096), tiny_model("qwen3"), str) for _ in "ab"
    )
    prompt, params = Prompt(np.arange(3, 40, dtype=np.int32)), SamplingParams(max_tokens=4, seed=1)

    async def work() -> None:
        await used.sample(prompt, params)
        for sampler in (used, fresh):
            await publish(engine, sampler, 1)
        ours, theirs = await used.sample(prompt, params), await fresh.sample(prompt, params)
        assert np.array_equal(ours.logprobs, theirs.logprobs) and np.array_equal(ours.tokens, theirs.tokens)

    asyncio.run(work())


def test_ranks_of_one_lane_do_not_count_as_lanes() -> None:
    """G15: four ranks, two of them for one batch, are two shards of data."""
    parallel = ParallelConfig(data=2, tensor=2)
    assert (parallel.ranks, parallel.lanes, parallel.lane) == (4, 2, 2)
