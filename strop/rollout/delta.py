"""What changed in a set of weights since a receiver last had them: named tensors in, changed elements out.

Elements are compared as bytes, so a NaN that is new is sent and one that was there is not, and 0.0 is not -0.0.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from strop.errors import EngineError

_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(frozen=True, slots=True, kw_only=True)
class Delta:
    """The changed elements of one tensor."""

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    indices_N: Tensor  # int64, into the flattened tensor, ascending
    values_N: Tensor  # of `dtype`

    @property
    def num_bytes(self) -> int:
        """What it takes to send: 8 for each index, and the values."""
        return self.indices_N.nbytes + self.values_N.nbytes


def deltas(before: Mapping[str, Tensor], weights: Iterable[tuple[str, Tensor]]) -> Iterator[Delta]:
    """The changed elements of each tensor that has some. `before` is what the receiver has, and stays as it is.

    EngineError when names, shapes or formats are not those of `before`.
    """
    seen: set[str] = set()
    for name, tensor in weights:
        if name not in before:
            raise EngineError(f"{name}: the receiver has no such weight, so nothing is known of what changed")
        was = before[name]
        if was.shape != tensor.shape or was.dtype != tensor.dtype:
            raise EngineError(
                f"{name} was {tuple(was.shape)} {was.dtype} and is {tuple(tensor.shape)} {tensor.dtype}: send it whole"
            )
        seen.add(name)
        if len((delta := delta_of(name, was, tensor)).indices_N):
            yield delta
    if missing := sorted(before.keys() - seen):
        raise EngineError(f"{', '.join(missing[:5])}: the receiver has these weights, and nothing was said of them")


def delta_of(name: str, was: Tensor, tensor: Tensor) -> Delta:
    """What changed between two tensors of one shape and format; nothing, perhaps."""
    changed_N = (_bits(was) != _bits(tensor).to(was.device)).nonzero()[:, 0]
    values_N = tensor.detach().reshape(-1)[changed_N.to(tensor.device)].clone()
    return Delta(name=name, shape=tuple(tensor.shape), dtype=tensor.dtype, indices_N=changed_N, values_N=values_N)


@torch.no_grad()
def apply_deltas(weights: Mapping[str, Tensor], changes: Iterable[Delta]) -> None:
    """Write the changed elements in place: all or nothing.

    EngineError, and nothing written, for a tensor of another name, shape or format, or an index outside of it.
    """
    taken = list(changes)
    for delta in taken:
        own = weights.get(delta.name)
        if own is None:
            raise EngineError(f"a delta of {delta.name}, which is not here")
        if tuple(own.shape) != delta.shape or own.dtype != delta.dtype or delta.values_N.dtype != delta.dtype:
            raise EngineError(
                f"a delta of {delta.name} as {delta.shape} {delta.dtype}; here it is {tuple(own.shape)} {own.dtype}"
            )
        if len(delta.indices_N) != len(delta.values_N) or not _inside(delta.indices_N, own.numel()):
            raise EngineError(f"a delta of {delta.name} has indices that are not places of its {own.numel()} elements")
    for delta in taken:
        own = weights[delta.name]
        at = torch.unravel_index(delta.indices_N.to(own.device), delta.shape)
        own[at] = delta.values_N.to(own.device)


def _inside(indices_N: Tensor, count: int) -> bool:
    return not len(indices_N) or bool(int(indices_N.min()) >= 0 and int(indices_N.max()) < count)


def _bits(tensor: Tensor) -> Tensor:
    """Its elements as integers of their width, flat."""
    return tensor.detach().contiguous().view(-1).view(_BITS[tensor.element_size()])
