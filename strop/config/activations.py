"""What a forward pass keeps for its backward pass, and where."""

from __future__ import annotations

from typing import Annotated, Self

from pydantic import Field, model_validator

from strop.config.section import NonNegative, Section


class ActivationsConfig(Section):
    """What a forward pass keeps for its backward pass, and where. The gradient is the same to the bit."""

    checkpoint_every: NonNegative = 0
    """Keep only the input of every n-th layer, from the first on, and compute the rest again in the backward pass: 1 is
    every layer, 0 none."""
    checkpoint_modules: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Do so for the modules that these patterns match, instead of layers: `*` stands for characters of one dotted part,
    `**` for any number of parts."""
    offload: bool = False
    """Keep what layers need for the backward pass in host memory; it comes back one layer ahead of its use."""
    offload_modules: Annotated[tuple[str, ...], Field(strict=False)] = ()
    """Do so for the modules that these patterns match, instead of layers."""
    offload_min_kib: NonNegative = 64
    """Storages smaller than this stay on the device, in KiB."""
    offload_idle_mib: NonNegative = 1024
    """Host buffers that wait to be used again hold at most this much, in MiB."""

    @model_validator(mode="after")
    def _one_way(self) -> Self:
        if self.checkpoint_every and self.checkpoint_modules:
            raise ValueError("checkpoint_every and checkpoint_modules exclude each other: give one of them")
        if self.offload_modules and not self.offload:
            raise ValueError("offload_modules has no effect without offload: set it to true")
        return self
