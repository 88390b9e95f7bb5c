"""Everything strop reads from the process environment. No other file touches `os.environ`."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path


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
