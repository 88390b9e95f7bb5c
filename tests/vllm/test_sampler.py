"""The Sampler contract on a real vLLM (`make vllm VLLM_PYTHON=...`): the whole conformance suite, and what is vLLM's
own."""

# ruff: noqa: F403
from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.rollout.base import Sampler
from strop.rollout.router import SamplerLost
from strop.types import Prompt, SamplingParams
from tests import tiny_models
from tests.conformance.test_sampler import *
from tests.conformance.test_sampler import Factory, Limits, expected_logprobs, other_weights, run, tokens
from tests.tiny_models import tiny_model
from tests.unit.loops.test_recipe import RECIPE
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


# What is vLLM's own


def test_every_truncation_shows_in_the_sampling_logprobs(sampler: Sampler) -> None:
    """Together they are the distribution that was drawn from, whatever vLLM's order of truncations is."""
    prompt = tokens(9)
    params = SamplingParams(max_tokens=20, temperature=1.3, top_k=20, top_p=0.7, min_p=0.05, seed=2)
    (completion,) = run(sampler.sample(Prompt(prompt), params))
    expected = expected_logprobs(prompt, completion, 1.3)
    np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
    assert (completion.sampling_logprobs > completion.logprobs + 1e-4).any()
    assert (completion.sampling_logprobs >= completion.logprobs - 1e-5).all()
    assert (completion.sampling_logprobs <= 1e-6).all()


def test_weights_in_many_buckets_are_those_in_one(factory: Factory, monkeypatch: pytest.MonkeyPatch) -> None:
    """E13, on the real loader."""
    sampler, prompt, params = factory("qwen3", 0, Limits()), Prompt(tokens(20)), SamplingParams(max_tokens=8)
    for size in (1 << 26, 1):
        monkeypatch.setattr("strop.rollout.vllm.BUCKET_BYTES", size)
        asyncio.run(sampler.load_weights(iter(other_weights()), 4))
        (completion,) = run(sampler.sample(prompt, params))
        expected = expected_logprobs(prompt.tokens, completion, seed=1)
        np.testing.assert_allclose(completion.logprobs, expected, atol=1e-5, rtol=0)
        asyncio.run(sampler.load_weights(tiny_model("qwen3").state(), 5))


def test_a_killed_host_is_lost_and_leaves_no_process_behind(servers: Servers) -> None:
    sampler = servers.lend("qwen3", 0, Limits())
    child = sampler._link._child
    assert child is not None
    group = child.process.pid

    async def kill_midway() -> None:
        waiting = asyncio.ensure_future(sampler.sample(Prompt(tokens(5)), SamplingParams(max_tokens=100)))
        await sampler.sample(Prompt(tokens(4)), SamplingParams(max_tokens=5))
        os.kill(group, signal.SIGKILL)
        with pytest.raises(SamplerLost, match="gone"):
            await waiting

    asyncio.run(kill_midway())
    servers.forget(sampler)
    with pytest.raises(ProcessLookupError):  # they are killed by the thread that noticed, and reaped by the system
        for _ in range(200):
            os.killpg(group, 0)
            time.sleep(0.05)


def test_a_recipe_draws_with_vllm_what_it_learns_from(tmp_path: Path) -> None:
    """The trainer scores the drawn tokens as vLLM did, step after step of new weights."""
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    wide = "{model_type: qwen3, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, num_attention_heads: 2, "
    wide += "num_key_value_heads: 1, head_dim: 32, max_position_embeddings: 64, tie_word_embeddings: false}"
    changes = [
        f"model.fresh={wide}",
        "grpo={steps: 3, tasks_per_step: 4, group_size: 4, schedule: {lr: 1e-3}}",
        f"run.folder={tmp_path}/run",
        "sampler.kind=vllm",
        f"sampler.vllm={{python: {PYTHON}, start_timeout_s: 1800}}",
        "sampler.cache_tokens=1024",
        "sampler.max_running=16",
    ]
    runner.train(load_recipe(path, changes), path, resume=False)
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    gaps = [row["sampler/gap_max"] for row in rows if "sampler/gap_max" in row]
    assert len(gaps) >= 3
    assert max(gaps) < 1e-4
