"""Losses of a student against its teachers, per token and unreduced, on the student's own attempts.

    teacher's logprobs at K ids + the student's live ones at the same ids -> a divergence of the two -> loss [T]

A divergence of whole distributions is computed on the teacher's K likeliest tokens; with K the whole vocabulary it is
exact. Otherwise `Tail` says what becomes of the rest. The cheapest form needs no ids: the reverse KL at the sampled
tokens as a reward (`reverse_kl_rewards`), learned through any `PolicyLoss`.

    M teachers   K candidates of each   T packed tokens   N trained tokens of a step, attempt by attempt
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.algos.losses import masked, masked_max, masked_mean
from strop.types import Layout, Metrics, Outputs, Want

Float64s = NDArray[np.float64]

TAIL_FLOOR = 1e-5  # probability: below it, what is left of 1 is rounding in float32
LOG_FLOOR = -40.0  # of the teacher's logprobs: what it all but rules out costs the student much, and not infinity


class Divergence(StrEnum):
    """p is the teacher's distribution, q the student's."""

    FORWARD_KL = "forward_kl"  # KL(p, q) = sum p log(p / q): the student covers all that the teacher would say
    REVERSE_KL = "reverse_kl"  # KL(q, p) = sum q log(q / p): the student says only what the teacher would
    JENSEN_SHANNON = "jensen_shannon"  # beta KL(p, m) + (1 - beta) KL(q, m), m = beta p + (1 - beta) q


class Tail(StrEnum):
    """What becomes of the tokens that are not among the K."""

    BUCKET = "bucket"  # one more outcome, with all their probability: a lower bound of the whole divergence
    RENORMALISED = "renormalised"  # both are scaled to sum to 1 over the K: blind to what the student gives the others
    DROPPED = (
        "dropped"  # the K terms as they are; below 0 where the student has more probability there than the teacher
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class DistillInputs:
    """Constants, aligned to the batch's targets. Columns m K to (m + 1) K belong to teacher m, and so do those of the
    batch's `ids_TK`, which say which tokens they speak of."""

    behavior_logprobs_T: Tensor  # of the sampled tokens when they were sampled; to measure with
    teacher_logprobs_TK: Tensor  # [T, M K]; -inf where the student has no such token, which then is no outcome
    teacher_weights_TM: Tensor  # [T, M]; 0 where a teacher does not teach, and its columns may then hold anything


@dataclass(frozen=True, slots=True, kw_only=True)
class Distillation:
    """sum over teachers of weight * divergence(teacher, student), at every token: GKD (arXiv 2306.13649), MiniLLM's
    direction (2306.08543) and knowledge distillation itself (1503.02531) are `divergence` and `beta`.

    The tail as a bucket: arXiv 2608.14728. Raises ValueError unless 0 < beta < 1, or for inputs that do not fit.
    """

    divergence: Divergence = Divergence.FORWARD_KL
    tail: Tail = Tail.BUCKET
    beta: float = 0.5  # of Jensen-Shannon: towards 0 its gradient is beta times forward KL's

    def __post_init__(self) -> None:
        if not 0.0 < self.beta < 1.0:
            raise ValueError(f"beta mixes the two distributions and lies between 0 and 1; it is {self.beta}")

    @property
    def want(self) -> Want:
        return Want(per_row=True)

    def __call__(
        self, outputs: Outputs, inputs: DistillInputs, layout: Layout, mask_T: Tensor
    ) -> tuple[Tensor, Metrics]:
        if outputs.ids_logprobs_TK is None:
            raise ValueError("the engine gave no ids_logprobs_TK: the batch must name the teachers' tokens in ids_TK")
        loss_T, metrics = self.of(outputs.ids_logprobs_TK, inputs, mask_T)
        gap_T = masked(outputs.logprobs_T.detach() - inputs.behavior_logprobs_T, mask_T)
        return loss_T, metrics | {"policy/gap_max": masked_max(gap_T.abs(), mask_T)}

    def of(self, student_TK: Tensor, inputs: DistillInputs, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        """(loss [T], metrics) from the student's live logprobs [T, M K] at the teachers' ids."""
        teacher_TK, (rows, teachers) = inputs.teacher_logprobs_TK, inputs.teacher_weights_TM.shape
        if not student_TK.shape == teacher_TK.shape or rows != len(mask_T) or teacher_TK.shape[1] % teachers:
            raise ValueError(
                f"{tuple(student_TK.shape)} logprobs of the student, {tuple(teacher_TK.shape)} of the teachers and "
                f"{(rows, teachers)} weights do not fit: they must be [T, M K], [T, M K] and [T, M]"
            )
        shape = (rows, teachers, teacher_TK.shape[1] // teachers)
        weights_TM = masked(inputs.teacher_weights_TM, mask_T[:, None]).to(student_TK.dtype)
        taught_TM = weights_TM > 0
        absent_TMK = (teacher_TK.view(shape) == -torch.inf) & taught_TM[..., None]
        teacher_TMK = _filled(teacher_TK.view(shape).to(student_TK.dtype), taught_TM).clamp_min(LOG_FLOOR)
        student_TMK = torch.where(absent_TMK, LOG_FLOOR, _filled(student_TK.view(shape), taught_TM))
        apart_TM = self._apart(*self._with_tail(teacher_TMK, student_TMK))
        loss_T = (weights_TM * masked(apart_TM, taught_TM)).sum(-1)
        return loss_T, {
            "distill/divergence": masked_mean(loss_T, mask_T),
            "distill/teacher_mass": masked_mean(teacher_TMK.exp().sum(-1), taught_TM),
            "distill/student_mass": masked_mean(student_TMK.exp().sum(-1), taught_TM),
        }

    def _with_tail(self, teacher_TMK: Tensor, student_TMK: Tensor) -> tuple[Tensor, Tensor]:
        match self.tail:
            case Tail.DROPPED:
                return teacher_TMK, student_TMK
            case Tail.RENORMALISED:
                return teacher_TMK.log_softmax(-1), student_TMK.log_softmax(-1)
            case Tail.BUCKET:
                return _bucketed(teacher_TMK), _bucketed(student_TMK)

    def _apart(self, teacher_TMK: Tensor, student_TMK: Tensor) -> Tensor:
        match self.divergence:
            case Divergence.FORWARD_KL:
                return _kl(teacher_TMK, student_TMK)
            case Divergence.REVERSE_KL:
                return _kl(student_TMK, teacher_TMK)
            case Divergence.JENSEN_SHANNON:
                mixed_TMK = torch.logaddexp(
                    teacher_TMK + float(np.log(self.beta)), student_TMK + float(np.log1p(-self.beta))
                )
                return self.beta * _kl(teacher_TMK, mixed_TMK) + (1.0 - self.beta) * _kl(student_TMK, mixed_TMK)


def reverse_kl_rewards(student_N: Float64s, teacher_MN: Float64s, weights_MN: Float64s) -> Float64s:
    """sum over teachers of weight * (teacher's logprob - student's) at each sampled token: float64 [N].

    The mean of minus that over the student's samples is KL(student, teacher); as a reward of its own token, without
    what follows (a discount of 0), it is on-policy distillation as in arXiv 2306.08543, section 2.2, and in Tinker's
    cookbook. Where a weight is 0 the teacher's logprob may be anything.
    """
    return np.where(weights_MN > 0, weights_MN * (teacher_MN - student_N), 0.0).sum(0)


def _filled(logprobs_TMK: Tensor, taught_TM: Tensor) -> Tensor:
    """The logprobs where they are taught; elsewhere K + 1 equal outcomes, so that no operation leaves its range."""
    return torch.where(taught_TM[..., None], logprobs_TMK, -float(np.log1p(logprobs_TMK.shape[-1])))


def _bucketed(logprobs_TMK: Tensor) -> Tensor:
    """One more outcome: log(1 - sum of the others), no smaller than TAIL_FLOOR."""
    mass_TM = logprobs_TMK.logsumexp(-1, keepdim=True).clamp_max(float(np.log1p(-TAIL_FLOOR)))
    return torch.cat([logprobs_TMK, (-torch.expm1(mass_TM)).log()], -1)


def _kl(p_TMK: Tensor, q_TMK: Tensor) -> Tensor:
    return (p_TMK.exp() * (p_TMK - q_TMK)).sum(-1)
