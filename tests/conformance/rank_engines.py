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


def cramped_rank() -> Engine:
    """A rank whose files may not grow beyond a few kilobytes, as on a disk that is full."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails with an error, as on a full disk
    engine = tiny_rank("qwen3", torch.float32, EngineConfig(parallel=ParallelConfig(data=2)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return engine
