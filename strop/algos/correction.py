"""Corrections for data that another policy drew: an older one, or a sampler that computes slightly other numbers.

Two ways to use them. *Bypass*: leave `PolicyInputs.proximal_logprobs_T` out, so that a loss takes its ratio straight
to the policy that sampled; nothing here is needed. *Decoupled* (arXiv 2110.00641, 2505.24298): the trainer scores the
data before its updates, those logprobs become `proximal_logprobs_T` and anchor the ratio, and `importance_weights` of
them against the sampler's become `correction_T`.

Either way tokens may be rejected. `accepted` says which stay. Multiplied into `correction_T` the others still count in
the denominators; taken out of a batch's mask before its weights are written, they do not.

Tensors are [T], packed as `layout` says, `mask_T` bool. All results are constants without a gradient, and masked places
may hold anything.
"""

from __future__ import annotations

from enum import StrEnum

import torch
from torch import Tensor

from strop.algos.kl import LOG_RATIO_BOUND
from strop.algos.losses import fraction, masked, masked_mean
from strop.types import Layout, Metrics


class Level(StrEnum):
    """What a ratio or a divergence is of."""

    TOKEN = "token"
    SEQUENCE_SUM = "sequence_sum"  # log ratios summed: the probability ratio of the whole sequence
    SEQUENCE_MEAN = "sequence_mean"  # log ratios averaged: the geometric mean of the tokens' ratios
    SEQUENCE_MAX = "sequence_max"  # the furthest token


class Outside(StrEnum):
    """What becomes of a weight outside its bounds."""

    CLAMP = "clamp"  # the nearer bound: truncated importance sampling
    ZERO = "zero"  # nothing: masked importance sampling, IcePop


class Divergence(StrEnum):
    """What rejection looks at; x is the log ratio of trainer to sampler."""

    RATIO = "ratio"  # exp(x), between two bounds
    K2 = "k2"  # x^2 / 2, up to a bound
    K3 = "k3"  # exp(x) - 1 - x, up to a bound


def importance_weights(
    logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    layout: Layout,
    mask_T: Tensor,
    *,
    level: Level = Level.TOKEN,
    low: float = 0.0,
    high: float = 2.0,
    outside: Outside = Outside.CLAMP,
) -> tuple[Tensor, Metrics]:
    """exp(logprob - behavior logprob), bounded: weights [T] that make sampled data count as the trainer's own.

    With Level.TOKEN and CLAMP: truncated importance sampling, min(ratio, high) for low = 0. With ZERO: a weight outside
    [low, high] is 0 (IcePop). The sequence levels give every token its sequence's weight. 0 where the mask is off.
    Metrics speak of the weights before they were bounded. Raises ValueError for bounds without a range.
    """
    if not 0.0 <= low < high:
        raise ValueError(f"weights are kept between low and high, and 0 <= low < high: low={low}, high={high}")
    _no_largest_ratio(level)
    log_T = _log_ratio(logprobs_T, behavior_logprobs_T, mask_T)
    raw_T = _at_level(log_T, level, layout, mask_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    metrics: Metrics = {
        "correction/weight_mean": masked_mean(raw_T, mask_T),
        "correction/fraction_low": fraction(raw_T < low, mask_T),
        "correction/fraction_high": fraction(raw_T > high, mask_T),
    }
    match outside:
        case Outside.CLAMP:
            bounded_T = raw_T.clamp(low, high)
        case Outside.ZERO:
            bounded_T = torch.where((raw_T < low) | (raw_T > high), 0.0, raw_T)
    return masked(bounded_T, mask_T), metrics


def accepted(
    logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    layout: Layout,
    mask_T: Tensor,
    *,
    divergence: Divergence,
    level: Level,
    low: float = 0.0,
    high: float,
) -> tuple[Tensor, Metrics]:
    """Which trained tokens are close enough to what sampled them: bool [T], False where the mask is off.

    Close is low <= exp(x) <= high for Divergence.RATIO and k <= high for the others, with x or k taken at `level`: of
    the token, or the sum, mean or largest over its sequence. At a sequence level a sequence stays or goes as one.
    Raises ValueError for a `low` where there is none, a ratio's bounds without 1 between them, or a largest ratio.
    """
    x_T = _log_ratio(logprobs_T, behavior_logprobs_T, mask_T)
    if divergence is Divergence.RATIO:
        if not 0.0 <= low <= 1.0 <= high:
            raise ValueError(f"a ratio's bounds must hold 1 between them: low={low}, high={high}")
        _no_largest_ratio(level)
        ratio_T = _at_level(x_T, level, layout, mask_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
        kept_T = (ratio_T >= low) & (ratio_T <= high)
    else:
        if low != 0.0:
            raise ValueError(f"{divergence} has an upper bound alone, but low={low}")
        k_T = 0.5 * x_T.square() if divergence is Divergence.K2 else torch.expm1(x_T) - x_T
        kept_T = _at_level(k_T, level, layout, mask_T) <= high
    kept_T = kept_T & mask_T
    return kept_T, {"correction/rejected_fraction": fraction(~kept_T, mask_T)}


def off_policy_accepted(
    logprobs_T: Tensor,
    behavior_logprobs_T: Tensor,
    advantages_T: Tensor,
    layout: Layout,
    mask_T: Tensor,
    *,
    high: float,
) -> tuple[Tensor, Metrics]:
    """All trained tokens, but those of bad sequences that the policy has left behind: bool [T], False where masked.

    A token goes when its advantage is negative and mean(behavior logprob - logprob) over its sequence exceeds `high`:
    learning from a mistake that the policy no longer makes only disturbs it (DeepSeek-V3.2, arXiv 2512.02556, eq. 9).
    """
    x_T = _log_ratio(logprobs_T, behavior_logprobs_T, mask_T)
    far_T = -_at_level(x_T, Level.SEQUENCE_MEAN, layout, mask_T) > high
    kept_T = mask_T & ~(far_T & (masked(advantages_T, mask_T) < 0))
    return kept_T, {"correction/rejected_fraction": fraction(~kept_T, mask_T)}


def _no_largest_ratio(level: Level) -> None:
    if level is Level.SEQUENCE_MAX:
        raise ValueError("a sequence has no largest ratio: one far below 1 is as far as one above; take the largest k2")


def _log_ratio(logprobs_T: Tensor, behavior_logprobs_T: Tensor, mask_T: Tensor) -> Tensor:
    off_T = masked(logprobs_T.detach() - behavior_logprobs_T, mask_T)
    return off_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def _at_level(value_T: Tensor, level: Level, layout: Layout, mask_T: Tensor) -> Tensor:
    """The token's value, or its sequence's sum, mean or largest one, told to every token: [T]."""
    if level is Level.TOKEN:
        return value_T
    sequence_T = torch.from_numpy(layout.sequence_T).to(value_T.device)
    zeros_S = value_T.new_zeros(len(layout.lengths))
    if level is Level.SEQUENCE_MAX:
        lowest_T = torch.where(mask_T, value_T, -torch.inf)
        return torch.full_like(zeros_S, -torch.inf).scatter_reduce(0, sequence_T, lowest_T, "amax")[sequence_T]
    sum_S = zeros_S.index_add(0, sequence_T, value_T)
    if level is Level.SEQUENCE_SUM:
        return sum_S[sequence_T]
    return (sum_S / zeros_S.index_add(0, sequence_T, mask_T.to(value_T.dtype)).clamp(min=1.0))[sequence_T]
