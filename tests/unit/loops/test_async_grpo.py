"""Attempts drawn ahead: at lag 0 the synchronous loop itself; above it, no token older than was allowed."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Awaitable, Callable
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.config.policy import AsyncGRPOConfig
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.errors import RolloutError
from strop.loops.ahead import Ahead
from strop.rollout.groups import Failures, Player
from strop.types import Group, Message, SamplingParams
from tests.unit.loops.test_collect import trajectory
from tests.unit.loops.test_recipe import RECIPE

EPOCH = 92  # tasks of tiny_task.sums that are not held out
GRPO = {"tasks_per_step": 4, "group_size": 4, "schedule": {"lr": 1e-2}, "updates_per_step": 2}


def play(folder: Path, name: str, settings: dict[str, Any], *more: str, resume: bool = False) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    path = folder / "tiny.yaml"
    path.write_text(RECIPE.partition("grpo:")[0] + "run: {save_every: 1}\n")
    changed = [f"{name}={json.dumps(GRPO | settings)}", f"run.folder={folder}/run", *more]
    runner.train(load_recipe(path, changed), path, resume=resume)
    return [json.loads(line) for line in (folder / "run" / "metrics.jsonl").read_text().splitlines()]


def numbers(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    clocks = ("time/", "memory/", "async/")
    return [
        {k: v for k, v in r.items() if not k.startswith(clocks) and "per_s" not in k and k != "stage"} for r in rows
    ]


@pytest.mark.parametrize("settings", [{}, {"refills": 2}, {"kl": {"coefficient": 0.01}, "ratio_to": "trainer"}])
def test_without_lag_it_is_the_synchronous_loop_metric_for_metric(tmp_path: Path, settings: dict[str, Any]) -> None:
    steps = {"steps": 4}
    here = play(tmp_path / "sync", "grpo", steps | settings)
    there = play(tmp_path / "async", "async_grpo", steps | settings | {"max_lag": 0})
    assert numbers(there) == numbers(here)
    evaluations = [
        [
            {k: v for k, v in json.loads(line).items() if k not in ("time", "stage")}
            for line in (tmp_path / name / "run" / "evaluations.jsonl").read_text().splitlines()
        ]
        for name in ("sync", "async")
    ]
    assert evaluations[0] == evaluations[1]


@pytest.mark.parametrize("max_lag", [1, 2])
def test_no_token_is_older_than_allowed(tmp_path: Path, max_lag: int) -> None:
    rows = play(tmp_path, "async_grpo", {"steps": 6, "max_lag": max_lag})
    lags = [row["async/lag_max"] for row in rows]
    assert lags[0] == 0 and max(lags) <= max_lag
    assert max(lags) > 0, "nothing was drawn ahead"
    assert all(row["optim/grad_norm"] > 0 for row in rows if "optim/grad_norm" in row)


def test_a_resumed_run_takes_the_tasks_that_were_being_drawn_again(tmp_path: Path) -> None:
    """No task is lost or learned from twice: what is saved are the tasks that were not over."""
    play(tmp_path / "one", "async_grpo", {"steps": 4, "max_lag": 2})
    saved = sorted(path for path in (tmp_path / "one" / "run" / "checkpoints").iterdir())
    states = [json.loads((checkpoint / "state.json").read_text()) for checkpoint in saved]
    assert len(states) >= 2
    for state in states:
        stream = state["stream"]
        assert stream["epoch"] * EPOCH + stream["position"] + len(stream["ended"]) == 4 * state["step"]


def played(test: Callable[[], Awaitable[None]]) -> Callable[[], None]:
    @wraps(test)
    def run() -> None:
        async def work() -> None:
            await test()

        asyncio.run(work())

    return run


class Hand(Player):
    """Groups end when the test says so, with the rewards it says."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.seeds: list[tuple[int, int]] = []
        self.cancelled: list[str] = []
        self._playing: dict[str, asyncio.Future[list[float]]] = {}
        self._max_turns = 1

    async def play(
        self,
        tasks: list[Task],
        group_size: int,
        params: SamplingParams,
        *,
        step: int,
        failures: Failures | None = None,
        first: int = 0,
    ) -> list[Group]:
        (task,) = tasks
        self.begun.append(task.id)
        self.seeds.append((step, first))
        self._playing[task.id] = asyncio.get_running_loop().create_future()
        try:
            rewards = await self._playing[task.id]
        except asyncio.CancelledError:
            self.cancelled.append(task.id)
            raise
        assert failures is not None
        for reward in rewards:
            if np.isnan(reward):
                failures.add(task.id)
        failures.check(group_size)
        return [Group(task.id, [trajectory(reward) for reward in rewards])]

    async def end(self, *places: int, rewards: tuple[float, float] = (0.0, 1.0)) -> None:
        """End the tasks that were begun at these places, in this order."""
        for place in places:
            self._playing[self.begun[place]].set_result(list(rewards))
            await settled()


async def settled() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


def ahead(steps: int = 9, **settings: Any) -> tuple[Ahead, Hand]:
    fixed = {"group_size": 2, "tasks_per_step": 2, "steps": steps}
    player = Hand()
    tasks = [
        Task(id=f"t{i}", messages=[Message(role="user", content="?")], answer=None, source="s", meta={})
        for i in range(64)
    ]
    return Ahead(AsyncGRPOConfig.model_validate(fixed | settings), TaskStream(tasks, seed=0), player, PARAMS), player


async def taken(drawn: Ahead, step: int, player: Hand, *places: int) -> list[int]:
    """End tasks at these places while `step` waits; the places of those that it took."""
    taking = asyncio.ensure_future(drawn.take(step))
    await settled()
    await player.end(*places)
    return [player.begun.index(group.task_id) for group in (await taking).groups]


PARAMS = SamplingParams(max_tokens=4)
UNIFORM = (1.0, 1.0)


@played
async def test_slots_bound_what_is_in_the_making() -> None:
    """G16: what is begun is counted, so none can be lost; a slot is given back by what ended, failed or was dropped."""
    drawn, player = ahead(max_lag=2)
    for step in range(4):
        assert await taken(drawn, step, player, 2 * step, 2 * step + 1) == [2 * step, 2 * step + 1]
        assert len(player.begun) == 2 * (step + 3), "a slot is free when its weights are published, not before"
    assert player.seeds[:8] == [(0, i) for i in range(6)] + [(1, 0), (1, 1)]


@played
async def test_the_last_steps_begin_no_task_that_nothing_would_learn_from() -> None:
    drawn, player = ahead(steps=2, max_lag=3)
    assert await taken(drawn, 0, player, 0, 1) == [0, 1]
    assert await taken(drawn, 1, player, 2, 3) == [2, 3]
    assert len(player.begun) == 4


@played
async def test_an_order_is_kept() -> None:
    """G17: more have ended than a step takes. None is dropped: the next step has them, and nothing waits for them."""
    drawn, player = ahead(max_lag=1)
    assert await taken(drawn, 0, player, 3, 2, 1, 0) == [0, 1]
    assert await taken(drawn, 1, player) == [2, 3]


@played
async def test_a_window_takes_those_that_end_first_of_the_oldest() -> None:
    drawn, player = ahead(max_lag=2, window=2)
    assert await taken(drawn, 0, player, 5, 3, 1) == [1, 3], "5 is not of the 4 oldest"
    assert await taken(drawn, 1, player, 2) == [2, 5]
    assert await taken(drawn, 2, player, 7, 8, 4, 0) == [0, 4], "both are due, whatever else has ended"


@played
async def test_old_tasks_are_in_time_whatever_ends_first() -> None:
    """Random orders of ending: with a window and no over-sampling each task is taken once, within its lag."""
    for seed in range(20):
        rng = np.random.default_rng(seed)
        max_lag = int(rng.integers(1, 4))
        drawn, player = ahead(steps=12, max_lag=max_lag, window=int(rng.integers(1, max_lag + 2)))
        ended, seen = set[int](), list[int]()
        for step in range(12):
            taking = asyncio.ensure_future(drawn.take(step))
            await settled()
            while not taking.done():
                place = int(rng.choice([p for p in range(len(player.begun)) if p not in ended]))
                ended.add(place)
                await player.end(place)
            places = [player.begun.index(group.task_id) for group in taking.result().groups]
            assert len(places) == 2 and all(step - player.seeds[place][0] <= max_lag for place in places)
            seen += places
        assert sorted(seen) == list(range(24)) and not player.cancelled


@played
async def test_over_sampling_gives_up_those_that_end_last() -> None:
    drawn, player = ahead(max_lag=0, oversample=2)
    assert await taken(drawn, 0, player, 3, 1) == [1, 3]
    assert player.cancelled == [player.begun[0], player.begun[2]]
    assert len(player.begun) == 4 and drawn.state()["position"] == 4 and drawn.state()["ended"] == []
    taking = asyncio.ensure_future(drawn.take(1))
    await settled()
    await player.end(4, 5)
    assert (await taking).metrics["async/given_up"].result == 2


@played
async def test_over_sampling_within_a_lag_gives_up_only_what_is_too_old() -> None:
    drawn, player = ahead(max_lag=1, window=2, oversample=1)
    assert await taken(drawn, 0, player, 4, 3) == [3, 4]
    assert player.cancelled == [] and len(player.begun) == 5
    assert await taken(drawn, 1, player, 1, 2) == [1, 2], "those begun at version 0 are due; one of three is given up"
    assert player.cancelled == [player.begun[0]]


@played
async def test_a_dropped_group_gives_its_slot_to_another_task_at_once() -> None:
    drawn, player = ahead(max_lag=1, refills=1)
    taking = asyncio.ensure_future(drawn.take(0))
    await settled()
    await player.end(3, 0, rewards=UNIFORM)  # of step 1's as well
    assert len(player.begun) == 6
    await player.end(1, 2)
    attempts = await taking
    assert [player.begun.index(group.task_id) for group in attempts.groups] == [1, 2]
    assert attempts.metrics["data/dropped_groups"].result == 2
    assert attempts.metrics["rollout/uniform_groups"].result == 0.5


@played
async def test_refills_end_and_the_step_goes_without() -> None:
    drawn, player = ahead(max_lag=0, refills=1)
    taking = asyncio.ensure_future(drawn.take(0))
    await settled()
    for place in range(4):
        await player.end(place, rewards=UNIFORM)
    attempts = await taking
    assert attempts.groups == [] and len(player.begun) == 4


@played
async def test_a_resumed_run_plays_again_what_was_in_the_making() -> None:
    drawn, player = ahead(max_lag=2, window=2)
    await taken(drawn, 0, player, 3, 1)
    state = drawn.state()
    assert state["position"] == 0 and state["ended"] == [1, 3]
    tasks = TaskStream(
        [
            Task(id=f"t{i}", messages=[Message(role="user", content="?")], answer=None, source="s", meta={})
            for i in range(64)
        ],
        seed=0,
    )
    tasks.restore(state)
    assert [task.id for task in tasks.take(4)] == [player.begun[place] for place in (0, 2, 4, 5)]


@played
async def test_a_step_that_fails_gives_up_the_others() -> None:
    drawn, player = ahead(max_lag=1, max_failures=1)
    taking = asyncio.ensure_future(drawn.take(0))
    await settled()
    await player.end(2, rewards=(float("nan"), 1.0))
    assert not taking.done()
    await player.end(3, rewards=(float("nan"), 1.0))
    with pytest.raises(RolloutError, match="2 of 4 episodes of step 0 failed, max_failures=1"):
        await taking
    assert sorted(player.cancelled) == sorted(player.begun[:2])


def test_a_window_beyond_the_slots_is_refused() -> None:
    with pytest.raises(ValueError, match="window is 3: with max_lag 1 there are 2 steps' tasks"):
        AsyncGRPOConfig.model_validate({"max_lag": 1, "window": 3})
