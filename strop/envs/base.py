"""The Env protocol: what is attempted. An Env is used for one episode and thrown away."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from strop.types import Message


@dataclass(frozen=True, slots=True, kw_only=True)
class EnvStep:
    """What an environment answers to one reply."""

    reward: float = 0.0  # summed over the episode's steps
    done: bool = True
    messages: list[Message] = field(default_factory=list)  # observed next, when not done
    rewards: dict[str, float] = field(default_factory=dict)  # named parts of the reward, for the record


class Env(Protocol):
    async def start(self) -> list[Message]: ...

    async def step(self, reply: Message) -> EnvStep: ...
