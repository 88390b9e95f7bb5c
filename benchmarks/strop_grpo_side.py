"""strop's side of benchmarks/grpo_step.py: loops/grpo.py itself, on the workloads of benchmarks/peers/common.py."""

from __future__ import annotations

import argparse
import asyncio
import json
import tempfile
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoTokenizer

from benchmarks.peers import common
from strop.config.loops import ScheduleConfig
from strop.config.policy import AdvantageConfig, GRPOConfig, PolicyLossConfig
from strop.config.recipe import EngineConfig, EvaluateConfig, ModelConfig, Recipe, TasksConfig, TooLong
from strop.data.stream import TaskStream
from strop.data.tasks import Task
from strop.engines.build import build_engine
from strop.envs.base import EnvStep
from strop.loops import grpo
from strop.loops.evaluate import Evaluator
from strop.models.loading import load_model
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.rollout.groups import Player
from strop.track.run import Run
from strop.types import Int32s, Message, SamplingParams


class Ids:
    """A renderer that keeps a reply's token ids as text, because this workload scores ids."""

    stop_tokens: tuple[int, ...] = (common.EOS,)

    def __init__(self, folder: Path) -> None:
        self._tokenizer = AutoTokenizer.from_pretrained(folder)

    def start(self, messages: list[Message]) -> Int32s:
        return np.asarray(self._tokenizer(messages[0].get("content", ""))["input_ids"], np.int32)

    def observe(self, history: list[Message], new: list[Message], last: Int32s) -> Int32s | None:
        return None

    def answer(self, messages: list[Message], text: str) -> tuple[Int32s, int]:
        raise NotImplementedError("this workload has no answers to imitate")

    def parse(self, tokens: Int32s) -> Message:
        return {"role": "assistant", "content": " ".join(map(str, tokens.tolist()))}


class EvenIds:
    """Rewards the fraction of even ids in a reply."""

    def __init__(self, task: Task) -> None:
        self._task = task

    async def start(self) -> list[Message]:
        return self._task.messages

    async def step(self, reply: Message) -> EnvStep:
        return EnvStep(reward=common.reward([int(word) for word in reply.get("content", "").split()]))


async def run(workload: common.Workload, steps: int, assets: Path, pack_tokens: int, kernels: str) -> None:
    folder = common.build(workload.model, assets)
    tasks = [
        Task(id=str(i), messages=[{"role": "user", "content": prompt}], answer="", source="benchmark", meta={})
        for i, prompt in enumerate(workload.prompts())
    ]
    cfg = GRPOConfig(
        steps=steps,
        tasks_per_step=workload.tasks,
        group_size=workload.group,
        schedule=ScheduleConfig(lr=1e-6),
        advantage=AdvantageConfig.model_validate({"scale_by_std": True}),
        loss=PolicyLossConfig.model_validate({"clip_high": 0.2}),
    )
    packing = EngineConfig(pack_tokens=pack_tokens, head="plain")
    recipe = Recipe(
        model=ModelConfig.model_validate({"path": str(folder), "kernels": kernels}),
        tasks=TasksConfig(source="python", path="benchmark"),
        engine=packing,
        evaluate=EvaluateConfig(),
        grpo=cfg,
    )
    model = load_model(recipe.model, vocab_size=0, seed=0)
    cache_tokens = workload.tasks * (workload.longest + workload.group * workload.max_tokens * 3 // 4)
    sampler = BuiltinSampler(model.clone(), max_running=256, cache_tokens=cache_tokens)
    engine, renderer = build_engine(packing, model), Ids(folder)
    player = Player(sampler, renderer, EvenIds, seed=0, max_turns=1)
    params = SamplingParams(max_tokens=workload.max_tokens, stop_tokens=renderer.stop_tokens)
    evaluator = Evaluator(cfg=recipe.evaluate, tasks=[], player=player, renderer=renderer, params=params)
    base_rss_mb = common.memory_mb("VmRSS")
    with tempfile.TemporaryDirectory() as scratch:
        out = Path(scratch) / "run"
        stream = TaskStream(tasks, seed=0)
        with Run.start(out, recipe, decode=lambda tokens: "") as record:
            await record.begin("grpo", engine, stream)
            began, wall = time.process_time(), time.time()
            await grpo.train(
                cfg,
                tasks=stream,
                player=player,
                params=params,
                engine=engine,
                sampler=sampler,
                evaluator=evaluator,
                run=record,
                packing=packing,
                too_long=TooLong.ERROR,
                max_gap=1e-4,
            )
            total, elapsed = time.process_time() - began, time.time() - wall
        rows = [json.loads(line) for line in (out / "metrics.jsonl").read_text().splitlines()]
    for row in rows:
        phases = {key.removeprefix("time/cpu/"): value for key, value in row.items() if key.startswith("time/cpu/")}
        common.report_step(
            rollout=phases["sample"],
            learn=phases["learn"] + phases["pack"],
            step=sum(phases.values()),
            wall=row["time/step"],
            completion_tokens=round(row["rollout/tokens_mean"] * workload.tasks * workload.group),
        )
    print(f"all {steps} steps: {total:.2f} CPU s, {elapsed:.2f} wall s; gap {rows[-1]['sampler/gap_max']:.1e}")
    common.report_result(base_rss_mb=base_rss_mb)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=common.WORKLOADS)
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--assets", type=Path, required=True)
    parser.add_argument("--pack-tokens", type=int, default=2048)
    parser.add_argument("--kernels", default="native")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workload = common.WORKLOADS[arguments.workload]
    asyncio.run(run(workload, arguments.steps, arguments.assets, arguments.pack_tokens, arguments.kernels))


if __name__ == "__main__":
    main()
