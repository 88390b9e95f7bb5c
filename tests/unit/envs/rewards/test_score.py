"""What reward functions may return: F11, F12."""

from __future__ import annotations

import asyncio
from decimal import Decimal
from typing import Any

import numpy as np
import pytest
import torch

from strop.data.tasks import Task
from strop.envs.rewards.score import Invalid, Score, score_reply
from strop.errors import RolloutError

TASK = Task(id="rows:7", messages=[], answer="4", source="test", meta={})


def scored(result: Any) -> Score:
    return asyncio.run(score_reply(lambda task, reply: result, TASK, "a reply"))


@pytest.mark.parametrize(
    ("result", "value"),
    [
        (1, 1.0),
        (0.25, 0.25),
        (-2, -2.0),
        (True, 1.0),
        (False, 0.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(0.5), 0.5),
        (torch.tensor(0.5), 0.5),
        (torch.tensor([0.5]), 0.5),
        (Decimal("0.5"), 0.5),
    ],
)
def test_numbers_of_every_kind(result: Any, value: float) -> None:
    """F11"""
    assert scored(result) == Score(value, {"invalid": 0.0})


def test_named_parts_are_kept_beside_the_reward() -> None:
    """F11: the entry named reward is what is learned from; nothing is added up behind the user's back."""
    assert scored({"reward": 1, "accuracy": np.float32(0), "short": True}) == Score(
        1.0, {"invalid": 0.0, "accuracy": 0.0, "short": 1.0}
    )
    with pytest.raises(RolloutError, match=r"task rows:7 names \['acc', 'score'\], and must name 'reward' too"):
        scored({"score": 1, "acc": 0})
    with pytest.raises(RolloutError, match="'acc' of task rows:7 is None"):
        scored({"reward": 1, "acc": None})


@pytest.mark.parametrize(
    ("result", "why"),
    [
        (float("nan"), "not finite"),
        (float("inf"), "not finite"),
        (np.float64("nan"), "not finite"),
        (torch.tensor(float("nan")), "not finite"),
        (None, "NoneType"),
        ("1.0", "a str"),
        ([1.0], "a list"),
        (1j, "complex"),
        (torch.ones(2), "no reward"),
        (np.ones(2), "no reward"),
        (10**400, "no reward"),
    ],
)
def test_what_is_no_reward_is_an_error_with_the_task(result: Any, why: str) -> None:
    """F11: never a silent 0."""
    with pytest.raises(RolloutError, match=rf"'reward' of task rows:7 is .*{why}"):
        scored(result)


def test_three_outcomes_are_told_apart() -> None:
    """F12: a wrong answer, one that cannot be read, and a scorer that fails."""
    assert scored(0.0) == Score(0.0, {"invalid": 0.0})
    assert scored(Invalid("no number")) == Score(0.0, {"invalid": 1.0})

    def broken(task: Task, reply: str) -> float:
        raise KeyError("lost")

    with pytest.raises(KeyError, match="lost"):
        asyncio.run(score_reply(broken, TASK, "a reply"))


def test_async_functions_are_awaited() -> None:
    async def slow(task: Task, reply: str) -> float:
        await asyncio.sleep(0)
        return float(reply == task.answer)

    assert asyncio.run(score_reply(slow, TASK, "4")).value == 1.0
    assert asyncio.run(score_reply(slow, TASK, "5")).value == 0.0
