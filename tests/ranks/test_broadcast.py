"""Weights from one process to others by broadcast: samplers that serve a version all together, or not at all."""

from __future__ import annotations

import asyncio
import multiprocessing
from datetime import timedelta
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from strop.config.recipe import SamplerConfig
from strop.errors import EngineError, StropError
from strop.ops.checksum import checksum
from strop.rollout.build import build_sampler
from strop.types import Prompt, SamplingParams
from strop.weights import collective
from strop.weights.collective import Receiver, Sender
from tests.tiny_models import tiny_model

NAN = torch.tensor([0x7FC00001], dtype=torch.int32).view(torch.float32)
SIZE = 3
BUCKET = 1 << 12


def odd() -> list[tuple[str, Tensor]]:
    """Shapes, formats and layouts that a wire could get wrong: E03, E04, E12."""
    return [
        ("t", torch.arange(6.0).view(2, 3).t()),
        ("b", torch.ones(4, dtype=torch.bfloat16)),
        ("n", NAN.expand(3)),
        ("i", torch.arange(5)),
        ("z", torch.zeros(0, 2)),
        ("s", torch.tensor(2.5)),
        ("big", torch.arange(5000.0)),
    ]


def changed(by: float) -> list[tuple[str, Tensor]]:
    return [(name, tensor + by) for name, tensor in tiny_model("qwen3").state()]


def broken() -> Any:
    yield from odd()[:2]
    raise EngineError("the engine lost a weight")


def sends(sender: Sender) -> list[str]:
    said: list[str] = []
    for weights in (odd(), [], changed(0.01), [*changed(0.02)[1:]], broken(), changed(0.03)):
        try:
            sender.send(weights, len(said))
            said.append("sent")
        except StropError as error:
            said.append(str(error))
    return said


def receives(receiver: Receiver) -> list[Any]:
    arrived = receiver.receive()
    receiver._wire.agree(True)
    said: list[Any] = [[(n, str(t.dtype), tuple(t.shape), checksum(t)) for n, t in arrived.weights.items()]]
    arrived = receiver.receive()  # E17: nothing to send is no reason to hang
    receiver._wire.agree(True)
    said.append(len(arrived.weights))
    sampler = build_sampler(SamplerConfig(max_running=4, cache_tokens=4096), tiny_model("qwen3"), str)
    for _ in range(4):
        try:
            asyncio.run(receiver.load(sampler))
        except StropError as error:
            said.append(str(error))
        drawn = asyncio.run(sampler.sample(Prompt(np.array([3, 4], np.int32)), SamplingParams(max_tokens=4, seed=1)))
        said.append((sampler.version, drawn.logprobs.tolist()))
    return said


def work(pipe: Connection, rank: int, store: str, memory: str) -> None:
    torch.set_num_threads(1)
    if memory == "another machine" and rank == 2:
        collective.borrow = lambda lent: None
    limit = timedelta(seconds=120)
    dist.init_process_group("gloo", store=FileStore(store, SIZE), rank=rank, world_size=SIZE, timeout=limit)
    group = dist.distributed_c10d._get_default_group()
    if rank == 0:
        sender = Sender(group, bucket_bytes=BUCKET, shares=memory != "sockets")
        pipe.send([*sends(sender), bool(sender._shared)])
    else:
        pipe.send(receives(Receiver(group)))
    dist.destroy_process_group()


@pytest.mark.parametrize("memory", ["shared", "sockets", "another machine"])
def test_samplers_serve_a_version_together_or_not_at_all(memory: str, tmp_path: Path) -> None:
    """E04, E12, E13, E17, G06: one sender, two samplers in processes of their own, many small buckets; in memory that
    all share, over connections, and where one of them is on another machine.

    A weight that is missing, and an engine that fails half-way, leave both with the version that they served.
    """
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["strop.runtime.worker"])
    pipes: list[Any] = []
    children: list[Any] = []
    for rank in range(SIZE):
        here, there = context.Pipe()
        children.append(context.Process(target=work, args=(there, rank, str(tmp_path / "store"), memory), daemon=True))
        children[-1].start()
        there.close()
        pipes.append(here)
    sent, *received = [pipe.recv() for pipe in pipes]
    for child in children:
        child.join()
    assert sent.pop() == (memory == "shared")
    assert [said.split(":")[0] for said in sent] == [
        "sent",
        "sent",
        "sent",
        "version 3 arrived, and not every sampler could load it",
        "the engine lost a weight",
        "sent",
    ]
    assert received[0] == received[1]
    first, nothing, good, missing, still, failed, again, last = received[0]
    assert first == [(n, str(t.dtype), tuple(t.shape), checksum(t)) for n, t in odd()]
    assert nothing == 0
    assert good[0] == 2 and still == good and again == good, "a version that failed is not served, nor half of it"
    assert "missing" in missing and failed == "version 4 was given up by the engine that sent it"
    assert last[0] == 5 and last[1] != good[1]
    sampler = build_sampler(SamplerConfig(max_running=4, cache_tokens=4096), tiny_model("qwen3"), str)
    asyncio.run(sampler.load_weights(iter(changed(0.03)), 5))
    drawn = asyncio.run(sampler.sample(Prompt(np.array([3, 4], np.int32)), SamplingParams(max_tokens=4, seed=1)))
    assert np.allclose(drawn.logprobs, last[1], atol=1e-6)
