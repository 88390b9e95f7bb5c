"""Rewards in, advantages out: how much better each attempt at a task was than could be expected.

Group methods take `rewards_PG` float64 [P tasks, G attempts] and give float64 [P, G]. NaN is a missing reward (the
attempt failed): it takes no part in any statistic and its advantage is NaN, so that using it by mistake shows.

Two rules hold for every method that compares attempts with each other. A group whose rewards agree up to float noise
gives zeros, whatever it is divided by. A group with fewer than two rewards gives zeros: one attempt has nothing to be
compared with. `filters.informative` says which groups those are. Statistics are those of centred float64 values, never
E[x^2] - E[x]^2. Advantages of single tokens are in `token_advantages`.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from strop.algos.filters import REWARD_NOISE, Bools, Counts, Float64s, informative, present


def grpo(rewards_PG: Float64s, *, scale_by_std: bool, eps: float = 1e-6) -> Float64s:
    """Group-relative advantages: (r - mean) / (std + eps), or r - mean without `scale_by_std`.

    GRPO (arXiv 2402.03300, section 4.1.2) divides by the group's standard deviation (here with n - 1); Dr. GRPO
    (arXiv 2503.20783) does not, since that favours tasks that are nearly always or nearly never solved.
    """
    centred_PG = centred(rewards_PG)
    return centred_PG / (_std(centred_PG)[:, None] + eps) if scale_by_std else centred_PG


def rloo(rewards_PG: Float64s) -> Float64s:
    """r - the mean of the group's other rewards = n / (n - 1) (r - mean): leave-one-out (arXiv 2402.14740)."""
    count_P = present(rewards_PG).sum(axis=1)
    return centred(rewards_PG) * (count_P / np.maximum(count_P - 1, 1))[:, None]


def remax(rewards_PG: Float64s, greedy_P: Float64s) -> Float64s:
    """r - the reward of the greedy attempt at the same task (arXiv 2310.10505).

    The baseline comes from outside the group, so a single attempt, or a uniform group, is as good as any other.
    """
    present(rewards_PG)
    return rewards_PG - greedy_P[:, None]


def opo(rewards_PG: Float64s, counts_PG: Counts) -> Float64s:
    """r - sum(n r) / sum(n), n the tokens of an attempt: the variance-minimising baseline when every token's gradient
    has the same expected size (arXiv 2505.23585)."""
    live_PG = present(rewards_PG)
    weights_PG = np.where(live_PG, counts_PG, 0)
    total_P = np.maximum(weights_PG.sum(axis=1), 1)
    baseline_P = (weights_PG * np.where(live_PG, rewards_PG, 0.0)).sum(axis=1) / total_P
    return _informative_only(rewards_PG, rewards_PG - baseline_P[:, None])


def gpg(rewards_PG: Float64s, *, scale_by_std: bool = False, eps: float = 1e-6) -> Float64s:
    """alpha (r - mean), alpha = attempts / attempts in informative groups (arXiv 2504.02546, eq. 7).

    Groups that agree add nothing to the gradient but are counted by its mean; alpha takes them out of it. With
    `scale_by_std`, F_norm of the paper is the group's standard deviation.
    """
    live_PG = present(rewards_PG)
    useful = int(live_PG[informative(rewards_PG)].sum())
    return grpo(rewards_PG, scale_by_std=scale_by_std, eps=eps) * (int(live_PG.sum()) / max(useful, 1))


def gdpo(
    parts: Sequence[Float64s],
    weights: Sequence[float] | None = None,
    *,
    counts_PG: Counts | None = None,
    eps: float = 1e-6,
) -> Float64s:
    """Several rewards, each normalised within its group before they are added, so that none drowns the others.

        A = whiten(sum_k weight_k (r_k - mean_k) / (std_k + eps))

    arXiv 2601.05242. `parts` hold one [P, G] array for each reward; `weights` default to 1. The whitening runs
    over the attempts of the whole step, each counted once, or `counts_PG` times (verl counts its tokens). An attempt
    that lacks any part has no advantage. Raises ValueError for no parts, or for unequal numbers or shapes.
    """
    if not parts:
        raise ValueError("gdpo needs at least one reward")
    if len({part.shape for part in parts}) != 1:
        raise ValueError(f"rewards of unequal shape: {[part.shape for part in parts]}")
    weights = [1.0] * len(parts) if weights is None else weights
    if len(weights) != len(parts):
        raise ValueError(f"{len(parts)} rewards but {len(weights)} weights")
    total_PG = sum(
        (weight * grpo(part, scale_by_std=True, eps=eps) for weight, part in zip(weights, parts, strict=True)),
        start=np.zeros(parts[0].shape),
    )
    whitened_PG = whiten(total_PG, np.ones(total_PG.shape) if counts_PG is None else counts_PG)
    return np.where(np.isnan(total_PG), np.nan, whitened_PG)


def leave_one_out_max(rewards_PG: Float64s, *, scale_by_std: bool = True, eps: float = 1e-6) -> Float64s:
    """The best attempt gets its lead over the second best, the others 0: the group is judged by its best.

    Pass@G as an objective, with leave-one-out baselines (arXiv 2503.19595). With `scale_by_std` the lead is
    divided by the group's standard deviation + eps.
    """
    live_PG = present(rewards_PG)
    if rewards_PG.shape[1] < 2:
        return np.where(live_PG, 0.0, np.nan)
    ranked_PG = np.sort(np.where(live_PG, rewards_PG, -np.inf), axis=1)
    best_P1, second_P1 = ranked_PG[:, -1:], ranked_PG[:, -2:-1]
    lead_P1 = np.subtract(best_P1, second_P1, where=np.isfinite(second_P1), out=np.zeros(best_P1.shape))
    if scale_by_std:
        lead_P1 = lead_P1 / (_std(centred(rewards_PG))[:, None] + eps)
    return _informative_only(rewards_PG, np.where(live_PG, np.where(rewards_PG == best_P1, lead_P1, 0.0), np.nan))


def pass_at_k(rewards_PG: Float64s, k: int, *, solved_at: float = 1.0) -> Float64s:
    """Advantages for the chance that the best of any k attempts solves the task (arXiv 2508.10751).

    Of a group's n attempts w are wrong. Over all subsets of k attempts, with R = 1 - C(w, k) / C(n, k):

        right   (1 - R) / sqrt(R (1 - R))
        wrong   (1 - R - C(w - 1, k - 1) / C(n - 1, k - 1)) / sqrt(R (1 - R))

    Zero when R is 0 or 1, and in groups with fewer than k or two attempts. Raises ValueError for k < 1.
    """
    if k < 1:
        raise ValueError(f"pass@k takes the best of k attempts, k at least 1; it is {k}")
    live_PG = present(rewards_PG)
    right_PG = live_PG & (np.where(live_PG, rewards_PG, -np.inf) >= solved_at)
    count_P = live_PG.sum(axis=1)
    wrong_P = count_P - right_PG.sum(axis=1)
    none_P = _share_of_subsets(wrong_P, count_P, k)  # 1 - R: every attempt of the subset is wrong
    others_P = _share_of_subsets(wrong_P - 1, count_P - 1, k - 1)  # the same, given that one wrong attempt is in it
    deviation_P = np.sqrt(none_P * (1.0 - none_P))
    useful_P = (count_P >= max(k, 2)) & (deviation_P > 0)
    scale_P = np.where(useful_P, 1.0 / np.where(useful_P, deviation_P, 1.0), 0.0)
    advantages_PG = scale_P[:, None] * np.where(right_PG, none_P[:, None], (none_P - others_P)[:, None])
    return np.where(live_PG, advantages_PG, np.nan)


def reinforce_plus_plus_baseline(rewards_PG: Float64s, counts_PG: Counts) -> Float64s:
    """r - its group's mean, whitened over all tokens of the step (arXiv 2501.03262).

    `counts_PG` are the attempts' trained tokens: an attempt counts in the whitening as often as it has tokens.
    """
    return np.where(present(rewards_PG), whiten(centred(rewards_PG), counts_PG), np.nan)


def whiten(values: Float64s, counts: Counts | Bools | Float64s, *, eps: float = 1e-8) -> Float64s:
    """(x - mean) / sqrt(variance + eps) over all values, each counted `counts` times; the variance with n - 1.

    Both arguments have one shape. A value with count 0 may hold anything, takes no part and becomes 0; NaN with a count
    is a missing value: it takes no part and stays NaN. Fewer than two things counted, or values that agree within
    REWARD_NOISE, give zeros: one value has no deviation, and noise is not to be scaled up.
    """
    counted = np.asarray(counts, np.float64)
    missing = np.isnan(values) & (counted > 0)
    live = (counted > 0) & ~missing
    counted = np.where(live, counted, 0.0)
    total = counted.sum()
    taken = values[live]
    if total < 2 or np.ptp(taken) <= REWARD_NOISE * max(1.0, float(np.abs(taken).max())):
        return np.where(missing, np.nan, 0.0)
    filled = np.where(live, values, 0.0)
    deviations = np.where(live, filled - (counted * filled).sum() / total, 0.0)
    variance = (counted * deviations * deviations).sum() / (total - 1)
    return np.where(missing, np.nan, deviations / np.sqrt(variance + eps))


def centred(rewards_PG: Float64s) -> Float64s:
    """r - its group's mean, float64 [P, G]: 0 in groups that are not informative, NaN where the reward is missing."""
    live_PG = present(rewards_PG)
    mean_P = np.where(live_PG, rewards_PG, 0.0).sum(axis=1) / np.maximum(live_PG.sum(axis=1), 1)
    return _informative_only(rewards_PG, rewards_PG - mean_P[:, None])


def _informative_only(rewards_PG: Float64s, advantages_PG: Float64s) -> Float64s:
    """The advantages, but 0 in groups that are not informative; NaN stays where the reward is missing."""
    return np.where(informative(rewards_PG)[:, None] | np.isnan(rewards_PG), advantages_PG, 0.0)


def _std(centred_PG: Float64s) -> Float64s:
    """Each group's standard deviation [P], with n - 1, from centred values; NaN values take no part."""
    live_PG = ~np.isnan(centred_PG)
    square_PG = np.where(live_PG, centred_PG, 0.0) ** 2
    return np.sqrt(square_PG.sum(axis=1) / np.maximum(live_PG.sum(axis=1) - 1, 1))


def _share_of_subsets(some_P: Counts, all_P: Counts, k: int) -> Float64s:
    """C(some, k) / C(all, k) [P]: the share of subsets of k that lie within `some`; 0 when there are too few."""
    share_P = np.ones(len(all_P))
    for i in range(k):
        share_P = share_P * np.maximum(some_P - i, 0) / np.maximum(all_P - i, 1)
    return share_P
