"""Rewards that compare a reply with its task's answer: letter by letter, or by the last number."""

from __future__ import annotations

from strop.data.tasks import Task
from strop.envs.rewards.answers import last_number
from strop.envs.rewards.score import Invalid
from strop.errors import DataError


def exact(task: Task, reply: str) -> float:
    """1 when the reply is the task's answer and nothing else; white space around either does not count."""
    return float(reply.strip() == expected(task).strip())


def number(task: Task, reply: str) -> float | Invalid:
    """1 when the last number of the reply equals the last one of the task's answer, exactly and however it is written.

    A reply without a number is `Invalid`; DataError when the task's answer holds none.
    """
    right = last_number(expected(task))
    if right is None:
        raise DataError(f"task {task.id}: its answer {expected(task)!r:.60} holds no number for tasks.reward number")
    said = last_number(reply)
    return Invalid("no number") if said is None else float(said == right)


def expected(task: Task) -> str:
    """The task's answer. Raises DataError when it has none."""
    if task.answer is None:
        raise DataError(f"task {task.id} has no answer to compare with; give it one, or a reward that needs none")
    return task.answer
