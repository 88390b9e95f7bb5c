"""Losses: per-token, unreduced. A batch's weights do every mean, once, for every backend.

Each loss is a frozen record of its knobs; calling it gives (loss_T, metrics). Its `Inputs` are the constants that it
needs beside the live outputs, every field [T] and aligned to the batch's targets.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.types import Layout, Metric, Metrics, Outputs, Reduction, Want

LOG_RATIO_BOUND = 20.0  # exp(20) is 5e8: past it a ratio says only "huge", and float32 sums lose everything else


@dataclass(frozen=True, slots=True, kw_only=True)
class PolicyInputs:
    """Constants of a policy-gradient loss, each float [T]."""

    behavior_logprobs_T: Tensor  # of the policy that sampled, 0 where nothing was sampled
    advantages_T: Tensor
    reference_logprobs_T: Tensor | None = None


def masked_mean(value_T: Tensor, mask_T: Tensor) -> Metric:
    """A mean over the masked tokens that can still be merged with other batches'."""
    return Metric(Reduction.MEAN, torch.where(mask_T, value_T.detach(), 0.0).sum(), mask_T.sum())


@dataclass(frozen=True, slots=True, kw_only=True)
class CrossEntropy:
    """Negative log-likelihood of the targets: supervised fine-tuning. Takes no inputs."""

    @property
    def want(self) -> Want:
        return Want()

    def __call__(self, outputs: Outputs, inputs: None, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        loss_T = -outputs.logprobs_T
        return loss_T, {"loss/nll": masked_mean(loss_T, mask_T)}
