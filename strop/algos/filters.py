"""Rewards in, rewards or a choice of groups out: what is kept and what is docked before advantages are taken.

Everything is NumPy float64. NaN stands for a missing reward (the attempt failed) and is never read as 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Int64s = NDArray[np.int64]
Bools = NDArray[np.bool_]

REWARD_NOISE = 1e-6
"""Rewards of one group count as equal when they lie within this, times the larger of 1 and their size, of each other."""


def informative(rewards_PG: Float64s) -> Bools:
    """Which groups say anything: bool [P], False where the rewards agree or fewer than two are there (NaN: missing).

    Agreeing means max - min <= REWARD_NOISE * max(1, max |reward|). Float32 scorers, and sums of parts such as 0.1 + 0.2
    against 0.3, differ by 1e-7 of their size at most; a standard deviation made of that alone would turn noise into
    advantages of size 1. The spread is used because, unlike a deviation, it does not shrink as the group grows.
    DAPO's dynamic sampling (arXiv 2503.14476, eq. 11) keeps exactly these groups.

    Raises ValueError when `rewards_PG` is not two-dimensional or holds an infinity.
    """
    live_PG = present(rewards_PG)
    highest_P = np.max(rewards_PG, axis=1, initial=-np.inf, where=live_PG)
    lowest_P = np.min(rewards_PG, axis=1, initial=np.inf, where=live_PG)
    enough_P = live_PG.sum(axis=1) >= 2
    spread_P = np.subtract(highest_P, lowest_P, where=enough_P, out=np.zeros(len(enough_P)))
    scale_P = np.maximum(1.0, np.maximum(np.abs(highest_P), np.abs(lowest_P)))
    return enough_P & (spread_P > REWARD_NOISE * scale_P)


def present(rewards_PG: Float64s) -> Bools:
    """Which rewards are there: bool [P, G]. Raises ValueError for another number of axes, or for an infinite reward."""
    if rewards_PG.ndim != 2:
        raise ValueError(f"rewards must be [tasks, attempts]; their shape is {rewards_PG.shape}")
    if np.isinf(rewards_PG).any():
        p, g = (int(i) for i in np.argwhere(np.isinf(rewards_PG))[0])
        raise ValueError(
            f"the reward of attempt {g} at task {p} is {rewards_PG[p, g]}: it must be finite, or NaN when it is missing"
        )
    return ~np.isnan(rewards_PG)
