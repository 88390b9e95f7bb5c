"""Memory that processes of one machine share, without a name once all who should have it do.

lend: a file in memory, its place and its token -> borrow, in other processes -> forget: its name is gone
"""

from __future__ import annotations

import mmap
import os
import secrets
import shutil
import tempfile
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

_FOLDER = Path("/dev/shm")  # a file system in memory; where there is none, nothing is shared
_PREFIX = "strop-"
_TOKEN_BYTES = 16
_SPARE = 2  # times the size must be free: others live in that folder too


@dataclass(frozen=True, slots=True)
class Lent:
    """What other processes need to find the memory."""

    path: str
    token: str  # another machine may have a file of that name
    size: int  # bytes


def lend(size: int) -> tuple[Lent, Tensor] | None:
    """`size` bytes of this machine's memory, readable and writable by processes of this user. None where there is no
    such memory, or not enough."""
    if not _FOLDER.is_dir() or shutil.disk_usage(_FOLDER).free < _SPARE * size:
        return None
    token = secrets.token_bytes(_TOKEN_BYTES)
    fd, path = tempfile.mkstemp(prefix=_PREFIX, dir=_FOLDER)
    try:
        os.posix_fallocate(fd, 0, size + _TOKEN_BYTES)  # now, and not as a bus error at the first write
        os.pwrite(fd, token, size)
        return Lent(path, token.hex(), size), _mapped(fd, size)
    except OSError:
        os.unlink(path)
        return None
    finally:
        os.close(fd)


def borrow(lent: Lent) -> Tensor | None:
    """The memory that a process of this machine lent; None when there is none of that name here, or another."""
    path = Path(lent.path)
    if path.parent != _FOLDER or not path.name.startswith(_PREFIX):
        return None
    fd = -1
    try:
        fd = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
        if (
            os.fstat(fd).st_size != lent.size + _TOKEN_BYTES
            or os.pread(fd, _TOKEN_BYTES, lent.size).hex() != lent.token
        ):
            return None
        return _mapped(fd, lent.size)
    except OSError:
        return None
    finally:
        if fd >= 0:
            os.close(fd)


def forget(lent: Lent) -> None:
    """Take the name away: those who have the memory keep it, and it is gone with the last of them."""
    Path(lent.path).unlink(missing_ok=True)


def _mapped(fd: int, size: int) -> Tensor:
    return torch.frombuffer(mmap.mmap(fd, size), dtype=torch.uint8)
