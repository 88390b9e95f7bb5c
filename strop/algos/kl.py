"""Estimates of the Kullback-Leibler divergence from logprobs of sampled tokens: as a loss, and as a cost on rewards.

With d = logprob - reference logprob of a token that the policy drew, k1 and k3 have the mean KL(policy, reference)
over many tokens, k2 nearly that while d is small, and `abs` measures distance only. Their *gradients* are another
matter: over the policy's own samples k2's is the true gradient of the divergence, k1's is zero, and k3's is that of
the reversed divergence KL(reference, policy). The straight-through forms report one estimator and follow k2's
gradient. Values: Schulman, "Approximating KL Divergence" (2020). Gradients: arXiv 2506.09477.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

import numpy as np
import torch
from torch import Tensor

from strop.algos.filters import Bools, Float64s

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
    k2_T = 0.5 * d_T.square()
    match estimator:
        case Estimator.K1:
            return d_T
        case Estimator.K2:
            return k2_T
        case Estimator.K3:
            return _k3(d_T)
        case Estimator.ABS:
            return d_T.abs()
        case Estimator.K1_STRAIGHT_THROUGH:
            value_T = d_T
        case Estimator.K3_STRAIGHT_THROUGH:
            value_T = _k3(d_T)
        case Estimator.ABS_STRAIGHT_THROUGH:
            value_T = d_T.abs()
    return value_T.detach() + (k2_T - k2_T.detach())


def _k3(d_T: Tensor) -> Tensor:
    return torch.expm1((-d_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)) + d_T


def penalised_rewards(rewards_T: Float64s, kl_T: Float64s, mask_T: Bools, coefficient: float) -> Float64s:
    """r - coefficient * KL at trained tokens, r elsewhere: a new array [T]; `kl_T` stays as it is.

    Divergence as a cost, before returns or advantages are taken, as PPO for language models does
    (arXiv 1909.08593, eq. 2). What the policy did not choose costs nothing: `kl_T` may hold anything there.
    """
    return np.asarray(rewards_T, np.float64) - coefficient * np.where(mask_T, np.asarray(kl_T, np.float64), 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Coefficient:
    """What a unit of divergence costs: fixed, or led towards a target.

    With `target`, after a step that measured `kl` over `tokens` tokens (or episodes: `horizon`'s unit):

        value <- value * (1 + clip(kl / target - 1, -0.2, 0.2) * tokens / horizon)

    arXiv 1909.08593, section 2.2. Raises ValueError for a negative value, or a target or horizon that is not positive.
    """

    value: float
    target: float | None = None
    horizon: float = 10_000.0

    def __post_init__(self) -> None:
        if self.value < 0 or self.horizon <= 0 or (self.target is not None and self.target <= 0):
            raise ValueError(f"a coefficient must not be negative, its target and horizon must be positive: {self}")

    def after(self, kl: float, tokens: int) -> Coefficient:
        """The coefficient of the next step; this one, when it is fixed."""
        if self.target is None:
            return self
        error = min(max(kl / self.target - 1.0, -0.2), 0.2)
        return replace(self, value=self.value * (1.0 + error * tokens / self.horizon))
