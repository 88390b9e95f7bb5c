"""Every mean is a choice of weights: counts of trained tokens in, the weight of each trajectory's tokens out.

The weights are written once, over the whole optimizer step. What comes after sums `weights * loss` and never divides,
so micro-batches, ranks and gradient accumulation cannot change a result.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from strop.algos.filters import Float64s


class Weighting(StrEnum):
    """What one token's loss counts for."""

    TOKEN_MEAN = "token_mean"  # every token alike: DAPO (arXiv 2503.14476, eq. 12)
    TOKEN_SUM = "token_sum"  # no mean at all: the Tinker protocol
    SEQUENCE_MEAN_TOKEN_MEAN = "sequence_mean_token_mean"  # every trajectory alike: GRPO (arXiv 2402.03300, eq. 3)
    SEQUENCE_MEAN_TOKEN_SUM = "sequence_mean_token_sum"  # a trajectory counts for its length: REINFORCE, RLOO
    CONSTANT_HORIZON = "constant_horizon"  # the same over a fixed length: Dr. GRPO (arXiv 2503.20783)


def token_weights(weighting: Weighting, counts_N: NDArray[np.integer], *, horizon: int | None) -> Float64s:
    """The weight that each trained token of every trajectory carries: float64 [N].

    `counts_N` holds the trained tokens of all trajectories of one optimizer step: n tokens, `live` of the N
    trajectories with at least one, `total` tokens together.

        token_mean                1 / total
        token_sum                 1
        sequence_mean_token_mean  1 / (live n)
        sequence_mean_token_sum   1 / live
        constant_horizon          1 / (live horizon)

    A trajectory without trained tokens gets 0 and is not live: it changes nobody's weight. With none, all are 0.
    `horizon` is read by constant_horizon alone. Raises ValueError for a negative count, or a horizon that is missing
    or below 1 where it is needed.
    """
    counts_N = np.asarray(counts_N)
    if counts_N.size and counts_N.min() < 0:
        raise ValueError(
            f"trajectory {int(counts_N.argmin())} has {int(counts_N.min())} trained tokens: a count is 0 or more"
        )
    live_N = counts_N > 0
    live = max(int(live_N.sum()), 1)
    match weighting:
        case Weighting.TOKEN_MEAN:
            weights_N = np.full(len(counts_N), 1.0 / max(int(counts_N.sum(dtype=np.int64)), 1))
        case Weighting.TOKEN_SUM:
            weights_N = np.ones(len(counts_N))
        case Weighting.SEQUENCE_MEAN_TOKEN_MEAN:
            weights_N = 1.0 / (live * np.maximum(counts_N, 1).astype(np.float64))
        case Weighting.SEQUENCE_MEAN_TOKEN_SUM:
            weights_N = np.full(len(counts_N), 1.0 / live)
        case Weighting.CONSTANT_HORIZON:
            if horizon is None or horizon < 1:
                raise ValueError(f"constant_horizon divides by a horizon of at least 1 token; it is {horizon}")
            weights_N = np.full(len(counts_N), 1.0 / (live * horizon))
    return np.where(live_N, weights_N, 0.0)
