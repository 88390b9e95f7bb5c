"""strop's side of benchmarks/sampler.py: the built-in sampler on one workload, its logprobs checked in the same run."""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from pathlib import Path

import numpy as np
import torch

from benchmarks.peers import common
from benchmarks.peers.ids import prompt_ids
from strop.config.recipe import ModelConfig
from strop.models.loading import load_model
from strop.rollout.builtin.sampler import BuiltinSampler
from strop.types import Completion, Prompt, SamplingParams

LARGEST_GAP = 1e-5  # between a reported logprob and a packed forward pass over the same tokens


async def roll_out(
    sampler: BuiltinSampler, prompts: list[Prompt], workload: common.Workload, run: int
) -> list[Completion]:
    requests = [
        sampler.sample(
            prompt,
            SamplingParams(max_tokens=workload.max_tokens, stop_tokens=(common.EOS,), seed=1000 * run + 8 * p + g),
        )
        for p, prompt in enumerate(prompts)
        for g in range(workload.group)
    ]
    return list(await asyncio.gather(*requests))


async def largest_gap(sampler: BuiltinSampler, prompt: Prompt, completions: list[Completion]) -> float:
    gaps: list[float] = []
    for completion in completions:
        scored = await sampler.score(Prompt(np.concatenate((prompt.tokens, completion.tokens))))
        gaps.append(float(np.abs(scored[len(prompt.tokens) :] - completion.logprobs).max()))
    return max(gaps)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=common.WORKLOADS)
    parser.add_argument("--mode", choices=["native", "torch"], default="native", help="which kernels")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--assets", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workload = common.WORKLOADS[arguments.workload]
    folder = common.build(workload.model, arguments.assets)
    config = ModelConfig.model_validate({"path": str(folder), "kernels": arguments.mode})
    sampler = BuiltinSampler(load_model(config, vocab_size=0, seed=0), max_running=256, cache_tokens=65_536)
    prompts = [Prompt(np.array(ids, np.int32)) for ids in prompt_ids(workload)]
    for run in range(arguments.repeats):
        cpu, wall = time.process_time(), time.time()
        completions = asyncio.run(roll_out(sampler, prompts, workload, run))
        cpu, wall = time.process_time() - cpu, time.time() - wall
        tokens = sum(len(completion.tokens) for completion in completions)
        gap = asyncio.run(largest_gap(sampler, prompts[0], completions[: workload.group]))
        if gap > LARGEST_GAP:
            raise SystemExit(f"a reported logprob is {gap:.1e} from the forward pass over the same tokens")
        print("RUN", json.dumps({"cpu_s": cpu, "wall_s": wall, "tokens": tokens, "gap": gap}), flush=True)


if __name__ == "__main__":
    main()
