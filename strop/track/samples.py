"""A few attempts of a step as text: groups of trajectories -> Sample rows for samples.jsonl and the live view."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import StrEnum

import numpy as np

from strop.types import Group, Int32s, Trajectory

Decode = Callable[[Int32s], str]


class Why(StrEnum):
    """Why an attempt was chosen to be shown."""

    BEST = "best"
    WORST = "worst"
    RANDOM = "random"


@dataclass(frozen=True, slots=True, kw_only=True)
class Sample:
    """One attempt as people read it."""

    why: Why
    task_id: str
    prompt: str  # what came before the first sampled token
    reply: str  # everything from there on: replies, and what the environment said between them
    reward: float | None  # None: the episode failed and has no reward
    rewards: dict[str, float]  # the reward's named parts
    ending: str
    tokens: int  # sampled


def choose(groups: Sequence[Group], count: int, seed: str, decode: Decode) -> list[Sample]:
    """`count` attempts: the best, the worst, the rest at random; with `count` 1, a random one.

    `seed` decides what is random, ties included. Failed episodes are shown only where nothing else is left.
    """
    pool = [(group.task_id, trajectory) for group in groups for trajectory in group]
    random.Random(seed).shuffle(pool)
    pool.sort(key=lambda item: not math.isfinite(item[1].reward))  # stable: failed ones last, order otherwise random
    chosen: list[tuple[Why, str, Trajectory]] = []
    scored = [item for item in pool if math.isfinite(item[1].reward)]
    if count >= 2 and len(scored) >= 2:
        best = max(scored, key=lambda item: item[1].reward)
        worst = min((item for item in scored if item is not best), key=lambda item: item[1].reward)
        chosen = [(Why.BEST, *best), (Why.WORST, *worst)]
        pool = [item for item in pool if item is not best and item is not worst]
    chosen += [(Why.RANDOM, *item) for item in pool[: count - len(chosen)]]
    return [_sample(why, task_id, trajectory, decode) for why, task_id, trajectory in chosen]


def _sample(why: Why, task_id: str, trajectory: Trajectory, decode: Decode) -> Sample:
    prompt, replies = "", []
    for index, segment in enumerate(trajectory.segments):
        sampled = np.flatnonzero(segment.sampled)
        first = int(sampled[0]) if len(sampled) else len(segment)
        if index == 0:
            prompt = decode(segment.tokens[:first])
        replies.append(decode(segment.tokens[first:]))
    return Sample(
        why=why,
        task_id=task_id,
        prompt=prompt,
        reply="\n[history rewritten]\n".join(replies),
        reward=trajectory.reward if math.isfinite(trajectory.reward) else None,
        rewards={name: value for name, value in trajectory.rewards.items() if math.isfinite(value)},
        ending=str(trajectory.ending),
        tokens=trajectory.num_sampled,
    )
