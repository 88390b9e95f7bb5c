"""Engines that ranks make for themselves: importable by name from another process."""

from __future__ import annotations

import torch

from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.engines.base import Engine
from strop.engines.build import build_engine
from strop.ops.select import Impl
from tests.tiny_models import tiny_model


def tiny_rank(family: str, dtype: torch.dtype, config: EngineConfig, trainable: bool = True) -> Engine:
    """This rank's share of a tiny model, whose weights every rank draws alike."""
    return build_engine(config, tiny_model(family, dtype, Impl.TORCH), trainable=trainable)


def spread(data: int = 1, replicas: int = 1, sequence: int = 1) -> ParallelConfig:
    return ParallelConfig(data=data, replicas=replicas, sequence=sequence)
