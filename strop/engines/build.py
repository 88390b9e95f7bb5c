"""Which engine a recipe means, built. Backends are imported only when they are asked for."""

from __future__ import annotations

from strop.config.recipe import EngineConfig
from strop.engines.base import Engine
from strop.models.loading import LanguageModel


def build_engine(config: EngineConfig, model: LanguageModel, *, trainable: bool = True) -> Engine:
    """The engine of `config.kind` over a model that is already loaded; a frozen one when `trainable` is false."""
    from strop.engines.fsdp2.engine import Fsdp2Engine

    return Fsdp2Engine(model, config, trainable=trainable)
