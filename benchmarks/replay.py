"""What replaying and recording routes cost a training step: python -m benchmarks.replay

A Qwen3-MoE of 16 experts, 4 a token, and packed batches of 1024 tokens, one thread, float32. CPU seconds of this
process; the forms take turns in every round, in an order that changes, and each one's time is compared with the plain
form's of the same round. Printed are medians over the rounds. `replay` gives every token the routes of other weights;
`record` returns those that were taken.

The last line is ratio= the largest cost of replay over its limit of 5 %, or of recording over its limit of 3 %:
below 1 both hold.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import random
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads

import numpy as np
import torch
from torch import Tensor, nn

from strop.algos.losses import ImportanceSampling, PolicyInputs
from strop.config.model import ModelConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import Engine
from strop.engines.build import build_engine
from strop.models.loading import load_model
from strop.types import Layout, Routes, Want

FRESH = {
    "model_type": "qwen3_moe", "hidden_size": 256, "intermediate_size": 512, "moe_intermediate_size": 128,
    "num_experts": 16, "num_experts_per_tok": 4, "norm_topk_prob": True, "num_hidden_layers": 4,
    "num_attention_heads": 4, "num_key_value_heads": 4, "max_position_embeddings": 256,
}  # fmt: skip
VOCABULARY = 512
LENGTHS = (128,) * 8
LIMITS = {"replay": 0.05, "record": 0.03}


def engine(seed: int) -> Engine:
    model = load_model(
        ModelConfig.model_validate({"fresh": FRESH, "tokenizer": "none"}), vocab_size=VOCABULARY, seed=seed
    )
    with torch.no_grad():
        for parameter in model.module.parameters():
            if parameter.ndim >= 2:
                nn.init.normal_(parameter, std=0.05)
    return build_engine(EngineConfig(), model)


def batch() -> Batch[PolicyInputs]:
    rng, layout = np.random.default_rng(0), Layout(LENGTHS)
    tokens_T = rng.integers(0, VOCABULARY, layout.num_tokens)
    targets_T = np.append(tokens_T[1:], -1)
    targets_T[layout.starts_S + layout.lengths_S - 1] = -1
    mask_T = targets_T >= 0
    ones_T = torch.ones(len(mask_T))
    return Batch(
        tokens_T=torch.from_numpy(tokens_T),
        targets_T=torch.from_numpy(targets_T),
        mask_T=torch.from_numpy(mask_T),
        weights_T=torch.from_numpy(mask_T / mask_T.sum()).float(),
        layout=layout,
        inputs=PolicyInputs(behavior_logprobs_T=-ones_T, advantages_T=ones_T),
    )


def seconds(run: Callable[[], object]) -> float:
    began = time.process_time()
    run()
    return time.process_time() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    at, of, loss = engine(0), batch(), ImportanceSampling()
    routes = asyncio.run(engine(1).forward([of], Want(routes=True)))[0].routes
    own = asyncio.run(at.forward([of], Want(routes=True)))[0].routes
    assert routes is not None and own is not None
    given, itself = replace(of, routes=routes), replace(of, routes=own)

    def learn(batch: Batch[PolicyInputs], want: Want) -> Tensor:
        asyncio.run(at.zero_grad())
        return asyncio.run(at.forward_backward([batch], loss, want)).outputs[0].logprobs_T

    def score(batch: Batch[PolicyInputs], want: Want) -> Tensor:
        return asyncio.run(at.forward([batch], want))[0].logprobs_T

    forms: dict[str, Callable[[], Tensor]] = {
        "learn": lambda: learn(of, Want()),
        "learn, replay": lambda: learn(itself, Want()),
        "learn, record": lambda: learn(of, Want(routes=True)),
        "score": lambda: score(of, Want()),
        "score, replay": lambda: score(itself, Want()),
        "score, record": lambda: score(of, Want(routes=True)),
    }
    print(f"routes of other weights differ for {_differ(routes, own):.0%} of choices; replaying them:", end=" ")
    print(f"{seconds(lambda: learn(given, Want())):.2f} CPU s (another load on the experts, so another time)")
    taken: dict[str, list[float]] = {name: [] for name in forms}
    for name in forms:
        forms[name]()
    for _ in range(rounds):
        for name in random.sample(list(forms), len(forms)):
            taken[name].append(seconds(forms[name]))
    worst = 0.0
    for name, times in taken.items():
        kind, _, what = name.partition(", ")
        line = f"{name:14} {statistics.median(times):7.3f} CPU s"
        if what:
            cost = statistics.median(t / plain for t, plain in zip(times, taken[kind], strict=True)) - 1.0
            worst = max(worst, cost / LIMITS[what])
            line += f"  {cost:+.1%} (limit {LIMITS[what]:.0%})"
        print(line, flush=True)
    print(f"ratio={worst:.2f}")


def _differ(one: Routes, other: Routes) -> float:
    return float((np.sort(one.experts_TLK, -1) != np.sort(other.experts_TLK, -1)).any(-1).mean())


if __name__ == "__main__":
    main()
