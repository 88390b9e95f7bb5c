"""Weights on their way to another process: announced, sent in buckets, checked at the other end, used all at once.

    tensors -> Shipment: entries (name, shape, dtype, checksum) and bytes -> begin, put, put, ..., end -> tensors

What is sent is all of it, or what changed since the shipment that the receiver has, whichever is less for each tensor;
a receiver that has another one, or none, says so, and gets all. It has what it had until `end` finds everything there
and right: the checksum is of the whole tensor, also where only changes came.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from strop.errors import EngineError
from strop.ops.checksum import checksum
from strop.rollout.delta import Delta, apply_deltas, delta_of

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as it left."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int  # of its bytes, so that NaN is told from NaN too


Content = Tensor | Delta
Bucket = list[tuple[Entry, Content]]


def entry_of(name: str, tensor: Tensor, into: Tensor | None = None) -> Entry:
    """What there is to say of a tensor; its bytes are copied to `into` on the way."""
    return Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum(tensor, into))


def buckets(parts: Iterable[tuple[Entry, Content]], size: int = BUCKET_BYTES) -> Iterator[Bucket]:
    """Entries with what is sent of them, some megabytes at a time."""
    bucket: Bucket = []
    held = 0
    for entry, content in parts:
        bucket.append((entry, content))
        held += size_of(content)
        if held >= size:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


def size_of(content: Content) -> int:
    """Bytes that it takes to send."""
    return content.num_bytes if isinstance(content, Delta) else content.nbytes


class Shipment:
    """One set of weights, ready to be sent to any number of receivers: to be read as it is, or in buckets.

    `serial` counts shipments of one outbox; `before` are the weights of the one before, when changes may be sent.
    """

    def __init__(
        self, weights: Iterable[tuple[str, Tensor]], serial: int = 0, before: dict[str, Tensor] | None = None
    ) -> None:
        self.serial = serial
        self._weights = list(weights)
        self._before = before

    def __iter__(self) -> Iterator[tuple[str, Tensor]]:
        return iter(self._weights)

    def __len__(self) -> int:
        return len(self._weights)

    @cached_property
    def _entries(self) -> list[Entry]:
        return [entry_of(name, tensor) for name, tensor in self._weights]

    def whole(self) -> Iterator[Bucket]:
        """All of every tensor."""
        return buckets((entry, tensor) for entry, (_, tensor) in zip(self._entries, self._weights, strict=True))

    @cached_property
    def changes(self) -> list[Bucket] | None:
        """For receivers of the shipment before: of each tensor what changed, or all where that is less.

        None when there was none before, or it had other names, shapes or formats.
        """
        before = self._before
        if before is None or [_form(n, t) for n, t in before.items()] != [_form(n, t) for n, t in self._weights]:
            return None
        return list(buckets(self._changed(before)))

    def _changed(self, before: dict[str, Tensor]) -> Iterator[tuple[Entry, Content]]:
        for entry, (name, tensor) in zip(self._entries, self._weights, strict=True):
            delta = delta_of(name, before[name], tensor)
            yield entry, delta if delta.num_bytes < tensor.nbytes else tensor


def _form(name: str, tensor: Tensor) -> tuple[str, tuple[int, ...], torch.dtype]:
    return name, tuple(tensor.shape), tensor.dtype


class Outbox:
    """Makes shipments. With `deltas` it keeps a copy of the last one, to know what changed.

    `dtype` is what receivers compute in, when that is not what arrives here: numbers of a coarser format are fewer
    bytes, and far fewer of them change in a step.
    """

    def __init__(self, *, deltas: bool = False, dtype: torch.dtype | None = None) -> None:
        self._deltas = deltas
        self._dtype = dtype
        self._serial = 0
        self._last: dict[str, Tensor] | None = None

    def ship(self, weights: Iterable[tuple[str, Tensor]]) -> Shipment:
        self._serial += 1
        shipment = Shipment(cast(weights, self._dtype), self._serial, self._last)
        if self._deltas:
            self._last = {name: tensor.detach().cpu().clone() for name, tensor in shipment}
        return shipment


def cast(weights: Iterable[tuple[str, Tensor]], dtype: torch.dtype | None) -> Iterator[tuple[str, Tensor]]:
    """Floating-point weights in the format of who receives them; None: as they are."""
    for name, tensor in weights:
        yield name, tensor.to(dtype) if dtype is not None and tensor.is_floating_point() else tensor


def shards(weights: Iterable[tuple[str, Tensor]], size: int) -> Iterator[dict[str, Tensor]]:
    """Copies in host memory, so that tensors which are parts of one buffer are saved each for itself."""
    shard: dict[str, Tensor] = {}
    held = 0
    for name, tensor in weights:
        shard[name] = tensor.detach().to("cpu", copy=True).contiguous()
        held += tensor.nbytes
        if held >= size:
            yield shard
            shard, held = {}, 0
    if shard:
        yield shard


class Incoming:
    """The receiving end of one version. `held` are the weights of the shipment that changes are relative to."""

    def __init__(self, version: int, held: dict[str, Tensor] | None = None) -> None:
        self.version = version
        self._held = held or {}
        self._tensors: dict[str, Tensor] = {}

    def put(self, bucket: Bucket) -> None:
        """Take tensors in. EngineError for one that is not what its entry says, or that came before."""
        for entry, content in bucket:
            tensor = self._changed(entry, content) if isinstance(content, Delta) else content
            found = entry_of(entry.name, tensor)
            if found != entry:
                raise EngineError(f"weight {entry.name} of version {self.version} arrived as {found}, sent as {entry}")
            if entry.name in self._tensors:
                raise EngineError(f"weight {entry.name} of version {self.version} came twice")
            self._tensors[entry.name] = tensor

    def _changed(self, entry: Entry, delta: Delta) -> Tensor:
        was = self._held.get(entry.name)
        if was is None:
            raise EngineError(f"changes of weight {entry.name} came for version {self.version}, which is not here")
        if not len(delta.indices_N):
            return was
        changed = was.clone()
        apply_deltas({delta.name: changed}, [delta])
        return changed

    def end(self, count: int) -> dict[str, Tensor]:
        """All of them, when there are as many as were sent. EngineError when not."""
        if len(self._tensors) != count:
            raise EngineError(
                f"version {self.version}: {len(self._tensors)} weights arrived of the {count} that were sent"
            )
        return self._tensors


class Inbox:
    """Where the shipments for one sampler arrive: at most one is on its way, and one that failed is gone.

    With `keeps` a copy of the last one stays, for changes to be relative to.
    """

    def __init__(self, *, keeps: bool = False) -> None:
        self._keeps = keeps
        self._arriving: Incoming | None = None
        self._serial: int | None = None
        self._held: dict[str, Tensor] | None = None

    def begin(self, version: int, base: int | None) -> bool:
        """Announce a version: all of it, or what changed since the shipment `base`. False when that one is not here:
        then nothing is announced."""
        self._arriving = None
        if base is not None and (base != self._serial or self._held is None):
            return False
        self._arriving = Incoming(version, None if base is None else self._held)
        return True

    def put(self, bucket: Bucket) -> None:
        arriving = self._take()
        arriving.put(bucket)
        self._arriving = arriving

    def end(self, count: int) -> tuple[int, dict[str, Tensor]]:
        """(version, all of its weights), checked. Whoever has made use of them says `used`."""
        arriving = self._take()
        return arriving.version, arriving.end(count)

    def used(self, serial: int, weights: dict[str, Tensor]) -> None:
        if self._keeps:
            old = self._held or {}
            self._held = {n: t if t is old.get(n) else t.clone() for n, t in weights.items()}  # not the wire's buffer
            self._serial = serial

    def _take(self) -> Incoming:
        arriving, self._arriving = self._arriving, None
        if arriving is None:
            raise EngineError("weights arrived that nobody announced")
        return arriving
