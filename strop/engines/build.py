"""Which engine a recipe means, built. Backends are imported only when they are asked for."""

from __future__ import annotations

from torch import nn

from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.engines.base import Engine
from strop.engines.hyper import Standing
from strop.models.loading import LanguageModel


def build_engine(config: EngineConfig, model: LanguageModel, *, trainable: bool = True) -> Engine:
    """The engine of `config.kind` over a model that is already loaded; a frozen one when `trainable` is false."""
    from strop.engines.fsdp2.engine import Fsdp2Engine

    return Fsdp2Engine(model, config, trainable=trainable)


def check_parallel(config: ParallelConfig, module: nn.Module) -> None:
    """ConfigError when a model, which needs no weights, cannot be spread over ranks like this."""
    from strop.engines.fsdp2.expert_parallel import check_experts

    check_experts(module, config)


def standing_values(config: EngineConfig, model: LanguageModel) -> Standing:
    """The groups of parameters that a trainable engine over this model has, and what stands for them at first.

    The model needs no weights. ConfigError for `param_groups` that do not fit it.
    """
    from strop.engines.fsdp2.optimizer import parameter_groups

    return parameter_groups(model, config).standing()
