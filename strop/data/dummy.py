"""A batch that trains nothing, for a rank that would otherwise have no work: every rank runs as many as the others."""

from __future__ import annotations

from dataclasses import fields, replace
from typing import Any, TypeVar

import torch
from torch import Tensor

from strop.data.packing import Batch
from strop.types import Layout

InputsT = TypeVar("InputsT")


def dummy_of(batch: Batch[InputsT]) -> Batch[InputsT]:
    """One token of a batch that trains nothing, with every field that the batch has: what a rank without work runs."""
    return replace(
        batch,
        tokens_T=batch.tokens_T[:1],
        targets_T=torch.full_like(batch.targets_T[:1], -1),
        mask_T=torch.zeros_like(batch.mask_T[:1]),
        weights_T=torch.zeros_like(batch.weights_T[:1]),
        layout=Layout((1,)),
        inputs=_first_row(batch.inputs),
        temperature_T=None if batch.temperature_T is None else batch.temperature_T[:1],
        ids_TK=None if batch.ids_TK is None else batch.ids_TK[:1],
        routes=None if batch.routes is None else replace(batch.routes, experts_TLK=batch.routes.experts_TLK[:1]),
    )


def _first_row(inputs: Any) -> Any:
    """The first row of every column in a loss's record; what is of layers and experts has no rows, and stays."""
    if isinstance(inputs, Tensor):
        return inputs[:1]
    if inputs is None:
        return None
    rows = {
        field.name: _first_row(value)
        for field in fields(inputs)
        if isinstance(value := getattr(inputs, field.name), Tensor) and not field.name.endswith("_LE")
    }
    return replace(inputs, **rows)
