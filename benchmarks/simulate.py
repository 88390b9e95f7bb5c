"""The controller at scale, without a model: python -m benchmarks.simulate --samplers 10 100 1000 10000

    tasks -> collect -> router -> synthetic samplers -> groups -> advantages -> packed, balanced batches -> ranks

Everything between a task and a rank's batches is strop's own code, run as it is: environments, renderer, seeds, the
router, segments, groups, packing. Samplers and ranks are made up: a sampler runs `--running` requests at once at
`--rate` tokens a second each, and others wait for it; a rank works `--rank-rate` tokens a second. Replies have
log-normal lengths.

Time is the controller's own CPU time; where it has nothing to do but wait, the wait is skipped and only counted. So
samplers idle for two reasons, which are told apart by a second figure: the step as it would be if the controller took
no time. What the samplers' own stand-ins cost is left out. Two steps are run: the first tells the memory, the second
the rest, in memory that the process has by then, as all steps of a run but its first. One step is one burst: all
attempts begin together, and its end is the longest reply's, which is most of what idles a synchronous step.

The last line is ratio=A / B: A, the samples a second that so many samplers can draw, over B, those that the controller
can take in and hand out: below 1 the samplers are what a step waits for, above 1 the controller is.
"""

from __future__ import annotations

import argparse
import asyncio
import gc
import heapq
import os
import selectors
import time
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy and torch load

import numpy as np
import torch

from benchmarks.controller import rank_bytes
from strop.algos import advantages
from strop.config.policy import GRPOConfig
from strop.data.packing import pack_policy
from strop.data.placement import cost
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.environment import keep_memory
from strop.envs.base import EnvStep
from strop.loops.collect import collect
from strop.recipe import COLLECT
from strop.rollout.groups import Player
from strop.rollout.router import Router
from strop.types import Completion, Message, Prompt, SamplingParams, Stop

GROUP = 8
PROMPT = 64
MAX_REPLY = 16_384
GRAIN_S = 0.005  # what happens within so long happens at once


class World:
    """The clock, and what happens at which time."""

    def __init__(self) -> None:
        self.skipped = 0.0  # seconds that were waited
        self.outside = 0.0  # CPU seconds that are not the controller's
        self._events: list[tuple[float, int, Stand, asyncio.Future[None]]] = []
        self._count = self._turns = 0
        self.time = 0.0
        self._began = time.process_time()

    def read(self) -> float:
        """The time now. Reading CPU time is slow, so everybody else takes `time`, which is a little old."""
        self.time = time.process_time() - self._began - self.outside + self.skipped
        return self.time

    def at(self, when: float, sampler: Stand, answer: asyncio.Future[None]) -> None:
        self._count += 1
        heapq.heappush(self._events, (when, self._count, sampler, answer))

    def pass_time(self, wait: bool) -> None:
        """Let everything happen that is due; when there is nothing to do, skip to the next event."""
        self._turns += 1
        if not wait and self._turns % 64:
            return
        began = self.read()
        if wait and self._events and self._events[0][0] > self.time:
            self.skipped += self._events[0][0] - self.time
            began += self._events[0][0] - self.time
            self.time = self._events[0][0]
        while self._events and self._events[0][0] <= self.time + GRAIN_S:
            when, _, sampler, answer = heapq.heappop(self._events)
            sampler.ended(when)
            answer.set_result(None)
        self.outside += self.read() - began


class Skipping(selectors.SelectSelector):
    """Where an event loop would sleep, time is skipped instead."""

    def __init__(self, world: World) -> None:
        super().__init__()
        self._world = world

    def select(self, timeout: float | None = None) -> list[Any]:
        self._world.pass_time(wait=timeout is None or timeout > 0)
        return []


@dataclass(frozen=True, slots=True, kw_only=True)
class Replies:
    """Lengths and contents that all samplers draw from, made once."""

    lengths: list[int]
    tokens: np.ndarray
    logprobs: np.ndarray
    versions: np.ndarray


class Stand:
    """A `Sampler` that takes as long as one would."""

    serves_adapter = False
    version = 0

    def __init__(self, world: World, replies: Replies, running: int, rate: float) -> None:
        self._world, self._replies, self._rate = world, replies, rate
        self._free = running
        self._waiting: deque[tuple[int, asyncio.Future[None]]] = deque()
        self.busy_s = 0.0  # summed over requests
        self.last_s = 0.0

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        replies = self._replies
        count = replies.lengths[params.seed % len(replies.lengths)]
        answer: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        if self._free:
            self._free -= 1
            self._start(self._world.time, count, answer)
        else:
            self._waiting.append((count, answer))
        await answer
        return Completion(
            tokens=replies.tokens[:count],
            logprobs=replies.logprobs[:count],
            sampling_logprobs=replies.logprobs[:count],
            versions=replies.versions[:count],
            stop=Stop.TOKEN,
        )

    def ended(self, when: float) -> None:
        self.last_s = when
        if self._waiting:
            self._start(when, *self._waiting.popleft())
        else:
            self._free += 1

    def _start(self, now: float, count: int, answer: asyncio.Future[None]) -> None:
        takes = count / self._rate
        self.busy_s += takes
        self._world.at(now + takes, self, answer)

    async def score(self, prompt: Prompt) -> np.ndarray:
        raise NotImplementedError

    async def load_weights(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> None: ...

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def close(self) -> None: ...


class Plain:
    """A `Renderer` whose prompts have been tokens before."""

    stop_tokens = (2,)

    def __init__(self) -> None:
        self._prompt = np.arange(3, 3 + PROMPT, dtype=np.int32)

    def start(self, messages: list[Message]) -> np.ndarray:
        tokens = self._prompt.copy()
        tokens[:2] = divmod(int(messages[0].get("content", "0")), 50_000)
        return tokens

    def parse(self, tokens: np.ndarray) -> Message:
        return {"role": "assistant", "content": str(len(tokens))}

    def observe(self, history: list[Message], new: list[Message], last: np.ndarray) -> np.ndarray:
        raise NotImplementedError

    def answer(self, messages: list[Message], text: str) -> tuple[np.ndarray, int]:
        raise NotImplementedError


class Even:
    """An `Env`: a reply of an even number of tokens is right."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def start(self) -> list[Message]:
        return self._task.messages

    async def step(self, reply: Message) -> EnvStep:
        return EnvStep(reward=float(int(reply.get("content", "0")) % 2 == 0), done=True, messages=[])


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """One step, in seconds."""

    samples: int
    tokens: int
    collect_cpu: float
    learn_cpu: float  # advantages, packing, balancing, every rank's bytes
    sample_s: float  # as it went
    ideal_s: float  # if the controller took no time
    idle: float  # of the samplers' places, as it went
    idle_ideal: float
    idle_ranks: float  # while the batches are worked on, and made
    imbalance: float
    memory_mb: float
    draws: float  # samples a second that the samplers can draw

    @property
    def cpu_us(self) -> float:
        return (self.collect_cpu + self.learn_cpu) / self.samples * 1e6


def replies_of(mean: int, sigma: float, seed: int) -> Replies:
    rng = np.random.default_rng(seed)
    lengths = rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, 65_536).clip(1, MAX_REPLY).astype(int)
    return Replies(
        lengths=lengths.tolist(),
        tokens=rng.integers(3, 50_000, MAX_REPLY).astype(np.int32),
        logprobs=-rng.random(MAX_REPLY).astype(np.float32),
        versions=np.zeros(MAX_REPLY, np.int32),
    )


def peak_mb(*, begin: bool = False) -> float:
    """The most memory that this process has held since the last call that was to begin anew."""
    if begin:
        Path("/proc/self/clear_refs").write_text("5")
    (line,) = (one for one in Path("/proc/self/status").read_text().splitlines() if one.startswith("VmHWM:"))
    return int(line.split()[1]) / 1024


def shortest(lengths: np.ndarray, places: int) -> float:
    """Tokens of the busiest place when each request goes to the first free one, in order."""
    ends = [0] * places
    for count in lengths.tolist():
        heapq.heapreplace(ends, ends[0] + count)
    return max(ends)


def step(samplers: int, samples: int, replies: Replies, arguments: argparse.Namespace) -> Found:
    gc.collect()
    before_mb = peak_mb(begin=True)
    world = World()
    stands = [Stand(world, replies, arguments.running, arguments.rate) for _ in range(samplers)]
    tasks = [
        Task(id=f"t:{i}", messages=[{"role": "user", "content": str(i)}], answer="", source="simulated", meta={})
        for i in range(samples // GROUP)
    ]
    cfg = GRPOConfig(steps=1, tasks_per_step=len(tasks), group_size=GROUP)
    player = Player(Router(stands), Plain(), Even, seed=0)
    params = SamplingParams(max_tokens=MAX_REPLY)
    loop = asyncio.SelectorEventLoop(Skipping(world))
    began = time.process_time()
    attempts = loop.run_until_complete(collect(cfg, TaskStream(tasks, seed=0), player, params, step=0))
    collect_cpu = time.process_time() - began - world.outside
    loop.close()
    sample_s = max(stand.last_s for stand in stands)
    lengths = np.array([t.num_sampled for group in attempts.groups for t in group])
    places = samplers * arguments.running
    ideal_s = shortest(lengths, places) / arguments.rate
    busy = sum(stand.busy_s for stand in stands)

    began = time.process_time()
    packed = pack_policy(
        attempts.groups,
        advantages.grpo(attempts.rewards_PG, scale_by_std=True),
        max_tokens=arguments.pack_tokens,
        weighting="token_mean",
        horizon=None,
        temperature=1.0,
        share_prefixes=True,
        data_parallel=arguments.ranks,
    )
    for r in range(arguments.ranks):
        rank_bytes(packed.batches[r :: arguments.ranks])
    learn_cpu = time.process_time() - began
    costs = np.array([_cost(batch.layout) for batch in packed.batches]).reshape(-1, arguments.ranks)
    tokens = sum(map(len, packed.batches))
    mean_s = tokens / arguments.ranks / arguments.rank_rate
    rank_s = mean_s * costs.max(1).sum() / costs.mean(1).sum()  # ranks wait for one another in every round
    return Found(
        samples=samples,
        tokens=tokens,
        collect_cpu=collect_cpu,
        learn_cpu=learn_cpu,
        sample_s=sample_s,
        ideal_s=ideal_s,
        idle=1 - busy / (places * sample_s),
        idle_ideal=1 - busy / (places * ideal_s),
        idle_ranks=1 - mean_s / (rank_s + learn_cpu),
        imbalance=float(costs.sum(0).max() / costs.sum(0).mean() - 1),
        memory_mb=peak_mb() - before_mb,
        draws=places * arguments.rate / lengths.mean(),
    )


def _cost(layout: Any) -> float:
    return float(cost(layout.lengths_S, layout.prefix_lengths_S).sum())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samplers", type=int, nargs="+", default=[10, 100, 1_000, 10_000])
    parser.add_argument("--each", type=int, default=64, help="attempts in a step for each sampler")
    parser.add_argument("--samples", type=int, help="attempts in a step, instead")
    parser.add_argument("--running", type=int, default=16, help="requests that a sampler draws at once")
    parser.add_argument("--rate", type=float, default=50.0, help="tokens a second of one request")
    parser.add_argument("--mean", type=int, default=256, help="mean tokens of a reply, log-normal")
    parser.add_argument("--sigma", type=float, default=0.8)
    parser.add_argument("--ranks", type=int, default=64)
    parser.add_argument("--rank-rate", type=float, default=10_000.0, help="tokens a second that a rank learns from")
    parser.add_argument("--pack-tokens", type=int, default=32_768)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    gc.set_threshold(*COLLECT)  # as a run does
    keep_memory()  # as well
    replies = replies_of(arguments.mean, arguments.sigma, seed=0)
    print(
        f"{'samplers':>8} {'samples':>8} {'collect':>8} {'learn':>7} {'us/sample':>9} {'step s':>8} {'ideal s':>8} "
        f"{'idle':>6} {'ideal':>6} {'ranks idle':>10} {'uneven':>7} {'MB':>7}   (controller: CPU s)"
    )
    ratio = ""
    for samplers in arguments.samplers:
        samples = arguments.samples or max(samplers * arguments.each, GROUP * arguments.ranks)
        samples = samples // GROUP * GROUP
        first = step(samplers, samples, replies, arguments)
        f = step(samplers, samples, replies, arguments)
        print(
            f"{samplers:>8} {f.samples:>8} {f.collect_cpu:>8.2f} {f.learn_cpu:>7.2f} {f.cpu_us:>9.1f} "
            f"{f.sample_s:>8.2f} {f.ideal_s:>8.2f} {f.idle:>6.1%} {f.idle_ideal:>6.1%} {f.idle_ranks:>10.1%} "
            f"{f.imbalance:>7.2%} {first.memory_mb:>7.0f}",
            flush=True,
        )
        takes = 1e6 / f.cpu_us
        speeds = f"{samplers} samplers draw {f.draws:,.0f} samples/s, the controller takes {takes:,.0f}"
        ratio = f"ratio={f.draws / takes:.2f} ({speeds})"
    print(ratio)


if __name__ == "__main__":
    main()
