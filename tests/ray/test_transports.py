"""A recipe over Ray with each way to publish; samplers that die while a version is broadcast to them (`make ray`)."""

from __future__ import annotations

import asyncio
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray as ray_library
from torch import Tensor

from strop.rollout.router import Router
from strop.runtime.ray import connect
from strop.types import Prompt, SamplingParams
from strop.weights.actors import ListeningSampler
from strop.weights.broadcast import Broadcast
from tests.ray.test_ray import RUNTIME, pid_of, tiny_sampler
from tests.tiny_models import tiny_model
from tests.unit.loops.test_recipe import rows, run

ray: Any = ray_library  # its own annotations leave most of it out
GRPO = "grpo={steps: 3, tasks_per_step: 4, group_size: 4, schedule: {lr: 1e-3}}"
SAMPLERS = ["engine.runtime={kind: ray, cpus_per_rank: 0.25, timeout_s: 120}", "sampler.actors=2"]


@pytest.fixture(scope="module", autouse=True)
def cluster() -> Iterator[None]:
    connect(RUNTIME)
    yield
    ray.shutdown()


@pytest.fixture(scope="module")
def full(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return run(tmp_path_factory.mktemp("full"), GRPO, *SAMPLERS)


@pytest.mark.parametrize("publish", ["delta", "broadcast", "disk"])
def test_a_run_is_the_same_however_weights_travel(publish: str, full: Path, tmp_path: Path) -> None:
    found = run(tmp_path, GRPO, *SAMPLERS, f"sampler.publish={publish}")
    assert len(rows(found)) == 3
    for one, other in zip(rows(found), rows(full), strict=True):
        assert one["sampler/gap_max"] <= 1e-5, "what drew is what was trained"
        for metric in ("reward/mean", "optim/grad_norm", "policy/entropy"):
            assert one[metric] == pytest.approx(other[metric], rel=1e-2, abs=1e-5)
    if publish == "disk":
        assert [path.name for path in (found / "weights").iterdir()] == ["000004-version-3"]


class Deadly:
    """Weights of which reading some, for the first time, kills or stops a process."""

    def __init__(self, value: float, pid: int, how: signal.Signals) -> None:
        self.value, self._pid, self._how = value, pid, how
        self.readings = 0

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        self.readings += 1
        for number, (name, tensor) in enumerate(tiny_model("qwen3").state()):
            if number == 3 and self.readings == 1:
                os.kill(self._pid, self._how)
            yield name, tensor + self.value


@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sampler_that_is_lost_in_a_broadcast_is_left_out_and_the_others_serve_it(how: signal.Signals) -> None:
    samplers = [ListeningSampler(tiny_sampler, cpus=0.25, timeout_s=60) for _ in range(3)]
    router = Router(samplers, courier=Broadcast(samplers, timeout_s=5.0))
    here, prompt, params = (
        tiny_sampler(),
        Prompt(np.array([3, 4, 5], np.int32)),
        SamplingParams(max_tokens=8, seed=5),
    )

    async def work() -> None:
        await router.load_weights(tiny_model("qwen3").state(), 1)
        deadly = Deadly(0.01, pid_of(samplers[1].actor), how)
        await asyncio.wait_for(router.load_weights(deadly, 2), 60)
        assert list(router.lost) == [1] and deadly.readings == 2 and router.version == 2
        assert ("died" if how is signal.SIGKILL else "silent in a broadcast") in router.lost[1]
        await here.load_weights([(name, t + 0.01) for name, t in tiny_model("qwen3").state()], 2)
        expected = await here.sample(prompt, params)
        for one in (samplers[0], samplers[2], router):
            drawn = await one.sample(prompt, params)
            assert np.array_equal(drawn.tokens, expected.tokens) and np.array_equal(drawn.versions, expected.versions)
            assert np.allclose(drawn.logprobs, expected.logprobs, atol=1e-5)

    asyncio.run(work())
    for sampler in samplers:
        sampler.close()
