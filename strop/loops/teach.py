"""What frozen teachers say of a step's tokens, as constants of the student's loss.

    batches + each teacher's weight at each token -> their logprobs of the sampled tokens, as rewards
                                                  -> or their distributions at every token

Only rows that a teacher teaches go through its head.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TypeVar, cast

import numpy as np
import torch
from torch import Tensor

from strop.algos.distill_losses import DistillInputs, reverse_kl_rewards
from strop.algos.losses import PolicyInputs
from strop.algos.token_advantages import returns_to_go
from strop.data.packing import Batch, Packed, with_inputs
from strop.data.teaching import Float64s, spread_weights
from strop.engines.base import Engine
from strop.types import Metric, Metrics, Outputs, Reduction, Want

InputsT = TypeVar("InputsT")


async def rewarded(
    packed: Packed[PolicyInputs], weights_NM: Float64s, teachers: Sequence[Engine], *, discount: float
) -> tuple[list[Batch[PolicyInputs]], Metrics]:
    """The batches with an advantage at every token, minus the reverse KL there and what follows, discounted; the mean.

    The student's logprobs are the sampler's, of the same weights.
    """
    trained, weights = packed.trained, spread_weights(weights_NM, packed.trained)
    said = [await _ask(teacher, m, packed.batches, weights, Want()) for m, teacher in enumerate(teachers)]
    rewards_M = reverse_kl_rewards(
        trained.gather([batch.inputs.behavior_logprobs_T for batch in packed.batches]),
        np.stack([trained.gather([output.logprobs_T for output in outputs]) for outputs in said]),
        weights_NM[trained.attempt_M].T,
    )
    every_M = np.ones(len(rewards_M), np.bool_)
    advantages_M = returns_to_go(rewards_M, every_M, trained.counts_N, discount=discount)
    divergence = Metric(Reduction.MEAN, -float(rewards_M.sum()), len(rewards_M))
    return with_inputs(packed.batches, advantages=trained.scatter(advantages_M)), {"distill/divergence": divergence}


async def compared(
    batches: Sequence[Batch[PolicyInputs]],
    weights: Sequence[Tensor],
    teachers: Sequence[Engine],
    *,
    top_k: int,
    vocab_size: int,
) -> list[Batch[DistillInputs]]:
    """The batches with each teacher's `top_k` likeliest tokens at every row, for a student of `vocab_size` tokens.

    `weights` are the teachers' at each token, [T, M] for each batch.
    """
    said = [await _ask(teacher, m, batches, weights, Want(top_k=top_k)) for m, teacher in enumerate(teachers)]
    return [_lesson(batch, weights[b], [outputs[b] for outputs in said], vocab_size) for b, batch in enumerate(batches)]


async def _ask(
    teacher: Engine, m: int, batches: Sequence[Batch[InputsT]], weights: Sequence[Tensor], want: Want
) -> list[Outputs]:
    masked = [replace(batch, mask_T=w_TM[:, m] > 0) for batch, w_TM in zip(batches, weights, strict=True)]
    return await teacher.forward(masked, want)


def _lesson(
    batch: Batch[PolicyInputs], weights_TM: Tensor, said: list[Outputs], vocab_size: int
) -> Batch[DistillInputs]:
    ids_TK = torch.cat([output.top_k_ids_TK for output in said if output.top_k_ids_TK is not None], -1)
    logprobs_TK = torch.cat([output.top_k_logprobs_TK for output in said if output.top_k_logprobs_TK is not None], -1)
    foreign_TK = ids_TK >= vocab_size  # of rows that only fill the teacher's output matrix up
    inputs = DistillInputs(
        behavior_logprobs_T=batch.inputs.behavior_logprobs_T,
        teacher_logprobs_TK=torch.where(foreign_TK, -torch.inf, logprobs_TK),
        teacher_weights_TM=weights_TM,
    )
    return cast("Batch[DistillInputs]", replace(batch, inputs=inputs, ids_TK=torch.where(foreign_TK, 0, ids_TK)))
