"""What a forward pass keeps for its backward pass, and where: an `ActivationsConfig` applied to a model.

    kept on the device (the default) | computed again (checkpointing) | waiting in host memory (offload) | the last two

Under both, a block's input waits in host memory and the rest is computed again.
"""

from __future__ import annotations

from collections.abc import Callable, Generator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.config.activations import ActivationsConfig
from strop.engines.fsdp2.host import HostBuffers, copier_for
from strop.engines.fsdp2.offload import Offloader
from strop.errors import ConfigError
from strop.models.patterns import chosen


class Activations:
    """Nothing of the model changes outside `applied`.

    Raises ConfigError for a pattern that matches no module, and when layers are asked for in a model whose layers are
    not known: a choice that would change nothing is never taken for one that did.
    """

    def __init__(self, module: nn.Module, config: ActivationsConfig, device: torch.device) -> None:
        self._checkpointed = _checkpointed(module, config)
        self.buffers: HostBuffers | None = None
        self._offloader: Offloader | None = None
        if config.offload:
            self.buffers = HostBuffers(config.offload_idle_mib << 20, pinned=device.type == "cuda")
            self._offloader = Offloader(
                _modules(module, config.offload_modules, "offload"),
                self.buffers,
                copier_for(device),
                device=device,
                min_bytes=config.offload_min_kib << 10,
            )

    @contextmanager
    def applied(self) -> Generator[None]:
        """Forward and backward passes in this context do as the configuration says."""
        with ExitStack() as stack:
            for block in self._checkpointed:
                forward = block.forward
                block.forward = partial(checkpoint, forward, use_reentrant=False)
                stack.callback(_restore, block, forward)
            if self._offloader is not None:
                stack.enter_context(self._offloader.attached())
            yield


def _restore(block: nn.Module, forward: Callable[..., Any]) -> None:
    block.forward = forward


def _checkpointed(module: nn.Module, config: ActivationsConfig) -> list[nn.Module]:
    if config.checkpoint_every:
        return _modules(module, (), "checkpoint")[:: config.checkpoint_every]
    return _modules(module, config.checkpoint_modules, "checkpoint") if config.checkpoint_modules else []


def _modules(module: nn.Module, patterns: tuple[str, ...], what: str) -> list[nn.Module]:
    """The modules that the patterns match, in the model's order; without patterns its layers."""
    named = {name: part for name, part in module.named_modules() if name}
    if patterns:
        names = chosen(patterns, list(named), f"engine.activations.{what}_modules")
        return [named[name] for name in names]
    layers: list[nn.Module] = [part for part in named.values() if isinstance(part, GradientCheckpointingLayer)]
    if not layers:
        raise ConfigError(
            f"engine.activations: {type(module).__name__} does not say which of its modules are layers; name them in "
            f"{what}_modules, like {', '.join(list(named)[:3])}"
        )
    return layers
