"""One question, one reply, one score."""

from __future__ import annotations

from dataclasses import dataclass

from strop.data.tasks import Task
from strop.envs.base import EnvStep
from strop.envs.rewards.score import Reward, score_reply
from strop.types import Message


@dataclass(frozen=True, slots=True)
class SingleTurn:
    """Shows the task's messages and scores the reply to them. What the model reasoned before it is not scored."""

    task: Task
    reward: Reward

    async def start(self) -> list[Message]:
        return self.task.messages

    async def step(self, reply: Message) -> EnvStep:
        score = await score_reply(self.reward, self.task, reply.get("content", ""))
        return EnvStep(reward=score.value, done=True, rewards=score.parts)
