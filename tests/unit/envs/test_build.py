"""From a recipe's tasks section to environments: the built-in rewards, a generator's own, and the user's files."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

import pytest

from strop.config.recipe import TasksConfig
from strop.data.tasks import Task, load_tasks
from strop.envs.base import EnvStep
from strop.envs.build import make_env, make_reward
from strop.errors import ConfigError
from strop.types import Message

TASK = Task(id="t", messages=[Message(role="user", content="2+2?")], answer="4", source="test", meta={})


def config(**changes: Any) -> TasksConfig:
    return TasksConfig.model_validate({"source": "jsonl", "path": "tasks.jsonl", **changes})


def reply(text: str) -> Message:
    return Message(role="assistant", content=text)


@pytest.mark.parametrize(
    ("reward", "text", "value"), [("exact", "4", 1.0), ("exact", "4.", 0.0), ("number", "4.", 1.0)]
)
def test_single_turn(reward: str, text: str, value: float) -> None:
    env = make_env(config(reward=reward), Path())(TASK)
    assert asyncio.run(env.start()) == TASK.messages
    assert asyncio.run(env.step(reply(text))) == EnvStep(reward=value, done=True, rewards={"invalid": 0.0})


def test_reasoning_is_not_scored() -> None:
    env = make_env(config(reward="number"), Path())(TASK)
    thought = Message(role="assistant", content="4", reasoning_content="5 perhaps")
    assert asyncio.run(env.step(thought)).reward == 1.0
    unfinished = Message(role="assistant", content="", reasoning_content="so it is 4")
    assert asyncio.run(env.step(unfinished)) == EnvStep(reward=0.0, done=True, rewards={"invalid": 1.0})


def test_a_users_own_reward(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "async def good(task, reply):\n    return {'reward': reply == task.answer, 'length': len(reply)}\n"
        "def bad(task):\n    return 1.0\n"
    )
    env = make_env(config(reward="mine.py:good"), tmp_path)(TASK)
    step = asyncio.run(env.step(reply("4")))
    assert step.reward == 1.0 and step.rewards == {"invalid": 0.0, "length": 1.0}
    with pytest.raises(ConfigError, match=r"mine\.py:bad\(task\) must take a task and a reply"):
        make_env(config(reward="mine.py:bad"), tmp_path)
    with pytest.raises(ConfigError, match=r"mine\.py has no god"):
        make_env(config(reward="mine.py:god"), tmp_path)


def test_rewards_that_do_not_exist_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"tasks\.reward is 'exakt': choose exact, number, math, reasoning_gym"):
        make_reward(config(reward="exakt"), Path())
    with pytest.raises(ConfigError, match=r"scores tasks of that source only; tasks\.source is jsonl"):
        make_reward(config(reward="reasoning_gym"), Path())


def test_a_users_own_environment(tmp_path: Path) -> None:
    (tmp_path / "mine.py").write_text(
        "from strop.envs.base import EnvStep\n"
        "class Guess:\n"
        "    def __init__(self, task):\n        self.task, self.turn = task, 0\n"
        "    async def start(self):\n        return self.task.messages\n"
        "    async def step(self, reply):\n"
        "        self.turn += 1\n"
        "        return EnvStep(reward=float(self.turn), done=self.turn == 2)\n"
        "class Plain:\n"
        "    async def start(self):\n        return []\n"
        "    def step(self, reply):\n        return None\n"
    )
    new_env = make_env(config(env="mine.py:Guess", reward="exact"), tmp_path)
    first, second = new_env(TASK), new_env(TASK)
    assert asyncio.run(first.step(reply("x"))).reward == 1.0
    assert asyncio.run(first.step(reply("x"))).done
    assert asyncio.run(second.step(reply("x"))).reward == 1.0  # an attempt of its own
    with pytest.raises(ConfigError, match=r"tasks\.env mine\.py:Plain: an environment needs `async def step`"):
        make_env(config(env="mine.py:Plain"), tmp_path)


def test_a_generators_own_scorer() -> None:
    """The package's scorer gets the whole entry back, so that right answers in other words score 1 too."""
    gym = config(source="reasoning_gym", path="chain_sum", arguments={"size": 3, "seed": 5}, reward="reasoning_gym")
    tasks = load_tasks(gym, Path()).train
    new_env = make_env(gym, Path())
    for task in tasks:
        assert asyncio.run(new_env(task).step(reply(f" {task.answer}\n"))).reward == 1.0
        assert asyncio.run(new_env(task).step(reply("no"))).reward < 0.1
    countdown = config(
        source="reasoning_gym", path="countdown", arguments={"size": 1, "seed": 1}, reward="reasoning_gym"
    )
    task = load_tasks(countdown, Path()).train[0]
    other_form = f"({task.meta['metadata']['expression']})"  # not the text of the answer, but the same sum
    assert asyncio.run(make_env(countdown, Path())(task).step(reply(other_form))).reward == 1.0
    with pytest.raises(ConfigError, match="the generator 'chain_sum' cannot be made"):
        make_reward(
            config(source="reasoning_gym", path="chain_sum", arguments={"x": 1}, reward="reasoning_gym"), Path()
        )
