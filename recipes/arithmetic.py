"""Small sums in words, and a score that leads to the bare number. For `quickstart.yaml`; copy it and change it."""

import re

from strop.data.tasks import Task


def addition(largest: int = 19) -> list[dict[str, str]]:
    """Every sum of two numbers from 0 to `largest`: one row for each, with the question and the right answer."""
    return [
        {"prompt": f"What is {a} + {b}? Reply with the number only.", "answer": str(a + b)}
        for a in range(largest + 1)
        for b in range(largest + 1)
    ]


def score(task: Task, reply: str) -> float:
    """1 for exactly the number; 0.2 when the last number of a longer reply is right; else 0.

    The small step in between matters: a model that answers in sentences never earns the 1 by chance, and a group of
    attempts that all earn 0 teaches nothing.
    """
    if reply.strip() == task.answer:
        return 1.0
    numbers = re.findall(r"\d+", reply)
    return 0.2 if numbers and numbers[-1] == task.answer else 0.0
