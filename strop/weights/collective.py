"""Weights from one process to many over torch.distributed: one broadcast reaches them all, over gloo or NCCL.

    header (what comes, with checksums) -> a bucket of bytes -> ... -> end -> everybody: is all right? -> load

Rank 0 of a process group of its own sends, every other rank receives. All take part in every exchange, whatever goes
wrong: an error is kept until the end, where all learn of it and nobody serves the version. Where all are on one machine
and the bytes are in its memory, buckets lie in memory that they share, and only what is said of them goes over sockets.
"""

from __future__ import annotations

import asyncio
import json
import logging
import math
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.errors import EngineError, StropError
from strop.rollout.base import Sampler
from strop.rollout.transfer import Entry, Incoming, entry_of
from strop.weights.shared import Lent, borrow, forget, lend

BUCKET_BYTES = 32 << 20
_HEADER_BYTES = 8 << 10  # of a message, which fit into its first exchange: each takes most of a millisecond
_ALIGNED = 16  # bytes: where a tensor may begin in a bucket

log = logging.getLogger(__name__)
Group = dist.ProcessGroup


class Broken(EngineError):
    """A rank of the group is gone, or silent for longer than the group waits. The group is of no more use."""


class NotServed(EngineError):
    """A version came through, and is not served everywhere: the receivers say why. The group is in order."""


class Sender:
    """Rank 0 of `group`; `device` is where the group's backend takes tensors from. `shares` False: bytes go over the
    group's connections, wherever the receivers are."""

    def __init__(
        self, group: Group, device: str = "cpu", bucket_bytes: int = BUCKET_BYTES, *, shares: bool = True
    ) -> None:
        self._wire = _Wire(group, torch.device(device))
        self._bucket_bytes = bucket_bytes
        self._shares = shares and self._wire.device.type == "cpu"
        self._shared: dict[int, Tensor] = {}  # buckets that all have
        self._buffers = _Buffers(self._wire.device)

    def send(self, weights: Iterable[tuple[str, Tensor]], version: int) -> None:
        """Give every receiver these weights, and wait until all serve them. One bucket is on its way while the next is
        made. Raises NotServed when a receiver does not have all of it, or cannot use it, Broken when the group is; what
        `weights` raises too.
        """
        count, error = 0, None
        self._wire.announce({"version": version})
        try:
            for number, bucket in enumerate(self._buckets(weights)):
                self._put(number, bucket)
                count += len(bucket)
        except Broken:
            raise
        except (StropError, RuntimeError, ValueError) as raised:
            error = raised
        self._wire.wait()
        self._wire.announce({"count": count if error is None else None})
        arrived = self._wire.agree(error is None)
        if error is not None:
            raise error
        if not arrived:
            raise NotServed(f"version {version} did not arrive whole at every sampler: see what they raised")
        if not self._wire.agree(True):
            raise NotServed(f"version {version} arrived, and not every sampler could load it: see what they raised")

    def close(self) -> None:
        """Hang up. Receivers that wait learn of it at once."""
        self._wire.close()
        self._shared.clear()

    def _put(self, number: int, bucket: list[tuple[str, Tensor]]) -> None:
        size = sum(_room(tensor.nbytes) for _, tensor in bucket)
        shared = self._share(number, size)
        staged = self._buffers.take(number % 2, size) if shared is None else shared[:size]
        entries = _fill(staged, bucket)
        self._wire.wait()
        self._wire.announce({"entries": [asdict(entry) for entry in entries], "shared": shared is not None})
        if shared is None:
            self._wire.start(staged)

    def _share(self, number: int, size: int) -> Tensor | None:
        """Memory for a bucket that all ranks have; None when they have none, and are not to be asked again."""
        held = self._shared.get(number)
        if held is not None and len(held) >= size:
            return held
        lent, memory = (lend(size) if self._shares else None) or (None, None)
        if lent is None or memory is None:
            if self._shares:
                log.warning(
                    "weights are broadcast over connections: this machine has no shared memory for %d bytes", size
                )
            self._shares = False
            return None
        try:
            self._wire.announce({"memory": asdict(lent), "bucket": number})
            self._shares = self._wire.agree(True)
        finally:
            forget(lent)
        if not self._shares:
            return None
        self._shared[number] = memory
        return memory

    def _buckets(self, weights: Iterable[tuple[str, Tensor]]) -> Iterator[list[tuple[str, Tensor]]]:
        bucket: list[tuple[str, Tensor]] = []
        held = 0
        for name, tensor in weights:
            bucket.append((name, tensor))
            held += tensor.nbytes
            if held >= self._bucket_bytes:
                yield bucket
                bucket, held = [], 0
        if bucket:
            yield bucket


def _fill(staged: Tensor, bucket: list[tuple[str, Tensor]]) -> list[Entry]:
    """Copy tensors into a bucket, one after the other, and say what they are. A group sends one long message at two to
    three times the rate of many short ones."""
    entries: list[Entry] = []
    start = 0
    for name, tensor in bucket:
        entries.append(entry_of(name, tensor, staged[start : start + tensor.nbytes]))
        start += _room(tensor.nbytes)
    return entries


@dataclass(frozen=True, slots=True)
class Arrived:
    """A version, whole and checked here and everywhere. Its tensors lie in buffers that the next version overwrites:
    whoever keeps them copies them, as a sampler's `load_weights` does."""

    version: int
    weights: dict[str, Tensor]


class Receiver:
    """Any other rank of `group`: it must receive whenever rank 0 sends."""

    def __init__(self, group: Group, device: str = "cpu") -> None:
        self._wire = _Wire(group, torch.device(device))
        self._shared: dict[int, Tensor] = {}
        self._buffers = _Buffers(self._wire.device)

    async def load(self, sampler: Sampler) -> None:
        """Receive a version and have the sampler serve it; it goes on drawing until all of it is here. Raises what went
        wrong, here or elsewhere: then the sampler serves what it did before, or the new version where that came whole
        everywhere and another rank was lost or could not load it."""
        arrived = await asyncio.to_thread(self.receive)
        error: StropError | None = None
        try:
            await sampler.load_weights(iter(arrived.weights.items()), arrived.version)
        except StropError as raised:
            error = raised
        await asyncio.to_thread(self._wire.agree, error is None)
        if error is not None:
            raise error

    def receive(self) -> Arrived:
        """Wait for a version. Raises EngineError when it did not arrive whole at every receiver."""
        version = int(self._wire.hear()["version"])
        incoming, error, pending, number = Incoming(version), None, list[tuple[Entry, Tensor]](), 0
        while "count" not in (said := self._wire.hear()):
            if "memory" in said:
                self._share(int(said["bucket"]), Lent(**said["memory"]))
                continue
            entries = [Entry(e["name"], tuple(e["shape"]), e["dtype"], e["checksum"]) for e in said["entries"]]
            if said["shared"]:
                error = error or _take(incoming, pending) or _take(incoming, _cut(self._shared[number], entries))
                pending = []
            else:
                buffer = self._buffers.take(number, sum(_room(_bytes_of(entry)) for entry in entries))
                self._wire.start(buffer)
                error = error or _take(incoming, pending)  # while the next one is on its way
                self._wire.wait()
                pending = _cut(buffer, entries)
            number += 1
        error = error or _take(incoming, pending)
        weights: dict[str, Tensor] = {}
        count: int | None = said["count"]
        if count is None:
            error = error or EngineError(f"version {version} was given up by the engine that sent it")
        elif error is None:
            try:
                weights = incoming.end(count)
            except EngineError as raised:
                error = raised
        everywhere = self._wire.agree(error is None)
        if error is not None:
            raise error
        if not everywhere:
            raise EngineError(f"version {version} is whole here and not everywhere: it is not served")
        return Arrived(version, weights)

    def _share(self, number: int, lent: Lent) -> None:
        memory = borrow(lent)
        if self._wire.agree(memory is not None) and memory is not None:
            self._shared[number] = memory

    def close(self) -> None:
        """Hang up. The others learn of it at once."""
        self._wire.close()
        self._shared.clear()


class _Buffers:
    """Bytes on a device, used again for every version: memory that is new is slow."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._held: dict[int, Tensor] = {}

    def take(self, index: int, size: int) -> Tensor:
        """The first `size` bytes of buffer `index`, with whatever they hold."""
        held = self._held.get(index)
        if held is None or held.numel() < size:
            held = self._held[index] = torch.zeros(size, dtype=torch.uint8, device=self._device)
        return held[:size]


class _Wire:
    """Exchanges of a group, in one order on all ranks. Rank 0 speaks."""

    def __init__(self, group: Group, device: torch.device) -> None:
        self._open: Group | None = group
        self.device = device
        self._flying: list[tuple[dist.Work, Tensor]] = []

    @property
    def _group(self) -> Group:
        if self._open is None:
            raise Broken("the group of the broadcast was left")
        return self._open

    def close(self) -> None:
        """Connections are closed when nobody holds the group any more; a traceback may hold this object for long."""
        self._open, self._flying = None, []

    def announce(self, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        whole = torch.zeros(max(_HEADER_BYTES, 8 + len(data)), dtype=torch.uint8)
        whole[: 8 + len(data)] = torch.frombuffer(bytearray(len(data).to_bytes(8, "little") + data), dtype=torch.uint8)
        whole = whole.to(self.device)
        self._broadcast(whole[:_HEADER_BYTES])
        if len(whole) > _HEADER_BYTES:
            self._broadcast(whole[_HEADER_BYTES:])

    def hear(self) -> dict[str, Any]:
        first = torch.zeros(_HEADER_BYTES, dtype=torch.uint8, device=self.device)
        self._broadcast(first)
        data = bytes(first.cpu().numpy())
        end = 8 + int.from_bytes(data[:8], "little")
        if end > _HEADER_BYTES:
            more = torch.zeros(end - _HEADER_BYTES, dtype=torch.uint8, device=self.device)
            self._broadcast(more)
            data += bytes(more.cpu().numpy())
        return json.loads(data[8:end])

    def start(self, data: Tensor) -> None:
        """Begin to exchange bytes; they are not touched before `wait`."""
        if data.numel():
            with _naming():
                self._flying.append((self._group.broadcast(data, 0), data))

    def wait(self) -> None:
        """Until what was begun is done, and not only enqueued: then buffers may be used again."""
        with _naming():
            for work, _ in self._flying:
                work.wait()
        if self._flying and self.device.type == "cuda":  # a wait of NCCL's only orders streams
            torch.cuda.current_stream(self.device).synchronize()
        self._flying = []

    def agree(self, fine: bool) -> bool:
        """Whether all say so."""
        said = torch.tensor([int(fine)], device=self.device)
        with _naming():
            self._group.allreduce(said, dist.ReduceOp.MIN).wait()
        return bool(said.item())

    def _broadcast(self, data: Tensor) -> None:
        with _naming():
            self._group.broadcast(data, 0).wait()


@contextmanager
def _naming() -> Generator[None]:
    try:
        yield
    except RuntimeError as error:
        raise Broken(f"the broadcast of weights broke: {str(error).splitlines()[0]}") from error


def _take(incoming: Incoming, bucket: list[tuple[Entry, Tensor]]) -> EngineError | None:
    try:
        incoming.put(list(bucket))
    except EngineError as error:
        return error
    return None


def _cut(buffer: Tensor, entries: list[Entry]) -> list[tuple[Entry, Tensor]]:
    found: list[tuple[Entry, Tensor]] = []
    start = 0
    for entry in entries:
        size = _bytes_of(entry)
        found.append((entry, buffer[start : start + size].view(_dtype(entry)).view(entry.shape)))
        start += _room(size)
    return found


def _room(size: int) -> int:
    return -(-size // _ALIGNED) * _ALIGNED


def _bytes_of(entry: Entry) -> int:
    return math.prod(entry.shape) * _dtype(entry).itemsize


def _dtype(entry: Entry) -> torch.dtype:
    found = torch.__dict__.get(entry.dtype)
    if not isinstance(found, torch.dtype):
        raise EngineError(f"weight {entry.name} was sent as {entry.dtype}, which is no number format of torch's")
    return found
