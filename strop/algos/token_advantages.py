"""Rewards of single tokens in, advantages of single tokens out: returns, generalised advantages, token baselines.

Arrays are [T]: the tokens of N trajectories end to end, each trajectory whole and in time (its segments joined), and
`lengths_N` says where one ends and the next begins. For one segment a trajectory that is a Layout's `lengths_S`; for
several, joining them first lets a reward at the end reach tokens before a history edit.

`mask_T` marks the tokens that the policy chose. The others (prompts, tool results) may hold anything, NaN included:
time is counted in trained tokens alone, so an observation neither ends an episode, nor discounts it, nor lends its
value to a bootstrap. Results are float64 [T], 0 where the mask is off.
"""

from __future__ import annotations

import numpy as np

from strop.algos.advantages import whiten
from strop.algos.filters import Bools, Counts, Float64s, informative

ENERGY_FLOOR = 1e-8


def returns_to_go(rewards_T: Float64s, mask_T: Bools, lengths_N: Counts, *, discount: float = 1.0) -> Float64s:
    """G_t = r_t + discount G_{t+1}, over trained tokens. A reward counts only at a trained token."""
    counts_N = _trained(mask_T, lengths_N)
    return _spread(_accumulated(np.asarray(rewards_T, np.float64)[mask_T], counts_N, discount), mask_T)


def reinforce_plus_plus(rewards_T: Float64s, mask_T: Bools, lengths_N: Counts, *, discount: float = 1.0) -> Float64s:
    """Returns to go, whitened over all trained tokens of the step (arXiv 2501.03262)."""
    return whiten(returns_to_go(rewards_T, mask_T, lengths_N, discount=discount), mask_T)


def gae(
    rewards_T: Float64s,
    values_T: Float64s,
    mask_T: Bools,
    lengths_N: Counts,
    *,
    discount: float = 1.0,
    trace: float = 0.95,
    bootstrap_N: Float64s | None = None,
) -> tuple[Float64s, Float64s]:
    """Generalised advantages and the returns that a critic learns, both [T] (arXiv 1506.02438, eq. 16).

        delta_t = r_t + discount V_{t+1} - V_t
        A_t     = delta_t + discount trace A_{t+1}
        return  = A_t + V_t

    t + 1 is the next *trained* token. After a trajectory's last one V is `bootstrap_N`, the value of what was left when
    it was cut short; without it 0, an episode that ended. Whiten the advantages with `whiten(advantages_T, mask_T)`.
    """
    counts_N = _trained(mask_T, lengths_N)
    rewards_M = np.asarray(rewards_T, np.float64)[mask_T]
    values_M = np.asarray(values_T, np.float64)[mask_T]
    live_N = counts_N > 0
    next_M = np.roll(values_M, -1)
    next_M[np.cumsum(counts_N)[live_N] - 1] = 0.0 if bootstrap_N is None else bootstrap_N[live_N]
    advantages_M = _accumulated(rewards_M + discount * next_M - values_M, counts_N, discount * trace)
    return _spread(advantages_M, mask_T), _spread(advantages_M + values_M, mask_T)


def optimal_token_baseline(
    rewards_PG: Float64s, logprobs_T: Float64s, square_sums_T: Float64s, mask_T: Bools, lengths_PG: Counts
) -> Float64s:
    """r - a baseline for each token that minimises the variance of the policy gradient (arXiv 2602.07078).

        w_t = 1 - 2 p_t + sum over the vocabulary of p^2      the squared gradient of the token's logprob by its logits
        W_t = w_1 + ... + w_t                                 over trained tokens, so tool turns change nothing
        B_t = sum_g r_g W_t^g / sum_g W_t^g                   over the group's attempts that reach t

    `logprobs_T` and `square_sums_T` are of the sampled tokens: log p_t, and sum p^2. Past the second longest attempt
    there is nobody to compare with and B is 0, as published. As long as the policy was certain, W is only noise;
    ENERGY_FLOOR, added to each W, makes B the group's mean there. Groups that are not informative give zeros. A
    missing reward takes no part; its tokens get NaN.
    """
    counts_N = _trained(mask_T, lengths_PG.reshape(-1))
    rewards_N = rewards_PG.reshape(-1)
    owner_M = np.repeat(np.arange(len(counts_N)), counts_N)
    step_M = np.arange(len(owner_M)) - np.repeat(np.cumsum(counts_N) - counts_N, counts_N)
    probs_M = np.exp(np.asarray(logprobs_T, np.float64)[mask_T])
    energy_M = np.cumsum(1.0 - 2.0 * probs_M + np.asarray(square_sums_T, np.float64)[mask_T])
    before_N = np.append(0.0, energy_M)[np.cumsum(counts_N) - counts_N]
    energy_M = energy_M - before_N[owner_M] + ENERGY_FLOOR

    reward_M = rewards_N[owner_M]
    live_M = ~np.isnan(reward_M)
    longest = int(counts_N.max(initial=0))
    place_M = owner_M // max(rewards_PG.shape[1], 1) * longest + step_M  # the same step of the same group
    there = np.bincount(place_M[live_M], minlength=len(rewards_PG) * longest)
    weight = np.bincount(place_M[live_M], energy_M[live_M], minlength=len(there))
    total = np.bincount(place_M[live_M], (reward_M * energy_M)[live_M], minlength=len(there))
    baseline = np.divide(total, weight, out=np.zeros(len(there)), where=there >= 2)
    useful_M = informative(rewards_PG)[owner_M // max(rewards_PG.shape[1], 1)]
    return _spread(np.where(useful_M | ~live_M, reward_M - baseline[place_M], 0.0), mask_T)


def _trained(mask_T: Bools, lengths_N: Counts) -> Counts:
    """How many trained tokens each trajectory has: [N]. Raises ValueError when the lengths do not sum to T."""
    if int(np.sum(lengths_N)) != len(mask_T):
        raise ValueError(f"the lengths sum to {int(np.sum(lengths_N))}, but there are {len(mask_T)} tokens")
    owner_T = np.repeat(np.arange(len(lengths_N)), lengths_N)
    return np.bincount(owner_T[mask_T], minlength=len(lengths_N))


def _accumulated(values_M: Float64s, counts_N: Counts, factor: float) -> Float64s:
    """x_t + factor * (the same of t + 1), within each trajectory, from its last trained token back: [M].

    One pass over time for all trajectories at once: at each distance from the end, those that are that long.
    """
    order = np.argsort(-counts_N)
    ends_N = np.cumsum(counts_N)[order]
    longest = int(counts_N.max(initial=0))
    reach = len(counts_N) - np.searchsorted(np.sort(counts_N), np.arange(longest), side="right")
    result_M = values_M.copy()
    for back in range(1, longest):
        here = ends_N[: reach[back]] - 1 - back
        result_M[here] += factor * result_M[here + 1]
    return result_M


def _spread(values_M: Float64s, mask_T: Bools) -> Float64s:
    """Values of trained tokens, put back among all tokens; 0 elsewhere."""
    values_T = np.zeros(len(mask_T))
    values_T[mask_T] = values_M
    return values_T
