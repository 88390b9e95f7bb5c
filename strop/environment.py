"""The only place that reads environment variables. Each is read when asked for, and named here with its meaning."""

from __future__ import annotations

import os
from pathlib import Path


def cache_folder() -> Path:
    """Where converted models and compiled kernels are kept: $STROP_CACHE, else strop below the user's cache folder."""
    chosen = os.environ.get("STROP_CACHE")
    if chosen:
        return Path(chosen).expanduser().absolute()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base).expanduser().absolute() if base else Path.home() / ".cache") / "strop"
