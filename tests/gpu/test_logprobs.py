"""The head on a GPU, beside the plain form in float64: torch tiles, compiled kernels, and peak memory."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from strop.ops.logprobs import Entropy, Head, HeadImpl, score_targets
from tests.unit.ops.head_cases import Case, case, gradients, run

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU here"),
]
TOLERANCE = {torch.float32: 1e-4, torch.bfloat16: 3e-2}


def on_gpu(of: Case, dtype: torch.dtype) -> Case:
    leaves = {name: t.to("cuda", dtype) for name, t in of.leaves().items()}
    temperature = of.temperature.cuda() if isinstance(of.temperature, torch.Tensor) else of.temperature
    ids = None if of.ids is None else of.ids.cuda()
    return replace(of, **leaves, targets=of.targets.cuda(), temperature=temperature, ids=ids)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("form", ["plain", "chunked", "triton"])
@pytest.mark.parametrize("full", [False, True])
def test_values_and_gradients_are_those_of_float64(form: str, dtype: torch.dtype, full: bool) -> None:
    made = on_gpu(case(n=300, d=200, v=1000, full=full, seed=4), dtype)
    made = replace(made, weight=made.weight * 0.1)
    exact = on_gpu(made, torch.float64)
    (a, _), (b, _) = run(form, made, rows=64, square_sums=True), run("plain", exact, square_sums=True)
    close: dict[str, Any] = {"rtol": 0, "atol": TOLERANCE[dtype]}
    assert torch.allclose(a.logprobs_N.double(), b.logprobs_N, **close)
    assert a.entropy_N is not None and b.entropy_N is not None
    assert torch.allclose(a.entropy_N.double(), b.entropy_N, **close)
    one, other = gradients(form, made, rows=64), gradients("plain", exact)
    for name, wanted in other.items():
        got = one[name]
        assert got is not None and wanted is not None
        assert float((got.double() - wanted).abs().max() / wanted.abs().max()) < TOLERANCE[dtype], name


@pytest.mark.parametrize("form", [HeadImpl.CHUNKED, HeadImpl.TRITON])
def test_the_logits_are_never_there(form: HeadImpl) -> None:
    hidden = torch.randn(4096, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    weight = torch.randn(32_768, 256, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    targets = torch.randint(0, 32_768, (4096,), device="cuda")
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    scored = score_targets(hidden, Head(weight_VD=weight), targets, entropy=Entropy.GRADIENT, impl=form, rows=1024)
    assert scored.entropy_N is not None
    (scored.logprobs_N.sum() + scored.entropy_N.sum()).backward()
    peak = torch.cuda.max_memory_allocated() - before
    assert peak < 4096 * 32_768 * 4 / 4, "a quarter of the logits' size"
