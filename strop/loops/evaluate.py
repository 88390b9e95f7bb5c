"""Held-out accuracy: the same problems with the same seeds, before, along the way and after.

held-out tasks -> attempts (sampled, greedy) -> solved or not -> accuracy, pass@k, answers to read
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import comb

from strop.config.recipe import EvaluateConfig
from strop.data.tasks import Task
from strop.rollout.groups import Player
from strop.tokens.base import Renderer
from strop.track.evaluation import Answer, Evaluation
from strop.types import Group, SamplingParams


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluator:
    """Measures whatever policy the player's sampler serves."""

    cfg: EvaluateConfig
    tasks: list[Task]
    player: Player
    renderer: Renderer
    params: SamplingParams

    def due(self, step: int, *, last: bool) -> bool:
        """Whether accuracy is measured after this many steps: at the last one, and at every `cfg.every`-th."""
        return is_due(self.cfg, self.tasks, step, last=last)

    async def measure(self, stage: str, step: int) -> Evaluation:
        """Attempt every held-out task. An episode that fails stops the evaluation: its accuracy would mean nothing."""
        sampled = await self.player.play(
            self.tasks,
            self.cfg.attempts,
            replace(self.params, temperature=self.cfg.temperature),
            step=0,
        )
        greedy: list[Group] = []
        if self.cfg.greedy:
            greedy = await self.player.play(self.tasks, 1, replace(self.params, temperature=0.0), step=0)
        solved = [sum(t.reward >= self.cfg.solved_at for t in group) for group in sampled]
        trajectories = [t for group in sampled for t in group]
        return Evaluation(
            stage=stage,
            step=step,
            sampled_accuracy=sum(solved) / len(trajectories),
            greedy_accuracy=self._greedy_accuracy(greedy),
            pass_at_k={k: pass_at_k(self.cfg.attempts, solved, k) for k in powers_of_two(self.cfg.attempts)},
            mean_reward=sum(t.reward for t in trajectories) / len(trajectories),
            mean_tokens=sum(t.num_sampled for t in trajectories) / len(trajectories),
            answers=[
                *(self._answer(task, group, greedy=False) for task, group in zip(self.tasks, sampled, strict=True)),
                *(self._answer(task, group, greedy=True) for task, group in zip(self.tasks, greedy)),  # noqa: B905
            ],
        )

    def _greedy_accuracy(self, greedy: list[Group]) -> float | None:
        if not greedy:
            return None
        return sum(group.trajectories[0].reward >= self.cfg.solved_at for group in greedy) / len(greedy)

    def _answer(self, task: Task, group: Group, *, greedy: bool) -> Answer:
        """The first attempt, to read; not the best one."""
        first = group.trajectories[0]
        last = first.segments[-1]
        return Answer(
            task_id=task.id,
            prompt=str(task.messages[-1].get("content", "")),
            reply=str(self.renderer.parse(last.tokens[last.sampled]).get("content", "")),
            expected=str(task.answer),
            reward=first.reward,
            greedy=greedy,
        )


def is_due(cfg: EvaluateConfig, held_out: Sequence[object], step: int, *, last: bool) -> bool:
    """Whether something held out is measured after this many steps: at the last one, and at every `cfg.every`-th."""
    return bool(held_out) and (last or (cfg.every > 0 and step % cfg.every == 0))


def powers_of_two(limit: int) -> list[int]:
    return [1 << i for i in range(limit.bit_length()) if 1 << i <= limit]


def pass_at_k(attempts: int, solved: list[int], k: int) -> float:
    """Mean over tasks of 1 - C(n - c, k) / C(n, k): the unbiased pass@k of arXiv:2107.03374, equation 1."""
    return sum(1.0 - comb(attempts - c, k) / comb(attempts, k) for c in solved) / len(solved)
