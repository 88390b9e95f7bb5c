"""What one evaluation on held-out tasks found: evaluate loop -> Evaluation -> evaluations.jsonl, live view, report."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Measured(StrEnum):
    """What an accuracy is a fraction of."""

    ATTEMPTS = "sampled"  # attempts that a policy made
    PAIRS = "pairs"  # pairs of replies that a reward model told apart


@dataclass(frozen=True, slots=True, kw_only=True)
class Answer:
    """One attempt at one held-out task, as text."""

    task_id: str
    prompt: str
    reply: str
    expected: str
    reward: float
    greedy: bool  # drawn at temperature 0


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Accuracies are fractions of held-out tasks, or of attempts at them; attempts are kept as text for the report.

    A reward model attempts nothing: its accuracy is of pairs, its `mean_reward` by how much the better reply of a pair
    scores higher.
    """

    stage: str
    step: int
    sampled_accuracy: float  # of the sampled attempts, the fraction that solved their task; of pairs, that were right
    greedy_accuracy: float | None  # of the tasks, the fraction solved at temperature 0; None when not asked for
    pass_at_k: dict[int, float]  # k -> unbiased estimate of solving a task within k sampled attempts
    mean_reward: float
    mean_tokens: float  # sampled tokens in one attempt; of a pair, the tokens of one reply
    answers: list[Answer]
    measured: Measured = Measured.ATTEMPTS
