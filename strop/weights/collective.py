"""Weights from one process to many over torch.distributed: one broadcast reaches them all, over gloo or NCCL.

    header (what comes, with checksums) -> a bucket of bytes -> ... -> end -> everybody: is all right? -> load

Rank 0 of a process group of its own sends, every other rank receives. All take part in every exchange, whatever goes
wrong: an error is kept until the end, where all learn of it and nobody serves the version.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Generator, Iterable
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from strop.errors import EngineError, StropError
from strop.rollout.base import Sampler
from strop.rollout.transfer import Entry, Incoming, entry_of

BUCKET_BYTES = 32 << 20
_ALIGNED = 16  # bytes: where a tensor may begin in a bucket

Group = dist.ProcessGroup


class Broken(EngineError):
    """A rank of the group is gone, or silent for longer than the group waits. The group is of no more use."""


class NotServed(EngineError):
    """A version came through, and is not served everywhere: the receivers say why. The group is in order."""


class Sender:
    """Rank 0 of `group`; `device` is where the group's backend takes tensors from."""

    def __init__(self, group: Group, device: str = "cpu", bucket_bytes: int = BUCKET_BYTES) -> None:
        self._wire = _Wire(group, torch.device(device))
        self._bucket_bytes = bucket_bytes
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
                entries = [entry_of(name, tensor) for name, tensor in bucket]
                staged = self._stage(number % 2, entries, bucket)
                self._wire.wait()
                self._wire.announce({"entries": [asdict(entry) for entry in entries]})
                self._wire.start(staged)
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

    def _stage(self, index: int, entries: list[Entry], bucket: list[tuple[str, Tensor]]) -> Tensor:
        """The bytes of a bucket in one of two buffers: one is on its way while the other is filled. A group sends one
        long message at two to three times the rate of many short ones."""
        staged, start = self._buffers.take(index, sum(map(_room, entries))), 0
        for entry, (_, tensor) in zip(entries, bucket, strict=True):
            raw = tensor.detach().contiguous().view(-1).view(torch.uint8)
            staged[start : start + raw.numel()].copy_(raw)
            start += _room(entry)
        return staged

    def _buckets(self, weights: Iterable[tuple[str, Tensor]]) -> Iterable[list[tuple[str, Tensor]]]:
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
        incoming, error, pending, bucket = Incoming(version), None, list[tuple[Entry, Tensor]](), 0
        while "entries" in (said := self._wire.hear()):
            entries = [Entry(e["name"], tuple(e["shape"]), e["dtype"], e["checksum"]) for e in said["entries"]]
            buffer = self._buffers.take(bucket, sum(map(_room, entries)))
            self._wire.start(buffer)
            error = error or _take(incoming, pending)  # while the next one is on its way
            self._wire.wait()
            pending, bucket = _cut(buffer, entries), bucket + 1
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

    def close(self) -> None:
        """Hang up. The others learn of it at once."""
        self._wire.close()


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
        data = torch.frombuffer(bytearray(json.dumps(message).encode()), dtype=torch.uint8).to(self.device)
        self._broadcast(torch.tensor([data.numel()], device=self.device))
        self._broadcast(data)

    def hear(self) -> dict[str, Any]:
        size = torch.zeros(1, dtype=torch.int64, device=self.device)
        self._broadcast(size)
        data = torch.empty(int(size), dtype=torch.uint8, device=self.device)
        self._broadcast(data)
        return json.loads(bytes(data.cpu().numpy()))

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


def _room(entry: Entry) -> int:
    size = _dtype(entry).itemsize
    for length in entry.shape:
        size *= length
    return -(-size // _ALIGNED) * _ALIGNED


def _dtype(entry: Entry) -> torch.dtype:
    found = torch.__dict__.get(entry.dtype)
    if not isinstance(found, torch.dtype):
        raise EngineError(f"weight {entry.name} was sent as {entry.dtype}, which is no number format of torch's")
    return found


def _cut(buffer: Tensor, entries: list[Entry]) -> list[tuple[Entry, Tensor]]:
    found: list[tuple[Entry, Tensor]] = []
    start = 0
    for entry in entries:
        dtype, room = _dtype(entry), _room(entry)
        count = 1
        for length in entry.shape:
            count *= length
        raw = buffer[start : start + count * dtype.itemsize]
        found.append((entry, raw.view(dtype).view(entry.shape)))
        start += room
    return found
