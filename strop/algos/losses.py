"""Losses: per-token, unreduced. A batch's weights do every mean, once, for every backend.

Each loss is a frozen record of its knobs; calling it gives (loss_T, metrics). Its `Inputs` are the constants that it
needs beside the live outputs, every field [T] and aligned to the batch's targets. Masked places may hold anything, NaN
included: the *inputs* of every operation are masked, so neither a value nor a gradient can see them.

Here are the losses of single tokens' ratios; whole sequences' ratios are in `sequence_losses`, a critic's loss in
`value_losses`.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from strop.algos.balance import router_terms
from strop.algos.kl import LOG_RATIO_BOUND, Estimator, estimate
from strop.types import Layout, Metric, Metrics, Outputs, Reduction, Want


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Constants of a policy-gradient loss, each [T]; float unless it says otherwise."""

    behavior_logprobs_T: Tensor  # of the policy that sampled, 0 where nothing was sampled
    advantages_T: Tensor
    reference_logprobs_T: Tensor | None = None
    proximal_logprobs_T: Tensor | None = None  # of the policy that ratios are taken to; None: the one that sampled
    correction_T: Tensor | None = None  # importance weights that the surrogate is multiplied with; None: 1
    selected_T: Tensor | None = None  # bool; the tokens that ClipCov and KLCov treat differently
    expert_fractions_LE: Tensor | None = None  # [L, E] instead: each expert's part of the whole update's choices


@dataclass(frozen=True, slots=True, kw_only=True)
class Scored:
    """What a surrogate sees, each [T]: live values and constants with 0 in every masked place."""

    logprobs_T: Tensor  # live
    old_logprobs_T: Tensor  # of the policy that ratios are taken to
    log_ratio_T: Tensor  # live; logprob - old logprob, bounded by LOG_RATIO_BOUND
    advantages_T: Tensor
    mask_T: Tensor  # bool
    selected_T: Tensor | None  # bool


def masked(value_T: Tensor, mask_T: Tensor) -> Tensor:
    """The value where the mask is on and 0 elsewhere, whatever stands there; no gradient passes where it is off."""
    return torch.where(mask_T, value_T, 0.0)


def masked_mean(value_T: Tensor, mask_T: Tensor) -> Metric:
    """A mean over the masked tokens that can still be merged with other batches'."""
    return Metric(Reduction.MEAN, masked(value_T.detach(), mask_T).sum(), mask_T.sum())


def masked_max(value_T: Tensor, mask_T: Tensor) -> Metric:
    """The largest of non-negative values over the masked tokens, mergeable with other batches'."""
    value_T = masked(value_T.detach(), mask_T)
    return Metric(Reduction.MAX, value_T.max() if len(value_T) else value_T.sum(), mask_T.sum())


def fraction(chosen_T: Tensor, mask_T: Tensor) -> Metric:
    """The share of masked tokens that are chosen (bool [T]), mergeable with other batches'."""
    return Metric(Reduction.MEAN, (chosen_T & mask_T).sum(), mask_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyLoss(ABC):
    """A surrogate, plus the terms that any policy loss may carry: a cost for leaving a reference, a bonus for entropy.

        loss = correction * surrogate + kl_coefficient * KL(policy, reference) - entropy_coefficient * entropy
               + balance_coefficient * load_balancing + z_coefficient * router_z

    `old` in the formulas below is `proximal_logprobs_T` where the inputs have it (decoupled), and the policy that
    sampled where not (bypass). Raises ValueError when a term's numbers are not there, or inputs differ in shape.
    """

    per_row: ClassVar[bool] = False  # whether a token's loss depends on its own row alone; see `Want.per_row`

    kl_coefficient: float = 0.0
    kl_estimator: Estimator = Estimator.K3
    entropy_coefficient: float = 0.0
    balance_coefficient: float = 0.0  # of mixtures of experts, as the next: `strop.algos.balance`
    z_coefficient: float = 0.0

    @property
    def want(self) -> Want:
        routers = self.balance_coefficient != 0.0 or self.z_coefficient != 0.0
        return Want(
            entropy=self.entropy_coefficient != 0.0, router_logits=routers, per_row=self.per_row and not routers
        )

    @abstractmethod
    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        """The loss of each token [T], finite everywhere, and what is worth knowing about it."""

    def __call__(
        self, outputs: Outputs, inputs: PolicyInputs, layout: Layout, mask_T: Tensor
    ) -> tuple[Tensor, Metrics]:
        _same_shape(outputs.logprobs_T, inputs)
        old_T = inputs.behavior_logprobs_T if inputs.proximal_logprobs_T is None else inputs.proximal_logprobs_T
        at = Scored(
            logprobs_T=masked(outputs.logprobs_T, mask_T),
            old_logprobs_T=masked(old_T, mask_T),
            log_ratio_T=masked(outputs.logprobs_T - old_T, mask_T).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND),
            advantages_T=masked(inputs.advantages_T, mask_T),
            mask_T=mask_T,
            selected_T=None if inputs.selected_T is None else inputs.selected_T & mask_T,
        )
        loss_T, metrics = self.surrogate(at, layout)
        if inputs.correction_T is not None:
            loss_T = loss_T * masked(inputs.correction_T, mask_T)
        metrics |= _drift(outputs.logprobs_T, at, inputs)
        terms_T, measured = self._terms(outputs, inputs, mask_T)
        return loss_T + terms_T, metrics | measured

    def _terms(self, outputs: Outputs, inputs: PolicyInputs, mask_T: Tensor) -> tuple[Tensor | float, Metrics]:
        terms_T: Tensor | float = 0.0
        metrics: Metrics = {}
        if inputs.reference_logprobs_T is not None:
            kl_T = estimate(self.kl_estimator, outputs.logprobs_T, inputs.reference_logprobs_T, mask_T)
            metrics["kl/reference"] = masked_mean(kl_T, mask_T)
            if self.kl_coefficient:
                terms_T = terms_T + self.kl_coefficient * kl_T
        elif self.kl_coefficient:
            raise ValueError(f"kl_coefficient is {self.kl_coefficient}, but the batch has no reference_logprobs_T")
        if outputs.entropy_T is not None:
            metrics["policy/entropy"] = masked_mean(outputs.entropy_T, mask_T)
            if self.entropy_coefficient:
                terms_T = terms_T - self.entropy_coefficient * masked(outputs.entropy_T, mask_T)
        elif self.entropy_coefficient:
            raise ValueError(f"entropy_coefficient is {self.entropy_coefficient}, but the engine gave no entropy_T")
        if self.want.router_logits:
            router_T, measured = router_terms(
                outputs, inputs.expert_fractions_LE, mask_T, balance=self.balance_coefficient, z=self.z_coefficient
            )
            terms_T, metrics = terms_T + router_T, metrics | measured
        return terms_T, metrics


def _same_shape(logprobs_T: Tensor, inputs: PolicyInputs) -> None:
    """Refuse what would be broadcast: an advantage for each sequence spread over tokens is silently wrong."""
    for name, value_T in (
        ("behavior_logprobs_T", inputs.behavior_logprobs_T),
        ("advantages_T", inputs.advantages_T),
        ("reference_logprobs_T", inputs.reference_logprobs_T),
        ("proximal_logprobs_T", inputs.proximal_logprobs_T),
        ("correction_T", inputs.correction_T),
        ("selected_T", inputs.selected_T),
    ):
        if value_T is not None and value_T.shape != logprobs_T.shape:
            raise ValueError(f"{name} has shape {tuple(value_T.shape)}, the logprobs {tuple(logprobs_T.shape)}")


def _drift(logprobs_T: Tensor, at: Scored, inputs: PolicyInputs) -> Metrics:
    """How far the policy is from the one that sampled, and from the one that ratios are taken to."""
    gap_T = masked(logprobs_T.detach() - inputs.behavior_logprobs_T, at.mask_T)
    bounded_T = gap_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "policy/ratio_mean": masked_mean(at.log_ratio_T.detach().exp(), at.mask_T),
        "policy/gap_max": masked_max(gap_T.abs(), at.mask_T),
        "policy/ratio_extreme": fraction(gap_T.abs() > math.log(2.0), at.mask_T),  # not in [1/2, 2]
        "policy/kl_k3": masked_mean(torch.expm1(bounded_T) - bounded_T, at.mask_T),  # KL(behavior, policy)
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedSurrogate(PolicyLoss):
    """PPO's clipped surrogate, with bounds of its own for each side and an optional bound for bad tokens.

        ratio = exp(logprob - old logprob)
        loss  = max(-A ratio, -A clip(ratio, 1 - clip_low, 1 + clip_high))
        and where A < 0, with `dual_clip` c: min(loss, -A c)

    PPO: arXiv 1707.06347, eq. 7. Higher upper bound: DAPO, arXiv 2503.14476, section 3.1. Dual clip: arXiv 1912.09729.
    Raises ValueError for bounds outside 0 <= clip_low <= 1, clip_high >= 0, dual_clip > 1.
    """

    per_row: ClassVar[bool] = True

    clip_low: float
    clip_high: float
    dual_clip: float | None = None

    def __post_init__(self) -> None:
        if not 0.0 <= self.clip_low <= 1.0 or not self.clip_high >= 0.0:
            raise ValueError(
                f"a ratio is kept between 1 - clip_low and 1 + clip_high, which must be a range from 0 up: "
                f"clip_low={self.clip_low}, clip_high={self.clip_high}"
            )
        if self.dual_clip is not None and not self.dual_clip > 1.0:
            raise ValueError(f"dual_clip bounds a ratio from above and must exceed 1; it is {self.dual_clip}")

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        return self.clipped(at.log_ratio_T.exp(), at)

    def clipped(self, ratio_T: Tensor, at: Scored) -> tuple[Tensor, Metrics]:
        """The loss at any ratio [T], and how often its bounds decided."""
        low, high = 1.0 - self.clip_low, 1.0 + self.clip_high
        bad_T, good_T = at.advantages_T < 0, at.advantages_T > 0
        loss_T = torch.maximum(-at.advantages_T * ratio_T, -at.advantages_T * ratio_T.clamp(low, high))
        metrics: Metrics = {
            "policy/clip_fraction_low": fraction(bad_T & (ratio_T < low), at.mask_T),
            "policy/clip_fraction_high": fraction(good_T & (ratio_T > high), at.mask_T),
        }
        metrics["policy/clip_fraction"] = fraction((bad_T & (ratio_T < low)) | (good_T & (ratio_T > high)), at.mask_T)
        if self.dual_clip is not None:
            metrics["policy/clip_fraction_dual"] = fraction(bad_T & (ratio_T > self.dual_clip), at.mask_T)
            loss_T = torch.where(bad_T, torch.minimum(loss_T, -at.advantages_T * self.dual_clip), loss_T)
        return loss_T, metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class ImportanceSampling(PolicyLoss):
    """-A ratio, unclipped: the policy gradient of another policy's data. The Tinker protocol's loss of that name."""

    per_row: ClassVar[bool] = True

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        return -at.advantages_T * at.log_ratio_T.exp(), {}


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyGradient(PolicyLoss):
    """-A logprob: REINFORCE (Williams 1992), RLOO, ReMax, OPO and GPG (arXiv 2504.02546), which differ in A alone."""

    per_row: ClassVar[bool] = True

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        return -at.advantages_T * at.logprobs_T, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class CISPO(PolicyLoss):
    """-sg(clip(ratio, ratio_min, ratio_max)) A logprob: every token keeps a gradient, with a bounded weight.

    MiniMax-M1, arXiv 2506.13585, eq. 4. The bounds are ratios themselves, not distances from 1: published and verl's
    1 - low and 1 + high are written out, and TRL's epsilon_high is `ratio_max`. Raises ValueError unless
    0 <= ratio_min <= 1 <= ratio_max.
    """

    per_row: ClassVar[bool] = True

    ratio_min: float = 0.0
    ratio_max: float

    def __post_init__(self) -> None:
        if not 0.0 <= self.ratio_min <= 1.0 <= self.ratio_max:
            raise ValueError(f"the bounds are ratios around 1: ratio_min={self.ratio_min}, ratio_max={self.ratio_max}")

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        ratio_T = at.log_ratio_T.detach().exp()
        metrics: Metrics = {
            "policy/clip_fraction_low": fraction(ratio_T < self.ratio_min, at.mask_T),
            "policy/clip_fraction_high": fraction(ratio_T > self.ratio_max, at.mask_T),
        }
        return -ratio_T.clamp(self.ratio_min, self.ratio_max) * at.advantages_T * at.logprobs_T, metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class SAPO(PolicyLoss):
    """-A gate(ratio), gate = 4 / tau sigmoid(tau (ratio - 1)): a soft clip, of slope 1 at a ratio of 1.

    tau is `temperature_good` where A > 0 and `temperature_bad` elsewhere (arXiv 2511.20347). Raises ValueError unless
    both are positive.
    """

    per_row: ClassVar[bool] = True

    temperature_good: float = 1.0
    temperature_bad: float = 1.05

    def __post_init__(self) -> None:
        if not (self.temperature_good > 0.0 and self.temperature_bad > 0.0):
            raise ValueError(f"temperatures must be positive: {self.temperature_good}, {self.temperature_bad}")

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        good_T = at.advantages_T > 0
        good, bad = (at.advantages_T.new_tensor(t) for t in (self.temperature_good, self.temperature_bad))
        tau_T = torch.where(good_T, good, bad)
        gate_T = torch.sigmoid(tau_T * torch.expm1(at.log_ratio_T)) * (4.0 / tau_T)
        return -at.advantages_T * gate_T, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DRO(PolicyLoss):
    """-(A logprob - beta / 2 (logprob - old logprob)^2): a policy gradient held back by a square (arXiv 2405.19107).

    As the Tinker protocol writes it; `beta` is 0.05 in its examples.
    """

    per_row: ClassVar[bool] = True

    beta: float

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        return 0.5 * self.beta * at.log_ratio_T.square() - at.advantages_T * at.logprobs_T, {}


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPO(PolicyLoss, ABC):
    """-A sg(min(ratio, ratio_max)) logprob, but 0 for a token that would leave the trust region.

    A token leaves it when its advantage pushes its probability further from the old one and the two are already more
    than `low` (A < 0) or `high` (A > 0) apart, by a divergence of the two outcomes "this token" and "another"
    (arXiv 2602.04879). Ratios are unfair to rare tokens; this is not. Raises ValueError for a negative bound.
    """

    per_row: ClassVar[bool] = True

    low: float
    high: float
    ratio_max: float = 20.0

    def __post_init__(self) -> None:
        if not (self.low >= 0.0 and self.high >= 0.0 and self.ratio_max >= 1.0):
            raise ValueError(
                f"a trust region needs low >= 0, high >= 0, ratio_max >= 1: {self.low}, {self.high}, {self.ratio_max}"
            )

    @abstractmethod
    def distance(self, logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
        """How far apart the two probabilities of each token are, [T]; not negative."""

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        logprobs_T = at.logprobs_T.detach()
        far_T = self.distance(logprobs_T, at.old_logprobs_T)
        up_T = (at.advantages_T > 0) & (logprobs_T > at.old_logprobs_T) & (far_T > self.high)
        down_T = (at.advantages_T < 0) & (logprobs_T < at.old_logprobs_T) & (far_T > self.low)
        weight_T = torch.where(up_T | down_T, 0.0, at.log_ratio_T.detach().exp().clamp(max=self.ratio_max))
        metrics: Metrics = {
            "policy/clip_fraction_low": fraction(down_T, at.mask_T),
            "policy/clip_fraction_high": fraction(up_T, at.mask_T),
        }
        return -at.advantages_T * weight_T * at.logprobs_T, metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPOTotalVariation(DPPO):
    """DPPO with the total variation |p - p_old|."""

    def distance(self, logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
        return (logprobs_T.exp() - old_logprobs_T.exp()).abs()


@dataclass(frozen=True, slots=True, kw_only=True)
class DPPOKullbackLeibler(DPPO):
    """DPPO with p_old log(p_old / p) + (1 - p_old) log((1 - p_old) / (1 - p)); 1e-8 keeps the second log finite."""

    def distance(self, logprobs_T: Tensor, old_logprobs_T: Tensor) -> Tensor:
        rest_T, old_rest_T = -torch.expm1(logprobs_T) + 1e-8, -torch.expm1(old_logprobs_T) + 1e-8
        old_T = old_logprobs_T.exp()
        return old_T * (old_logprobs_T - logprobs_T) + (1.0 - old_T) * (old_rest_T / rest_T).log()


@dataclass(frozen=True, slots=True, kw_only=True)
class ClipCov(ClippedSurrogate):
    """PPO's clipped surrogate, without the tokens that `selection.clip_cov` chose over the whole step.

    Those few carry most of the loss of entropy (arXiv 2505.22617). Raises ValueError when nothing was selected.
    """

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        loss_T, metrics = self.clipped(at.log_ratio_T.exp(), at)
        selected_T = _selected(at)
        metrics["policy/selected_fraction"] = fraction(selected_T, at.mask_T)
        return torch.where(selected_T, 0.0, loss_T), metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class KLCov(PolicyLoss):
    """-A ratio, plus coefficient |logprob - old logprob| at the tokens that `selection.kl_cov` chose.

    Those are of the whole step (arXiv 2505.22617). Raises ValueError when nothing was selected.
    """

    per_row: ClassVar[bool] = True

    coefficient: float = 1.0

    def surrogate(self, at: Scored, layout: Layout) -> tuple[Tensor, Metrics]:
        selected_T = _selected(at)
        held_T = torch.where(selected_T, self.coefficient * at.log_ratio_T.abs(), 0.0)
        return held_T - at.advantages_T * at.log_ratio_T.exp(), {
            "policy/selected_fraction": fraction(selected_T, at.mask_T)
        }


def _selected(at: Scored) -> Tensor:
    if at.selected_T is None:
        raise ValueError("this loss needs selected_T in its inputs: choose tokens over the whole step first")
    return at.selected_T


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Negative log-likelihood of the targets: supervised fine-tuning. Takes no inputs."""

    @property
    def want(self) -> Want:
        return Want(per_row=True)

    def __call__(self, outputs: Outputs, inputs: None, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        loss_T = -masked(outputs.logprobs_T, mask_T)
        return loss_T, {"loss/nll": masked_mean(loss_T, mask_T)}
