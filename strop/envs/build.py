"""From a recipe's tasks section to a fresh environment for each attempt."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from pathlib import Path
from typing import cast

from strop.config.recipe import TasksConfig
from strop.data.tasks import Task
from strop.data.user_code import load_object
from strop.envs.base import Env
from strop.envs.rewards.gym import gym_reward
from strop.envs.rewards.match import exact, number
from strop.envs.rewards.math import MathReward
from strop.envs.rewards.score import Reward
from strop.envs.single_turn import SingleTurn
from strop.errors import ConfigError


def make_env(config: TasksConfig, base: Path) -> Callable[[Task], Env]:
    """What makes the environment of one attempt at a task; files of the user's own code are taken from `base`.

    Raises ConfigError when the environment or the reward that `config` names cannot be used.
    """
    if config.env == "single_turn":
        reward = make_reward(config, base)
        return lambda task: SingleTurn(task, reward)
    made = load_object(config.env, base)
    if inspect.isclass(made):
        for method in ("start", "step"):
            if not inspect.iscoroutinefunction(inspect.getattr_static(made, method, None)):
                raise ConfigError(f"tasks.env {config.env}: an environment needs `async def {method}`")
    return cast("Callable[[Task], Env]", made)


def make_reward(config: TasksConfig, base: Path) -> Reward:
    """The reward that `config` names. Raises ConfigError when there is none of that name, or it cannot run here."""
    match config.reward:
        case "exact":
            return exact
        case "number":
            return number
        case "math":
            return MathReward()
        case "reasoning_gym":
            if config.source != "reasoning_gym":
                raise ConfigError(
                    f"tasks.reward reasoning_gym scores tasks of that source only; tasks.source is {config.source}"
                )
            return gym_reward(config.path, config.arguments)
        case name if ".py:" in name:
            return cast("Reward", _takes_two(load_object(name, base), name))
        case name:
            raise ConfigError(
                f"tasks.reward is {name!r}: choose exact, number, math, reasoning_gym, or your own as file.py:function"
            )


def _takes_two(function: Callable[..., object], name: str) -> Callable[..., object]:
    try:
        inspect.signature(function).bind("task", "reply")
    except TypeError as error:
        raise ConfigError(f"tasks.reward {name}{inspect.signature(function)} must take a task and a reply") from error
    return function
