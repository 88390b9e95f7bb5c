"""Attempts of one or several segments and turns, with random tokens and logprobs."""

from __future__ import annotations

import numpy as np

from strop.types import Completion, Group, Segment, Stop, Trajectory


def segment(rng: np.random.Generator, prompt: list[int], turns: int) -> Segment:
    made = Segment()
    made.observe(np.array(prompt, np.int32))
    for _ in range(turns):
        n = int(rng.integers(1, 4))
        made.act(
            Completion(
                tokens=rng.integers(0, 50, n).astype(np.int32),
                logprobs=rng.normal(size=n).astype(np.float32),
                sampling_logprobs=np.zeros(n, np.float32),
                versions=np.zeros(n, np.int32),
                stop=Stop.TOKEN,
            )
        )
        made.observe(rng.integers(0, 50, int(rng.integers(0, 3))).astype(np.int32))
    return made


def random_groups(rng: np.random.Generator) -> list[Group]:
    """Attempts of one or several segments, some of which nothing was sampled in."""
    groups: list[Group] = []
    for p in range(int(rng.integers(1, 5))):
        prompt = [100 + p, *rng.integers(0, 50, int(rng.integers(0, 4))).tolist()]
        attempts = [
            Trajectory([segment(rng, prompt, int(rng.integers(0, 3))) for _ in range(int(rng.integers(1, 4)))])
            for _ in range(3)
        ]
        groups.append(Group(f"t{p}", attempts))
    return groups
