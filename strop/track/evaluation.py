"""What one evaluation on held-out tasks found: evaluate loop -> Evaluation -> evaluations.jsonl, live view, report."""

from __future__ import annotations

from dataclasses import dataclass


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
    """Accuracies are fractions of held-out tasks, or of attempts at them; attempts are kept as text for the report."""

    stage: str
    step: int
    sampled_accuracy: float  # of the sampled attempts, the fraction that solved their task
    greedy_accuracy: float | None  # of the tasks, the fraction solved at temperature 0; None when not asked for
    pass_at_k: dict[int, float]  # k -> unbiased estimate of solving a task within k sampled attempts
    mean_reward: float
    mean_tokens: float  # sampled tokens in one attempt
    answers: list[Answer]
