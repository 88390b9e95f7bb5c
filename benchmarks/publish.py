"""What it takes to publish weights, beside one copy of as many bytes: python -m benchmarks.publish

A decoder of --hidden channels, in float32, its sampler and its engine. All on one thread each, best of --rounds, taken
in turns with the copy, whose memory has been touched before, like everybody's.

    local      engine and sampler in one process: checked, and copied into the sampler's model
    broadcast  gloo over loopback from this process to one other: checksums at both ends, and into that one's model;
               wall time, since two processes take part
    bytes      what a delta sends when one number in a hundred changed, over what all would be

Local counts CPU time. The last line is ratio=LOCAL / copy, broadcast=BROADCAST / copy, delta=DELTA bytes / all bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import tempfile
import time
from collections.abc import Callable
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"  # read when torch loads

import torch
import torch.distributed as dist
from torch.distributed import FileStore  # pyright: ignore[reportPrivateImportUsage]

from strop.config.model import ModelConfig
from strop.config.recipe import EngineConfig, SamplerConfig
from strop.engines.build import build_engine
from strop.models.loading import LanguageModel, load_model
from strop.rollout.build import build_sampler
from strop.rollout.transfer import Outbox, size_of
from strop.weights.collective import Receiver, Sender
from strop.weights.publish import publish

VOCABULARY = 8_192
SAMPLER = SamplerConfig(max_running=4, cache_tokens=1_024)


def model_of(hidden: int, layers: int) -> LanguageModel:
    heads = max(1, hidden // 64)
    fresh = {
        "model_type": "qwen3",
        "hidden_size": hidden,
        "intermediate_size": 3 * hidden,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": max(1, heads // 2),
        "head_dim": 64,
    }
    return load_model(ModelConfig(fresh=fresh), vocab_size=VOCABULARY, seed=0)


def receive(hidden: int, layers: int, store: str, rounds: int) -> None:
    """The other process: a sampler that is given every version."""
    torch.set_num_threads(1)
    sampler = build_sampler(SAMPLER, model_of(hidden, layers), str)
    receiver = Receiver(group_of(store, rank=1))
    for _ in range(rounds):
        asyncio.run(receiver.load(sampler))
    dist.destroy_process_group()


def group_of(store: str, rank: int) -> dist.ProcessGroup:
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=300))
    return dist.new_group()  # pyright: ignore[reportReturnType]


def best(work: Callable[[], None], clock: Callable[[], float], rounds: int) -> float:
    found: list[float] = []
    for _ in range(rounds):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hidden", type=int, default=512)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=7)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    rounds = arguments.rounds
    model = model_of(arguments.hidden, arguments.layers)
    sampler = build_sampler(SAMPLER, model.clone(), str)
    engine = build_engine(EngineConfig(), model)
    size = sum(tensor.nbytes for _, tensor in model.state())
    source = torch.ones(size, dtype=torch.uint8)
    target = source.clone()

    def copy() -> None:
        target.copy_(source)

    def local() -> None:
        asyncio.run(publish(engine, sampler, 1))

    copied, published = float("inf"), float("inf")
    for _ in range(rounds):
        copied = min(copied, best(copy, time.process_time, 1))
        published = min(published, best(local, time.process_time, 1))
    print(f"{size / 1e6:.0f} MB, one copy {copied * 1e3:.1f} ms of CPU ({size / copied / 1e9:.1f} GB/s)")
    print(f"local      {published * 1e3:8.1f} ms of CPU  {published / copied:.2f} copies")

    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder) / "store")
        child = get_context("spawn").Process(
            target=receive, args=(arguments.hidden, arguments.layers, store, rounds), daemon=True
        )
        child.start()
        sender = Sender(group_of(store, rank=0))
        walls, copies = [], []
        for version in range(rounds):
            copies.append(best(copy, time.perf_counter, 3))
            walls.append(best(lambda v=version: sender.send(engine.lend_weights(), v), time.perf_counter, 1))
        child.join()
        dist.destroy_process_group()
    sent, copied_wall = min(walls), min(copies)
    print(f"broadcast  {sent * 1e3:8.1f} ms of wall {sent / copied_wall:.2f} copies of {copied_wall * 1e3:.1f} ms")

    outbox = Outbox(deltas=True)
    outbox.ship(engine.weights())
    changed = dict(engine.weights())
    for tensor in changed.values():
        tensor.view(-1)[:: min(100, tensor.numel())] += 1.0
    began = time.process_time()
    shipment = outbox.ship(changed.items())
    bytes_sent = sum(size_of(content) for bucket in shipment.changes or [] for _, content in bucket)
    print(
        f"delta      {bytes_sent / 1e6:8.2f} MB of {size / 1e6:.2f} MB; found, with checksums, in "
        f"{(time.process_time() - began) / copied:.1f} copies of CPU"
    )
    print(
        f"ratio={published / copied:.2f} broadcast={sent / copied_wall:.2f} delta={bytes_sent / size:.3f} "
        "(aims: at most 1.5, 4 and 0.1)"
    )


if __name__ == "__main__":
    main()
