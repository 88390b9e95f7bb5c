"""Host memory for what leaves the device, and the copies there and back.

    bytes on the device -> a buffer taken from `HostBuffers` -> bytes on the device again -> the buffer given back

On CUDA a stream of its own copies beside the computation, and events order the two; on a CPU, which is its own host,
the same calls copy at once.
"""

from __future__ import annotations

from collections import OrderedDict
from threading import RLock
from typing import Protocol

import torch
from torch import Tensor, UntypedStorage


class HostBuffers:
    """Byte buffers, reused. Idle ones hold at most `idle_cap` bytes: layouts used longest ago are freed first.

    A layout is a size, rounded up to one of eight steps between powers of two, so that packs of slightly different
    lengths share buffers; no buffer is more than an eighth too large.
    """

    def __init__(self, idle_cap: int, *, pinned: bool) -> None:
        self._idle_cap = idle_cap
        self._pinned = pinned
        self._idle: OrderedDict[int, list[Tensor]] = OrderedDict()  # by layout; the one used last stands last
        self._lock = RLock()  # buffers come back whenever a graph dies, on any thread
        self.in_use = 0  # bytes
        self.idle = 0
        self.peak = 0  # the most bytes that were ever in use

    def take(self, nbytes: int) -> Tensor:
        """A buffer of at least `nbytes`, as uint8; its contents are anything."""
        layout = _layout(nbytes)
        with self._lock:
            waiting = self._idle.get(layout)
            buffer = waiting.pop() if waiting else None
            self._touch(layout)
            self.idle -= 0 if buffer is None else layout
            self.in_use += layout
            self.peak = max(self.peak, self.in_use)
        return torch.empty(layout, dtype=torch.uint8, pin_memory=self._pinned) if buffer is None else buffer

    def give(self, buffer: Tensor) -> None:
        """Take a buffer back."""
        with self._lock:
            self.in_use -= buffer.nbytes
            self._idle.setdefault(buffer.nbytes, []).append(buffer)
            self._touch(buffer.nbytes)
            self.idle += buffer.nbytes
            while self.idle > self._idle_cap:
                oldest = next(iter(self._idle))
                if self._idle[oldest]:
                    self._idle[oldest].pop()
                    self.idle -= oldest
                if not self._idle[oldest]:
                    del self._idle[oldest]

    def _touch(self, layout: int) -> None:
        if layout in self._idle:
            self._idle.move_to_end(layout)


def _layout(nbytes: int) -> int:
    step = max(1 << max(nbytes.bit_length() - 4, 0), 512)
    return -(-nbytes // step) * step


def storage_key(storage: UntypedStorage) -> int:
    """Which storage it is, among those that live: not where it lies, which may change and be used again."""
    return storage._cdata  # pyright: ignore[reportPrivateUsage] - nothing public tells


class Transfer(Protocol):
    """A copy under way."""

    def ended(self) -> bool: ...

    def wait(self) -> None:
        """Let what is computed from here on come after it."""
        ...


class Copier(Protocol):
    """Both directions. Everything that touches a host buffer happens in the order of the calls."""

    def to_host(self, source: Tensor, buffer: Tensor) -> Transfer:
        """Copy `source` (uint8 on the device), as computed so far, into the start of `buffer`."""
        ...

    def to_device(self, buffer: Tensor, nbytes: int) -> tuple[Tensor, Transfer]:
        """The start of `buffer` as new memory on the device, for use after the transfer's `wait`."""
        ...


class Ended:
    """The transfer of a copier that copies at once."""

    def ended(self) -> bool:
        return True

    def wait(self) -> None:
        pass


class DirectCopier:
    """Copies at once: for a CPU."""

    def to_host(self, source: Tensor, buffer: Tensor) -> Transfer:
        buffer[: source.nbytes].copy_(source)
        return Ended()

    def to_device(self, buffer: Tensor, nbytes: int) -> tuple[Tensor, Transfer]:
        return buffer[:nbytes].clone(), Ended()


class StreamTransfer:
    """A copy on the side stream; `fetched` is the memory it makes, which belongs to that stream."""

    def __init__(self, event: torch.cuda.Event | torch.Event, fetched: Tensor | None = None) -> None:
        self._event = event
        self._fetched = fetched

    def ended(self) -> bool:
        return self._event.query()

    def wait(self) -> None:
        stream = torch.cuda.current_stream()
        stream.wait_event(self._event)
        if self._fetched is not None:
            self._fetched.record_stream(stream)  # it is not reused before what is queued there now has read it


class StreamCopier:
    """Copies beside the computation, on one stream for both directions, so that a buffer's copies stay in order."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)

    def to_host(self, source: Tensor, buffer: Tensor) -> Transfer:
        self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            buffer[: source.nbytes].copy_(source, non_blocking=True)
            return StreamTransfer(self._stream.record_event())

    def to_device(self, buffer: Tensor, nbytes: int) -> tuple[Tensor, Transfer]:
        with torch.cuda.stream(self._stream):
            fetched = buffer[:nbytes].to(self._device, non_blocking=True)
            return fetched, StreamTransfer(self._stream.record_event(), fetched)


def copier_for(device: torch.device) -> Copier:
    return StreamCopier(device) if device.type == "cuda" else DirectCopier()
