"""A critic's loss: the square of what it predicted wrong, held near what it predicted before."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from strop.algos.losses import fraction, masked, masked_mean
from strop.types import Layout, Metrics, Outputs, Want


@dataclass(frozen=True, slots=True, kw_only=True)
class ValueInputs:
    """Constants of a value loss, each float [T]."""

    old_values_T: Tensor  # what the critic predicted before this step's updates
    returns_T: Tensor


@dataclass(frozen=True, slots=True, kw_only=True)
class ClippedValue:
    """max((v - R)^2, (clip(v, v_old - clip, v_old + clip) - R)^2) / 2; without `clip` just (v - R)^2 / 2.

    PPO's value loss as implemented by OpenAI's baselines (see arXiv 2005.12729). Raises ValueError for a negative clip,
    or when the engine gave no values.
    """

    clip: float | None = None

    def __post_init__(self) -> None:
        if self.clip is not None and not self.clip >= 0.0:
            raise ValueError(f"clip is a distance from the old value and must not be negative; it is {self.clip}")

    @property
    def want(self) -> Want:
        return Want(values=True)

    def __call__(self, outputs: Outputs, inputs: ValueInputs, layout: Layout, mask_T: Tensor) -> tuple[Tensor, Metrics]:
        if outputs.values_T is None:
            raise ValueError("a value loss needs values_T: the engine's model must have a value head")
        value_T = masked(outputs.values_T, mask_T)
        old_T, return_T = masked(inputs.old_values_T, mask_T), masked(inputs.returns_T, mask_T)
        square_T = (value_T - return_T).square()
        metrics: Metrics = {"value/mean": masked_mean(value_T, mask_T), "value/error": masked_mean(square_T, mask_T)}
        if self.clip is not None:
            held_T = (value_T.clamp(old_T - self.clip, old_T + self.clip) - return_T).square()
            metrics["value/clip_fraction"] = fraction(held_T > square_T, mask_T)
            square_T = torch.maximum(square_T, held_T)
        return 0.5 * square_T, metrics
