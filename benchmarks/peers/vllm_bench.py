"""vLLM for CPUs on one workload's prompts: python -m benchmarks.peers.vllm_bench A --mode compile --assets DIR

CPU seconds are those of the whole process tree: vLLM works in processes of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from pathlib import Path

from benchmarks.peers import common
from benchmarks.peers.ids import prompt_ids

# Read by vllm when it is imported.
os.environ.setdefault("VLLM_CPU_KVCACHE_SPACE", "1")
os.environ.setdefault("VLLM_LOGGING_LEVEL", "WARNING")
os.environ.setdefault("HF_HUB_OFFLINE", "1")


def cpu_seconds() -> float:
    import psutil

    here = psutil.Process()
    tree = [here, *here.children(recursive=True)]
    return sum(sum(process.cpu_times()[:2]) for process in tree)


def main() -> None:
    from vllm import LLM, SamplingParams  # pyright: ignore[reportMissingImports]

    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("workload", choices=common.WORKLOADS)
    parser.add_argument("--mode", choices=["compile", "eager"], default="compile")
    parser.add_argument("--repeats", type=int, default=2)
    parser.add_argument("--assets", type=Path, required=True)
    arguments = parser.parse_args()
    workload = common.WORKLOADS[arguments.workload]
    began = time.time()
    llm = LLM(
        model=str(common.build(workload.model, arguments.assets)),
        dtype="float32",
        max_model_len=workload.longest + workload.max_tokens + 64,
        enforce_eager=arguments.mode == "eager",
        max_num_seqs=256,
        max_num_batched_tokens=4096,
        seed=0,
    )
    print(f"vllm was ready after {time.time() - began:.0f} s", flush=True)
    params = SamplingParams(
        n=workload.group, temperature=1.0, max_tokens=workload.max_tokens, logprobs=0, detokenize=False
    )
    prompts = [{"prompt_token_ids": ids} for ids in prompt_ids(workload)]
    for _ in range(arguments.repeats):
        cpu, wall = cpu_seconds(), time.time()
        answers = llm.generate(prompts, params, use_tqdm=False)
        cpu, wall = cpu_seconds() - cpu, time.time() - wall
        tokens = sum(len(output.token_ids) for answer in answers for output in answer.outputs)
        print("RUN", json.dumps({"cpu_s": cpu, "wall_s": wall, "tokens": tokens}), flush=True)


if __name__ == "__main__":
    main()
