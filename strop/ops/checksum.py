"""A checksum of a tensor's bytes at the speed of memory, which can copy them on the way."""

from __future__ import annotations

import zlib
from functools import cache

import torch
from torch import Tensor

from strop.ops.native.build import NativeUnavailable, kernel

_WORDS = 1024  # 64-bit words in a row
_ROWS = 256  # rows that torch reads from memory once and sums twice


def checksum(tensor: Tensor, into: Tensor | None = None) -> int:
    """32 bits that tell a tensor's bytes from others; `into` [bytes], uint8, becomes a copy of them.

    The bytes are rows of 64-bit words, which are summed by row and by column; the sums, and what fills no row, go
    through CRC-32. Any one changed word changes a sum, and so do any two that change places. The C++ and torch forms
    find the same number. Raises ValueError when `into` has another size.
    """
    raw = as_bytes(tensor)
    if into is not None and (into.dtype != torch.uint8 or into.shape != raw.shape or not into.is_contiguous()):
        raise ValueError(f"{raw.numel()} bytes do not go into {into.dtype} of shape {tuple(into.shape)}")
    whole = raw.numel() // (8 * _WORDS) * (8 * _WORDS)
    sums = b""
    if whole:
        form = native_sums if raw.is_cpu and (into is None or into.is_cpu) and _has_native() else torch_sums
        by_row, by_column = form(raw[:whole], None if into is None else into[:whole])
        sums = _bytes(torch.cat([by_row, by_column]))
    if into is not None:
        into[whole:].copy_(raw[whole:])
    return zlib.crc32(_bytes(raw[whole:]), zlib.crc32(sums))


def as_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor [numel * itemsize], in order; a copy only where they do not lie side by side."""
    return tensor.detach().contiguous().view(-1).view(torch.uint8)


def torch_sums(raw: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """(sums by row, sums by column) of whole rows of words, and the copy; int64, wrapping."""
    if into is not None:
        into.copy_(raw)
    aligned = raw if raw.storage_offset() % 8 == 0 else raw.clone()
    words = aligned.view(torch.int64).view(-1, _WORDS)
    by_column = torch.zeros(_WORDS, dtype=torch.int64, device=words.device)
    by_row: list[Tensor] = []
    for rows in words.split(_ROWS):
        by_column += rows.sum(0)
        by_row.append(rows.sum(1))
    return torch.cat(by_row), by_column


def native_sums(raw: Tensor, into: Tensor | None) -> tuple[Tensor, Tensor]:
    """`torch_sums` in one pass over memory, on the CPU."""
    rows = raw.numel() // (8 * _WORDS)
    by_row = torch.empty(rows, dtype=torch.int64)
    by_column = torch.zeros(_WORDS, dtype=torch.int64)
    target = None if into is None else into.data_ptr()
    kernel("checksum")(raw.data_ptr(), target, rows, _WORDS, by_row.data_ptr(), by_column.data_ptr())
    return by_row, by_column


@cache
def _has_native() -> bool:
    try:
        kernel("checksum")
    except NativeUnavailable:
        return False
    return True


def _bytes(tensor: Tensor) -> memoryview:
    return tensor.cpu().view(torch.uint8).numpy().data
