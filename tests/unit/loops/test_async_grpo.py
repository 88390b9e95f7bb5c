"""Attempts drawn ahead: at lag 0 the synchronous loop itself; above it, no token older than was allowed."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from strop import recipe as runner
from strop.config.loader import load_recipe
from strop.config.policy import AsyncGRPOConfig
from strop.data.attempts import Attempts
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.errors import RolloutError
from strop.loops.ahead import Ahead
from strop.types import Message, SamplingParams
from tests.unit.loops.test_collect import Script, trajectory
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
    """No task is lost: the stream stands where the next step's tasks begin, not where those drawn ahead end."""
    play(tmp_path / "one", "async_grpo", {"steps": 4, "max_lag": 2})
    saved = sorted(path for path in (tmp_path / "one" / "run" / "checkpoints").iterdir())
    states = [json.loads((checkpoint / "state.json").read_text()) for checkpoint in saved]
    assert len(states) >= 2
    # P tasks a step, none of those drawn ahead; the tiny source begins a new epoch sooner than that
    assert all((s["stream"]["position"] - 4 * s["step"]) % EPOCH == 0 for s in states)


def ahead(attempts: dict[str, list[Any]], max_lag: int, per_step: int = 1) -> tuple[Ahead, Script]:
    cfg = AsyncGRPOConfig.model_validate({"group_size": 2, "tasks_per_step": per_step, "max_lag": max_lag})
    tasks = [
        Task(id=name, messages=[Message(role="user", content=name)], answer=None, source="s", meta={})
        for name in attempts
    ]
    player = Script(attempts)
    return Ahead(cfg, TaskStream(tasks, seed=0), player, SamplingParams(max_tokens=4), first=0), player


SPLIT = [trajectory(0.0), trajectory(1.0)]


def test_slots_bound_what_is_open() -> None:
    async def work() -> None:
        drawn, player = ahead({f"t{i}": SPLIT for i in range(8)}, 2)
        for step in range(4):
            drawn.open_until(step + 2)
            await asyncio.sleep(0)
            assert len(player.asked) == step + 3, "(max_lag + 1) steps are open, and no more"
            found = await drawn.attempts_of(step)
            assert isinstance(found, Attempts) and len(found.groups) == 1
        played = [name for names, *_ in player.asked for name in names]
        assert len(set(played)) == len(played)

    asyncio.run(work())


def test_the_position_is_that_of_the_next_step() -> None:
    async def work() -> None:
        drawn, _ = ahead({f"t{i}": SPLIT for i in range(9)}, 2, per_step=2)
        drawn.open_until(2)
        await drawn.attempts_of(0)
        assert drawn.position_of(1).state()["position"] == 2
        await drawn.attempts_of(1)
        assert drawn.position_of(2).state()["position"] == 4

    asyncio.run(work())


def test_a_step_that_fails_gives_up_the_others() -> None:
    async def work() -> None:
        drawn, player = ahead({"a": [trajectory(float("nan"))] * 2, "b": [trajectory(float("nan"))] * 2}, 1)
        drawn.open_until(1)
        with pytest.raises(RolloutError):
            await drawn.attempts_of(0)
        assert all(task.done() for task in drawn._open.values())
        assert player.asked

    asyncio.run(work())
