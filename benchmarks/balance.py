"""How evenly a step's work is dealt to ranks, beside verl's way and the order of arrival: python -m benchmarks.balance

    lengths of a step's texts -> batches of at most --pack-tokens for each rank -> each rank's work, each round's work

The work of a text of n tokens is 24,576 n + n^2, as strop and verl both count it. `sums` is the work of the busiest
rank over the mean, less 1: what ranks lose that wait for one another once in a step. `rounds` takes the busiest rank
of every round of batches: what ranks lose that gather weights together in every batch. `batches` is a rank's number of
forward passes, `ms` the CPU time of one thread.

Lengths: `gym` are questions of seven of reasoning-gym's generators, 4 letters a token, with log-normal replies (mean
107); `gsm` and `reasoning` are log-normal, with the mean and spread of replies to school problems (mean 230 tokens, at
most 1,024) and of long reasoning (mean 3,000, at most 16,384).

verl's way, from its definition: Karmarkar and Karp's largest differencing method over the works, into as many parts
as ranks, all of one number of texts; then again in each rank, into as many batches as its tokens need, the largest of
all ranks' numbers. A part may come out over --pack-tokens: `over` counts such batches. `arrival` cuts the texts into
as many runs as ranks and fills batches in order.

The last line is ratio=3 % / strop's largest `sums`: 1 or more meets the aim.
"""

from __future__ import annotations

import argparse
import heapq
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

os.environ["OMP_NUM_THREADS"] = "1"  # read when numpy loads

import numpy as np
from numpy.typing import NDArray

from strop.data.placement import cost, place

Int64s = NDArray[np.int64]
Dealt = list[list[list[int]]]  # by rank, by round: texts
GYM = ("gcd", "chain_sum", "basic_arithmetic", "caesar_cipher", "countdown", "spell_backward", "letter_counting")
AIM = 0.03


@dataclass(frozen=True, slots=True, kw_only=True)
class Evenness:
    sums: float
    rounds: float
    batches: int
    over: int
    ms: float


def lengths_of(source: str, count: int, seed: int) -> Int64s:
    rng = np.random.default_rng(seed)
    if source == "gym":
        return _gym(count, rng)
    mean, sigma, most = {"gsm": (230, 0.5, 1_024), "reasoning": (3_000, 0.8, 16_384)}[source]
    return rng.lognormal(np.log(mean) - sigma**2 / 2, sigma, count).clip(16, most).astype(np.int64)


def _gym(count: int, rng: np.random.Generator) -> Int64s:
    import reasoning_gym

    each = 64
    texts = [len(entry["question"]) for name in GYM for entry in reasoning_gym.create_dataset(name, size=each, seed=1)]
    prompts = np.array(texts) // 4
    return (rng.choice(prompts, count) + rng.lognormal(4.5, 0.6, count)).clip(16, 4_096).astype(np.int64)


def work(lengths: Int64s) -> Int64s:
    return cost(lengths, np.zeros_like(lengths))


def ours(lengths: Int64s, ranks: int, pack_tokens: int) -> Dealt:
    bin_S, bins = place(work(lengths), lengths, capacity=pack_tokens, multiple=ranks)
    dealt: Dealt = [[[] for _ in range(bins // ranks)] for _ in range(ranks)]
    for s, b in enumerate(bin_S.tolist()):
        dealt[b % ranks][b // ranks].append(s)
    return dealt


def arrival(lengths: Int64s, ranks: int, pack_tokens: int) -> Dealt:
    dealt: Dealt = []
    for part in np.array_split(np.arange(len(lengths)), ranks):
        batches: list[list[int]] = [[]]
        held = 0
        for s in part.tolist():
            if held + lengths[s] > pack_tokens:
                batches.append([])
                held = 0
            batches[-1].append(s)
            held += int(lengths[s])
        dealt.append(batches)
    return dealt


def verls(lengths: Int64s, ranks: int, pack_tokens: int) -> Dealt:
    parts = differencing(work(lengths).tolist(), ranks, equal_size=True)
    most = max(-(-int(lengths[part].sum()) // pack_tokens) for part in parts)
    return [
        [[part[i] for i in batch] for batch in differencing(work(lengths[part]).tolist(), most, equal_size=False)]
        for part in parts
    ]


def differencing(works: Sequence[int], parts: int, *, equal_size: bool) -> list[list[int]]:
    """Karmarkar and Karp's method: join the two partial partitions with the largest differences, fullest part with
    emptiest. With `equal_size` it begins with `parts` texts at a time, one in each part, and so all stay alike."""
    order = sorted(range(len(works)), key=lambda i: works[i])
    step = parts if equal_size else 1
    if len(order) % step:
        raise ValueError(f"{len(order)} texts do not go into {parts} parts of one size")
    heap: list[tuple[int, int, list[tuple[int, list[int]]]]] = []
    for n, first in enumerate(range(0, len(order), step)):
        some = [(works[i], [i]) for i in order[first : first + step]]
        filled = sorted([*some, *[(0, list[int]()) for _ in range(parts - len(some))]], key=lambda p: -p[0])
        heapq.heappush(heap, (filled[-1][0] - filled[0][0], n, filled))
    while len(heap) > 1:
        (_, n, a), (_, _, b) = heapq.heappop(heap), heapq.heappop(heap)
        joined = [(x + y, xs + ys) for (x, xs), (y, ys) in zip(a, reversed(b), strict=True)]
        joined.sort(key=lambda p: -p[0])
        heapq.heappush(heap, (joined[-1][0] - joined[0][0], n, joined))
    return [members for _, members in heap[0][2]]


def measure(deal: Callable[[Int64s, int, int], Dealt], lengths: Int64s, ranks: int, pack_tokens: int) -> Evenness:
    began = time.process_time()
    dealt = deal(lengths, ranks, pack_tokens)
    ms = (time.process_time() - began) * 1e3
    assert sorted(s for rank in dealt for batch in rank for s in batch) == list(range(len(lengths)))
    works = work(lengths)
    most = max(map(len, dealt))
    loads = np.zeros((ranks, most))
    for r, rank in enumerate(dealt):
        by_work = sorted((int(works[batch].sum()) for batch in rank), reverse=True)  # as verl and strop both order them
        loads[r, : len(by_work)] = by_work
    sums = loads.sum(1)
    return Evenness(
        sums=float(sums.max() / sums.mean() - 1),
        rounds=float(loads.max(0).sum() / sums.mean() - 1),
        batches=most,
        over=sum(int(lengths[batch].sum()) > pack_tokens for rank in dealt for batch in rank),
        ms=ms,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=4_096)
    parser.add_argument("--ranks", type=int, nargs="+", default=[8, 64])
    parser.add_argument(
        "--sources", nargs="+", choices=["gym", "gsm", "reasoning"], default=["gym", "gsm", "reasoning"]
    )
    parser.add_argument("--pack-tokens", type=int, default=32_768)
    parser.add_argument("--seed", type=int, default=0)
    arguments = parser.parse_args()
    print(f"{'lengths':>10} {'ranks':>5} {'':>8} {'sums':>8} {'rounds':>8} {'batches':>7} {'over':>5} {'ms':>8}")
    worst = 0.0
    for source in arguments.sources:
        lengths = lengths_of(source, arguments.samples, arguments.seed)
        for ranks in arguments.ranks:
            for name, deal in (("strop", ours), ("verl", verls), ("arrival", arrival)):
                e = measure(deal, lengths, ranks, arguments.pack_tokens)
                worst = max(worst, e.sums) if name == "strop" else worst
                print(
                    f"{source:>10} {ranks:>5} {name:>8} {e.sums:>8.2%} {e.rounds:>8.2%} {e.batches:>7} {e.over:>5} "
                    f"{e.ms:>8.1f}"
                )
    print(f"ratio={AIM / max(worst, 1e-9):.2f} (at most {AIM:.0%} over the mean, over strop's {worst:.2%}; 1 meets it)")


if __name__ == "__main__":
    main()
