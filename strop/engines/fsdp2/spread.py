"""Where an engine's model lies: in this process alone, or spread over ranks that compute each batch together.

    batch -> this rank's slice of its tokens -> hidden states -> outputs of the slice -> outputs of the batch

An engine asks its place for these steps and is otherwise the same code on every rank. All ranks make the same calls in
the same order with equally many batches, whatever those hold: nothing here depends on data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer

from strop.config.parallel import ParallelConfig
from strop.data.packing import Batch
from strop.engines.fsdp2.expert_parallel import even_axis, share_experts
from strop.engines.fsdp2.tensor_parallel import split_heads
from strop.engines.fsdp2.ulysses import UlyssesAttention, gather_rows
from strop.errors import ConfigError, EngineError
from strop.models.attention import AttentionContext, PackedAttention
from strop.models.loading import LanguageModel
from strop.ops.select import Impl
from strop.types import Layout, Outputs

T = TypeVar("T")
InputsT = TypeVar("InputsT")


class Place(Protocol):
    """Where a model lies."""

    @property
    def ranks(self) -> int:
        """How many hold it together."""
        ...

    def run(self, compute: Callable[[], T]) -> T:
        """Compute with the model's weights at hand."""
        ...

    def share(self, batch: Batch[InputsT]) -> Batch[InputsT]:
        """This rank's slice of a batch: `layout` still speaks of the whole."""
        ...

    def positions(self, layout: Layout) -> Tensor:
        """Positions of the tokens of `share`."""
        ...

    def attention(self, layout: Layout) -> AttentionContext: ...

    def whole(self, outputs: Outputs, total: int) -> Outputs:
        """Outputs of a slice to those of the batch of `total` tokens, on every rank."""
        ...

    def own(self, column_T: Tensor, fill: float) -> Tensor:
        """The slice of one column of a batch that belongs to `share`, filled up with `fill`."""
        ...

    def gather(self, rows: Tensor, total: int) -> Tensor:
        """Every rank's slice of a column as that of the batch of `total` tokens, on every rank; a gradient comes back
        for this rank's own rows."""
        ...

    def add(self, numbers: Tensor) -> Tensor:
        """What each rank counted in its slice, summed."""
        ...

    def syncs(self, now: bool) -> None:
        """Whether the next backward pass sums gradients over ranks; it does so once for a call, at its last batch."""
        ...

    def add_up(self, adapter: Iterable[Tensor]) -> None:
        """After a call's last backward pass: what each rank has only a part of the gradient of is summed."""
        ...

    def put_away(self) -> None:
        """Every rank keeps its own shard of the weights alone."""
        ...

    def wait(self) -> None:
        """Until every rank is here."""
        ...


class Alone:
    """The whole model in this process."""

    ranks = 1

    def __init__(self, model: LanguageModel) -> None:
        self._model = model

    def run(self, compute: Callable[[], T]) -> T:
        return compute()

    def share(self, batch: Batch[InputsT]) -> Batch[InputsT]:
        return batch

    def positions(self, layout: Layout) -> Tensor:
        return torch.from_numpy(layout.positions_T).to(self._model.device)

    def attention(self, layout: Layout) -> AttentionContext:
        return PackedAttention(layout, self._model.impl)

    def whole(self, outputs: Outputs, total: int) -> Outputs:
        return outputs

    def own(self, column_T: Tensor, fill: float) -> Tensor:
        return column_T

    def gather(self, rows: Tensor, total: int) -> Tensor:
        return rows

    def add(self, numbers: Tensor) -> Tensor:
        return numbers

    def syncs(self, now: bool) -> None: ...

    def add_up(self, adapter: Iterable[Tensor]) -> None: ...

    def put_away(self) -> None: ...

    def wait(self) -> None: ...


class Spread:
    """A model sharded over the ranks of this process's group (FSDP2), the tokens of a batch over some of them.

    Sharding replaces the model's parameters by this rank's shards. Raises EngineError when the process group has
    another number of ranks than `config`.
    """

    def __init__(self, model: LanguageModel, config: ParallelConfig) -> None:
        if dist.get_world_size() != config.ranks:
            raise EngineError(f"engine.parallel means {config.ranks} ranks, and there are {dist.get_world_size()}")
        self.ranks = config.ranks
        self._model = model
        device = model.device.type
        sizes = (config.replicas, config.data, config.sequence, config.tensor)
        places = init_device_mesh(device, sizes, mesh_dim_names=("replicas", "data", "sequence", "tensor"))
        self._sequence = places.get_group("sequence") if config.sequence > 1 else None
        mesh = init_device_mesh(
            device,
            (config.replicas, config.shards, config.tensor),
            mesh_dim_names=("replicas", "shards", "tensor"),  # data and sequence ranks both add to a gradient
        )
        partial = split_heads(model, mesh["tensor"]) if config.tensor > 1 else []
        root = _Root(model.module)
        if config.compute == "bfloat16" and model.impl is Impl.NATIVE:
            raise ConfigError(
                "engine.parallel.compute is bfloat16, and native kernels are float32: set model.kernels=torch"
            )
        precision = MixedPrecisionPolicy(
            param_dtype=torch.bfloat16 if config.compute == "bfloat16" else None, reduce_dtype=model.dtype
        )
        if config.experts > 1:
            _shard_experts(model, config, device, precision)
        shards = mesh["shards"] if config.replicas == 1 else mesh["replicas", "shards"]
        shard(root, shards, precision)
        self._root = root
        self._tensor = mesh.get_group("tensor")
        self._partial = [model.module.get_parameter(name) for name in partial]
        self._sharded = [part for part in root.modules() if isinstance(part, FSDPModule)]

    def run(self, compute: Callable[[], T]) -> T:
        return self._root(compute)

    def share(self, batch: Batch[InputsT]) -> Batch[InputsT]:
        if self._sequence is None:
            return batch
        return replace(
            batch,
            tokens_T=self.own(batch.tokens_T, 0),
            targets_T=self.own(batch.targets_T, -1),
            mask_T=self.own(batch.mask_T, False),
            weights_T=self.own(batch.weights_T, 0.0),
            temperature_T=None if batch.temperature_T is None else self.own(batch.temperature_T, 1.0),
            ids_TK=None if batch.ids_TK is None else self.own(batch.ids_TK, 0),
            routes=None,  # routers are told theirs before, from `own`
        )

    def positions(self, layout: Layout) -> Tensor:
        positions_T = torch.from_numpy(self._filled(layout).positions_T).to(self._model.device)
        return positions_T if self._sequence is None else positions_T[self._slice(layout.num_tokens)]

    def attention(self, layout: Layout) -> AttentionContext:
        inner = PackedAttention(self._filled(layout), self._model.impl)
        return inner if self._sequence is None else UlyssesAttention(inner, self._sequence)

    def whole(self, outputs: Outputs, total: int) -> Outputs:
        return outputs.each_row(lambda rows: self.gather(rows, total))

    def own(self, column_T: Tensor, fill: float) -> Tensor:
        if self._sequence is None:
            return column_T
        total = len(column_T)
        return _padded(column_T, self._padded(total) - total, fill)[self._slice(total)]

    def gather(self, rows: Tensor, total: int) -> Tensor:
        return rows if self._sequence is None else gather_rows(rows, self._sequence)[:total]

    def add(self, numbers: Tensor) -> Tensor:
        if self._sequence is not None:
            dist.all_reduce(numbers, group=self._sequence)
        return numbers

    def syncs(self, now: bool) -> None:
        for part in self._sharded:
            part.set_requires_gradient_sync(now, recurse=False)
            part.set_is_last_backward(now)

    def add_up(self, adapter: Iterable[Tensor]) -> None:
        for parameter in adapter:  # every rank holds it whole, and saw its own tokens
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        for parameter in self._partial:
            if parameter.grad is not None:
                assert isinstance(parameter.grad, DTensor)
                dist.all_reduce(parameter.grad.to_local(), group=self._tensor)

    def put_away(self) -> None:
        for part in self._sharded:
            part.reshard()

    def wait(self) -> None:
        dist.barrier()

    def _padded(self, total: int) -> int:
        """Tokens of a batch, filled up so that every rank has as many."""
        size = 1 if self._sequence is None else dist.get_world_size(self._sequence)
        return -(-total // size) * size

    def _slice(self, total: int) -> slice:
        share = self._padded(total) // dist.get_world_size(self._sequence)
        rank = dist.get_rank(self._sequence)
        return slice(rank * share, (rank + 1) * share)

    def _filled(self, layout: Layout) -> Layout:
        """The layout with the filling as a sequence of its own."""
        pads = self._padded(layout.num_tokens) - layout.num_tokens
        return layout if not pads else Layout((*layout.lengths, pads), (*layout.parents, -1))


class _Root(nn.Module):
    """What FSDP takes for the model: its forward is whatever an engine computes, with the weights gathered."""

    def __init__(self, module: nn.Module) -> None:
        super().__init__()
        self.module = module

    def forward(self, compute: Callable[[], T]) -> T:
        return compute()


def shard(root: nn.Module, mesh: DeviceMesh, precision: MixedPrecisionPolicy) -> None:
    """Each layer and the rest by itself: gathered when it is computed, its gradient summed, never averaged."""
    for layer in [child for child in root.modules() if isinstance(child, GradientCheckpointingLayer)]:
        fully_shard(layer, mesh=mesh, mp_policy=precision)
    fully_shard(root, mesh=mesh, mp_policy=precision, reshard_after_forward=False)
    for child in root.modules():
        if isinstance(child, FSDPModule):
            child.set_gradient_divide_factor(1.0)
            child.set_force_sum_reduction_for_comms(True)


def _shard_experts(model: LanguageModel, config: ParallelConfig, device: str, precision: MixedPrecisionPolicy) -> None:
    """Each rank's experts by themselves: cut over the ranks that have the same ones."""
    alike = config.shards // config.experts
    mesh = init_device_mesh(
        device, (config.replicas, alike, config.experts), mesh_dim_names=("replicas", "alike", "experts")
    )
    over = mesh["alike"] if config.replicas == 1 else mesh["replicas", "alike"]
    precision = replace(precision, cast_forward_inputs=False)  # what routers weigh in float32 stays that
    for part in share_experts(model.module, mesh["experts"]):
        fully_shard(part, mesh=over, mp_policy=precision, shard_placement_fn=lambda own: even_axis(own, alike))


def on_first_rank(tensor: Tensor) -> Tensor | None:
    """The whole tensor on the first rank, None on the others. All ranks must ask."""
    whole = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
    return whole.detach().contiguous() if is_first_rank() else None


def is_first_rank() -> bool:
    return not dist.is_initialized() or dist.get_rank() == 0


def total_norm(grads: Iterable[Tensor]) -> Tensor:
    """The 2-norm of all gradients together, the same on every rank: a shard's square counts once."""
    grads = list(grads)
    if not any(isinstance(grad, DTensor) for grad in grads):
        return torch.nn.utils.get_total_norm(grads)
    squares: dict[tuple[DeviceMesh, tuple[int, ...]], Tensor] = {}
    for grad in grads:
        assert isinstance(grad, DTensor)
        dims = tuple(i for i, placement in enumerate(grad.placements) if not placement.is_replicate())
        local = torch.linalg.vector_norm(grad.to_local(), dtype=torch.float64).square()
        key = (grad.device_mesh, dims)
        squares[key] = squares[key] + local if key in squares else local
    total = torch.zeros((), dtype=torch.float64)
    for (mesh, dims), square in squares.items():
        for dim in dims:
            dist.all_reduce(square, group=mesh.get_group(dim))
        total = total + square
    return total.sqrt()


def _padded(column: Tensor, pads: int, value: float) -> Tensor:
    return torch.cat([column, column.new_full((pads, *column.shape[1:]), value)]) if pads else column
