"""The scorer that a reasoning-gym generator brings with it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from strop.data.tasks import Task
from strop.envs.rewards.score import Reward
from strop.errors import ConfigError


def gym_reward(name: str, arguments: Mapping[str, Any]) -> Reward:
    """The reward of generator `name`, made with `arguments` as its tasks were: 0 to 1, of the reply without its edges.

    Raises ConfigError when there is no such generator or it does not take the arguments.
    """
    import reasoning_gym

    try:
        dataset = reasoning_gym.create_dataset(name, **{"seed": 0, **arguments})
    except (TypeError, ValueError, AssertionError) as error:
        raise ConfigError(f"tasks.reward reasoning_gym: the generator {name!r} cannot be made: {error}") from error

    def reward(task: Task, reply: str) -> float:
        return dataset.score_answer(reply.strip(), dict(task.meta))

    return reward
