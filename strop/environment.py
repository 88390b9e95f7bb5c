"""Everything strop reads from the process environment, and sets in its process. No other file touches `os.environ`."""

from __future__ import annotations

import ctypes
import os
import platform
from collections.abc import Mapping
from pathlib import Path

_M_TRIM_THRESHOLD, _M_MMAP_MAX = -1, -4  # malloc.h


def cache_folder() -> Path:
    """Where strop keeps what it can make again: compiled kernels, converted models. Not created here.

    `STROP_CACHE` names the folder itself; else it is `strop` in `XDG_CACHE_HOME`, else `~/.cache/strop`.
    """
    own = os.environ.get("STROP_CACHE")
    if own:
        return Path(own)
    shared = os.environ.get("XDG_CACHE_HOME")
    return (Path(shared) if shared else Path.home() / ".cache") / "strop"


def child_environment(more: Mapping[str, str]) -> dict[str, str]:
    """What a process that strop starts sees: what strop sees, and `more`."""
    return {**os.environ, **more}


def keep_memory() -> None:
    """Let this process keep what it frees. A step allocates what the one before freed, and memory that is new, page by
    page, costs more than filling it. Does nothing where the C library is not glibc."""
    if platform.libc_ver()[0] != "glibc":
        return
    mallopt = ctypes.CDLL(None).mallopt
    for parameter, value in ((_M_MMAP_MAX, 0), (_M_TRIM_THRESHOLD, -1)):  # all from the heap, which never shrinks
        if not mallopt(parameter, value):
            raise OSError(f"mallopt({parameter}, {value}) failed")
