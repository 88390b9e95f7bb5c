"""Playing a step's groups: seeds, failures, and what is reported."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable
from dataclasses import dataclass, field
from math import isnan

import numpy as np
import pytest
from torch import Tensor

from strop.config.recipe import DrawConfig
from strop.data.tasks import Task
from strop.envs.base import EnvStep
from strop.errors import RolloutError
from strop.rollout.groups import Failures, Player, describe, sampling_params
from strop.rollout.router import NoSampler
from strop.rollout.seeds import attempt_seeds
from strop.types import (
    Completion,
    Ending,
    Float32s,
    Group,
    Int32s,
    Message,
    Prompt,
    SamplingParams,
    Segment,
    Stop,
    Trajectory,
    results,
)


@dataclass
class Recorder:
    """A sampler that answers with its request's seed, and remembers what ran at once."""

    seeds: list[int] = field(default_factory=list)
    running: int = 0
    most_running: int = 0
    version: int = 0

    async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
        self.seeds.append(params.seed)
        self.running += 1
        self.most_running = max(self.most_running, self.running)
        await asyncio.sleep(0)
        self.running -= 1
        token = np.array([params.seed % 1000], np.int32)
        return Completion(
            tokens=token,
            logprobs=np.zeros(1, np.float32),
            sampling_logprobs=np.zeros(1, np.float32),
            versions=np.zeros(1, np.int32),
            stop=Stop.TOKEN,
        )

    async def score(self, prompt: Prompt) -> Float32s:
        raise NotImplementedError

    @property
    def serves_adapter(self) -> bool:
        return False

    async def load_weights(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        raise NotImplementedError

    async def sleep(self) -> None: ...

    async def wake(self) -> None: ...

    def close(self) -> None: ...


class Words:
    """A renderer of which nothing matters but its stop tokens."""

    stop_tokens = (2, 9)

    def start(self, messages: list[Message]) -> Int32s:
        return np.arange(3, dtype=np.int32)

    def observe(self, history: list[Message], new: list[Message], last: Int32s) -> Int32s | None:
        return None

    def parse(self, tokens: Int32s) -> Message:
        return {"role": "assistant", "content": str(tokens[0])}

    def answer(self, messages: list[Message], text: str) -> tuple[Int32s, int]:
        raise NotImplementedError


@dataclass
class Fragile:
    """An environment that fails when its task says so."""

    task: Task

    async def start(self) -> list[Message]:
        if self.task.answer == "breaks at once":
            raise ValueError("no such board")
        return self.task.messages

    async def step(self, reply: Message) -> EnvStep:
        if self.task.answer == "breaks when odd" and int(reply.get("content", "0")) % 2:
            raise KeyError("odd")
        return EnvStep(reward=1.0)


def task(name: str, answer: str = "") -> Task:
    return Task(id=name, messages=[{"role": "user", "content": "?"}], answer=answer, source="test", meta={})


def play(player: Player, tasks: list[Task], size: int, step: int = 0, max_failures: int = 0) -> list[Group]:
    return asyncio.run(
        player.play(tasks, size, SamplingParams(max_tokens=4), step=step, failures=Failures(step, max_failures))
    )


def test_an_episode_that_never_ends_is_named_and_counted():
    """G16: of 8 attempts one never returns. The others are kept, nobody waits for ever, and there is a limit."""

    class Stuck(Recorder):
        async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
            if params.seed == attempt_seeds(3, 0, range(1, 2), 3)[0, 2]:
                await asyncio.Event().wait()
            return await super().sample(prompt, params)

    player = Player(Stuck(), Words(), Fragile, seed=3, timeout_s=0.2)
    first, second = play(player, [task("a"), task("b")], 4, max_failures=1)
    assert [t.ending for t in first] == [Ending.DONE] * 4
    assert [t.ending for t in second] == [Ending.DONE, Ending.DONE, Ending.FAILED, Ending.DONE]
    assert isnan(second.trajectories[2].reward) and results(describe([first, second]))["rollout/failed"] == 1
    with pytest.raises(RolloutError, match=r"1 of 8 episodes of step 0 failed, max_failures=0: task b: no end within"):
        play(player, [task("a"), task("b")], 4)


def test_episodes_of_a_step_that_is_given_up_are_given_up_too():
    class Counting(Recorder):
        given_up: int = 0

        async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
            try:
                await asyncio.Event().wait()
            finally:
                self.given_up += 1
            raise AssertionError

    async def work() -> int:
        sampler = Counting()
        player = Player(sampler, Words(), Fragile, seed=3)
        params = SamplingParams(max_tokens=4)
        playing = asyncio.ensure_future(player.play([task("a")], 3, params, step=0, failures=Failures(0, 0)))
        await asyncio.sleep(0.01)
        playing.cancel()
        await asyncio.gather(playing, return_exceptions=True)
        await asyncio.sleep(0)
        return sampler.given_up

    assert asyncio.run(work()) == 3


def test_all_episodes_of_a_step_run_at_once_and_come_back_in_order():
    sampler = Recorder()
    groups = play(Player(sampler, Words(), Fragile, seed=3), [task("a"), task("b"), task("a")], 4, step=7)
    assert sampler.most_running == 12
    assert [group.task_id for group in groups] == ["a", "b", "a"]
    for index, group in enumerate(groups):
        got = [int(t.segments[-1].tokens[-1]) for t in group]
        assert got == [seed % 1000 for seed in attempt_seeds(3, 7, range(index, index + 1), 4)[0].tolist()]


def test_every_attempt_has_a_seed_of_its_own_that_a_resumed_run_finds_again():
    """J07: distinct over attempts, tasks (the same task twice too), steps and runs; the same when played again."""
    sampler = Recorder()
    for seed, step in ((0, 0), (0, 1), (1, 0)):
        play(Player(sampler, Words(), Fragile, seed=seed), [task("a"), task("a")], 4, step=step)
    assert len(set(sampler.seeds)) == 24
    again = Recorder()
    play(Player(again, Words(), Fragile, seed=0), [task("a"), task("a")], 4, step=1)
    assert again.seeds == sampler.seeds[8:16]
    assert all(0 <= seed < 2**64 for seed in again.seeds)


def test_failed_episodes_are_counted_logged_and_have_no_reward(caplog: pytest.LogCaptureFixture):
    player = Player(Recorder(), Words(), Fragile, seed=0)
    with caplog.at_level(logging.WARNING):
        groups = play(player, [task("good"), task("bad", "breaks at once")], 2, max_failures=2)
    good, bad = groups
    assert [t.ending for t in good] == [Ending.DONE] * 2
    assert [t.ending for t in bad] == [Ending.FAILED] * 2
    assert all(isnan(t.reward) for t in bad)
    assert caplog.text.count("episode of task bad failed") == 2
    assert "no such board" in caplog.text
    measured = results(describe(groups))
    assert measured["reward/mean"] == 1.0
    assert measured["rollout/failed"] == 2


def test_one_failure_too_many_stops_the_step_and_names_the_first():
    player = Player(Recorder(), Words(), Fragile, seed=0)
    tasks = [task("good"), *(task(f"bad{n}", "breaks at once") for n in range(5))]
    with pytest.raises(RolloutError) as raised:
        play(player, tasks, 1, step=4, max_failures=4)
    message = str(raised.value)
    assert "5 of 6 episodes of step 4 failed, max_failures=4" in message
    assert "task bad0: ValueError: no such board" in message
    assert "and 2 more" in message
    assert "bad4" not in message
    assert len(play(player, tasks, 1, max_failures=5)) == 6


def test_without_any_sampler_a_step_ends_at_once_however_many_episodes_may_fail():
    """Requests that hang are not waited for, and no episode is counted as one that failed."""

    class Gone(Recorder):
        async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
            self.seeds.append(params.seed)
            if len(self.seeds) > 2:
                raise NoSampler("no sampler is left")
            await asyncio.Event().wait()
            return await super().sample(prompt, params)

    sampler, failures = Gone(), Failures(0, 99)
    player = Player(sampler, Words(), Fragile, seed=3)
    with pytest.raises(NoSampler, match="no sampler is left"):
        asyncio.run(player.play([task("a")], 4, SamplingParams(max_tokens=4), step=0, failures=failures))
    assert len(sampler.seeds) == 4 and failures._errors == []


def test_a_cancelled_step_is_not_a_failure(caplog: pytest.LogCaptureFixture):
    """Stopping a run must not look like broken episodes."""

    class Endless(Recorder):
        async def sample(self, prompt: Prompt, params: SamplingParams) -> Completion:
            await asyncio.Event().wait()
            raise AssertionError

    async def stop_soon() -> None:
        player = Player(Endless(), Words(), Fragile, seed=0)
        playing = asyncio.ensure_future(
            player.play([task("a")], 2, SamplingParams(max_tokens=1), step=0, failures=Failures(0, 9))
        )
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        playing.cancel()
        with pytest.raises(asyncio.CancelledError):
            await playing

    asyncio.run(stop_soon())
    assert caplog.text == ""


def test_sampling_params_are_the_recipes_and_the_renderers():
    draw = DrawConfig(max_tokens=7, temperature=0.6, top_k=5, top_p=0.9, min_p=0.1, stop=("END",))
    assert sampling_params(draw, Words()) == SamplingParams(
        max_tokens=7, temperature=0.6, top_k=5, top_p=0.9, min_p=0.1, stop_tokens=(2, 9), stop_strings=("END",)
    )


def trajectory(reward: float, sampled: int = 2, ending: Ending = Ending.DONE, **parts: float) -> Trajectory:
    if ending is Ending.FAILED:
        return Trajectory(reward=float("nan"), ending=ending)
    segment = Segment()
    segment.observe(np.zeros(5, np.int32))
    zeros = np.zeros(sampled, np.int32)
    segment.act(
        Completion(
            tokens=zeros,
            logprobs=zeros.astype(np.float32),
            sampling_logprobs=zeros.astype(np.float32),
            versions=zeros,
            stop=Stop.TOKEN,
        )
    )
    return Trajectory([segment], reward=reward, rewards=parts, ending=ending)


def test_describe_gives_the_numbers_of_a_step():
    groups = [
        Group("a", [trajectory(1.0, 2), trajectory(0.0, 6, Ending.LENGTH)]),
        Group("b", [trajectory(0.5, 4), trajectory(0.5, 4)]),
    ]
    assert results(describe(groups)) == {
        "reward/mean": 0.5,
        "reward/std": pytest.approx(np.std([1, 0, 0.5, 0.5])),
        "rollout/tokens_mean": 4.0,
        "rollout/tokens_max": 6.0,
        "rollout/prompt_tokens": 5.0,
        "rollout/truncated": 0.25,
        "rollout/failed": 0.0,
        "rollout/uniform_groups": 0.5,
    }


def test_a_part_that_an_episode_does_not_name_counts_as_zero():
    """F12: scored 1 in one of two finished episodes is a mean of 0.5, and does not vanish; a failed one is left out."""
    groups = [Group("a", [trajectory(1.0, right=1.0), trajectory(0.0), trajectory(0.0, ending=Ending.FAILED)])]
    measured = results(describe(groups))
    assert measured["reward/right"] == 0.5
    assert measured["rollout/failed"] == 1


@pytest.mark.parametrize("groups", [[], [Group("a", [])], [Group("a", [trajectory(0, ending=Ending.FAILED)] * 2)]])
def test_a_step_without_anything_divides_by_nothing(groups: list[Group]):
    """G10: no episodes, or none that ended; A14: a failed one is missing, not 0."""
    measured = results(describe(groups))
    assert "reward/mean" not in measured
    assert "rollout/tokens_max" not in measured
    assert measured["rollout/failed"] == sum(len(group) for group in groups)


def test_an_empty_completion_is_described_too():
    """G10."""
    measured = results(describe([Group("a", [trajectory(0.0, 0), trajectory(0.0, 0)])]))
    assert measured["rollout/tokens_mean"] == measured["rollout/tokens_max"] == 0.0
    assert measured["rollout/uniform_groups"] == 1.0


def test_a_group_with_one_reward_left_is_uniform():
    measured = results(describe([Group("a", [trajectory(1.0), trajectory(0.0, ending=Ending.FAILED)])]))
    assert measured["rollout/uniform_groups"] == 1.0
