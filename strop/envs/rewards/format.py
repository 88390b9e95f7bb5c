"""Rewards for the form of a reply, whatever it says: parts of a reward that you write."""

from __future__ import annotations

from strop.data.tasks import Task
from strop.envs.rewards.answers import boxed


def has_box(task: Task, reply: str) -> float:
    """1 when the reply holds a \\boxed{...} with something in it. Only the reply is read, never the prompt."""
    return float(bool(boxed(reply)))


def in_order(reply: str, *tags: str) -> bool:
    """Whether the reply is <a>...</a><b>...</b> for the tags a, b: each once, in this order, nothing beside them."""
    rest = reply.strip()
    for tag in tags:
        opening, closing = f"<{tag}>", f"</{tag}>"
        if not rest.startswith(opening):
            return False
        inside, found, rest = rest[len(opening) :].partition(closing)
        if not found or opening in inside:
            return False
        rest = rest.lstrip()
    return not rest
