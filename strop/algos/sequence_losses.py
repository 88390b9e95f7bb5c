"""Losses whose ratio belongs to a whole sequence: one number from all its trained tokens, felt by each of them.

Each still gives one loss a token, [T]. With a weighting that is constant inside a sequence, such as the mean over
sequences of the mean over tokens, their sum is the published loss of the sequence. A sequence here is one of the
layout's: a branch counts its own trained tokens only, since what it shares with others is never trained.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from strop.algos.losses import ClippedSurrogate, PolicyLoss, Scored, fraction
from strop.types import Layout, Metrics


def sequence_means(value_T: Tensor, layout: Layout, mask_T: Tensor) -> Tensor:
    """The mean of each sequence's masked tokens, told to every token of it: [T]. 0 in a sequence without any.

    `value_T` must be 0 wherever the mask is off, as everything in `Scored` is.
    """
    sequence_T = torch.from_numpy(layout.sequence_T).to(value_T.device)
    zeros_S = value_T.new_zeros(len(layout.lengths))
    count_S = zeros_S.index_add(0, sequence_T, mask_T.to(value_T.dtype)).clamp(min=1.0)
    return (zeros_S.index_add(0, sequence_T, value_T) / count_S)[sequence_T]


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPO(ClippedSurrogate):
    """PPO's clipped surrogate of the sequence's ratio: the geometric mean of its tokens' ratios.

        ratio = exp(mean over the sequence's tokens of logprob - old logprob)

    arXiv 2507.18071, eqs. 5-7. Published with clip_low=3e-4, clip_high=4e-4, weighted as sequence_mean_token_mean.
    """

    per_row: ClassVar[bool] = False

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        return self.clipped(sequence_means(at.log_ratio_T, layout, at.mask_T).exp(), at)


@dataclass(frozen=True, slots=True, kw_only=True)
class GSPOToken(ClippedSurrogate):
    """GSPO in which every token sees its own advantage: the sequence's ratio as a value, its own logprob as gradient.

        ratio_t = sg(sequence ratio) * logprob_t's probability / sg(the same)

    arXiv 2507.18071, eqs. 13-14. The gradient is GSPO's where the advantage is the same along the sequence.
    """

    per_row: ClassVar[bool] = False

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        value_T = sequence_means(at.log_ratio_T.detach(), layout, at.mask_T)
        return self.clipped((value_T + (at.logprobs_T - at.logprobs_T.detach())).exp(), at)


@dataclass(frozen=True, slots=True, kw_only=True)
class GMPO(PolicyLoss):
    """-A times the geometric mean of ratios that are clipped one by one, each on the side that its advantage favours.

        loss = -mean(A) exp(mean over tokens of min(sign(A) x, sign(A) clip(x, -clip_low, clip_high)) sign(A))

    with x = logprob - old logprob: the bounds are of the *log* ratio, published as 0.4 and 0.4 (arXiv 2507.20673).
    Raises ValueError for a negative bound.
    """

    clip_low: float = 0.4
    clip_high: float = 0.4

    def __post_init__(self) -> None:
        if not (self.clip_low >= 0.0 and self.clip_high >= 0.0):
            raise ValueError(f"a log ratio is kept between -clip_low and clip_high: {self.clip_low}, {self.clip_high}")

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        sign_T, x_T = at.advantages_T.sign(), at.log_ratio_T
        kept_T = sign_T * torch.minimum(sign_T * x_T, sign_T * x_T.clamp(-self.clip_low, self.clip_high))
        ratio_T = sequence_means(kept_T, layout, at.mask_T).exp()
        metrics: Metrics = {
            "policy/clip_fraction_low": fraction((at.advantages_T < 0) & (x_T < -self.clip_low), at.mask_T),
            "policy/clip_fraction_high": fraction((at.advantages_T > 0) & (x_T > self.clip_high), at.mask_T),
        }
        return -sequence_means(at.advantages_T, layout, at.mask_T) * ratio_T, metrics
