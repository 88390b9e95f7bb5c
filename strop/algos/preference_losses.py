"""Losses on preferences: two texts at one prompt, and which of them is better. Per token, unreduced, like every loss.

What a pair costs is one number, made of all its trained tokens and told to each of them. `data/pairs` gives those of
one pair equal weights that sum to one part in the number of pairs, so the weighted sum is the mean over pairs. A pair
is never split over batches, and no loss here looks beyond one.

    token logprobs [T] -> a score of each text, [P] chosen and [P] rejected -> loss of each pair [P] -> loss_T

P counts the pairs of a batch; x = logprob - reference logprob; h = score of the chosen - score of the rejected.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.nn.functional import logsigmoid

from strop.algos.losses import masked, masked_mean
from strop.types import Layout, Metric, Metrics, Outputs, Reduction, Want

CERTAIN = -1e-6
"""The largest mean logprob whose odds are taken: those of a probability of 1 are infinite."""


@dataclass(frozen=True, slots=True, kw_only=True)
class PairInputs:
    """Constants of a preference loss, each [T]; float unless it says otherwise."""

    pair_T: Tensor  # int64; which pair of the batch a token belongs to, from 0. For KTO: which text
    chosen_T: Tensor  # bool; whether its text is the chosen one. For KTO: whether it is desirable
    reference_logprobs_T: Tensor | None = None
    margin_T: Tensor | None = None  # by how much the chosen text should score higher (BradleyTerry); None: 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PairSums:
    """Sums over each pair's counted tokens, told apart by text, each [P]. Unused places at the end hold 0."""

    chosen_P: Tensor
    rejected_P: Tensor

    @classmethod
    def of(cls, value_T: Tensor, inputs: PairInputs, layout: Layout, mask_T: Tensor) -> PairSums:
        """Masked places may hold anything, in every column."""
        value_T, pair_T = masked(value_T, mask_T), torch.where(mask_T, inputs.pair_T, 0)
        zeros_P = value_T.new_zeros(len(layout.lengths))  # no batch has more pairs than sequences
        chosen_T = inputs.chosen_T & mask_T
        return cls(
            chosen_P=zeros_P.index_add(0, pair_T, masked(value_T, chosen_T)),
            rejected_P=zeros_P.index_add(0, pair_T, masked(value_T, ~chosen_T)),
        )

    def __truediv__(self, other: PairSums) -> PairSums:
        return PairSums(chosen_P=self.chosen_P / other.chosen_P, rejected_P=self.rejected_P / other.rejected_P)

    @property
    def difference_P(self) -> Tensor:
        return self.chosen_P - self.rejected_P


def _counts(inputs: PairInputs, layout: Layout, mask_T: Tensor, like_T: Tensor) -> PairSums:
    """The counted tokens of each pair's texts, at least 1."""
    counts = PairSums.of(torch.ones_like(like_T), inputs, layout, mask_T)
    return PairSums(chosen_P=counts.chosen_P.clamp(min=1.0), rejected_P=counts.rejected_P.clamp(min=1.0))


def _log_ratios(outputs: Outputs, inputs: PairInputs) -> Tensor:
    """x [T]. Raises ValueError when the batch has no reference."""
    if inputs.reference_logprobs_T is None:
        raise ValueError("this loss compares with a reference, and the batch has no reference_logprobs_T")
    return outputs.logprobs_T - inputs.reference_logprobs_T


def _told(value_P: Tensor, inputs: PairInputs, mask_T: Tensor) -> Tensor:
    """Each pair's number at every counted token of it, [T]."""
    return value_P[torch.where(mask_T, inputs.pair_T, 0)]


def _mean_over_pairs(value_P: Tensor, live_P: Tensor) -> Metric:
    return Metric(Reduction.MEAN, torch.where(live_P, value_P.detach(), 0.0).sum(), live_P.sum())


def _describe(loss_P: Tensor, reward: PairSums, live_P: Tensor) -> Metrics:
    """What is worth knowing of each pair: its loss, and what its two texts are worth. A tie is half right."""
    h_P = reward.difference_P
    right_P = 0.5 * (1.0 + h_P.detach().sign())
    return {
        "loss/preference": _mean_over_pairs(loss_P, live_P),
        "preference/accuracy": _mean_over_pairs(right_P, live_P),
        "preference/margin": _mean_over_pairs(h_P, live_P),
        "preference/chosen_reward": _mean_over_pairs(reward.chosen_P, live_P),
        "preference/rejected_reward": _mean_over_pairs(reward.rejected_P, live_P),
    }


@dataclass(frozen=True, slots=True, kw_only=True)
class PreferenceLoss(ABC):
    """A loss of h, the difference of two texts' scores. Raises ValueError unless `beta` is positive.

    A text's reward, in the metrics, is beta times its score.
    """

    beta: float

    def __post_init__(self) -> None:
        if not self.beta > 0.0:
            raise ValueError(f"beta scales the scores and must be positive; it is {self.beta}")

    @property
    def want(self) -> Want:
        return Want()

    @abstractmethod
    def scores(self, outputs: Outputs, inputs: PairInputs, layout: Layout, mask_T: Tensor) -> PairSums:
        """What each text is worth, before beta."""

    @abstractmethod
    def of_pairs(self, score: PairSums) -> Tensor:
        """The loss of each pair [P], finite for any finite scores."""

    def __call__(self, outputs: Outputs, inputs: PairInputs, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        score = self.scores(outputs, inputs, layout, mask_T)
        loss_P = self.of_pairs(score)
        live_P = PairSums.of(torch.ones_like(outputs.logprobs_T), inputs, layout, mask_T).chosen_P > 0
        reward = PairSums(chosen_P=self.beta * score.chosen_P, rejected_P=self.beta * score.rejected_P)
        metrics = _describe(loss_P, reward, live_P)
        metrics["preference/chosen_nll"] = masked_mean(-outputs.logprobs_T, inputs.chosen_T & mask_T)
        return _told(loss_P, inputs, mask_T), metrics


@dataclass(frozen=True, slots=True, kw_only=True)
class _AgainstReference(PreferenceLoss, ABC):
    """A text scores sum(x) over its trained tokens; with `per_token` their mean. Needs `reference_logprobs_T`."""

    per_token: bool = False

    def scores(self, outputs: Outputs, inputs: PairInputs, layout: Layout, mask_T: Tensor) -> PairSums:
        sums = PairSums.of(_log_ratios(outputs, inputs), inputs, layout, mask_T)
        return sums / _counts(inputs, layout, mask_T, outputs.logprobs_T) if self.per_token else sums


@dataclass(frozen=True, slots=True, kw_only=True)
class _OwnLogprobs(PreferenceLoss, ABC):
    """A text scores the mean of its trained tokens' logprobs. No reference."""

    def scores(self, outputs: Outputs, inputs: PairInputs, layout: Layout, mask_T: Tensor) -> PairSums:
        sums = PairSums.of(outputs.logprobs_T, inputs, layout, mask_T)
        return sums / _counts(inputs, layout, mask_T, outputs.logprobs_T)


@dataclass(frozen=True, slots=True, kw_only=True)
class DPO(_AgainstReference):
    """-(1 - e) log sigmoid(beta h) - e log sigmoid(-beta h), e being `label_smoothing`.

    arXiv 2305.18290, eq. 7, is e = 0; above it e is the share of labels believed to be flipped (conservative DPO, a
    note by the same authors). `per_token` is the length-normalised form of Tulu 3, arXiv 2411.15124. Raises ValueError
    unless 0 <= e < 1/2.
    """

    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        PreferenceLoss.__post_init__(self)
        _check_smoothing(self.label_smoothing)

    def of_pairs(self, score: PairSums) -> Tensor:
        h_P = self.beta * score.difference_P
        return -(1.0 - self.label_smoothing) * logsigmoid(h_P) - self.label_smoothing * logsigmoid(-h_P)


@dataclass(frozen=True, slots=True, kw_only=True)
class RobustDPO(_AgainstReference):
    """(-(1 - e) log sigmoid(beta h) + e log sigmoid(-beta h)) / (1 - 2 e), e being `label_smoothing`.

    Unbiased when a share e of the labels is flipped (arXiv 2403.00409); it has no lower bound. Raises ValueError unless
    0 <= e < 1/2.
    """

    label_smoothing: float

    def __post_init__(self) -> None:
        PreferenceLoss.__post_init__(self)
        _check_smoothing(self.label_smoothing)

    def of_pairs(self, score: PairSums) -> Tensor:
        h_P, e = self.beta * score.difference_P, self.label_smoothing
        return (-(1.0 - e) * logsigmoid(h_P) + e * logsigmoid(-h_P)) / (1.0 - 2.0 * e)


def _check_smoothing(label_smoothing: float) -> None:
    if not 0.0 <= label_smoothing < 0.5:
        raise ValueError(
            f"label_smoothing is the share of flipped labels, from 0 up to but not 1/2; it is {label_smoothing}"
        )


@dataclass(frozen=True, slots=True, kw_only=True)
class Hinge(_AgainstReference):
    """max(0, 1 - beta h): the loss of SLiC-HF (arXiv 2305.10425, eq. 1) on DPO's scores, as in arXiv 2309.06657."""

    def of_pairs(self, score: PairSums) -> Tensor:
        return (1.0 - self.beta * score.difference_P).clamp(min=0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class IPO(_AgainstReference):
    """(h - 1 / (2 beta))^2: a difference of a given size instead of one without end. arXiv 2310.12036, eq. 17.

    The equation sums x over a text; its authors' results are of the mean, which is `per_token` (as TRL reports).
    """

    def of_pairs(self, score: PairSums) -> Tensor:
        return (score.difference_P - 0.5 / self.beta).square()


@dataclass(frozen=True, slots=True, kw_only=True)
class SimPO(_OwnLogprobs):
    """-log sigmoid(beta h - target_margin), scores being mean logprobs. arXiv 2405.14734, eq. 6; beta is 2 or more.

    Raises ValueError for a negative margin.
    """

    target_margin: float

    def __post_init__(self) -> None:
        PreferenceLoss.__post_init__(self)
        if not self.target_margin >= 0.0:
            raise ValueError(f"target_margin must not be negative; it is {self.target_margin}")

    def of_pairs(self, score: PairSums) -> Tensor:
        return -logsigmoid(self.beta * score.difference_P - self.target_margin)


@dataclass(frozen=True, slots=True, kw_only=True)
class ORPO(_OwnLogprobs):
    """-m_c - beta log sigmoid(log odds(m_c) - log odds(m_r)), log odds(m) = m - log(1 - exp(m)), m the mean logprobs.

    Imitation of the chosen text and a preference for it in one loss. arXiv 2403.07691, eqs. 4-7; beta is its lambda. A
    mean logprob above `CERTAIN` counts as that in the odds.
    """

    def of_pairs(self, score: PairSums) -> Tensor:
        log_odds_P = _log_odds(score.chosen_P) - _log_odds(score.rejected_P)
        return -score.chosen_P - self.beta * logsigmoid(log_odds_P)


def _log_odds(mean_P: Tensor) -> Tensor:
    mean_P = mean_P.clamp(max=CERTAIN)
    return mean_P - torch.log(-torch.expm1(mean_P))


@dataclass(frozen=True, slots=True, kw_only=True)
class KTO:
    """desirable (1 - sigmoid(beta (r - z))) for a desirable text, undesirable (1 - sigmoid(beta (z - r))) for another.

    r = sum(x) over the text; z is `baseline`, an estimate of KL(policy, reference) from `kto_baseline` that is the same
    for the whole step and takes no gradient. arXiv 2402.01306, eq. 8. Here a text stands alone: `pair_T` counts texts.
    Raises ValueError unless beta is positive and nothing else is negative, and when the batch has no reference.
    """

    beta: float
    baseline: float
    desirable: float = 1.0
    undesirable: float = 1.0

    def __post_init__(self) -> None:
        if not (self.beta > 0.0 and min(self.baseline, self.desirable, self.undesirable) >= 0.0):
            raise ValueError(
                f"beta must be positive, baseline and weights not negative: beta={self.beta}, "
                f"baseline={self.baseline}, desirable={self.desirable}, undesirable={self.undesirable}"
            )

    @property
    def want(self) -> Want:
        return Want()

    def __call__(self, outputs: Outputs, inputs: PairInputs, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        r = PairSums.of(_log_ratios(outputs, inputs), inputs, layout, mask_T)
        counts = PairSums.of(torch.ones_like(outputs.logprobs_T), inputs, layout, mask_T)
        good_P, bad_P = counts.chosen_P > 0, counts.rejected_P > 0
        good_loss_P = self.desirable * torch.sigmoid(self.beta * (self.baseline - r.chosen_P))
        bad_loss_P = self.undesirable * torch.sigmoid(self.beta * (r.rejected_P - self.baseline))
        loss_P = torch.where(good_P, good_loss_P, bad_loss_P)
        metrics: Metrics = {
            "loss/preference": _mean_over_pairs(loss_P, good_P | bad_P),
            "preference/chosen_reward": _mean_over_pairs(self.beta * r.chosen_P, good_P),
            "preference/rejected_reward": _mean_over_pairs(self.beta * r.rejected_P, bad_P),
            "preference/chosen_nll": masked_mean(-outputs.logprobs_T, inputs.chosen_T & mask_T),
        }
        return _told(loss_P, inputs, mask_T), metrics


def kto_baseline(log_ratio_sum: float, texts: int) -> float:
    """max(0, mean of r over texts whose reply belongs to another prompt): KTO's z, arXiv 2402.01306, section 4.2.

    `log_ratio_sum` is x summed over all those `texts`. Raises ValueError without any.
    """
    if texts < 1:
        raise ValueError("KTO's baseline is a mean over texts, and there are none")
    return max(log_ratio_sum / texts, 0.0)


@dataclass(frozen=True, slots=True, kw_only=True)
class BradleyTerry:
    """-log sigmoid(v_c - v_r - margin) + center (v_c + v_r)^2, v being a text's value at its last token.

    The mask names those last tokens and nothing else: `data/pairs.pack_scored`. A reward model's loss: arXiv
    2203.02155, eq. 1; margins as in Llama 2, arXiv 2307.09288, eq. 2; `center` keeps values near 0, as in arXiv
    2312.09244. Raises ValueError for a negative center, or when the engine gave no values.
    """

    center: float = 0.0

    def __post_init__(self) -> None:
        if not self.center >= 0.0:
            raise ValueError(f"center weighs a square and must not be negative; it is {self.center}")

    @property
    def want(self) -> Want:
        return Want(values=True)

    def __call__(self, outputs: Outputs, inputs: PairInputs, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        if outputs.values_T is None:
            raise ValueError("a reward model's loss needs values_T: the engine's model must have a value head")
        value = PairSums.of(outputs.values_T, inputs, layout, mask_T)
        h_P = value.difference_P
        margin_P: Tensor | float = 0.0
        if inputs.margin_T is not None:
            margin_P = PairSums.of(inputs.margin_T, inputs, layout, mask_T).chosen_P
        loss_P = -logsigmoid(h_P - margin_P) + self.center * (value.chosen_P + value.rejected_P).square()
        live_P = PairSums.of(torch.ones_like(outputs.values_T), inputs, layout, mask_T).chosen_P > 0
        return _told(loss_P, inputs, mask_T), _describe(loss_P, value, live_P)
