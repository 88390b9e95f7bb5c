"""Faults that systems over several ranks had, each with its small input and the right answer."""

from __future__ import annotations

import asyncio
import multiprocessing
from collections.abc import Callable
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from strop.algos.advantages import whiten
from strop.config.recipe import SamplerConfig
from strop.engines.base import Engine, OptimParams
from strop.engines.build import build_engine
from strop.engines.fsdp2.spread import total_norm
from strop.engines.fsdp2.ulysses import gather_rows
from strop.rollout.build import build_sampler
from strop.types import Prompt, SamplingParams, results
from strop.weights.publish import publish
from tests.conformance.test_engine import DEFAULT, Scaled, pack, sequences
from tests.ranks.shapes import SHAPES, over
from tests.tiny_models import tiny_model


def on_two_ranks(folder: Path, work: Callable[[int], Any]) -> list[Any]:
    """What `work(rank)` returns in two processes of one gloo group."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["strop.runtime.worker"])
    pipes: list[Any] = []
    children: list[Any] = []
    for rank in range(2):
        here, there = context.Pipe()
        children.append(context.Process(target=_child, args=(there, work, rank, str(folder / "store")), daemon=True))
        children[-1].start()
        there.close()
        pipes.append(here)
    found = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join()
    return found


def _child(pipe: Connection, work: Callable[[int], Any], rank: int, store: str) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2)
    pipe.send(work(rank))
    dist.barrier()  # the other one may still be on its way here
    dist.destroy_process_group()


def test_advantages_are_whitened_over_the_whole_step() -> None:
    """A32: ranks would hold [1, 3], [5, 7] and nothing. There is one controller, and it whitens once."""
    values, counts = np.array([1.0, 3.0, 5.0, 7.0, 9.0]), np.array([1, 1, 1, 1, 0])
    assert whiten(values, counts)[:4] == pytest.approx([-1.1619, -0.3873, 0.3873, 1.1619], abs=1e-4)


@pytest.mark.parametrize("shape", ["sequence2", "data2"])
def test_a_loss_and_its_metrics_do_not_count_ranks(shape: str) -> None:
    """A33: loss, norm and divergence of a batch are the same on one rank and on two that share its tokens."""
    batches = [pack(sequences(4, seed=seed)) for seed in range(2)]

    async def work(engine: Engine) -> tuple[dict[str, float], float]:
        learned = await engine.forward_backward(batches, Scaled(entropy=0.1))
        outcome = await engine.optim_step(OptimParams(lr=1e-3))
        return results(learned.metrics), outcome.grad_norm

    one = asyncio.run(work(build_engine(DEFAULT, tiny_model("qwen3", torch.float64))))
    spread = over(SHAPES[shape], "qwen3", torch.float64, DEFAULT)
    try:
        two = asyncio.run(work(spread))
    finally:
        spread.close()
    assert one[0].keys() == two[0].keys() and one[0]
    assert two[0] == pytest.approx(one[0], rel=1e-10) and two[1] == pytest.approx(one[1], rel=1e-10)


def gradient_of_gathered(rank: int) -> list[float]:
    """Of y = sum(w * gathered), which every rank computes from all rows."""
    rows = torch.full((2,), float(rank), dtype=torch.float64, requires_grad=True)
    group = dist.distributed_c10d._get_default_group()
    (torch.arange(1.0, 5.0, dtype=torch.float64) * gather_rows(rows, group)).sum().backward()
    assert rows.grad is not None
    return rows.grad.tolist()


def test_what_is_computed_on_every_rank_counts_once(tmp_path: Path) -> None:
    """A34: the gradient of a rank's rows is its slice of w, not twice that."""
    assert on_two_ranks(tmp_path, gradient_of_gathered) == [[1.0, 2.0], [3.0, 4.0]]


def norm_of_shards(rank: int) -> float:
    mesh = init_device_mesh("cpu", (2,))
    shard = DTensor.from_local(torch.tensor([3.0 + rank]), mesh, [Shard(0)])
    return float(total_norm([shard]))


def norm_of_copies(rank: int) -> float:
    mesh = init_device_mesh("cpu", (2,))
    return float(total_norm([DTensor.from_local(torch.tensor([3.0, 4.0]), mesh, [Replicate()])]))


@pytest.mark.parametrize("work", [norm_of_shards, norm_of_copies])
def test_a_norm_counts_each_number_once(work: Callable[[int], float], tmp_path: Path) -> None:
    """A35: shards [3] and [4], or both on either rank: 5, not 7 and not 7.07."""
    assert on_two_ranks(tmp_path, work) == [5.0, 5.0]


def test_ranks_write_one_checkpoint_and_read_it_without_pickle(tmp_path: Path) -> None:
    """D08, D14: shards become whole tensors in safetensors, written by one rank; no rank has random state to keep.

    What a resumed run draws comes from its seed and step, so a checkpoint of two ranks goes on as one of one does.
    """
    batches = [pack(sequences(4, seed=seed)) for seed in range(3)]

    async def train(engine: Engine, first: int) -> None:
        for batch in batches[first:]:
            await engine.forward_backward([batch], Scaled())
            await engine.optim_step(OptimParams(lr=1e-2))

    engines = [over(SHAPES["data2"], "qwen3", torch.float64, DEFAULT) for _ in range(2)]
    try:
        whole, resumed = engines
        asyncio.run(whole.forward_backward([batches[0]], Scaled()))
        asyncio.run(whole.optim_step(OptimParams(lr=1e-2)))
        asyncio.run(whole.save(tmp_path))
        assert sorted(file.name for file in tmp_path.iterdir()) == ["model.safetensors", "optimizer.safetensors"]
        assert all(tensor.ndim == 0 or len(tensor) for tensor in load_file(tmp_path / "optimizer.safetensors").values())
        asyncio.run(resumed.load(tmp_path))
        for engine in engines:
            asyncio.run(train(engine, 1))
        expected, found = (dict(engine.weights()) for engine in engines)
    finally:
        for engine in engines:
            engine.close()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())


def test_what_was_published_does_not_change_when_the_trainer_goes_on() -> None:
    """E05: the source is overwritten right after the publish is done, and the sampler has the old values."""
    engine = build_engine(DEFAULT, tiny_model("qwen3"))
    sampler = build_sampler(SamplerConfig(max_running=4, cache_tokens=4096), tiny_model("qwen3").clone(), str)
    params = SamplingParams(max_tokens=8, seed=1)
    prompt = Prompt(np.array([3, 4], np.int32))

    async def work() -> list[Any]:
        await publish(engine, sampler, version=1)
        before = await sampler.sample(prompt, params)
        await engine.forward_backward([pack(sequences(4))], Scaled())
        await engine.optim_step(OptimParams(lr=1.0))
        after = await sampler.sample(prompt, params)
        await publish(engine, sampler, version=2)
        return [before.logprobs, after.logprobs, (await sampler.sample(prompt, params)).logprobs]

    before, after, renewed = asyncio.run(work())
    assert np.array_equal(before, after) and not np.array_equal(before, renewed)


def test_ranks_with_unequal_work_end_together() -> None:
    """G05: 2 batches for one rank and 1 for the other, only to be scored: no hang, nothing skipped, the order kept."""
    batches = [pack(sequences(count, seed=count)) for count in (1, 3, 2)]
    spread = over(SHAPES["data2"], "qwen3", torch.float64, DEFAULT)
    try:
        found = asyncio.run(spread.forward(batches))
    finally:
        spread.close()
    expected = asyncio.run(build_engine(DEFAULT, tiny_model("qwen3", torch.float64)).forward(batches))
    assert len(found) == 3
    for one, two in zip(expected, found, strict=True):
        assert torch.allclose(one.logprobs_T, two.logprobs_T, atol=1e-12)
