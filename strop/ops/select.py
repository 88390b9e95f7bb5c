"""Which form of the kernels a run takes: a request, a number format and a device go in, an `Impl` comes out."""

from __future__ import annotations

from enum import StrEnum
from importlib.util import find_spec

import torch

from strop.errors import ConfigError
from strop.ops.native.build import NativeUnavailable, library


class Impl(StrEnum):
    """A form of every kernel in `strop.ops`: plain torch, the C++ loops of `strop.ops.native`, or Triton (of which
    there is the gated delta rule; everything else is plain torch beside it)."""

    TORCH = "torch"
    NATIVE = "native"
    TRITON = "triton"


def native_status() -> tuple[bool, str]:
    """Whether the C++ kernels can run here, and one sentence that says so; builds them if they are not built yet."""
    try:
        found = library()
    except NativeUnavailable as error:
        return False, f"native kernels cannot be built: {error}"
    return True, f"native kernels are ready ({found.width} floats a vector, built by {found.compiler}): {found.path}"


def resolve(requested: str, *, dtype: torch.dtype, device: torch.device) -> Impl:
    """The form that `requested` ("auto", "torch", "native" or "triton") means for tensors of `dtype` on `device`.

    "auto" takes the native form wherever it can run, and never Triton. Raises ConfigError when "native" or "triton" is
    asked for and cannot run, and for any other word.
    """
    if requested == Impl.TORCH:
        return Impl.TORCH
    if requested == Impl.TRITON:
        problem = _triton_problem(dtype, device)
        if problem is not None:
            raise ConfigError(f"model.kernels=triton: {problem}; or set model.kernels to auto or torch")
        return Impl.TRITON
    if requested not in ("auto", Impl.NATIVE):
        raise ConfigError(f"model.kernels={requested!r} is none of auto, torch, native, triton")
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


def _triton_problem(dtype: torch.dtype, device: torch.device) -> str | None:
    if device.type != "cuda":
        return f"Triton's kernels run on GPUs, not on {device}: use device cuda"
    if dtype == torch.float64:
        return "Triton's kernels compute in float32: set model.dtype to float32 or bfloat16"
    return "the package triton is missing: pip install triton" if find_spec("triton") is None else None
