"""The knobs of a low-rank adapter."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field

from strop.config.section import NonNegative, Section


class AdapterConfig(Section):
    """A low-rank adapter (LoRA, arXiv 2106.09685): the model's own weights stay as they are, and a small product of two
    matrices beside each of the chosen ones learns."""

    rank: NonNegative = 0
    """Columns of the two matrices; 0 trains the whole model instead."""
    alpha: Annotated[float, Field(gt=0)] = 32.0
    """The product is scaled by alpha / rank, so that a learning rate serves every rank."""
    targets: Annotated[
        tuple[Literal["attention", "mlp", "experts", "unembedding"], ...], Field(strict=False, min_length=1)
    ] = ("attention", "mlp")
    """Which matrices: of attention, of feed-forward parts, of stacked experts, the output matrix."""
    seed: int = 0
    """Draws the first of the two matrices; the second begins at 0."""
