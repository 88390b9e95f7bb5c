"""Activation offload: what a block keeps for its backward pass waits in host memory.

    a block runs -> each storage that autograd saves is copied to a host buffer while the next operations run
    -> the next block begins: copies that have ended let go of the device's memory
    -> backward reaches a block: its storages come back, and those of the block before it start coming

Nothing is stashed outside the autograd graph: a buffer goes back to the pool when the last tensor that was saved in it
dies, whether the graph was used, dropped, or never finished because of an exception.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from weakref import WeakValueDictionary, ref

import torch
from torch import Tensor, UntypedStorage, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.distributed.tensor import DTensor
from torch.multiprocessing.reductions import StorageWeakRef

from strop.engines.fsdp2.host import Copier, HostBuffers, Transfer, storage_key
from strop.errors import EngineError


class Stash:
    """One storage: on the device until its copy has ended, in a host buffer for as long as somebody needs it."""

    def __init__(self, tensor: Tensor, host: tuple[HostBuffers, Tensor], copier: Copier) -> None:
        storage = tensor.untyped_storage()
        self.version = tensor._version  # a later write makes other contents
        self._witness: Tensor | None = tensor.detach()  # counts the writes from now on
        self._spoiled = False
        self._identity = StorageWeakRef(storage)  # while this lives, no other storage gets its key
        self._nbytes = storage.nbytes()
        self._buffers, self._buffer = host
        self._copier = copier
        self._here: UntypedStorage | None = storage
        self._coming: Transfer | None = None
        self._leaving = copier.to_host(_bytes_of(storage), self._buffer)

    def __del__(self) -> None:
        self._buffers.give(self._buffer)

    def settle(self, *, wait: bool) -> None:
        """Let go of the device's memory if the copy to the host has ended, or after it."""
        if self._coming is None and self._here is not None and (wait or self._leaving.ended()):
            self._leaving.wait()
            self._look()
            self._here = self._witness = None

    def fetch(self) -> None:
        """Start bringing it back, unless it is here."""
        if self._here is None:
            fetched, self._coming = self._copier.to_device(self._buffer, self._nbytes)
            self._here = fetched.untyped_storage()

    def drop(self) -> None:
        """Let go of what was brought back; the host still has it."""
        if self._coming is not None:
            self._here = self._coming = None

    def storage(self) -> UntypedStorage:
        """On the device, ready to be read by what is computed next.

        EngineError when it was written over while a copy might still have been reading it; without offload autograd
        refuses every such write.
        """
        self._look()
        if self._spoiled:
            raise EngineError(
                "a tensor that the backward pass needs was written over in place after it was saved: such a module "
                "cannot be trained, with or without offload"
            )
        self.fetch()
        if self._coming is not None:
            self._coming.wait()
        assert self._here is not None
        return self._here

    def _look(self) -> None:
        self._spoiled = self._spoiled or (self._witness is not None and self._witness._version != self.version)


class Pass:
    """One run of one block, kept alive by the tensors that were saved in it."""

    def __init__(self, module: nn.Module, previous: Pass | None) -> None:
        self.module = module
        self.kept = {_storage_key(tensor) for tensor in (*module.parameters(), *module.buffers())}
        self._previous = None if previous is None else ref(previous)
        self._stashes: dict[int, ref[Stash]] = {}

    @property
    def previous(self) -> Pass | None:
        return None if self._previous is None else self._previous()

    @property
    def stashes(self) -> list[Stash]:
        """Those still needed, the one saved last first: backward needs it first."""
        return [stash for weak in reversed(self._stashes.values()) if (stash := weak()) is not None]

    def add(self, stash: Stash) -> None:
        self._stashes[id(stash)] = ref(stash)


class Saved:
    """What autograd holds instead of a tensor: where in which stash it lies."""

    def __init__(self, tensor: Tensor, stash: Stash, run: Pass) -> None:
        self.stash, self.run = stash, run
        self._empty = tensor.new_empty(0)
        self._offset, self._size, self._stride = tensor.storage_offset(), tensor.size(), tensor.stride()

    def tensor(self) -> Tensor:
        return self._empty.new_empty(0).set_(self.stash.storage(), self._offset, self._size, self._stride)


class Offloader:
    """Offloads what `blocks` save. Storages of less than `min_bytes` stay on the device, and so do parameters and
    buffers.

    Blocks may run several times, in one another, under checkpointing (then only their inputs are saved) and under
    FSDP2. The last block's storages stay where they are until another begins: backward needs them at once.
    """

    def __init__(
        self,
        blocks: Sequence[nn.Module],
        buffers: HostBuffers,
        copier: Copier,
        *,
        device: torch.device,
        min_bytes: int,
    ) -> None:
        self._blocks = blocks
        self._buffers, self._copier = buffers, copier
        self._device, self._min_bytes = device, min_bytes
        self._known: WeakValueDictionary[int, Stash] = WeakValueDictionary()
        self._open: list[tuple[Pass, saved_tensors_hooks]] = []
        self._last: ref[Pass] | None = None
        self._active: ref[Pass] | None = None  # where backward is

    @contextmanager
    def attached(self) -> Generator[None]:
        """Offload what the blocks save in this context. Backward may come later."""
        with ExitStack() as stack:
            stack.callback(self._close)
            for block in self._blocks:
                stack.enter_context(_removed(block.register_forward_pre_hook(self._enter)))
                stack.enter_context(_removed(block.register_forward_hook(self._leave, always_call=True)))
            yield

    def _enter(self, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if not torch.is_grad_enabled():
            return
        previous = _alive(self._last)
        for stash in [] if previous is None else previous.stashes:
            stash.settle(wait=False)
        run = Pass(module, previous)
        hooks = saved_tensors_hooks(partial(self._pack, run), self._unpack)
        hooks.__enter__()
        self._open.append((run, hooks))

    def _leave(self, module: nn.Module, inputs: tuple[Any, ...], output: object) -> None:
        """Also after an exception in the block; then what it had saved dies with its graph."""
        if not self._open or self._open[-1][0].module is not module:
            return
        run, hooks = self._open.pop()
        hooks.__exit__()
        previous = run.previous
        for stash in [] if previous is None else previous.stashes:
            stash.settle(wait=True)
        if run.stashes:
            self._last = ref(run)

    def _close(self) -> None:
        """Blocks that an interrupt left open."""
        while self._open:
            self._open.pop()[1].__exit__()

    def _pack(self, run: Pass, tensor: Tensor) -> Tensor | Saved:
        if not self._takes(run, tensor):
            return tensor
        storage = tensor.untyped_storage()
        stash = self._known.get(storage_key(storage))
        if stash is None or stash.version != tensor._version:
            stash = Stash(tensor, (self._buffers, self._buffers.take(storage.nbytes())), self._copier)
            self._known[storage_key(storage)] = stash
        run.add(stash)
        return Saved(tensor, stash, run)

    def _takes(self, run: Pass, tensor: Tensor) -> bool:
        plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_inference()
        if not plain or tensor.is_conj() or tensor.is_neg() or tensor.device != self._device:
            return False
        storage = tensor.untyped_storage()
        return storage.nbytes() >= max(self._min_bytes, 1) and storage_key(storage) not in run.kept

    def _unpack(self, saved: Tensor | Saved) -> Tensor:
        if isinstance(saved, Tensor):
            return saved
        self._arrive(saved.run)
        return saved.tensor()

    def _arrive(self, run: Pass) -> None:
        """Backward needs `run`: bring it back, and the one before it, which is needed next."""
        left = _alive(self._active)
        if left is run:
            return
        self._active = ref(run)
        previous = run.previous
        wanted = [*run.stashes, *([] if previous is None else previous.stashes)]
        for stash in [] if left is None else left.stashes:
            if stash not in wanted:
                stash.drop()
        for stash in wanted:
            stash.fetch()


@contextmanager
def _removed(handle: torch.utils.hooks.RemovableHandle) -> Generator[None]:
    try:
        yield
    finally:
        handle.remove()


def _alive(weak: ref[Pass] | None) -> Pass | None:
    return None if weak is None else weak()


def _bytes_of(storage: UntypedStorage) -> Tensor:
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def _storage_key(tensor: Tensor) -> int:
    local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
    return storage_key(local.untyped_storage())
