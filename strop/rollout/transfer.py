"""Weights on their way to another process: announced, sent in buckets, checked at the other end, used all at once.

    tensors -> entries (name, shape, dtype, checksum) and bytes -> begin, put, put, ..., end -> tensors

A receiver has what it had until `end` finds everything there and right.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.errors import EngineError

BUCKET_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class Entry:
    """One tensor as it left."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    checksum: int  # CRC-32 of its bytes, so that NaN is told from NaN too


def entry_of(name: str, tensor: Tensor) -> Entry:
    return Entry(name, tuple(tensor.shape), str(tensor.dtype).removeprefix("torch."), checksum(tensor))


def checksum(tensor: Tensor) -> int:
    """CRC-32 of a tensor's bytes."""
    flat = tensor.detach().cpu().contiguous().view(-1)
    return zlib.crc32(memoryview(flat.view(torch.uint8).numpy())) if flat.numel() else 0


def buckets(weights: Iterable[tuple[str, Tensor]], size: int = BUCKET_BYTES) -> Iterator[list[tuple[Entry, Tensor]]]:
    """Tensors with their entries, some megabytes at a time."""
    bucket: list[tuple[Entry, Tensor]] = []
    held = 0
    for name, tensor in weights:
        bucket.append((entry_of(name, tensor), tensor))
        held += tensor.nbytes
        if held >= size:
            yield bucket
            bucket, held = [], 0
    if bucket:
        yield bucket


class Incoming:
    """The receiving end of one version."""

    def __init__(self, version: int) -> None:
        self.version = version
        self._tensors: dict[str, Tensor] = {}

    def put(self, bucket: list[tuple[Entry, Tensor]]) -> None:
        """Take tensors in. EngineError for one that is not what its entry says, or that came before."""
        for entry, tensor in bucket:
            found = entry_of(entry.name, tensor)
            if found != entry:
                raise EngineError(f"weight {entry.name} of version {self.version} arrived as {found}, sent as {entry}")
            if entry.name in self._tensors:
                raise EngineError(f"weight {entry.name} of version {self.version} came twice")
            self._tensors[entry.name] = tensor

    def end(self, count: int) -> Iterator[tuple[str, Tensor]]:
        """All of them, when there are as many as were sent. EngineError when not."""
        if len(self._tensors) != count:
            raise EngineError(
                f"version {self.version}: {len(self._tensors)} weights arrived of the {count} that were sent"
            )
        return iter(self._tensors.items())
