"""Engines that ranks make for themselves: importable by name from another process."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.engines.base import Engine
from strop.engines.build import build_engine
from strop.engines.fsdp2.engine import Fsdp2Engine
from strop.models.experts import Form
from strop.models.shards import full
from strop.ops.select import Impl
from tests.tiny_models import tiny_model


def tiny_rank(family: str, dtype: torch.dtype, config: EngineConfig, trainable: bool = True) -> Engine:
    """This rank's share of a tiny model, whose weights every rank draws alike."""
    return build_engine(config, tiny_model(family, dtype, Impl.TORCH), trainable=trainable)


def spread(data: int = 1, replicas: int = 1, sequence: int = 1) -> ParallelConfig:
    return ParallelConfig(data=data, replicas=replicas, sequence=sequence)


GRADIENT = "gradient of "


class OpenEngine(Fsdp2Engine):
    """Gives what has accumulated too, to the last bit, beside the weights."""

    def weights(self, form: Form = Form.SAVED) -> Iterator[tuple[str, Tensor]]:
        yield from super().weights(form)
        for name, parameter in self.model.module.named_parameters():
            if parameter.grad is not None:
                yield GRADIENT + name, full(parameter.grad)


def open_rank(family: str, dtype: torch.dtype, config: EngineConfig) -> Engine:
    return OpenEngine(tiny_model(family, dtype, Impl.TORCH), config)


def cramped_rank() -> Engine:
    """A rank whose files may not grow beyond a few kilobytes, as on a disk that is full."""
    import resource
    import signal

    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # so that a write fails with an error, as on a full disk
    engine = tiny_rank("qwen3", torch.float32, EngineConfig(parallel=ParallelConfig(data=2)))
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, 4096))
    return engine
