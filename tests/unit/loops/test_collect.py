"""What a step plays: refills for groups that say nothing, failures over all rounds, rewards docked for length."""

from __future__ import annotations

import asyncio
from typing import Any

import numpy as np
import pytest

from strop.config.policy import GRPOConfig
from strop.data.attempts import Attempts
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.errors import RolloutError
from strop.loops.collect import collect
from strop.rollout.groups import Failures, Player
from strop.types import Completion, Ending, Group, Message, SamplingParams, Segment, Stop, Trajectory

NAN = float("nan")


def trajectory(reward: float, tokens: int = 2, **parts: float) -> Trajectory:
    segment = Segment()
    segment.observe(np.array([1], np.int32))
    zeros = np.zeros(tokens, np.float32)
    segment.act(
        Completion(
            tokens=np.ones(tokens, np.int32),
            logprobs=zeros,
            sampling_logprobs=zeros,
            versions=np.zeros(tokens, np.int32),
            stop=Stop.TOKEN,
        )
    )
    return Trajectory([segment], reward, parts, Ending.FAILED if np.isnan(reward) else Ending.DONE)


class Script(Player):
    """Gives each task the trajectories that are written for it, and notes what it was asked."""

    def __init__(self, attempts: dict[str, list[Trajectory]]) -> None:
        self.attempts = attempts
        self.asked: list[tuple[list[str], int, int, float]] = []
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
        self.asked.append(([task.id for task in tasks], group_size, first, params.temperature))
        groups = [Group(task.id, self.attempts[task.id][:group_size]) for task in tasks]
        for group in groups:
            for t in group:
                if t.ending is Ending.FAILED and failures:
                    failures.add(group.task_id)
        if failures:
            failures.check(len(tasks) * group_size)
        return groups


def play(
    attempts: dict[str, list[Trajectory]],
    per_step: int,
    *,
    cfg: dict[str, Any] | None = None,
    drop_uniform: bool = False,
    refills: int = 0,
    greedy: bool = False,
) -> tuple[Attempts, Script]:
    config = GRPOConfig.model_validate({"group_size": 2, "tasks_per_step": per_step} | (cfg or {}))
    tasks = [
        Task(id=name, messages=[Message(role="user", content=name)], answer=None, source="s", meta={})
        for name in attempts
    ]
    player = Script(attempts)
    playing = collect(
        config,
        TaskStream(tasks, seed=0),
        player,
        SamplingParams(max_tokens=8),
        step=3,
        drop_uniform=drop_uniform,
        refills=refills,
        greedy=greedy,
    )
    return asyncio.run(playing), player


UNIFORM, SPLIT = [trajectory(1.0), trajectory(1.0)], [trajectory(0.0), trajectory(1.0)]


def test_dropped_groups_are_played_again_with_new_tasks() -> None:
    """DAPO's dynamic sampling: as many new tasks as groups are missing, until the step is full."""
    attempts = {f"t{i}": UNIFORM if i % 2 else SPLIT for i in range(16)}
    found, player = play(attempts, 8, drop_uniform=True, refills=9)
    played = [name for names, *_ in player.asked for name in names]
    assert len(found.groups) == 8
    assert all(attempts[group.task_id] is SPLIT for group in found.groups)
    assert len(set(played)) == len(played), "a stream gives each task once an epoch"
    counts = [len(names) for names, *_ in player.asked]
    kept = 0
    for names, _, first, _ in player.asked:
        assert len(names) == 8 - kept
        assert first == sum(counts[: [n for n, *_ in player.asked].index(names)])
        kept += sum(attempts[name] is SPLIT for name in names)
    assert found.metrics["data/dropped_groups"].result == len(played) - 8


def test_without_refills_a_step_is_what_is_left() -> None:
    found, player = play({"a": UNIFORM, "b": SPLIT, "c": UNIFORM}, 3, drop_uniform=True)
    assert [group.task_id for group in found.groups] == ["b"]
    assert len(player.asked) == 1
    assert found.metrics["rollout/uniform_groups"].result == pytest.approx(2 / 3)


def test_refills_end() -> None:
    found, player = play({"a": UNIFORM, "b": UNIFORM}, 2, drop_uniform=True, refills=3)
    assert found.groups == [] and len(player.asked) == 4
    assert found.rewards_PG.shape == (0, 2) and found.counts_PG.size == 0


def test_all_groups_are_kept_when_none_may_be_dropped() -> None:
    found, _ = play({"a": UNIFORM, "b": SPLIT}, 2)
    assert sorted(group.task_id for group in found.groups) == ["a", "b"]


def test_failures_count_over_all_rounds() -> None:
    failing = [trajectory(NAN), trajectory(1.0)]
    attempts = {"a": failing, "b": failing}
    found, _ = play(attempts, 1, drop_uniform=True, refills=1, cfg={"max_failures": 2})
    assert found.groups == []
    with pytest.raises(RolloutError, match="2 of 4 episodes of step 3"):
        play(attempts, 1, drop_uniform=True, refills=1, cfg={"max_failures": 1})


def test_the_greedy_attempt_is_one_more() -> None:
    found, player = play({"a": SPLIT, "b": UNIFORM}, 2, greedy=True)
    assert player.asked[-1][1] == 1 and player.asked[-1][3] == 0.0
    assert found.greedy_P is not None
    assert found.greedy_P.tolist() == [found.groups[p].trajectories[0].reward for p in range(2)]
    assert found.metrics["rollout/failed"].count == 4, "greedy attempts are a baseline, not part of the step"


def test_long_replies_are_docked() -> None:
    """DAPO's soft punishment: of 8 tokens the last 4 cost 0.25 each."""
    attempts = {"a": [trajectory(1.0, 4), trajectory(1.0, 5)], "b": [trajectory(0.0, 8), trajectory(NAN, 8)]}
    length = {"overlong_buffer": 4, "overlong_penalty": 1.0}
    found, _ = play(attempts, 2, cfg={"length": length, "max_failures": 1})
    docked = {g.task_id: row.tolist() for g, row in zip(found.groups, found.rewards_PG, strict=True)}
    assert docked["a"] == [1.0, 0.75]
    assert docked["b"][0] == -1.0 and np.isnan(docked["b"][1])


def test_an_overlong_buffer_of_nothing_changes_nothing() -> None:
    """C09."""
    found, _ = play({"a": [trajectory(1.0, 8), trajectory(0.0, 8)]}, 1, cfg={"length": {"overlong_buffer": 0}})
    assert found.rewards_PG.tolist() == [[1.0, 0.0]]


def test_short_right_answers_gain() -> None:
    attempts = {"a": [trajectory(1.0, 2), trajectory(1.0, 4)], "b": [trajectory(0.5, 2), trajectory(1.0, 4)]}
    found, _ = play(attempts, 2, cfg={"length": {"prefer_short": 0.1, "solved_at": 1.0}})
    docked = {g.task_id: row.tolist() for g, row in zip(found.groups, found.rewards_PG, strict=True)}
    assert docked["a"] == pytest.approx([1.05, 0.95])
    assert docked["b"] == pytest.approx([0.5, 0.95]), "a wrong answer gains nothing by being short"


def test_named_parts_of_rewards() -> None:
    attempts = {"a": [trajectory(1.0, 2, right=1.0, short=0.5), trajectory(0.0, 2, right=0.0)]}
    found, _ = play(attempts, 1)
    assert found.parts("right").tolist() == [[1.0, 0.0]]
    assert found.parts("short")[0, 0] == 0.5 and np.isnan(found.parts("short")[0, 1])
    failed, _ = play({"a": [trajectory(NAN, 2, right=0.0), trajectory(0.0, 2, right=1.0)]}, 1, cfg={"max_failures": 1})
    assert np.isnan(failed.parts("right")[0, 0]), "a failed episode has no part of a reward"
