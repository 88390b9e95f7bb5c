"""Trajectories to packed batches: the one place that shifts targets, masks prompts and writes loss weights."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Generic, TypeVar

from torch import Tensor

from strop.types import Layout, Routes

InputsT = TypeVar("InputsT")


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch(Generic[InputsT]):
    """Packed sequences for one forward pass: tensors [T], no padding anywhere. Engines never split a Batch.

    Every token is here; the last target of a sequence is -1 with its mask off and weight 0. `mask_T` says which targets
    count, `weights_T` holds the normalisation and may be zero or negative: neither stands for the other.
    """

    tokens_T: Tensor  # int64
    targets_T: Tensor  # int64, the next token of the same text; -1 where there is none
    mask_T: Tensor  # bool
    weights_T: Tensor  # float32; zero wherever the mask is off
    layout: Layout
    inputs: InputsT  # the loss's own record of [T] tensors
    temperature_T: Tensor | None = None  # float32; None is 1
    routes: Routes | None = None

    def __len__(self) -> int:
        return self.layout.num_tokens
