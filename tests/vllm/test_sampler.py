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
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.errors import RolloutError
from strop.rollout.base import Sampler
from strop.rollout.router import SamplerLost
from strop.rollout.vllm import VllmSampler
from strop.types import Completion, Int32s, Prompt, SamplingParams, Stop
from tests import tiny_models
from tests.conformance.servers import Servers
from tests.conformance.test_sampler import *
from tests.conformance.test_sampler import Factory, Limits, decode, expected_logprobs, other_weights, run, tokens
from tests.tiny_models import tiny_model
from tests.unit.loops import test_router_replay
from tests.unit.loops.test_recipe import RECIPE
from tests.unit.rollout.builtin.test_routes import routed
from tests.vllm.servers import AT_ONCE, FAMILIES, PYTHON, start, wider

pytestmark = pytest.mark.skipif(not PYTHON, reason="needs VLLM_PYTHON, the Python of an environment that has vLLM")


@pytest.fixture(scope="module")
def servers() -> Iterator[Servers[VllmSampler]]:
    servers = Servers(start, AT_ONCE)
    with pytest.MonkeyPatch.context() as patch:
        for family in FAMILIES:
            patch.setitem(tiny_models.FAMILIES, family, wider(family))
        yield servers
    servers.close()


@pytest.fixture
def factory(servers: Servers[VllmSampler]) -> Iterator[Factory]:
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


def expected_routes(prompt: Int32s, completion: Completion, seed: int = 0) -> np.ndarray:
    """The trainer's own, ids of a token in order: vLLM's kernels for the choice leave it open."""
    text = np.concatenate([prompt, completion.tokens])
    return np.sort(routed(tiny_model("qwen3_moe", seed=seed), text).experts_TLK, -1)


def check_routes(prompt: Int32s, completion: Completion) -> None:
    got = completion.routes
    assert got is not None and got.layers == (0, 1) and got.experts_TLK.dtype == np.int16
    assert len(got) == len(prompt) + len(completion.tokens)
    assert np.array_equal(np.sort(got.experts_TLK, -1)[:-1], expected_routes(prompt, completion)[:-1])
    assert (got.experts_TLK[-1] == -1).all()


def test_routes_are_the_trainers(factory: Factory) -> None:
    """Twins with one prompt, prompts that begin alike, a cache that cannot hold them all, stop strings, and neighbours
    that do not ask."""
    sampler = factory("qwen3_moe", 0, Limits())
    whole, begin = tokens(70, 1), tokens(40, 1)
    prompts = [whole, whole, begin, tokens(20, 5), whole, tokens(1, 6), np.concatenate([begin, tokens(9, 7)])]
    asked = [SamplingParams(max_tokens=24, seed=n, routes=n != 3) for n in range(len(prompts))]
    free = run(*(sampler.sample(Prompt(prompt), params) for prompt, params in zip(prompts, asked, strict=True)))
    assert free[3].routes is None
    for prompt, params, completion in zip(prompts, asked, free, strict=True):
        if params.routes:
            check_routes(prompt, completion)
    again = run(*(sampler.sample(Prompt(whole), SamplingParams(max_tokens=3, seed=n, routes=True)) for n in (8, 9)))
    for completion in again:  # from blocks that are known
        check_routes(whole, completion)
    stop = decode(free[0].tokens[5:7].tolist())[1:]
    (cut,) = run(sampler.sample(Prompt(whole), replace(asked[0], stop_strings=(stop,))))
    assert len(cut.tokens) < 24 and cut.stop is Stop.TOKEN
    check_routes(whole, cut)


def test_routes_of_tokens_that_older_weights_drew_stay(factory: Factory) -> None:
    sampler, prompt, new = factory("qwen3_moe", 0, Limits()), tokens(33, 1), tiny_model("qwen3_moe", seed=1)

    async def update() -> list[Completion]:
        """Some wait for room, so that some are on their way when the weights come, however fast they are drawn."""
        short = asyncio.ensure_future(sampler.sample(Prompt(tokens(4)), SamplingParams(max_tokens=8)))
        asked = [SamplingParams(max_tokens=90, seed=n, routes=True) for n in range(10)]
        running = [asyncio.ensure_future(sampler.sample(Prompt(prompt), params)) for params in asked]
        await short
        await sampler.load_weights(new.state(), 1)
        return list(await asyncio.gather(*running))

    both = [one for one in asyncio.run(update()) if 3 < np.count_nonzero(one.versions == 0) < 87]
    assert both
    for completion in both:
        assert completion.routes is not None
        kept = len(prompt) + np.count_nonzero(completion.versions == 0) - 1
        found = np.sort(completion.routes.experts_TLK, -1)
        first, then = (expected_routes(prompt, completion, seed) for seed in (0, 1))
        assert not np.array_equal(first, then)
        assert np.array_equal(found[:kept], first[:kept])
        assert np.array_equal(found[kept:-1], then[kept:-1])


def test_cancelled_requests_leave_no_record(factory: Factory) -> None:
    sampler = factory("qwen3_moe", 0, Limits())
    assert isinstance(sampler, VllmSampler)
    params = SamplingParams(max_tokens=60, routes=True)

    async def cancel() -> None:
        first = sampler._link._next
        tasks = [asyncio.ensure_future(sampler.sample(Prompt(tokens(9, n)), params)) for n in range(4)]
        await sampler.sample(Prompt(tokens(2)), SamplingParams(max_tokens=4))
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        await sampler.sample(Prompt(tokens(2)), SamplingParams(max_tokens=4, routes=True))
        for number in range(first, first + 4):
            left = sampler._link.ask({"op": "routes", "of": number, "count": 1})
            assert not (await asyncio.wrap_future(left))["experts"]

    asyncio.run(cancel())


def test_a_model_without_experts_has_no_routes(sampler: Sampler) -> None:
    with pytest.raises(RolloutError, match="it has no experts; leave"):
        run(sampler.sample(Prompt(tokens(5)), SamplingParams(max_tokens=4, routes=True)))


def test_a_killed_host_is_lost_and_leaves_no_process_behind(servers: Servers[VllmSampler]) -> None:
    sampler = servers.lend("qwen3", 0, Limits())
    child = sampler._link._child
    assert child is not None
    group = child.process.pid

    async def kill_midway() -> None:
        """Some wait for room, so that some are on their way, however fast they are drawn."""
        short = asyncio.ensure_future(sampler.sample(Prompt(tokens(4)), SamplingParams(max_tokens=5)))
        asked = [SamplingParams(max_tokens=100, seed=n) for n in range(12)]
        waiting = [asyncio.ensure_future(sampler.sample(Prompt(tokens(5)), params)) for params in asked]
        await short
        os.kill(group, signal.SIGKILL)
        ended = await asyncio.gather(*waiting, return_exceptions=True)
        lost = [one for one in ended if isinstance(one, SamplerLost)]
        assert lost and all("gone" in str(error) for error in lost)
        assert all(len(one.tokens) == 100 for one in ended if isinstance(one, Completion))
        assert len(lost) + sum(isinstance(one, Completion) for one in ended) == len(ended)

    asyncio.run(kill_midway())
    servers.forget(sampler)
    with pytest.raises(ProcessLookupError):  # they are killed by the thread that noticed, and reaped by the system
        for _ in range(200):
            os.killpg(group, 0)
            time.sleep(0.05)


ADAPTER = "{rank: 4, targets: [attention, mlp, unembedding]}"
WIDE = (
    "model.fresh={model_type: qwen3, hidden_size: 64, intermediate_size: 64, num_hidden_layers: 2, "
    "num_attention_heads: 2, num_key_value_heads: 1, head_dim: 32, max_position_embeddings: 64, "
    "tie_word_embeddings: %s}"
)


@pytest.mark.parametrize(
    "changes",
    [[WIDE % "false"], [WIDE % "true", f"engine.adapter={ADAPTER}"]],
    ids=["whole", "adapter"],
)
def test_a_recipe_draws_with_vllm_what_it_learns_from(tmp_path: Path, changes: list[str]) -> None:
    """The trainer scores the drawn tokens as vLLM did, step after step of new weights; an adapter's are merged, and a
    tied output matrix that it changes alone is untied."""
    path = tmp_path / "tiny.yaml"
    path.write_text(RECIPE)
    changes = [
        *changes,
        "grpo={steps: 3, tasks_per_step: 4, group_size: 4, schedule: {lr: 1e-2}}",
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


def test_a_mixture_of_experts_is_replayed_as_vllm_drew_it(tmp_path: Path) -> None:
    fresh = "{model_type: qwen3_moe, hidden_size: 64, intermediate_size: 64, moe_intermediate_size: 32, "
    fresh += "num_experts: 4, num_experts_per_tok: 2, num_hidden_layers: 2, num_attention_heads: 2, "
    fresh += "num_key_value_heads: 1, head_dim: 32, max_position_embeddings: 64, tie_word_embeddings: false}"
    rows = test_router_replay.run(
        tmp_path, "grpo", f"model.fresh={fresh}", "sampler.kind=vllm", "sampler.cache_tokens=1024",
        f"sampler.vllm={{python: {PYTHON}, start_timeout_s: 1800}}", "sampler.max_running=16",
        router_replay="rollout", router={"measure_every": 1}, updates_per_step=1,
    )  # fmt: skip
    assert len(rows) == 2
    assert all(row["sampler/gap_max"] < 1e-4 and 0.6 < row["router/replayed"] < 1.0 for row in rows)
    assert all(row["router/disagreement"] < 0.01 for row in rows)
