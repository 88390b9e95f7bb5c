"""Rewards in, advantages out: how much better each attempt, or each token, was than could be expected.

Group methods take `rewards_PG` float64 [P tasks, G attempts] and give float64 [P, G]. NaN is a missing reward (the
attempt failed): it takes no part in any statistic and its advantage is NaN, so that using it by mistake shows.

Two rules hold for every group method. A group whose rewards agree up to float noise gives zeros, whatever it is
divided by. A group with fewer than two rewards gives zeros: one attempt has nothing to be compared with.
`filters.informative` says which groups those are. Statistics are of centred float64 values, never E[x^2] - E[x]^2.
"""

from __future__ import annotations

import numpy as np

from strop.algos.filters import Bools, Float64s, informative, present


def grpo(rewards_PG: Float64s, *, scale_by_std: bool, eps: float = 1e-6) -> Float64s:
    """Group-relative advantages: (r - mean) / (std + eps), or r - mean without `scale_by_std`.

    GRPO (arXiv 2402.03300, eq. 9) divides by the group's standard deviation (here with n - 1); Dr. GRPO
    (arXiv 2503.20783, eq. 5) does not, since that favours groups that are nearly all right or all wrong.
    """
    centred_PG, live_PG = centred(rewards_PG)
    if not scale_by_std:
        return centred_PG
    count_P = live_PG.sum(axis=1)
    square_P = np.sum(centred_PG * centred_PG, axis=1, where=live_PG)
    std_P = np.sqrt(square_P / np.maximum(count_P - 1, 1))
    return centred_PG / (std_P + eps)[:, None]


def centred(rewards_PG: Float64s) -> tuple[Float64s, Bools]:
    """(rewards less their group's mean, which of them are there), each [P, G].

    The first is 0 in groups that are not informative, and NaN where the reward is missing.
    """
    live_PG = present(rewards_PG)
    count_P = np.maximum(live_PG.sum(axis=1), 1)
    mean_P = np.sum(rewards_PG, axis=1, where=live_PG) / count_P
    centred_PG = np.where(informative(rewards_PG)[:, None], rewards_PG - mean_P[:, None], 0.0)
    return np.where(live_PG, centred_PG, np.nan), live_PG
