"""transformers on one workload's prompts: `generate` on padded batches, or `generate_batch`, its continuous batching.

Usage: python -m benchmarks.peers.hf_gen A --mode generate --assets DIR
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, GenerationConfig

from benchmarks.peers import common
from benchmarks.peers.ids import prompt_ids


def generate(model: Any, prompts: list[list[int]], config: GenerationConfig) -> int:
    """All prompts in one left-padded batch, with the cache that transformers takes by default. Returns tokens drawn."""
    longest = max(map(len, prompts))
    ids = torch.tensor([[common.PAD] * (longest - len(prompt)) + prompt for prompt in prompts])
    mask = torch.tensor([[0] * (longest - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    drawn = model.generate(input_ids=ids, attention_mask=mask, generation_config=config)[:, longest:]
    ended_before = (drawn == common.EOS).int().cumsum(1) - (drawn == common.EOS).int()
    return int((ended_before == 0).sum())


def generate_batch(model: Any, prompts: list[list[int]], config: GenerationConfig) -> int:
    answers = model.generate_batch(prompts, generation_config=config, progress_bar=False)
    return sum(len(answer.generated_tokens) for answer in answers.values())


MODES = {"generate": generate, "generate_batch": generate_batch}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=common.WORKLOADS)
    parser.add_argument("--mode", choices=MODES, default="generate")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--assets", type=Path, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    workload = common.WORKLOADS[arguments.workload]
    folder = common.build(workload.model, arguments.assets)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa").eval()
    prompts = [ids for ids in prompt_ids(workload) for _ in range(workload.group)]
    config = GenerationConfig(
        max_new_tokens=workload.max_tokens,
        do_sample=True,
        temperature=1.0,
        top_k=0,
        top_p=1.0,
        eos_token_id=common.EOS,
        pad_token_id=common.PAD,
    )
    for run in range(arguments.repeats):
        torch.manual_seed(run)
        cpu, wall = time.process_time(), time.time()
        with torch.no_grad():
            tokens = MODES[arguments.mode](model, prompts, config)
        cpu, wall = time.process_time() - cpu, time.time() - wall
        print("RUN", json.dumps({"cpu_s": cpu, "wall_s": wall, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
