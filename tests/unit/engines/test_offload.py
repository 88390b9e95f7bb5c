"""Activation offload: the same gradients to the bit, device memory really given up, and nothing left behind. (I02)"""

from __future__ import annotations

import gc
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from strop.engines.fsdp2.host import Copier, DirectCopier, HostBuffers, Transfer
from strop.engines.fsdp2.offload import Offloader
from strop.errors import EngineError

autograd: Any = torch._C.__dict__["_autograd"]
CPU = torch.device("cpu")
WIDTH = 16


class Late:
    """A transfer that happens when it is waited for, and not before: the worst that a side stream may do."""

    def __init__(self, run: Callable[[], object]) -> None:
        self._run: Callable[[], object] | None = run

    def ended(self) -> bool:
        return self._run is None

    def wait(self) -> None:
        if self._run is not None:
            self._run()
            self._run = None


class LateCopier:
    """Copies as late as the protocol allows, in the order of the calls, and notes what was asked."""

    def __init__(self) -> None:
        self.queue: list[Late] = []
        self.log: list[str] = []

    def _later(self, name: str, run: Callable[[], object]) -> Transfer:
        self.log.append(name)
        before = list(self.queue)

        def in_order() -> None:
            for transfer in before:
                transfer.wait()
            run()

        self.queue.append(Late(in_order))
        return self.queue[-1]

    def to_host(self, source: Tensor, buffer: Tensor) -> Transfer:
        weak, nbytes = StorageWeakRef(source.untyped_storage()), source.nbytes

        def copy() -> None:
            storage: Any = torch.UntypedStorage._new_with_weak_ptr(weak.cdata)
            there = None if storage is None else torch.empty(0, dtype=torch.uint8).set_(storage)
            buffer[:nbytes] = 0x7F if there is None else there  # memory given up too early holds anything

        return self._later("out", copy)

    def to_device(self, buffer: Tensor, nbytes: int) -> tuple[Tensor, Transfer]:
        fetched = torch.full((nbytes,), 0x7F, dtype=torch.uint8)
        return fetched, self._later("back", lambda: fetched.copy_(buffer[:nbytes]))


class Block(nn.Module):
    """Saves views, slices, transposes, broadcasts, results of its own and the same storage several times."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.gain = nn.Parameter(torch.randn(WIDTH))

    def forward(self, x: Tensor, scale: Tensor | None = None) -> Tensor:
        q, k, v = self.mix(x).chunk(3, dim=-1)  # views of one storage
        scores = torch.softmax(q @ k.t() / 4, -1)  # an output that is saved
        mixed = scores @ v
        part = mixed[2:6] * mixed[2:6].sin()  # a slice, twice
        spread = part.mean(0).expand(len(x), -1) * mixed.t().contiguous().t()  # a broadcast, odd strides
        if scale is not None:
            spread = spread * scale  # the same tensor in every block
        return x + self.out(torch.relu(spread) * self.gain) + (x * x).tanh()


class Net(nn.Module):
    def __init__(self, depth: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block() for _ in range(depth)])

    def forward(self, x: Tensor, order: Sequence[int] | None = None) -> Tensor:
        scale = torch.linspace(0.5, 2.0, WIDTH)
        for n in order if order is not None else range(len(self.blocks)):
            x = self.blocks[n](x, scale)
        return x


def net(depth: int = 4) -> Net:
    torch.manual_seed(0)
    return Net(depth)


def data(rows: int = 8, seed: int = 1) -> Tensor:
    return torch.randn(rows, WIDTH, generator=torch.Generator().manual_seed(seed))


def offloader(model: Net, copier: Copier | None = None, min_bytes: int = 0, cap: int = 1 << 30) -> Offloader:
    buffers = HostBuffers(cap, pinned=False)
    return Offloader(list(model.blocks), buffers, copier or DirectCopier(), device=CPU, min_bytes=min_bytes)


def buffers_of(made: Offloader) -> HostBuffers:
    return made._buffers


def grads(model: nn.Module) -> list[Tensor]:
    return [parameter.grad.clone() for parameter in model.parameters() if parameter.grad is not None]


def learn(model: Net, x: Tensor, order: Sequence[int] | None = None) -> list[Tensor]:
    x = x.clone().requires_grad_()
    model.zero_grad()
    model(x, order).pow(2).sum().backward()
    assert x.grad is not None
    return [*grads(model), x.grad]


def same(a: list[Tensor], b: list[Tensor]) -> bool:
    return len(a) == len(b) > 0 and all(torch.equal(x, y) for x, y in zip(a, b, strict=True))


@pytest.fixture(params=[DirectCopier, LateCopier])
def copier(request: pytest.FixtureRequest) -> Copier:
    return request.param()


def test_gradients_are_the_same_to_the_bit_and_nothing_is_left(copier: Copier) -> None:
    """I02: views, slices, transposes, broadcasts, storages that are saved many times."""
    model = net()
    expected = learn(model, data())
    made = offloader(model, copier)
    with made.attached():
        for _ in range(3):
            assert same(learn(model, data()), expected)
            assert buffers_of(made).in_use == 0 and buffers_of(made).idle > 0
    assert buffers_of(made).peak > 4 * data().nbytes
    assert same(learn(model, data()), expected), "detached"


@pytest.mark.parametrize("order", [[0, 1, 2, 3, 0, 1], [0, 0, 0], [3, 1]])
def test_blocks_may_run_again_and_in_any_order(copier: Copier, order: list[int]) -> None:
    model = net()
    expected = learn(model, data(), order)
    made = offloader(model, copier)
    with made.attached():
        assert same(learn(model, data(), order), expected)
    assert buffers_of(made).in_use == 0


def test_two_graphs_at_once_in_either_order(copier: Copier) -> None:
    model = net()
    for first in (0, 1):
        results: list[list[Tensor]] = []
        for made in (None, offloader(model, copier)):
            model.zero_grad()
            with nothing() if made is None else made.attached():
                losses = [model(data(seed=seed)).pow(2).sum() for seed in (1, 2)]
                losses[first].backward()
                losses[1 - first].backward()
                del losses
            results.append(grads(model))
            assert made is None or buffers_of(made).in_use == 0
        assert same(*results)


def test_a_graph_can_be_walked_twice_and_differentiated_twice(copier: Copier) -> None:
    model = net()
    results: list[list[Tensor]] = []
    for made in (None, offloader(model, copier)):
        model.zero_grad()
        x = data().requires_grad_()
        with nothing() if made is None else made.attached():
            loss = model(x).pow(2).sum()
            loss.backward(retain_graph=True)
            loss.backward(retain_graph=True)
            (slope,) = torch.autograd.grad(loss, x, create_graph=True)
            slope.pow(2).sum().backward()
        results.append(grads(model))
        del loss, slope
        assert made is None or buffers_of(made).in_use == 0
    assert same(*results)


def no_hooks_left() -> bool:
    return autograd._top_saved_tensors_default_hooks(True) is None


@contextmanager
def nothing() -> Generator[None]:
    yield


class Fixed(nn.Module):
    """Saves one storage of known size in each block."""

    def __init__(self, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Sine() for _ in range(depth)])

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x


class Sine(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return (x * 1.5).sin() * 2.0  # saves one product


def test_the_device_holds_two_blocks_at_the_most_however_many_there_are() -> None:
    """On the way forward the block that runs and what leaves; on the way back the block needed and the one before."""

    def peak(depth: int, *, offload: bool, retain: bool = False) -> float:
        model = Fixed(depth)
        made = Offloader(list(model.blocks), HostBuffers(0, pinned=False), DirectCopier(), device=CPU, min_bytes=0)
        with made.attached() if offload else nothing(), StorageCount() as storages:
            model(torch.ones(1000, requires_grad=True)).sum().backward(retain_graph=retain)
        return storages.peak / 4000

    assert peak(12, offload=False) - peak(4, offload=False) == 8
    assert peak(12, offload=True) == peak(4, offload=True) == 6, "with the products and gradients in flight"
    assert peak(12, offload=True, retain=True) == peak(4, offload=True, retain=True) < peak(4, offload=False)


class StorageCount(TorchDispatchMode):
    """Live bytes of float storages made by any operation, and their peak."""

    def __init__(self) -> None:
        super().__init__()
        self.held: dict[int, tuple[StorageWeakRef, int]] = {}
        self.peak = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # pyright: ignore
        out = func(*args, **(kwargs or {}))
        for tensor in out if isinstance(out, tuple | list) else (out,):
            if isinstance(tensor, Tensor) and tensor.untyped_storage().nbytes() == 4000:
                storage = tensor.untyped_storage()
                self.held[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.held = {key: (ref, size) for key, (ref, size) in self.held.items() if not ref.expired()}
        self.peak = max(self.peak, sum(size for _, size in self.held.values()))
        return out


def test_backward_asks_for_a_block_before_it_is_needed() -> None:
    model = net(3)
    copier = LateCopier()
    made = offloader(model, copier)
    arrivals: list[tuple[int, list[bool]]] = []
    original = made._arrive

    def arrive(run: object) -> None:
        original(run)  # pyright: ignore[reportArgumentType]
        block = list(model.blocks).index(run.module)  # pyright: ignore[reportAttributeAccessIssue]
        previous = run.previous  # pyright: ignore[reportAttributeAccessIssue]
        asked = [] if previous is None else [stash._here is not None for stash in previous.stashes]
        arrivals.append((block, asked))

    made._arrive = arrive  # pyright: ignore[reportAttributeAccessIssue]
    with made.attached():
        learn(model, data())
    order = list(dict.fromkeys(block for block, _ in arrivals))
    assert order == [2, 1, 0]
    assert all(all(asked) for _, asked in arrivals)
    assert any(asked for block, asked in arrivals if block == 2)
    out = copier.log.count("out")
    assert copier.log[:out] == ["out"] * out and 0 < copier.log.count("back") < out, "the last block never left"


def test_an_exception_in_a_block_leaves_nothing(copier: Copier) -> None:
    """I02: no stash, no hook: the next pass is as the first."""
    model = net()
    expected = learn(model, data())
    made = offloader(model, copier)

    def fail(module: nn.Module, inputs: object, output: object) -> None:
        raise RuntimeError("in the block")

    handle = model.get_submodule("blocks.2.out").register_forward_hook(fail)
    with made.attached():
        with pytest.raises(RuntimeError, match="in the block"):
            learn(model, data())
        gc.collect()
        kept = data().requires_grad_().sin()
        assert buffers_of(made).in_use == 0, f"outside of blocks nothing is offloaded, {len(kept)} rows"
        handle.remove()
        assert same(learn(model, data()), expected)
    assert not any(block._forward_hooks or block._forward_pre_hooks for block in model.blocks)
    assert no_hooks_left()


def test_an_exception_outside_the_blocks_and_an_interrupt_leave_nothing(copier: Copier) -> None:
    model = net()
    made = offloader(model, copier)

    def interrupted(module: nn.Module, inputs: object, output: object) -> None:
        raise KeyboardInterrupt

    handle = model.get_submodule("blocks.1.out").register_forward_hook(interrupted)
    with pytest.raises(KeyboardInterrupt), made.attached():
        learn(model, data())
    handle.remove()
    gc.collect()
    assert no_hooks_left()
    assert buffers_of(made).in_use == 0
    with pytest.raises(ZeroDivisionError), made.attached():
        raise ZeroDivisionError(model(data()).shape)
    gc.collect()
    assert buffers_of(made).in_use == 0


def test_a_graph_that_is_never_used_gives_everything_back(copier: Copier) -> None:
    model = net()
    expected = learn(model, data())
    made = offloader(model, copier)
    with made.attached():
        loss = model(data()).sum()
        assert buffers_of(made).in_use > 0
        del loss
        gc.collect()
        assert buffers_of(made).in_use == 0
        with torch.no_grad():
            model(data())
        assert buffers_of(made).in_use == 0
        assert same(learn(model, data()), expected)


def test_an_exception_in_backward_gives_everything_back(copier: Copier) -> None:
    model = net()
    expected = learn(model, data())
    made = offloader(model, copier)
    with made.attached():
        x = data().requires_grad_()
        x.register_hook(lambda grad: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            model(x).sum().backward()
        gc.collect()
        assert buffers_of(made).in_use == 0
        assert same(learn(model, data()), expected)


def test_an_address_that_is_used_again_never_returns_the_old_contents() -> None:
    """I02: identity is the storage, not where it lies: storages of one size are freed and made again all the time."""
    sine = Sine()
    made = Offloader([sine], HostBuffers(1 << 20, pinned=False), DirectCopier(), device=CPU, min_bytes=0)
    with made.attached():
        losses = []
        for seed in range(20):
            x = torch.full((500,), float(seed), requires_grad=True)
            losses.append((x, sine(x).sum()))
        for x, loss in losses:
            loss.backward()
            assert x.grad is not None and torch.equal(x.grad, 3.0 * torch.cos(1.5 * x.detach()))


class Overwrites(nn.Module):
    """Saves a storage, writes over it, and saves it again."""

    def __init__(self, needed: bool) -> None:
        super().__init__()
        self.needed = needed
        self.first: Tensor | None = None

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2.0
        self.first = SaveOnly.apply(y)  # pyright: ignore[reportAttributeAccessIssue]
        assert self.first is not None
        with torch.no_grad():
            y.add_(1.0)
        return (self.first if self.needed else y.clone()) + SaveOnly.apply(y)  # pyright: ignore[reportOperatorIssue]


def test_what_is_written_over_after_it_was_saved_is_refused_as_autograd_does() -> None:
    for offload in (False, True):
        for needed in (False, True):
            block = Overwrites(needed)
            made = Offloader([block], HostBuffers(0, pinned=False), DirectCopier(), device=CPU, min_bytes=0)
            x = torch.ones(64, requires_grad=True)
            with made.attached() if offload else nothing():
                loss = block(x).sum()
                if needed:
                    words = "written over in place" if offload else "modified by an inplace operation"
                    with pytest.raises((EngineError, RuntimeError), match=words):
                        loss.backward()
                else:
                    loss.backward()
                    assert x.grad is not None and x.grad.eq(2.0 + 2.0 * 3.0).all()


class SaveOnly(torch.autograd.Function):
    """Identity; its gradient is multiplied with what was saved."""

    @staticmethod
    def forward(ctx, x):  # pyright: ignore
        ctx.save_for_backward(x)
        return x.clone()

    @staticmethod
    def backward(ctx, *grads):  # pyright: ignore
        return grads[0] * ctx.saved_tensors[0]


def test_parameters_small_storages_and_other_devices_stay() -> None:
    model = net(2)
    made = offloader(model, min_bytes=data().nbytes + 1)
    with made.attached():
        learn(model, data())
    assert buffers_of(made).peak > 0
    biggest = offloader(model, min_bytes=1 << 20)
    with biggest.attached():
        learn(model, data())
    assert buffers_of(biggest).peak == 0
    everything = offloader(model, copier := LateCopier())
    with everything.attached():
        loss = model(data()).sum()
        own = {parameter.untyped_storage()._cdata for parameter in model.parameters()}
        assert not own & set(everything._known.keys()) and copier.log
    del loss


@pytest.mark.parametrize("every", [1, 2])
def test_under_checkpointing_only_inputs_wait_on_the_host(copier: Copier, every: int) -> None:
    model = net()
    expected = learn(model, data())
    plain = offloader(model)
    with plain.attached():
        learn(model, data())
    for block in model.blocks[::every]:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    made = offloader(model, copier)
    with made.attached():
        assert same(learn(model, data()), expected)
        assert same(learn(model, data()), expected)
    assert buffers_of(made).in_use == 0 and 0 < buffers_of(made).peak < buffers_of(plain).peak / (3 - every)


def test_a_module_inside_a_checkpointed_one(copier: Copier) -> None:
    model = net()
    expected = learn(model, data())
    inner = Offloader(
        [model.get_submodule(f"blocks.{n}.out") for n in range(4)],
        HostBuffers(0, pinned=False),
        copier,
        device=CPU,
        min_bytes=0,
    )
    nested = Offloader(
        [m for n in range(4) for m in (model.blocks[n], model.get_submodule(f"blocks.{n}.out"))],
        HostBuffers(0, pinned=False),
        copier,
        device=CPU,
        min_bytes=0,
    )
    with nested.attached():
        assert same(learn(model, data()), expected)
    for block in model.blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    with inner.attached():
        assert same(learn(model, data()), expected)
    gc.collect()
    assert buffers_of(inner).in_use == buffers_of(nested).in_use == 0


@pytest.fixture
def one_rank(tmp_path: Path) -> Iterator[None]:
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/rendezvous", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.parametrize("checkpointed", [False, True])
def test_under_fsdp2(one_rank: None, copier: Copier, checkpointed: bool) -> None:
    """Sharded modules gather their parameters inside the same hooks: those are never offloaded."""
    results: list[list[Tensor]] = []
    for offload in (False, True):
        model = net()
        made = offloader(model, copier)
        for block in model.blocks:
            if checkpointed:
                block.forward = partial(checkpoint, block.forward, use_reentrant=False)
            fully_shard(block)
        fully_shard(model)
        with made.attached() if offload else nothing():
            for _ in range(2):
                model.zero_grad()
                model(data()).pow(2).sum().backward()
        results.append([p.grad.full_tensor() for p in model.parameters()])  # pyright: ignore
        assert buffers_of(made).in_use == 0 and (buffers_of(made).peak > 0) == offload
    assert same(*results)
