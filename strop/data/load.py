"""How a step's tokens used the experts: routes of its batches in, counts and the numbers to report out.

L layers with routers    E experts
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from strop.algos.balance import fractions_of, sampled_rows, violations
from strop.algos.kl import LOG_RATIO_BOUND
from strop.algos.losses import PolicyInputs, fraction, masked, masked_mean
from strop.data.packing import Batch
from strop.data.routes import expert_counts
from strop.types import Metric, Metrics, Outputs, Reduction, merge_metrics


@dataclass(frozen=True, slots=True)
class Load:
    """How often each expert was taken: int64 [L, E]."""

    layers: tuple[int, ...]  # decoder-layer indices
    counts_LE: NDArray[np.int64]

    def __add__(self, other: Load) -> Load:
        return Load(self.layers, self.counts_LE + other.counts_LE)

    def metrics(self) -> Metrics:
        """How far each layer is from even load, and the step's worst layer and mean over layers."""
        metrics: Metrics = {}
        for name, off_L in violations(self.counts_LE).items():
            for layer, off in zip(self.layers, off_L.tolist(), strict=True):
                metrics[f"router/load_{name}/layer_{layer}"] = Metric(Reduction.MEAN, off)
            metrics[f"router/load_{name}"] = Metric(Reduction.MEAN, float(off_L.sum()), len(off_L))
        return metrics


def sampled_load(batches: Sequence[Batch[PolicyInputs]], outputs: Sequence[Outputs]) -> Load | None:
    """The load of the sampled tokens, a text's last left out: by the batches' routes, else as `outputs` have them.

    `outputs` are those of a forward pass that was asked for routes. None when there are no batches.
    """
    total: Load | None = None
    for batch, output in zip(batches, outputs, strict=True):
        routes = output.routes if batch.routes is None else batch.routes
        counts_LE = _counts(output)
        assert routes is not None
        counted_T = sampled_rows(batch.mask_T.numpy(), batch.targets_T.numpy())
        load = Load(routes.layers, expert_counts(routes, counted_T, counts_LE.shape[1]))
        total = load if total is None else total + load
    return total


def with_fractions(batches: Sequence[Batch[PolicyInputs]], outputs: Sequence[Outputs]) -> list[Batch[PolicyInputs]]:
    """The update's batches with each expert's part of its choices, counted over all trained tokens of all of them."""
    if not batches:
        return []
    whole_LE = torch.from_numpy(fractions_of(np.sum([_counts(output) for output in outputs], 0)).astype(np.float32))
    return [replace(batch, inputs=replace(batch.inputs, expert_fractions_LE=whole_LE)) for batch in batches]


def unreplayed(batches: Sequence[Batch[PolicyInputs]], outputs: Sequence[Outputs]) -> Metrics:
    """What `policy/kl_k3` and `policy/ratio_extreme` would be without replay: `outputs` chose their experts freely."""
    parts: list[Metrics] = []
    for batch, output in zip(batches, outputs, strict=True):
        mask_T = batch.mask_T
        gap_T = masked(output.logprobs_T.cpu() - batch.inputs.behavior_logprobs_T, mask_T)
        bounded_T = gap_T.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
        parts.append(
            {
                "router/unreplayed_kl": masked_mean(torch.expm1(bounded_T) - bounded_T, mask_T),
                "router/unreplayed_extreme": fraction(gap_T.abs() > math.log(2.0), mask_T),
            }
        )
    return merge_metrics(parts)


def _counts(output: Outputs) -> NDArray[np.int64]:
    counts_LE: Tensor | None = output.expert_counts_LE
    if counts_LE is None:
        raise ValueError("the engine was asked for routes and gave no expert_counts_LE")
    return counts_LE.numpy()
