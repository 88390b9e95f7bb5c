"""A reward model, complete. One step, left to right:

    tasks with a better and a worse reply -> pairs of texts -> packed batches -> values at their ends -> gradients
          -> weights

The engine holds a value model; a reply's score is its value at the text's last token, when all of it has been read.
Measured is the share of held-out pairs whose better reply scores higher.

    P tasks per step   N texts, chosen before rejected, pair by pair
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from strop.algos.preference_losses import BradleyTerry
from strop.config.preferences import RewardModelConfig
from strop.config.recipe import EvaluateConfig
from strop.data.pairs import Fit, pack_scored, preference_of
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.engines.base import Engine
from strop.errors import DataError
from strop.loops.evaluate import is_due
from strop.loops.schedule import optim_params
from strop.tokens.base import Renderer
from strop.track.evaluation import Answer, Evaluation, Measured
from strop.track.run import Run
from strop.types import Metric, Reduction, Want


@dataclass(frozen=True, slots=True, kw_only=True)
class Judge:
    """Scores pairs of replies with whatever value model the engine holds."""

    engine: Engine
    renderer: Renderer
    fit: Fit

    async def scores(self, tasks: list[Task]) -> NDArray[np.float64]:
        """[P, 2]: what each task's chosen and rejected reply score. DataError when a pair does not fit a batch."""
        packed = pack_scored([preference_of(self.renderer, task) for task in tasks], self.fit)
        if packed.dropped:
            raise DataError(
                f"{packed.dropped} held-out pairs are longer than engine.pack_tokens {self.fit.max_tokens}, and an "
                "accuracy without them would be of other pairs: raise it, or take their rows out"
            )
        outputs = await self.engine.forward(packed.batches, Want(values=True))
        values = [output.values_T for output in outputs if output.values_T is not None]
        return packed.trained.gather(values).reshape(len(tasks), 2)

    async def measure(self, tasks: list[Task], stage: str, step: int) -> Evaluation:
        """Of held-out pairs, the share whose better reply scores higher; a tie is half right."""
        scores_P2 = await self.scores(tasks)
        margin_P = scores_P2[:, 0] - scores_P2[:, 1]
        right_P = 0.5 * (1.0 + np.sign(margin_P))
        preferences = [preference_of(self.renderer, task) for task in tasks]
        lengths = [int(example.trained.sum()) for p in preferences for example, _ in p.examples]
        return Evaluation(
            stage=stage,
            step=step,
            sampled_accuracy=float(right_P.mean()),
            greedy_accuracy=None,
            pass_at_k={},
            mean_reward=float(margin_P.mean()),
            mean_tokens=sum(lengths) / len(lengths),
            answers=[
                Answer(
                    task_id=task.id,
                    prompt=str(task.messages[-1].get("content", "")),
                    reply=f"{chosen:+.3f}  {task.chosen}\n{rejected:+.3f}  {task.rejected}",
                    expected=str(task.chosen),
                    reward=float(right),
                    greedy=False,
                )
                for task, (chosen, rejected), right in zip(tasks, scores_P2, right_P, strict=True)
            ],
            measured=Measured.PAIRS,
        )


async def train(
    cfg: RewardModelConfig,
    *,
    tasks: TaskStream,
    judge: Judge,
    held_out: list[Task],
    evaluate: EvaluateConfig,
    run: Run,
) -> None:
    """Train the judge's engine to score chosen replies higher, for `cfg.steps` steps from where `run` stands.

    Raises DataError for a task that has no two replies, EngineError after engine.max_skipped_steps skipped optimizer
    steps.
    """
    engine = judge.engine
    if run.step == 0 and held_out:
        run.record_evaluation(await judge.measure(held_out, "reward_model", 0))

    for step in range(run.step, cfg.steps):
        # 1. Tasks and their replies become pairs of texts, scored at their ends.
        with run.span("pack"):
            taken = tasks.take(cfg.tasks_per_step)
            packed = pack_scored([preference_of(judge.renderer, task) for task in taken], judge.fit)

        # 2. Learn.
        with run.span("learn"):
            learned = await engine.forward_backward(packed.batches, BradleyTerry(center=cfg.center))
            run.count_outcome(await engine.optim_step(optim_params(cfg.schedule, run.updates, cfg.steps)))

        # 3. Measure, record, save.
        last = step + 1 == cfg.steps
        if is_due(evaluate, held_out, step + 1, last=last):
            with run.span("evaluate"):
                run.record_evaluation(await judge.measure(held_out, "reward_model", step + 1))
        metrics = learned.metrics | {"data/dropped": Metric(Reduction.SUM, packed.dropped)}
        await run.end_step(step + 1, metrics, engine, tasks, last=last)
