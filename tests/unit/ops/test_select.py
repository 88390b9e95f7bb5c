"""Which form of the kernels a run takes, and what is said when the native one cannot run."""

from __future__ import annotations

import pytest
import torch

from strop.errors import ConfigError
from strop.ops import select
from strop.ops.native.build import NativeUnavailable
from strop.ops.select import Impl, native_status, resolve

CPU, GPU = torch.device("cpu"), torch.device("cuda", 0)


def test_native_kernels_are_ready_here() -> None:
    """Every other test of the native form means something only if this holds."""
    ready, sentence = native_status()
    assert ready, sentence
    assert "floats a vector" in sentence


@pytest.mark.parametrize(
    ("requested", "dtype", "device", "expected"),
    [
        ("auto", torch.float32, CPU, Impl.NATIVE),
        ("native", torch.float32, CPU, Impl.NATIVE),
        ("torch", torch.float32, CPU, Impl.TORCH),
        ("auto", torch.float64, CPU, Impl.TORCH),
        ("auto", torch.bfloat16, CPU, Impl.TORCH),
        ("auto", torch.float32, GPU, Impl.TORCH),
        ("torch", torch.float64, GPU, Impl.TORCH),
    ],
)
def test_a_request_resolves(requested: str, dtype: torch.dtype, device: torch.device, expected: Impl) -> None:
    assert resolve(requested, dtype=dtype, device=device) is expected


@pytest.mark.parametrize(
    ("dtype", "device", "reason"),
    [
        (torch.float64, CPU, "compute in float32, not in float64: set model.dtype to float32"),
        (torch.float32, GPU, "run on the CPU, not on cuda:0: use device cpu"),
    ],
)
def test_native_that_cannot_run_is_refused_with_its_remedy(
    dtype: torch.dtype, device: torch.device, reason: str
) -> None:
    with pytest.raises(ConfigError, match=reason):
        resolve("native", dtype=dtype, device=device)


def test_without_a_compiler_auto_is_torch_and_native_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing() -> None:
        raise NativeUnavailable("no C++ compiler among c++: install one")

    monkeypatch.setattr(select, "library", missing)
    assert native_status() == (False, "native kernels cannot be built: no C++ compiler among c++: install one")
    assert resolve("auto", dtype=torch.float32, device=CPU) is Impl.TORCH
    with pytest.raises(
        ConfigError, match=r"model\.kernels=native: .* install one; or set model\.kernels to auto or torch"
    ):
        resolve("native", dtype=torch.float32, device=CPU)


def test_an_unknown_word_is_named() -> None:
    with pytest.raises(ConfigError, match="'fast' is none of auto, torch, native"):
        resolve("fast", dtype=torch.float32, device=CPU)


def test_triton_is_taken_only_when_asked_for_and_refused_with_its_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(select, "find_spec", lambda name: object())
    assert resolve("triton", dtype=torch.bfloat16, device=GPU) is Impl.TRITON
    assert resolve("auto", dtype=torch.float32, device=GPU) is Impl.TORCH
    with pytest.raises(ConfigError, match="run on GPUs, not on cpu"):
        resolve("triton", dtype=torch.float32, device=CPU)
    with pytest.raises(ConfigError, match=r"set model\.dtype to float32 or bfloat16"):
        resolve("triton", dtype=torch.float64, device=GPU)
    monkeypatch.setattr(select, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match=r"pip install triton; or set model\.kernels to auto or torch"):
        resolve("triton", dtype=torch.float32, device=GPU)
