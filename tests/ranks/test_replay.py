"""Routes over two ranks of shards: what is recorded comes back, what is given is replayed, gradients are one rank's."""

from __future__ import annotations

import asyncio
from dataclasses import replace

import numpy as np
import pytest
import torch

from strop.config.recipe import EngineConfig
from strop.engines.base import Engine
from strop.types import Want, results
from tests.conformance.test_engine import Scaled, assert_close, gradient, pack, sequences
from tests.ranks.shapes import SHAPES, over
from tests.tiny_models import tiny_model


def alone(seed: int = 0) -> Engine:
    from strop.engines.build import build_engine

    return build_engine(EngineConfig(), tiny_model("qwen3_moe", seed=seed))


@pytest.mark.parametrize("shape", ["data2"])
def test_routes_over_ranks_are_those_of_one(shape: str) -> None:
    texts = sequences(6)
    batches = [pack(texts[:3]), pack(texts[3:])]
    one, other, spread = alone(), alone(seed=1), over(SHAPES[shape], "qwen3_moe", torch.float32, EngineConfig())
    try:
        own = asyncio.run(one.forward(batches, Want(routes=True)))
        ours = asyncio.run(spread.forward(batches, Want(routes=True)))
        for a, b in zip(own, ours, strict=True):
            assert a.routes is not None and b.routes is not None and a.routes.layers == b.routes.layers
            assert np.array_equal(a.routes.experts_TLK, b.routes.experts_TLK)
        foreign = asyncio.run(other.forward(batches, Want(routes=True)))
        given = [replace(batch, routes=output.routes) for batch, output in zip(batches, foreign, strict=True)]
        done = asyncio.run(spread.forward_backward(given, Scaled(), Want(routes=True)))
        assert results(done.metrics)["router/replayed"] == 1.0
        for batch, output in zip(given, done.outputs, strict=True):
            assert batch.routes is not None and output.routes is not None
            assert np.array_equal(batch.routes.experts_TLK, output.routes.experts_TLK)
        asyncio.run(spread.zero_grad())
        assert_close(gradient(one, given, Scaled()), gradient(spread, given, Scaled()), 2e-5)
    finally:
        spread.close()
