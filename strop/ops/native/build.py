"""Compile the C++ kernels once, keep the library in the cache folder, and bind it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


class NativeUnavailable(Exception):
    """The kernels cannot be built or loaded here; the message says why and what would help."""


@dataclass(frozen=True, slots=True)
class Library:
    """The loaded kernels."""

    path: Path
    compiler: str
    width: int  # floats in one vector


def library() -> Library:
    raise NativeUnavailable("they are not part of this version yet")
