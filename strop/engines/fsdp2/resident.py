"""An engine's tensors, away to host memory and back. Storages move, tensors stay: views, ties and moments keep pointing
where they did.

    every storage behind them, once -> bytes copied into a host buffer -> the storage emptied; and the same way back

A CPU is its own host, and runs the same code.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, UntypedStorage
from torch.distributed.tensor import DTensor

from strop.engines.fsdp2.host import storage_key


@dataclass(frozen=True, slots=True)
class Away:
    """Storages that are empty for now, each with its bytes in host memory."""

    held: list[tuple[UntypedStorage, Tensor]]

    @classmethod
    def move(cls, tensors: Iterable[Tensor], device: torch.device) -> Away:
        """Take everything on `device` that these tensors look at. Nothing is emptied before everything is copied."""
        by_storage: dict[int, list[Tensor]] = {}
        for tensor in map(_local, tensors):
            if tensor.device == device:
                by_storage.setdefault(storage_key(tensor.untyped_storage()), []).append(tensor)
        storages = [_resizable(sharing) for sharing in by_storage.values()]
        held = [(storage, _host_copy(storage)) for storage in storages]
        if device.type == "cuda":
            torch.cuda.synchronize(device)  # the copies must have ended before their sources go (I04)
        for storage, _ in held:
            storage.resize_(0)
        return cls(held)

    def back(self) -> None:
        """Every byte where it was."""
        for storage, buffer in self.held:
            storage.resize_(buffer.nbytes)
            _bytes_of(storage).copy_(buffer, non_blocking=True)
        if self.held and self.held[0][0].device.type == "cuda":
            torch.cuda.synchronize(self.held[0][0].device)  # the buffers go now


def _local(tensor: Tensor) -> Tensor:
    """This rank's shard of a sharded tensor; it is the memory that its engine works on."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def _resizable(sharing: list[Tensor]) -> UntypedStorage:
    """The storage that these tensors share; one of a mapped file is copied first, since it cannot be emptied."""
    storage = sharing[0].untyped_storage()
    if storage.resizable():
        return storage
    copy = torch.empty(storage.nbytes(), dtype=torch.uint8, device=storage.device)
    copy.copy_(_bytes_of(storage))
    for tensor in sharing:
        with torch.no_grad():
            tensor.set_(copy.untyped_storage(), tensor.storage_offset(), tensor.size(), tensor.stride())
    return copy.untyped_storage()


def _host_copy(storage: UntypedStorage) -> Tensor:
    buffer = torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=storage.device.type == "cuda")
    return buffer.copy_(_bytes_of(storage), non_blocking=True)


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)
