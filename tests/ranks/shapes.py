"""Engines over ranks for the conformance suites, and their end."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch

from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.engines.base import Engine
from strop.runtime.processes import ProcessRanks
from strop.runtime.remote_engine import RemoteEngine
from tests.conformance.rank_engines import tiny_rank

SHAPES = {
    "data2": ParallelConfig(data=2),
    "sequence2": ParallelConfig(sequence=2),
    "data2-sequence2": ParallelConfig(data=2, sequence=2),
    "tensor2": ParallelConfig(tensor=2),
    "data2-tensor2": ParallelConfig(data=2, tensor=2),
    "replicas2-data2": ParallelConfig(replicas=2, data=2),
}
EXPERT_SHAPES = {
    "data2-experts2": ParallelConfig(data=2, experts=2),
    "data4-experts2": ParallelConfig(data=4, experts=2),
    "data4-experts4": ParallelConfig(data=4, experts=4),
    "replicas2-data2-experts2": ParallelConfig(replicas=2, data=2, experts=2),
    "data2-sequence2-experts2": ParallelConfig(data=2, sequence=2, experts=2),
    "data2-sequence2-experts4": ParallelConfig(data=2, sequence=2, experts=4),
}
"""For mixtures of experts alone."""


def over(parallel: ParallelConfig, family: str, dtype: torch.dtype, config: EngineConfig) -> RemoteEngine:
    """An engine over processes of this machine."""
    config = config.model_copy(update={"parallel": parallel})
    make: Callable[[], Engine] = partial(tiny_rank, family, dtype, config)
    return RemoteEngine(ProcessRanks([make] * parallel.ranks, timeout_s=120), parallel)
