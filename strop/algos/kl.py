"""Estimates of the Kullback-Leibler divergence from logprobs of sampled tokens: as a loss, and as a cost on rewards.

With d = logprob - reference logprob of a token that the policy drew, every estimator below has, over many tokens, the
value KL(policy, reference) (`abs` only its size), but their *gradients* differ (A18): under the policy's own samples
k1's has expectation zero, k2's is the true gradient, and k3's is that of the reversed divergence. The straight-through
forms report one estimator and follow k2's gradient. Values: Schulman, "Approximating KL Divergence" (2020);
gradients: Tang and Munos, arXiv 2506.09477.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: past it a ratio says only "huge", and float32 sums lose everything else


class Estimator(StrEnum):
    """How a token's divergence is estimated; see `estimate`."""

    K1 = "k1"
    K2 = "k2"
    K3 = "k3"
    ABS = "abs"
    K1_STRAIGHT_THROUGH = "k1_straight_through"
    K3_STRAIGHT_THROUGH = "k3_straight_through"
    ABS_STRAIGHT_THROUGH = "abs_straight_through"


def estimate(estimator: Estimator, logprobs_T: Tensor, reference_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    """The divergence at each token, [T], with its gradient into `logprobs_T`; 0 and no gradient where the mask is off.

    k1   d
    k2   d^2 / 2
    k3   exp(-d) - 1 + d     (the exponent bounded by LOG_RATIO_BOUND)
    abs  |d|
    *_straight_through       that value, with k2's gradient
    """
    d_T = torch.where(mask_T, logprobs_T - reference_logprobs_T, 0.0)
    match estimator:
        case Estimator.K1:
            return d_T
        case Estimator.K2:
            return 0.5 * d_T.square()
        case Estimator.K3:
            return torch.expm1((-d_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) + d_T
        case Estimator.ABS:
            return d_T.abs()
        case Estimator.K1_STRAIGHT_THROUGH:
            base = Estimator.K1
        case Estimator.K3_STRAIGHT_THROUGH:
            base = Estimator.K3
        case Estimator.ABS_STRAIGHT_THROUGH:
            base = Estimator.ABS
    k2_T = 0.5 * d_T.square()
    return estimate(base, logprobs_T, reference_logprobs_T, mask_T).detach() + (k2_T - k2_T.detach())
