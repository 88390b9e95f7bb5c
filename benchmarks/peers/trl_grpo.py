"""TRL's GRPOTrainer on one workload: python -m benchmarks.peers.trl_grpo A --steps 2 --assets DIR

It runs in an environment of its own, with trl==1.16.0. Settings are TRL's defaults except for what the workload fixes,
and gradient checkpointing, which is off: it would only slow TRL down.
"""

from __future__ import annotations

import argparse
import os
import tempfile
import time
from pathlib import Path
from typing import Any

os.environ["HF_HUB_OFFLINE"] = "1"
os.environ["TOKENIZERS_PARALLELISM"] = "false"

import torch
from datasets import Dataset
from transformers import AutoTokenizer, TrainerCallback
from trl import GRPOConfig, GRPOTrainer  # pyright: ignore[reportMissingImports]

from benchmarks.peers import common


class Clock(TrainerCallback):
    """CPU seconds of the parts of a step, and of the whole step, read where TRL calls them."""

    def __init__(self) -> None:
        self.rollout = self.scoring = 0.0
        self.completion_tokens = 0
        self.begun = self.begun_wall = 0.0

    def attach(self, trainer: Any) -> None:
        generate, score = trainer._generate_single_turn, trainer._generate_and_score_completions

        def timed_generate(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = generate(*args, **kwargs)
            self.rollout += time.process_time() - start
            self.completion_tokens += sum(map(len, result[0] if isinstance(result, tuple) else result))
            return result

        def timed_score(*args: Any, **kwargs: Any) -> Any:
            start = time.process_time()
            result = score(*args, **kwargs)
            self.scoring += time.process_time() - start
            return result

        trainer._generate_single_turn = timed_generate
        trainer._generate_and_score_completions = timed_score

    def _restart(self) -> None:
        self.rollout = self.scoring = 0.0
        self.completion_tokens = 0
        self.begun, self.begun_wall = time.process_time(), time.perf_counter()

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self._restart()

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        step = time.process_time() - self.begun
        common.report_step(
            rollout=self.rollout,
            learn=step - self.scoring,  # forward, backward and the optimizer
            step=step,
            wall=time.perf_counter() - self.begun_wall,
            completion_tokens=self.completion_tokens,
        )
        self._restart()


def rewards(prompts: Any, completions: Any, completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [common.reward(ids) for ids in completion_ids]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("workload", choices=sorted(common.WORKLOADS))
    parser.add_argument("--steps", type=int, default=2)
    parser.add_argument("--assets", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workload = common.WORKLOADS[arguments.workload]
    folder = common.build(workload.model, arguments.assets)
    micro_batches = workload.tasks * workload.group // workload.micro_batch
    with tempfile.TemporaryDirectory() as output:
        config = GRPOConfig(
            output_dir=output,
            per_device_train_batch_size=workload.micro_batch,
            gradient_accumulation_steps=micro_batches,
            steps_per_generation=micro_batches,
            num_generations=workload.group,
            max_completion_length=workload.max_tokens,
            learning_rate=1e-6,
            lr_scheduler_type="constant",
            max_steps=arguments.steps,
            temperature=1.0,
            beta=0.0,
            seed=0,
            shuffle_dataset=False,
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            model_init_kwargs={"dtype": "float32", "attn_implementation": "sdpa"},
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
        )
        clock = Clock()
        trainer = GRPOTrainer(
            model=str(folder),
            reward_funcs=rewards,
            args=config,
            train_dataset=Dataset.from_dict({"prompt": workload.prompts()}),
            processing_class=AutoTokenizer.from_pretrained(folder),
            callbacks=[clock],
        )
        clock.attach(trainer)
        base = common.memory_mb("VmRSS")
        trainer.train()
        common.report_result(base_rss_mb=base)


if __name__ == "__main__":
    main()
