"""Adapters over ranks: each rank holds them whole over its shards of the base, and they learn what one rank's do."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strop.config.adapter import AdapterConfig
from strop.config.recipe import EngineConfig
from strop.engines.base import Engine, OptimParams
from strop.engines.build import build_engine
from strop.errors import EngineError
from strop.models.lora import WEIGHTS
from strop.runtime.processes import ProcessRanks
from strop.runtime.remote_engine import RemoteEngine
from tests.conformance.rank_engines import tiny_rank
from tests.conformance.test_engine import Scaled, pack, sequences
from tests.ranks.shapes import SHAPES
from tests.tiny_models import tiny_model

STEP = OptimParams(lr=1e-2, weight_decay=0.01)
BATCHES = [pack(sequences(4, seed=seed)) for seed in range(3)]
EVERY = AdapterConfig(rank=4, alpha=8.0, targets=("attention", "mlp", "unembedding"), seed=1)
SMALL = AdapterConfig(rank=2, targets=("attention",), seed=2)


def frozen_over(shape: str, family: str) -> RemoteEngine:
    config = EngineConfig(parallel=SHAPES[shape])
    make = partial(tiny_rank, family, torch.float64, config, False)
    return RemoteEngine(ProcessRanks([make] * config.parallel.ranks, timeout_s=120), config.parallel)


@pytest.fixture(params=[("data2", "qwen3"), ("sequence2", "llama"), ("replicas2-data2", "qwen3_next")], ids="-".join)
def bases(request: pytest.FixtureRequest) -> Iterator[tuple[Engine, Engine]]:
    shape, family = request.param
    spread = frozen_over(shape, family)
    yield build_engine(EngineConfig(), tiny_model(family, torch.float64), trainable=False), spread
    spread.close()


def assert_alike(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        assert torch.allclose(tensor, other[name], rtol=1e-9, atol=1e-11), name


def test_they_learn_what_one_rank_learns(bases: tuple[Engine, Engine], tmp_path: Path) -> None:
    """Two adapters in turns over one base, gradients that accumulate over calls, steps, folders; the base stands."""

    async def work(base: Engine, folder: Path) -> list[dict[str, Tensor]]:
        before = (await base.forward([BATCHES[2]]))[0].logprobs_T
        policy, other = base.adapter("policy", EVERY), base.adapter("other", SMALL)
        norms: list[Tensor] = []
        for step in range(3):
            await policy.forward_backward([BATCHES[step]], Scaled())
            await policy.forward_backward(BATCHES[:2], Scaled(entropy=0.1))
            await other.forward_backward([BATCHES[step]], Scaled())
            norms.append(torch.tensor((await policy.optim_step(STEP)).grad_norm))
        assert not (await other.optim_step(STEP)).skipped
        assert torch.equal((await base.forward([BATCHES[2]]))[0].logprobs_T, before)
        after = (await policy.forward([BATCHES[2]]))[0].logprobs_T
        assert (after - before).abs().max() > 1e-4
        folder.mkdir()
        await policy.save(folder)
        again = base.adapter("again", EVERY)
        await again.load(folder)
        found = dict(again.adapter_weights())
        assert_alike(found, dict(policy.adapter_weights()))
        return [
            found,
            dict(other.adapter_weights()),
            dict(policy.weights()),
            {"norms": torch.stack(norms), "logprobs": after},
            load_file(folder / WEIGHTS),
        ]

    one, two = (asyncio.run(work(base, tmp_path / str(i))) for i, base in enumerate(bases))
    for expected, found in zip(one, two, strict=True):
        assert_alike(expected, found)


def test_what_they_cannot_be_over_ranks_is_said() -> None:
    base = frozen_over("data2", "qwen3_moe")
    try:
        with pytest.raises(EngineError, match=r"engine\.adapter\.targets"):
            base.adapter("a", AdapterConfig(rank=2, targets=("experts",)))
        with pytest.raises(EngineError, match="this engine is frozen"):
            asyncio.run(base.optim_step(STEP))
    finally:
        base.close()
