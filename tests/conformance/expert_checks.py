"""What dealing a mixture's experts to ranks must not change, for any family and any shape of ranks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from strop.config.activations import ActivationsConfig
from strop.config.parallel import ParallelConfig
from strop.config.recipe import EngineConfig
from strop.data.packing import Batch
from strop.engines.base import Engine, ForwardBackward, OptimParams
from strop.engines.build import build_engine
from strop.engines.fsdp2.engine import MOMENTS, WEIGHTS
from strop.runtime.processes import ProcessRanks
from strop.runtime.remote_engine import RemoteEngine
from strop.types import Routes, Want, results
from tests.conformance.rank_engines import GRADIENT, open_rank
from tests.conformance.test_engine import Scaled, pack, sequences
from tests.tiny_models import tiny_model

EXACT = 1e-10  # of the largest number of its kind, in float64
STEP = OptimParams(lr=1e-2, max_grad_norm=0.5)
LOSS = Scaled(entropy=0.1)
AGAIN = EngineConfig(activations=ActivationsConfig(checkpoint_every=1))


def open_engines(family: str, parallel: ParallelConfig, *, again: bool) -> tuple[Engine, RemoteEngine]:
    """One rank, and as many as `parallel` says; these compute every layer twice when `again`."""
    config = (AGAIN if again else EngineConfig()).model_copy(update={"parallel": parallel})
    make = partial(open_rank, family, torch.float64, config)
    spread = RemoteEngine(ProcessRanks([make] * parallel.ranks, timeout_s=300), parallel)
    return open_rank(family, torch.float64, EngineConfig()), spread


def uneven() -> list[Batch[Tensor]]:
    """Three batches of unlike lengths, the first of one token that has no target: a rank of two has a dummy too."""
    texts = sequences()
    return [pack(texts[:1]), pack(texts[1:5]), pack(texts[5:])]


def run(work: Coroutine[Any, Any, Any]) -> Any:
    return asyncio.run(work)


def gradients(engine: Engine) -> dict[str, Tensor]:
    """What has accumulated, which is then cleared."""
    found = {name: tensor for name, tensor in engine.weights() if name.startswith(GRADIENT)}
    run(engine.zero_grad())
    return found


def assert_exact(one: dict[str, Tensor], other: dict[str, Tensor]) -> None:
    assert one.keys() == other.keys()
    scale = max(float(tensor.abs().max()) for tensor in one.values())
    assert scale > 1e-3
    for name, tensor in one.items():
        assert float((tensor - other[name]).abs().max()) <= EXACT * scale, name


def assert_same_routes(one: Routes | None, other: Routes | None) -> None:
    assert one is not None and other is not None and one.layers == other.layers
    assert np.array_equal(one.experts_TLK, other.experts_TLK)


def check_numbers(one: Engine, spread: RemoteEngine) -> None:
    """Names and bytes, outputs, gradients, and all but float64's last digits."""
    ours, theirs = dict(one.weights()), dict(spread.weights())
    assert list(ours) == list(theirs)
    assert all(torch.equal(ours[name], theirs[name]) for name in ours)
    batches, want = uneven(), Want(entropy=True, every_row=True)
    for a, b in zip(run(one.forward(batches, want)), run(spread.forward(batches, want)), strict=True):
        assert torch.allclose(a.logprobs_T, b.logprobs_T, rtol=0, atol=EXACT)
        assert a.entropy_T is not None and b.entropy_T is not None
        assert torch.allclose(a.entropy_T, b.entropy_T, rtol=0, atol=EXACT)
    for engine in (one, spread):
        run(engine.forward_backward(batches[:2], LOSS))
        run(engine.forward_backward(batches[2:], LOSS))  # one batch: of two ranks with different ones, one has none
    assert_exact(gradients(one), gradients(spread))


def check_replay(one: Engine, spread: RemoteEngine, family: str) -> None:
    """Routes recorded; replayed from other weights; and all of them to the same two experts, so that ranks get none."""
    batches, want = uneven(), Want(routes=True)
    own = run(one.forward(batches, want))
    for a, b in zip(own, run(spread.forward(batches, want)), strict=True):
        assert_same_routes(a.routes, b.routes)
    other = build_engine(EngineConfig(), tiny_model(family, torch.float64, seed=1), trainable=False)
    foreign = [replace(b, routes=o.routes) for b, o in zip(batches, run(other.forward(batches, want)), strict=True)]
    crowded: list[Batch[Tensor]] = []
    for batch, output in zip(batches, own, strict=True):
        experts_TLK = np.zeros_like(output.routes.experts_TLK) + np.array([1, 0], np.int16)
        crowded.append(replace(batch, routes=replace(output.routes, experts_TLK=experts_TLK)))
    for given in (foreign, crowded):
        done: ForwardBackward = run(spread.forward_backward(given, LOSS, want))
        run(one.forward_backward(given, LOSS))
        assert results(done.metrics)["router/replayed"] == 1.0
        for batch, output in zip(given, done.outputs, strict=True):
            assert_same_routes(batch.routes, output.routes)
        assert_exact(gradients(one), gradients(spread))


def check_steps(one: Engine, spread: RemoteEngine, folder: Path) -> None:
    """Three steps, saved by each, read by the other, and three more: norms, weights, moments."""
    batches = [[pack(sequences(3, seed=seed)), pack(sequences(2, seed=seed + 100))] for seed in range(6)]

    async def train(engine: Engine, number: int) -> float:
        await engine.forward_backward(batches[number], LOSS)
        outcome = await engine.optim_step(STEP)
        assert not outcome.skipped
        return outcome.grad_norm

    async def three(numbers: range) -> None:
        for number in numbers:
            assert await train(spread, number) == pytest.approx(await train(one, number), rel=EXACT)

    def same(a: dict[str, Tensor], b: dict[str, Tensor]) -> None:
        assert a.keys() == b.keys()
        assert all(torch.allclose(a[name], b[name], rtol=1e-8, atol=1e-9) for name in a)

    run(three(range(3)))
    same(dict(one.weights()), dict(spread.weights()))
    for name, engine in (("one", one), ("spread", spread)):
        (folder / name).mkdir()
        run(engine.save(folder / name))
    for file in (WEIGHTS, MOMENTS):
        same(load_file(folder / "one" / file), load_file(folder / "spread" / file))
    run(one.load(folder / "spread"))
    run(spread.load(folder / "one"))
    (folder / "again").mkdir()
    run(spread.save(folder / "again"))
    for file in (WEIGHTS, MOMENTS):
        assert (folder / "again" / file).read_bytes() == (folder / "one" / file).read_bytes()
    run(three(range(3, 6)))
    same(dict(one.weights()), dict(spread.weights()))
