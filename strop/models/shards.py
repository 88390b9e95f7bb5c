"""What a rank keeps of a tensor that is spread over ranks, and the whole of it again."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor


def full(tensor: Tensor) -> Tensor:
    """A copy of the whole tensor, on every rank. All ranks must ask."""
    if isinstance(tensor, DTensor):
        return tensor.full_tensor().detach().clone()
    return tensor.detach().clone()


def gathered(weights: Iterable[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Each tensor whole, one at a time; one that is whole already is itself. All ranks must take all of them."""
    for name, tensor in weights:
        yield name, tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def share_of(whole: Tensor, own: Tensor) -> Tensor:
    """What this rank keeps of a whole tensor that every rank has, laid out as `own` is; a copy. No rank is asked.

    Where two dimensions of a mesh cut the same axis, the last one cut first: FSDP cuts what tensor parallelism left.
    """
    if not isinstance(own, DTensor):
        return whole.clone()
    local, mesh = whole, own.device_mesh
    for dim in reversed(range(mesh.ndim)):
        placement = own.placements[dim]
        if placement.is_replicate():
            continue
        axis: int = placement.dim  # pyright: ignore[reportAttributeAccessIssue] - a shard, plain or strided
        chunks = torch.chunk(local, mesh.size(dim), axis)
        mine = mesh.get_local_rank(dim)
        local = chunks[mine] if mine < len(chunks) else local.narrow(axis, 0, 0)
    return DTensor.from_local(
        local.contiguous().clone().to(own.device),
        mesh,
        own.placements,
        run_check=False,
        shape=whole.shape,
        stride=own.stride(),
    )
