"""Losses: per-token, unreduced. A batch's weights do every mean, once, for every backend.

Each loss is a frozen record of its knobs; calling it gives (loss_T, metrics). Its `Inputs` are the constants that it
needs beside the live outputs, every field [T] and aligned to the batch's targets. Masked places may hold anything, NaN
included: the *inputs* of every operation are masked, so neither a value nor a gradient can see them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algos.kl import LOG_RATIO_BOUND, Estimator, estimate
from strop.types import Layout, Metric, Metrics, Outputs, Reduction, Want


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Constants of a policy-gradient loss, each float [T]."""

    behavior_logprobs_T: Tensor  # of the policy that sampled, 0 where nothing was sampled
    advantages_T: Tensor
    reference_logprobs_T: Tensor | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a surrogate sees, each [T]: live values and constants with 0 in every masked place."""

    logprobs_T: Tensor  # live
    log_ratio_T: Tensor  # live; logprob less the old policy's, bounded by LOG_RATIO_BOUND
    advantages_T: Tensor
    mask_T: Tensor


def masked_mean(value_T: Tensor, mask_T: Tensor) -> Metric:
    """A mean over the masked tokens that can still be merged with other batches'."""
    return Metric(Reduction.MEAN, torch.where(mask_T, value_T.detach(), 0.0).sum(), mask_T.sum())


def masked_max(value_T: Tensor, mask_T: Tensor) -> Metric:
    """The largest non-negative value over the masked tokens, mergeable with other batches'."""
    value_T = torch.where(mask_T, value_T.detach(), 0.0)
    return Metric(Reduction.MAX, value_T.max() if len(value_T) else value_T.sum(), mask_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(ABC):
    """A surrogate, plus the terms that any policy loss may carry: a cost for leaving a reference, a bonus for entropy.

        loss = surrogate + kl_coefficient * KL(policy, reference) - entropy_coefficient * entropy

    Raises ValueError when a term's numbers are not in the batch.
    """

    kl_coefficient: float = 0.0
    kl_estimator: Estimator = Estimator.K3
    entropy_coefficient: float = 0.0

    @property
    def want(self) -> Want:
        return Want(entropy=self.entropy_coefficient != 0.0)

    @abstractmethod
    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        """The loss of each token [T], finite everywhere, and what is worth knowing about it."""

    def __call__(
        self, outputs: Outputs, inputs: PolicyInputs, layout: Layout, mask_T: Tensor
    ) -> tuple[Tensor, Metrics]:
        off_T = torch.where(mask_T, outputs.logprobs_T - inputs.behavior_logprobs_T, 0.0)
        at = Scored(
            logprobs_T=torch.where(mask_T, outputs.logprobs_T, 0.0),
            log_ratio_T=off_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
            advantages_T=torch.where(mask_T, inputs.advantages_T, 0.0),
            mask_T=mask_T,
        )
        loss_T, metrics = self.surrogate(at, layout)
        metrics["policy/gap_max"] = masked_max(off_T.abs(), mask_T)
        drift_T = at.log_ratio_T.detach()
        metrics["policy/kl_k3"] = masked_mean(torch.expm1(drift_T) - drift_T, mask_T)  # KL(behavior, policy)
        if inputs.reference_logprobs_T is not None:
            kl_T = estimate(self.kl_estimator, outputs.logprobs_T, inputs.reference_logprobs_T, mask_T)
            metrics["kl/reference"] = masked_mean(kl_T, mask_T)
            loss_T = loss_T + self.kl_coefficient * kl_T
        elif self.kl_coefficient:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient}, but the batch has no reference_logprobs_T")
        if outputs.entropy_T is not None:
            entropy_T = torch.where(mask_T, outputs.entropy_T, 0.0)
            metrics["policy/entropy"] = masked_mean(entropy_T, mask_T)
            loss_T = loss_T - self.entropy_coefficient * entropy_T
        elif self.entropy_coefficient:
            raise ValueError(f"entropy_coefficient is {self.entropy_coefficient}, but the engine gave no entropy_T")
        return loss_T, metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSurrogate(PolicyLoss):
    """PPO's clipped surrogate, with bounds of its own for each side and an optional bound for bad tokens.

        ratio = exp(logprob - old logprob)
        loss  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))
        and where A < 0, with `dual_clip` c: min(loss, -A c)

    PPO: arXiv 1707.06347, eq. 7. Higher upper bound: DAPO, arXiv 2503.14476, eq. 10. Dual clip: arXiv 1912.09729, eq. 5.
    Raises ValueError for bounds outside 0 <= clip_low <= 1, clip_high >= 0, dual_clip > 1.
    """

    clip_low: float
    clip_high: float
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0 or self.clip_high < 0.0:
            raise ValueError(
                f"the ratio's bounds are 1 - clip_low and 1 + clip_high: {self.clip_low}, {self.clip_high} make none"
            )
        if self.dual_clip is not None and self.dual_clip <= 1.0:
            raise ValueError(f"dual_clip bounds a ratio from above and must exceed 1; it is {self.dual_clip}")

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        return clipped(at.log_ratio_T.exp(), at, self)


def clipped(ratio_T: Tensor, at: Scored, bounds: ClippedSurrogate) -> tuple[Tensor, Metrics]:
    """The clipped surrogate of any ratio [T], and which of its bounds were reached."""
    low, high = 1.0 - bounds.clip_low, 1.0 + bounds.clip_high
    loss_T = torch.maximum(-at.advantages_T * ratio_T, -at.advantages_T * ratio_T.clamp(low, high))
    low_T = (at.advantages_T < 0) & (ratio_T < low)
    high_T = (at.advantages_T > 0) & (ratio_T > high)
    metrics: Metrics = {
        "policy/ratio_mean": masked_mean(ratio_T, at.mask_T),
        "policy/clip_fraction": masked_mean((low_T | high_T).to(ratio_T.dtype), at.mask_T),
        "policy/clip_fraction_low": masked_mean(low_T.to(ratio_T.dtype), at.mask_T),
        "policy/clip_fraction_high": masked_mean(high_T.to(ratio_T.dtype), at.mask_T),
    }
    if bounds.dual_clip is not None:
        dual_T = (at.advantages_T < 0) & (ratio_T > bounds.dual_clip)
        metrics["policy/clip_fraction_dual"] = masked_mean(dual_T.to(ratio_T.dtype), at.mask_T)
        loss_T = torch.where(at.advantages_T < 0, torch.minimum(loss_T, -at.advantages_T * bounds.dual_clip), loss_T)
    return loss_T, metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Negative log-likelihood of the targets: supervised fine-tuning. Takes no inputs."""

    @property
    def want(self) -> Want:
        return Want()

    def __call__(self, outputs: Outputs, inputs: None, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        loss_T = torch.where(mask_T, -outputs.logprobs_T, 0.0)
        return loss_T, {"loss/nll": masked_mean(loss_T, mask_T)}
