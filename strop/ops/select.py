"""Which form of the kernels a run takes: a request, a number format and a device go in, an `Impl` comes out."""

from __future__ import annotations

from enum import StrEnum

import torch

from strop.errors import ConfigError
from strop.ops.native.build import NativeUnavailable, library


class Impl(StrEnum):
    """A form of every kernel in `strop.ops`: plain torch, or the C++ loops of `strop.ops.native`."""

    TORCH = "torch"
    NATIVE = "native"


def native_status() -> tuple[bool, str]:
    """Whether the C++ kernels can run here, and one sentence that says so; builds them if they are not built yet."""
    try:
        found = library()
    except NativeUnavailable as error:
        return False, f"native kernels cannot be built: {error}"
    return True, f"native kernels are ready ({found.width} floats a vector, built by {found.compiler}): {found.path}"


def resolve(requested: str, *, dtype: torch.dtype, device: torch.device) -> Impl:
    """The form that `requested` ("auto", "torch" or "native") means for tensors of `dtype` on `device`.

    "auto" takes the native form wherever it can run. Raises ConfigError when "native" is asked for and cannot run, and
    for any other word.
    """
    if requested == Impl.TORCH:
        return Impl.TORCH
    if requested not in ("auto", Impl.NATIVE):
        raise ConfigError(f"model.kernels={requested!r} is none of auto, torch, native")
    problem = _native_problem(dtype, device)
    if problem is None:
        return Impl.NATIVE
    if requested == Impl.NATIVE:
        raise ConfigError(f"model.kernels=native: {problem}; or set model.kernels to auto or torch")
    return Impl.TORCH


def _native_problem(dtype: torch.dtype, device: torch.device) -> str | None:
    """What keeps the native kernels from running, with its remedy; None when nothing does."""
    if device.type != "cpu":
        return f"the native kernels run on the CPU, not on {device}: use device cpu"
    if dtype != torch.float32:
        name = str(dtype).removeprefix("torch.")
        return f"the native kernels compute in float32, not in {name}: set model.dtype to float32"
    ready, sentence = native_status()
    return None if ready else sentence
