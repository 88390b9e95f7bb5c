"""Rewards in, rewards or a choice of groups out: what is kept and what is docked before advantages are taken.

Everything is NumPy float64. NaN stands for a missing reward (the attempt failed) and is never read as 0.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Float64s = NDArray[np.float64]
Counts = NDArray[np.integer]
Bools = NDArray[np.bool_]

REWARD_NOISE = 1e-6
"""Rewards count as equal when no two lie further apart than this, times their size where that exceeds 1."""


def informative(rewards_PG: Float64s) -> Bools:
    """Which groups say anything: bool [P], False where the rewards agree or fewer than two are there (NaN: missing).

    Agreeing means max - min <= REWARD_NOISE * max(1, max |reward|). Float32 scorers, and sums of parts such as
    0.1 + 0.2 against 0.3, differ by 1e-7 of their size at most; a standard deviation made of that alone would turn
    noise into advantages of size 1. The spread is used because, unlike a deviation, it does not shrink as the group
    grows. These are the groups that DAPO's dynamic sampling keeps (arXiv 2503.14476, section 3.2).

    Raises ValueError when `rewards_PG` is not two-dimensional or holds an infinity.
    """
    live_PG = present(rewards_PG)
    enough_P = live_PG.sum(axis=1) >= 2
    highest_P = np.where(live_PG, rewards_PG, -np.inf).max(axis=1, initial=-np.inf)
    lowest_P = np.where(live_PG, rewards_PG, np.inf).min(axis=1, initial=np.inf)
    size_P = np.maximum(1.0, np.maximum(np.abs(highest_P), np.abs(lowest_P)))
    return enough_P & (highest_P - REWARD_NOISE * size_P > lowest_P)


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


def best(rewards_PG: Float64s, *, keep: int, at_least: float) -> Bools:
    """Which attempts to imitate: bool [P, G], in each group the `keep` with the largest rewards, none below `at_least`.

    Of attempts with equal rewards the earlier ones. A missing reward is never among them: it is no small reward.
    Rejection sampling (arXiv 2308.01825), best of n (2304.06767).
    """
    live_PG = present(rewards_PG)
    order_PG = np.argsort(np.where(live_PG, -rewards_PG, np.inf), axis=1, kind="stable")
    rank_PG = np.argsort(order_PG, axis=1, kind="stable")
    return live_PG & (rank_PG < keep) & (np.where(live_PG, rewards_PG, -np.inf) >= at_least)


def overlong_penalty(lengths_N: Counts, *, max_length: int, buffer: int, factor: float = 1.0) -> Float64s:
    """What to add to the reward of a reply of each length, in tokens: DAPO's soft overlong punishment, float64 [N].

    0 up to max_length - buffer, then falling in a line to -factor at max_length, and -factor past it
    (arXiv 2503.14476, section 3.4). Raises ValueError unless 0 < buffer <= max_length and factor >= 0.
    """
    if not 0 < buffer <= max_length:
        raise ValueError(f"the buffer is the last part of {max_length} tokens, where the penalty grows; it is {buffer}")
    if factor < 0:
        raise ValueError(f"factor is the size of the penalty and must not be negative; it is {factor}")
    over_N = (np.asarray(lengths_N, np.float64) - (max_length - buffer)) / buffer
    return -factor * np.clip(over_N, 0.0, 1.0)


def length_reward(lengths_PG: Counts, solved_PG: Bools) -> Float64s:
    """A soft length penalty inside each group: what to add to the reward of every attempt, float64 [P, G].

        lambda = 0.5 - (length - shortest) / (longest - shortest)
        solved: lambda      not solved: min(0, lambda)

    So short right answers gain, long ones lose, and a wrong answer never gains by being short. A group whose lengths
    agree gets 0. Kimi k1.5, arXiv 2501.12599, section 2.3.3.
    """
    lengths_PG = np.asarray(lengths_PG, np.int64)
    longest_P1 = lengths_PG.max(axis=1, keepdims=True, initial=0)
    shortest_P1 = lengths_PG.min(axis=1, keepdims=True, initial=np.iinfo(np.int64).max)
    range_P1 = longest_P1 - shortest_P1
    gain_PG = 0.5 - (lengths_PG - shortest_P1) / np.maximum(range_P1, 1)
    gain_PG = np.where(solved_PG, gain_PG, np.minimum(gain_PG, 0.0))
    return np.where(range_P1 > 0, gain_PG, 0.0)
