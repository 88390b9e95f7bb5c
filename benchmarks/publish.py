"""What it takes to publish weights, beside one copy of as many bytes: python -m benchmarks.publish

A decoder of --hidden channels, in float32, its sampler and its engine. All on one thread each, best of --rounds, taken
in turns with the copy, whose memory has been touched before, like everybody's.

    local      engine and sampler in one process: checked, and copied into the sampler's model
    broadcast  from this process to one other, which is found to be on this machine: said over gloo, the bytes through
               memory that both have; checksums at both ends, and into that one's model. Wall time, as two take part
    sockets    the same with the bytes over gloo too, as to another machine, on loopback; beside it `stream`, the bytes
               alone through one connection and into memory: no transfer over TCP is faster here
    bytes      what a delta sends when one number in a hundred changed, over what all would be

Local counts CPU time. The last line is ratio=LOCAL / copy, broadcast=BROADCAST / copy, sockets=SOCKETS / copy,
stream=STREAM / copy, delta=DELTA bytes / all bytes.
"""

from __future__ import annotations

import argparse
import asyncio
import os
import socket
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
from strop.engines.base import Engine
from strop.engines.build import build_engine
from strop.models.loading import LanguageModel, load_model
from strop.ops.checksum import as_bytes
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


def receive(hidden: int, layers: int, store: str, port: int, rounds: int) -> None:
    """The other process: a sampler that is given every version, and the end of a bare connection."""
    torch.set_num_threads(1)
    sampler = build_sampler(SAMPLER, model_of(hidden, layers), str)
    shared, sockets = (Receiver(group) for group in groups_of(store, rank=1))
    size = sum(tensor.nbytes for _, tensor in model_of(hidden, layers).state())
    with socket.create_connection(("127.0.0.1", port)) as stream:
        buffer = memoryview(bytearray(size))
        for _ in range(rounds):
            asyncio.run(shared.load(sampler))
            asyncio.run(sockets.load(sampler))
            arrived = 0
            while arrived < size:
                arrived += stream.recv_into(buffer[arrived : arrived + (4 << 20)])
            stream.sendall(b"!")
    dist.destroy_process_group()


def groups_of(store: str, rank: int) -> tuple[dist.ProcessGroup, dist.ProcessGroup]:
    dist.init_process_group("gloo", store=FileStore(store, 2), rank=rank, world_size=2, timeout=timedelta(seconds=300))
    return dist.new_group(), dist.new_group()  # pyright: ignore[reportReturnType]


def best(work: Callable[[], None], clock: Callable[[], float], rounds: int) -> float:
    found: list[float] = []
    for _ in range(rounds):
        began = clock()
        work()
        found.append(clock() - began)
    return min(found)


def to_another(engine: Engine, model: tuple[int, int], rounds: int, copy: Callable[[], None]) -> dict[str, float]:
    """Seconds of wall time, the best of `rounds`: copy, broadcast, sockets, stream."""
    found: dict[str, float] = {}
    content = b"".join(as_bytes(tensor).numpy().tobytes() for _, tensor in engine.weights())
    with tempfile.TemporaryDirectory() as folder, socket.create_server(("127.0.0.1", 0)) as server:
        store, port = str(Path(folder) / "store"), server.getsockname()[1]
        child = get_context("spawn").Process(target=receive, args=(*model, store, port, rounds), daemon=True)
        child.start()
        one, other = groups_of(store, rank=0)
        shared, sockets = Sender(one), Sender(other, shares=False)
        stream = server.accept()[0]

        def streamed() -> None:
            stream.sendall(content)
            stream.recv(1)

        for version in range(rounds):
            for name, work in {
                "copy": copy,
                "broadcast": lambda: shared.send(engine.lend_weights(), version),  # noqa: B023 - called at once
                "sockets": lambda: sockets.send(engine.lend_weights(), version),  # noqa: B023
                "stream": streamed,
            }.items():
                found[name] = min(
                    found.get(name, float("inf")), best(work, time.perf_counter, 3 if name == "copy" else 1)
                )
        stream.close()
        child.join()
        dist.destroy_process_group()
    return found


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

    walls = to_another(engine, (arguments.hidden, arguments.layers), rounds, copy)
    ratios = {name: wall / walls["copy"] for name, wall in walls.items()}
    for name in ("broadcast", "sockets", "stream"):
        print(
            f"{name:10} {walls[name] * 1e3:8.1f} ms of wall {ratios[name]:.2f} copies of {walls['copy'] * 1e3:.1f} ms"
        )

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
        f"ratio={published / copied:.2f} broadcast={ratios['broadcast']:.2f} sockets={ratios['sockets']:.2f} "
        f"stream={ratios['stream']:.2f} delta={bytes_sent / size:.3f} (aims: local 1.5, broadcast 4, delta 0.1 at most)"
    )


if __name__ == "__main__":
    main()
