"""A training loop with everything that a run records and nothing else: a few numbers that learn."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import numpy as np

from strop.config.recipe import Recipe
from strop.engines.base import Applied, OptimOutcome, OptimParams, SkipReason
from strop.track.evaluation import Answer, Evaluation
from strop.track.run import Run, stages
from strop.types import (
    Completion,
    Ending,
    Group,
    Int32s,
    Metric,
    Reduction,
    Segment,
    Stop,
    StreamState,
    Trajectory,
    merge_metrics,
)


def recipe(arguments: dict[str, Any] | None = None, **run: Any) -> Recipe:
    """Two stages of three and five steps, saved every second."""
    return Recipe.model_validate(
        {
            "model": {"path": "models/base"},
            "tasks": {"source": "python", "path": "tasks.py:make", "arguments": arguments or {}},
            "evaluate": {"every": 2},
            "sft": {"steps": 3},
            "grpo": {"steps": 5, "updates_per_step": 2},
            "run": {"save_every": 2, "samples_per_step": 3} | run,
        }
    )


def decode(tokens: Int32s) -> str:
    return " ".join(str(token) for token in tokens)


class FakeStream:
    """An epoch of five tasks in another order each time; its position is all its state. (D02)"""

    def __init__(self) -> None:
        self.epoch = self.position = 0

    def take(self, count: int) -> list[int]:
        taken: list[int] = []
        for _ in range(count):
            taken.append(int(np.random.default_rng(self.epoch).permutation(5)[self.position]))
            self.position += 1
            if self.position == 5:
                self.epoch, self.position = self.epoch + 1, 0
        return taken

    def state(self) -> StreamState:
        return StreamState(seed=0, epoch=self.epoch, position=self.position, ended=[], fingerprint=0)

    def restore(self, state: StreamState) -> None:
        self.epoch, self.position = state["epoch"], state["position"]


class FakeEngine:
    """One parameter under Adam: what comes next depends on moments and the step count as well as on the value. (D06)"""

    def __init__(self) -> None:
        self.value = self.first = self.second = self.gradient = 0.0
        self.count = 0

    def forward_backward(self, tasks: list[int]) -> float:
        self.gradient += sum(2 * (self.value - 0.1 * task) for task in tasks)
        return sum((self.value - 0.1 * task) ** 2 for task in tasks)

    def optim_step(self, params: OptimParams) -> OptimOutcome:
        norm, self.gradient = self.gradient, 0.0
        if not math.isfinite(norm):
            return OptimOutcome(grad_norm=norm, skipped=True, reason=SkipReason.NON_FINITE_GRADIENT)
        self.count += 1
        self.first = 0.9 * self.first + 0.1 * norm
        self.second = 0.99 * self.second + 0.01 * norm * norm
        ahead = self.first / (1 - 0.9**self.count)
        assert isinstance(params.lr, float)
        self.value -= params.lr * ahead / (math.sqrt(self.second / (1 - 0.99**self.count)) + 1e-8)
        return OptimOutcome(grad_norm=abs(norm), applied={"adamw/decay": Applied(lr=params.lr)})

    async def save(self, folder: Path) -> None:
        assert folder.is_dir() and not any(folder.iterdir()), "save needs an existing, empty folder"
        (folder / "engine.json").write_text(json.dumps([self.value, self.first, self.second, self.count]))

    async def load(self, folder: Path) -> None:
        self.value, self.first, self.second, self.count = json.loads((folder / "engine.json").read_text())


def trajectory(prompt: list[int], reply: list[int], reward: float, ending: Ending = Ending.DONE) -> Trajectory:
    segment = Segment()
    segment.observe(np.array(prompt, np.int32))
    zeros = np.zeros(len(reply), np.float32)
    segment.act(
        Completion(
            tokens=np.array(reply, np.int32),
            logprobs=zeros,
            sampling_logprobs=zeros,
            versions=np.zeros(len(reply), np.int32),
            stop=Stop.TOKEN,
        )
    )
    return Trajectory(segments=[segment], reward=reward, rewards={"format": 1.0}, ending=ending)


def evaluation(stage: str, step: int, accuracy: float) -> Evaluation:
    return Evaluation(
        stage=stage,
        step=step,
        sampled_accuracy=accuracy,
        greedy_accuracy=accuracy / 2,
        pass_at_k={1: accuracy, 4: min(1.0, 2 * accuracy)},
        mean_reward=accuracy,
        mean_tokens=3.5,
        answers=[Answer(task_id="t0", prompt="1 + 1", reply=f"{step}", expected="2", reward=accuracy, greedy=True)],
    )


async def one_stage(run: Run, stage: str, engine: FakeEngine) -> None:
    """What a loop of strop does with a run, in its order."""
    stream = FakeStream()
    if not await run.begin(stage, engine, stream):
        return
    steps = stages(run.recipe)[stage]
    if run.step == 0:
        run.record_evaluation(evaluation(stage, 0, _accuracy(engine)))
    for step in range(run.step, steps):
        with run.span("sample"):
            tasks = stream.take(4)
            groups = [
                Group(str(task), [trajectory([task], [step, i], engine.value * i) for i in range(3)]) for task in tasks
            ]
        metrics = {"reward/mean": Metric(Reduction.MEAN, engine.value, 4)}
        for half in (tasks[:2], tasks[2:]):
            with run.span("learn"):
                loss = engine.forward_backward(half)
                run.count_outcome(engine.optim_step(OptimParams(lr=0.1 / (1 + run.updates))))  # D07
            metrics = merge_metrics([metrics, {"loss": Metric(Reduction.MEAN, loss, 2)}])
        last = step + 1 == steps
        if last or (step + 1) % 2 == 0:
            run.record_evaluation(evaluation(stage, step + 1, _accuracy(engine)))
        run.samples(step + 1, groups)
        await run.end_step(step + 1, metrics, engine, stream, last=last)


def _accuracy(engine: FakeEngine) -> float:
    return math.exp(-((engine.value - 0.2) ** 2))


async def all_stages(run: Run) -> FakeEngine:
    engine = FakeEngine()
    with run:
        for stage in stages(run.recipe):
            await one_stage(run, stage, engine)
    return engine
