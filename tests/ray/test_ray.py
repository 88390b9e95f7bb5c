"""On a real Ray: ranks and samplers as actors, and what happens when one dies or hangs (`make ray`)."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray as ray_library
import torch

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.config.parallel import ParallelConfig, RuntimeConfig
from strop.config.recipe import EngineConfig, SamplerConfig
from strop.engines.build import build_engine
from strop.errors import RolloutError
from strop.rollout.base import Sampler
from strop.rollout.build import build_sampler
from strop.rollout.ray import RaySampler
from strop.rollout.router import Router, SamplerLost
from strop.rollout.transfer import Outbox, size_of
from strop.runtime.ranks import RankError
from strop.runtime.ray import RayRanks, connect
from strop.runtime.remote_engine import RemoteEngine
from strop.types import Prompt, SamplingParams
from tests.conformance.rank_engines import tiny_rank
from tests.conformance.test_engine import DEFAULT, TOLERANCE, Scaled, assert_close, gradient, pack, sequences
from tests.tiny_models import tiny_model
from tests.unit.loops.test_recipe import RECIPE

ray: Any = ray_library  # its own annotations leave most of it out
RUNTIME = RuntimeConfig(kind="ray", cpus_per_rank=0.25, timeout_s=60)


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    connect(RUNTIME)
    yield
    ray.shutdown()


def engine_over(parallel: ParallelConfig, family: str = "qwen3", timeout_s: float = 60) -> RemoteEngine:
    config = EngineConfig(parallel=parallel)
    runtime = RUNTIME.model_copy(update={"timeout_s": timeout_s})
    return RemoteEngine(
        RayRanks([partial(tiny_rank, family, torch.float64, config)] * parallel.ranks, runtime), parallel
    )


@pytest.mark.parametrize(
    ("parallel", "family"), [(ParallelConfig(data=2), "qwen3"), (ParallelConfig(sequence=2), "llama")]
)
def test_gradients_are_those_of_one_rank(parallel: ParallelConfig, family: str) -> None:
    texts, loss = sequences(), Scaled(entropy=0.1)
    engine = engine_over(parallel, family)
    found = gradient(engine, [pack(texts[:2]), pack(texts[2:3]), pack(texts[3:])], loss)
    expected = gradient(build_engine(DEFAULT, tiny_model(family, torch.float64)), [pack(texts)], loss)
    assert_close(expected, found, TOLERANCE[torch.float64])
    engine.close()


def pid_of(actor: Any) -> int:
    return int(ray.get(actor.__ray_call__.remote(lambda self: os.getpid())))


def test_a_killed_rank_is_named() -> None:
    engine = engine_over(ParallelConfig(data=2))
    ranks = engine._ranks
    assert isinstance(ranks, RayRanks)
    os.kill(pid_of(ranks._actors[1]), signal.SIGKILL)
    with pytest.raises(RankError, match="rank 1 died in forward"):
        asyncio.run(engine.forward([pack(sequences())]))
    with pytest.raises(RankError, match="ranks were stopped"):
        asyncio.run(engine.zero_grad())


def test_a_hanging_rank_is_named() -> None:
    engine = engine_over(ParallelConfig(data=2))
    ranks = engine._ranks
    assert isinstance(ranks, RayRanks)
    ranks._timeout_s = 4.0
    os.kill(pid_of(ranks._actors[0]), signal.SIGSTOP)
    with pytest.raises(RankError, match=r"^rank 0 did not answer forward within 4 s and hangs; rank 1 did not either"):
        asyncio.run(engine.forward([pack(sequences())]))


def tiny_sampler() -> Sampler:
    return build_sampler(SamplerConfig(max_running=8, cache_tokens=4096), tiny_model("qwen3"), str)


def meeting_sampler(folder: Path, own: str, other: str) -> Sampler:
    """One that starts when another does."""
    (folder / own).touch()
    deadline = time.monotonic() + 60
    while not (folder / other).exists():
        assert time.monotonic() < deadline, f"{other} did not begin while {own} did"
        time.sleep(0.05)
    return tiny_sampler()


def test_samplers_start_side_by_side(tmp_path: Path) -> None:
    samplers = [RaySampler(partial(meeting_sampler, tmp_path, *names), cpus=0.25) for names in ("ab", "ba")]
    assert [sampler.started().version for sampler in samplers] == [0, 0]
    for sampler in samplers:
        sampler.close()


def test_a_sampler_that_finds_no_place_is_an_error_that_says_what_there_is() -> None:
    sampler = RaySampler(tiny_sampler, cpus=1000, timeout_s=2)
    with pytest.raises(RolloutError, match=r"did not start within 2 s; .*needs 1000 CPU: lower sampler.actors"):
        sampler.started()


def test_a_sampler_that_cannot_be_made_is_an_error_with_its_reason(tmp_path: Path) -> None:
    sampler = RaySampler(partial(meeting_sampler, tmp_path / "none", "a", "b"), cpus=0.25)
    with pytest.raises(RolloutError, match=r"(?s)did not start: .*No such file or directory"):
        sampler.started()


def test_a_sampler_in_an_actor_draws_what_one_here_draws() -> None:
    here, there = tiny_sampler(), RaySampler(tiny_sampler, cpus=0.25).started()
    prompt, params = Prompt(np.array([3, 4, 5], np.int32)), SamplingParams(max_tokens=8, seed=5)
    weights = [(name, t + 0.01) for name, t in tiny_model("qwen3").state()]

    async def both(sampler: Sampler) -> list[Any]:
        drawn = [await sampler.sample(prompt, params)]
        await sampler.load_weights(iter(weights), 3)
        return [*drawn, await sampler.sample(prompt, params)]

    for ours, theirs in zip(asyncio.run(both(here)), asyncio.run(both(there)), strict=True):
        assert np.array_equal(ours.tokens, theirs.tokens)
        assert np.allclose(ours.logprobs, theirs.logprobs, atol=1e-5)
        assert np.array_equal(ours.versions, theirs.versions)
    there.close()


def test_an_actor_that_has_the_version_before_is_sent_what_changed() -> None:
    """And one that missed it is sent everything; both then draw what a sampler with those weights draws."""
    here = tiny_sampler()
    behind, there = (RaySampler(tiny_sampler, cpus=0.25, deltas=True).started() for _ in range(2))
    prompt, params = Prompt(np.array([3, 4, 5], np.int32)), SamplingParams(max_tokens=8, seed=5)
    outbox = Outbox(deltas=True)
    weights = {name: t.clone() for name, t in tiny_model("qwen3").state()}

    async def work() -> None:
        await there.load_weights(outbox.ship(weights.items()), 1)
        for tensor in weights.values():
            tensor.view(-1)[::100] += 1.0
        shipment = outbox.ship(weights.items())
        sizes = [sum(size_of(c) for b in sent for _, c in b) for sent in (shipment.changes or [], shipment.whole())]
        assert 0 < sizes[0] < 0.1 * sizes[1]
        asked: list[bool] = []
        for sampler in (there, behind):
            asked.append(await sampler._announce(2, shipment.serial - 1))
            await sampler.load_weights(shipment, 2)
        assert asked == [True, False]
        await here.load_weights(weights.items(), 2)
        expected, *drawn = [await sampler.sample(prompt, params) for sampler in (here, there, behind)]
        for one in drawn:
            assert np.array_equal(one.tokens, expected.tokens) and np.array_equal(one.versions, expected.versions)
            assert np.allclose(one.logprobs, expected.logprobs, atol=1e-5)

    asyncio.run(work())
    there.close()
    behind.close()


def test_requests_of_a_killed_sampler_are_drawn_elsewhere() -> None:
    """No request is lost or drawn twice: as many completions as requests, each of its own seed."""
    samplers = [RaySampler(tiny_sampler, cpus=0.25).started() for _ in range(2)]
    router = Router(samplers)
    alone = tiny_sampler()
    prompt = Prompt(np.array([3, 4, 5], np.int32))

    async def work() -> None:
        asked = [asyncio.ensure_future(router.sample(prompt, SamplingParams(max_tokens=60, seed=s))) for s in range(24)]
        await asyncio.sleep(0.05)
        ray.kill(samplers[0].actor)
        drawn = await asyncio.gather(*asked)
        assert list(router.lost) == [0]
        for s, completion in enumerate(drawn):
            expected = await alone.sample(prompt, SamplingParams(max_tokens=60, seed=s))
            assert np.array_equal(completion.tokens, expected.tokens), s
        with pytest.raises(SamplerLost):
            await samplers[0].sample(prompt, SamplingParams(max_tokens=1))

    asyncio.run(work())
    samplers[1].close()


def noted_sampler(path: Path) -> Sampler:
    """One whose process can be found."""
    path.write_text(str(os.getpid()))
    return tiny_sampler()


def test_requests_of_a_stopped_sampler_are_drawn_elsewhere(tmp_path: Path) -> None:
    """It is alive and silent: found by its silence, named, and killed."""
    path = tmp_path / "pid"
    makes = (partial(noted_sampler, path), tiny_sampler)
    samplers = [RaySampler(make, cpus=0.25, timeout_s=10) for make in makes]
    router = Router([sampler.started() for sampler in samplers])
    alone = tiny_sampler()
    prompt = Prompt(np.array([3, 4, 5], np.int32))

    async def work() -> None:
        asked = [asyncio.ensure_future(router.sample(prompt, SamplingParams(max_tokens=60, seed=s))) for s in range(8)]
        os.kill(int(path.read_text()), signal.SIGSTOP)
        drawn = await asyncio.gather(*asked)
        assert list(router.lost) == [0] and "silent for 15 s, and was killed" in router.lost[0]
        for s, completion in enumerate(drawn):
            expected = await alone.sample(prompt, SamplingParams(max_tokens=60, seed=s))
            assert np.array_equal(completion.tokens, expected.tokens), s

    asyncio.run(work())
    samplers[1].close()


@pytest.mark.parametrize("adapter", [0, 4])
def test_a_recipe_through_ray_is_the_recipe_in_one_process(tmp_path: Path, adapter: int) -> None:
    """Two ranks and two samplers as actors, which get an adapter merged; the same tokens are drawn and learned from."""
    found: dict[str, list[dict[str, Any]]] = {}
    over_ray = ["engine.parallel.data=2", "engine.runtime={kind: ray, cpus_per_rank: 0.25}", "sampler.actors=2"]
    over_ray.append("sampler.publish=delta")
    for name, more in (("here", []), ("ray", over_ray)):
        folder = tmp_path / name
        folder.mkdir()
        path = folder / "tiny.yaml"
        path.write_text(RECIPE)
        grpo = "grpo={steps: 3, tasks_per_step: 4, group_size: 4, schedule: {lr: 1e-3}}"
        runner.train(
            load_recipe(path, [grpo, f"engine.adapter.rank={adapter}", f"run.folder={folder}/run", *more]),
            path,
            resume=False,
        )
        found[name] = [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]
    for here, there in zip(found["here"], found["ray"], strict=True):
        assert there["sampler/gap_max"] <= 1e-5
        for metric in ("reward/mean", "optim/grad_norm", "policy/entropy"):
            assert there[metric] == pytest.approx(here[metric], rel=1e-2, abs=1e-5)
