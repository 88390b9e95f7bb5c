"""The controller's share of one step, without a model: python -m benchmarks.controller

    rewards -> advantages -> packed, balanced batches for eight ranks -> each rank's bytes, ready to send

CPU seconds of this process on one thread, the median of several steps, for 1,024 to 102,400 attempts in groups of 8:
prompts of 64 tokens, replies of 1 to 128 (64.5 on average), batches of at most 16,384 tokens. Every step gets attempts
that nothing has read before, as after a rollout. Beside it stands the limit: one copy of as many bytes.

verl's figures were measured once, with 0.9.1 on another machine and the same lengths (padded to 192 there); they are
printed as reported. The last line is ratio=TARGET / ours, for 10,240 attempts with shared prompts: 1 or more meets it.
"""

from __future__ import annotations

import argparse
import os
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy and torch load

import numpy as np
import torch

from strop.algos import advantages
from strop.algos.losses import PolicyInputs
from strop.data.packing import Batch, pack_policy
from strop.environment import keep_memory
from strop.types import Completion, Group, Segment, Stop, Trajectory

ResultT = TypeVar("ResultT")

RANKS = 8
GROUP = 8
PROMPT = 64
MAX_REPLY = 128
PACK_TOKENS = 16_384
TARGET_MS = 50.0
TARGET_SAMPLES = 10_240
VERL_MS = {1_024: 121.0, 10_240: 1_185.0}
"""GRPO advantages, removing padding, concatenating 8 parts, pickling and unpickling, reordering, balancing 8 ranks."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Step:
    """Milliseconds of CPU for one step's phases, and what came of it."""

    advantages: float
    pack: float
    hand_over: float
    copy: float  # the same bytes once more, from one block to another
    megabytes: float
    batches: int
    tokens: int
    imbalance: float  # the fullest batch's tokens over the mean

    @property
    def total(self) -> float:
        return self.advantages + self.pack + self.hand_over


def attempts(samples: int, seed: int) -> list[Group]:
    """Groups as a sampler leaves them: every attempt with its own copy of the prompt."""
    rng = np.random.default_rng(seed)
    lengths = rng.integers(1, MAX_REPLY + 1, samples).tolist()
    groups: list[Group] = []
    for p in range(samples // GROUP):
        prompt = rng.integers(3, 50_000, PROMPT).astype(np.int32)
        trajectories: list[Trajectory] = []
        for n in lengths[p * GROUP : (p + 1) * GROUP]:
            segment = Segment()
            segment.observe(prompt)
            logprobs = -rng.random(n).astype(np.float32)
            segment.act(
                Completion(
                    tokens=rng.integers(3, 50_000, n).astype(np.int32),
                    logprobs=logprobs,
                    sampling_logprobs=logprobs,
                    versions=np.zeros(n, np.int32),
                    stop=Stop.TOKEN,
                )
            )
            trajectories.append(Trajectory(segments=[segment], reward=float(rng.integers(0, 2))))
        groups.append(Group(f"task:{p}", trajectories))
    return groups


def tensors(batch: Batch[PolicyInputs]) -> list[torch.Tensor]:
    """What a rank needs of a batch; its layout, a few numbers for each sequence, goes beside it."""
    inputs = batch.inputs
    columns = [batch.tokens_T, batch.targets_T, batch.mask_T, batch.weights_T]
    return [*columns, inputs.behavior_logprobs_T, inputs.advantages_T]


def rank_bytes(batches: list[Batch[PolicyInputs]]) -> np.ndarray:
    """One rank's batches in one block: every tensor's bytes, once."""
    columns = [column.numpy().view(np.uint8) for batch in batches for column in tensors(batch)]
    return np.concatenate(columns)


def timed(work: Callable[[], ResultT]) -> tuple[ResultT, float]:
    """What the work returns, and its CPU milliseconds."""
    start = time.process_time()
    result = work()
    return result, (time.process_time() - start) * 1e3


def step(groups: list[Group], *, share_prefixes: bool) -> Step:
    def weigh() -> np.ndarray:
        rewards_PG = np.array([[t.reward for t in group] for group in groups])
        return advantages.grpo(rewards_PG, scale_by_std=True)

    advantages_PG, advantages_ms = timed(weigh)
    packed, pack_ms = timed(
        lambda: pack_policy(
            groups,
            advantages_PG,
            max_tokens=PACK_TOKENS,
            weighting="token_mean",
            horizon=None,
            temperature=1.0,
            share_prefixes=share_prefixes,
            data_parallel=RANKS,
        )
    )
    blocks, hand_over_ms = timed(lambda: [rank_bytes(packed.batches[r::RANKS]) for r in range(RANKS)])
    size = sum(block.nbytes for block in blocks)
    assert size == sum(column.nbytes for batch in packed.batches for column in tensors(batch))
    source = np.concatenate(blocks)
    _, copy_ms = timed(source.copy)
    fill = [len(batch) for batch in packed.batches]
    return Step(
        advantages=advantages_ms,
        pack=pack_ms,
        hand_over=hand_over_ms,
        copy=copy_ms,
        megabytes=size / 1e6,
        batches=len(fill),
        tokens=sum(fill),
        imbalance=max(fill) * len(fill) / sum(fill),
    )


def measure(samples: int, rounds: int) -> dict[bool, Step]:
    """The median step of each layout, the two taken in turns, after one that is not counted: it grows the heap."""
    steps: dict[bool, list[Step]] = {False: [], True: []}
    step(attempts(samples, rounds), share_prefixes=False)
    for r in range(rounds):
        for share_prefixes in (False, True):
            steps[share_prefixes].append(step(attempts(samples, r), share_prefixes=share_prefixes))
    return {share: sorted(found, key=lambda s: s.total)[len(found) // 2] for share, found in steps.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, nargs="+", default=[1_024, 10_240, 102_400], help="attempts in one step")
    parser.add_argument("--rounds", type=int, default=5, help="steps of each size and layout; the largest takes two")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    keep_memory()  # as a run does
    print("CPU milliseconds, one thread; medians")
    print(
        f"{'samples':>8} {'prompts':>8} {'advantages':>10} {'pack':>8} {'hand-over':>9} {'total':>8} {'one copy':>8} "
        f"{'MB':>7} {'tokens':>10} {'batches':>7} {'max/mean':>8}"
    )
    ratio = None
    for samples in arguments.samples:
        found = measure(samples, arguments.rounds if samples <= TARGET_SAMPLES else 2)
        for share, s in found.items():
            print(
                f"{samples:>8} {'shared' if share else 'repeated':>8} {s.advantages:>10.1f} {s.pack:>8.1f} "
                f"{s.hand_over:>9.1f} {s.total:>8.1f} {s.copy:>8.1f} {s.megabytes:>7.1f} {s.tokens:>10} {s.batches:>7} "
                f"{s.imbalance:>8.3f}"
            )
        if samples in VERL_MS:
            print(f"{samples:>8} verl 0.9.1, reported: {VERL_MS[samples]:.0f}")
        if samples == TARGET_SAMPLES:
            ratio = TARGET_MS / found[True].total
    if ratio is not None:
        print(
            f"ratio={ratio:.2f} (at most {TARGET_MS:.0f} ms of CPU for {TARGET_SAMPLES} samples, over ours; 1 meets it)"
        )


if __name__ == "__main__":
    main()
