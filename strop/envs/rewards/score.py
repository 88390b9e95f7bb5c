"""What a reward function may return, and what becomes of it: a score, an answer that cannot be read, or an error.

reward(task, reply) -> number, named numbers or Invalid -> Score
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from typing import SupportsFloat

from strop.data.tasks import Task
from strop.errors import RolloutError

TOTAL = "reward"  # the entry of a mapping that is the reward itself; the others are for the record
INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Invalid:
    """The reply has no answer that can be read. It earns 0 and is counted, apart from answers that are wrong."""

    reason: str


Result = SupportsFloat | Mapping[str, SupportsFloat] | Invalid
Reward = Callable[[Task, str], Result | Awaitable[Result]]


@dataclass(frozen=True, slots=True)
class Score:
    """A finite reward, and its named parts for the record; `invalid` is among them, 1 or 0, whatever the reward."""

    value: float
    parts: dict[str, float]


async def score_reply(reward: Reward, task: Task, reply: str) -> Score:
    """Call `reward`, which may be a plain function or async, and check what it returned.

    Raises RolloutError, naming the task, when that is no finite number, nor a mapping with such a number as "reward".
    What the function itself raises passes through: the episode then fails, and failures are counted, never scored 0.
    """
    result = reward(task, reply)
    if not isinstance(result, float) and inspect.isawaitable(result):
        result = await result
    if isinstance(result, Invalid):
        return Score(0.0, {INVALID: 1.0})
    if not isinstance(result, Mapping):
        return Score(_number(result, task, TOTAL), {INVALID: 0.0})
    if TOTAL not in result:
        raise RolloutError(
            f"the reward of task {task.id} names {sorted(map(str, result))}, and must name {TOTAL!r} too"
        )
    numbers = {str(name): _number(value, task, str(name)) for name, value in result.items()}
    value = numbers.pop(TOTAL)
    return Score(value, {INVALID: 0.0, **numbers})


def _number(value: object, task: Task, name: str) -> float:
    """A Python number, truth value, NumPy scalar or one-element tensor as a float."""
    try:
        if isinstance(value, str) or not isinstance(value, SupportsFloat):
            raise TypeError(f"it is a {type(value).__name__}")
        number = float(value)
        if not math.isfinite(number):
            raise ValueError("it is not finite")
    except (TypeError, ValueError, OverflowError, RuntimeError) as error:  # RuntimeError: a tensor of many elements
        raise RolloutError(f"{name!r} of task {task.id} is {value!r:.60}, which is no reward: {error}") from error
    return number
