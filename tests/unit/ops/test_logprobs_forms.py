"""Which forms of the head can be had, and liger-kernel's, which does less than strop's own."""

from __future__ import annotations

from dataclasses import replace
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from strop.errors import ConfigError
from strop.ops import head_liger, logprobs
from strop.ops.head import Ask, Shard
from strop.ops.head_stream import TorchKernels
from strop.ops.head_tiles import Summary
from strop.ops.logprobs import Entropy, Head, HeadImpl, require, score_targets
from tests.unit.ops.head_cases import Case, case, run

CPU = torch.device("cpu")
needs_liger = pytest.mark.skipif(find_spec("liger_kernel") is None, reason="liger-kernel has no wheel for this system")


@pytest.mark.parametrize("impl", list(HeadImpl))
def test_every_form_can_be_had_here(impl: HeadImpl) -> None:
    """Triton's by its interpreter, which the tests switch on."""
    if find_spec("triton") is None and impl in (HeadImpl.TRITON, HeadImpl.LIGER):
        with pytest.raises(ConfigError, match="pip install"):
            require(impl, device=CPU, dtype=torch.float32)
    else:
        assert require(impl, device=CPU, dtype=torch.float32) is None


@pytest.mark.parametrize(("impl", "package"), [(HeadImpl.TRITON, "triton"), (HeadImpl.LIGER, "liger-kernel")])
def test_a_package_that_is_not_installed_is_named(
    monkeypatch: pytest.MonkeyPatch, impl: HeadImpl, package: str
) -> None:
    monkeypatch.setattr(logprobs, "find_spec", lambda name: None)
    others = "or take plain, chunked or fused"
    words = f"^engine.head={impl} needs the package {package}: pip install {package}, {others}$"
    with pytest.raises(ConfigError, match=words):
        require(impl, device=CPU, dtype=torch.float32)
    for own in (HeadImpl.PLAIN, HeadImpl.CHUNKED, HeadImpl.FUSED):
        require(own, device=CPU, dtype=torch.float32, softcap=1.0, bias=True)


def test_triton_needs_a_gpu_or_its_interpreter(monkeypatch: pytest.MonkeyPatch) -> None:
    triton = pytest.importorskip("triton", reason="triton has no wheel for this system")
    monkeypatch.setattr(triton.knobs.runtime, "interpret", False)
    words = (
        r"^engine.head=triton needs a GPU .or TRITON_INTERPRET=1, which is for tests., and the model is on the CPU: "
        r"take plain, chunked or fused$"
    )
    with pytest.raises(ConfigError, match=words):
        require(HeadImpl.TRITON, device=CPU, dtype=torch.float32)
    require(HeadImpl.TRITON, device=torch.device("cuda"), dtype=torch.bfloat16, softcap=1.0, bias=True)
    with pytest.raises(ConfigError, match=r"^engine.head=triton multiplies no torch\.float64 on a GPU: take plain, c"):
        require(HeadImpl.TRITON, device=torch.device("cuda"), dtype=torch.float64)


def test_the_triton_form_asks_its_kernels_what_the_chunked_form_asks_torch(monkeypatch: pytest.MonkeyPatch) -> None:
    head_triton = pytest.importorskip("strop.ops.head_triton", reason="triton has no wheel for this system")
    monkeypatch.setattr(head_triton, "TritonKernels", TorchKernels)
    summed, found = [], []
    for form in ("chunked", "triton"):
        of, into = case(full=True).live(), torch.zeros(13, 3, dtype=torch.float64)
        scored, total = run(form, of, weight_grad_VD=into)
        total.backward()
        assert of.hidden.grad is not None and of.weight.grad is None and into.any()
        found.append([scored.logprobs_N, of.hidden.grad, into])
        summed.append(total.item())
    assert summed[0] == summed[1] and all(torch.equal(a, b) for a, b in zip(*found, strict=True))


def test_the_liger_form_is_given_what_was_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[object] = []

    def given(hidden: Tensor, head: Head, picks: Tensor, temperature: Tensor | float | None, ask: Ask) -> Summary:
        seen.extend((hidden, head, picks.tolist(), temperature, ask))
        some_N, some_NK = hidden[:, 0], picks[:, :0]
        return Summary(
            picked_NJ=hidden[:, :1], entropy_N=some_N, square_sums_N=some_N,
            top_ids_NK=some_NK, top_logprobs_NK=some_NK.float(),
        )  # fmt: skip

    monkeypatch.setattr(head_liger, "liger", given)
    of = case(temperature=0.7)
    head = of.head()
    found = score_targets(
        of.hidden, head, of.targets, temperature_N=0.7, entropy=Entropy.VALUE, impl=HeadImpl.LIGER, square_sums=True
    )
    wanted = [of.hidden, head, of.targets[:, None].tolist(), 0.7, Ask(entropy=Entropy.VALUE, square_sums=True)]
    assert all(one is other or one == other for one, other in zip(seen, wanted, strict=True))
    assert torch.equal(found.logprobs_N, of.hidden[:, 0])


@needs_liger
@pytest.mark.parametrize(
    ("asked", "lacking"),
    [({"softcap": 30.0}, "a soft cap, take"), ({"bias": True}, "a bias, take"),
     ({"softcap": 30.0, "bias": True}, "a soft cap and a bias, take")],
)  # fmt: skip
def test_liger_does_not_take_every_model(asked: dict[str, Any], lacking: str) -> None:
    words = f"^engine.head=liger: this model's head has {lacking} plain, chunked or fused$"
    with pytest.raises(ConfigError, match=words):
        require(HeadImpl.LIGER, device=CPU, dtype=torch.float32, **asked)


@pytest.mark.interpreted
@needs_liger
@pytest.mark.parametrize("temperature", [None, 0.7, torch.linspace(0.5, 2.0, 19)])
@pytest.mark.parametrize("entropy", list(Entropy))
def test_liger_gives_what_the_plain_head_gives(temperature: Tensor | float | None, entropy: Entropy) -> None:
    made = case(d=8, temperature=temperature)
    made = replace(made, targets=made.targets.index_fill(0, torch.tensor([3]), -1))
    mine, plain = (replace(made, hidden=made.hidden.float(), weight=made.weight.float()).live() for _ in range(2))
    (a, sum_a), (b, sum_b) = run("liger", mine, entropy=entropy), run("plain", plain, entropy=entropy)
    assert torch.allclose(a.logprobs_N, b.logprobs_N, rtol=0, atol=1e-5)
    if entropy is Entropy.NONE:
        assert a.entropy_N is None
    else:
        assert a.entropy_N is not None and b.entropy_N is not None
        assert torch.allclose(a.entropy_N, b.entropy_N, rtol=0, atol=1e-5)
        assert a.entropy_N.requires_grad is (entropy is Entropy.GRADIENT)
    sum_a.backward()
    sum_b.backward()
    for name in ("hidden", "weight"):
        one, other = mine.leaves()[name].grad, plain.leaves()[name].grad
        assert one is not None and other is not None and torch.allclose(one, other, rtol=0, atol=1e-4)


@pytest.mark.interpreted
@needs_liger
def test_ligers_gradients_are_finite_differences() -> None:
    """It computes in float32 whatever goes in, so the differences are coarse."""
    of = case(n=4, d=3, v=6)

    def value(hidden: Tensor, weight: Tensor) -> Tensor:
        return run("liger", replace(of, hidden=hidden, weight=weight))[1].double()

    leaves = (of.hidden.clone().requires_grad_(), of.weight.clone().requires_grad_())
    assert torch.autograd.gradcheck(value, leaves, eps=1e-2, atol=5e-3, rtol=1e-3)


@needs_liger
def test_liger_refuses_what_it_cannot_do() -> None:
    of = case()
    full = case(full=True)
    shard = Shard(group=None, start=0, size=13)  # type: ignore[arg-type]
    refused: list[tuple[str, Case, dict[str, Any]]] = [
        ("a bias", replace(of, bias=full.bias), {}),
        ("a soft cap", replace(of, softcap=2.0), {}),
        ("an adapter of the head", replace(of, a=full.a, b=full.b), {}),
        ("logprobs of given ids", replace(of, ids=full.ids), {}),
        ("the likeliest tokens", of, {"top_k": 1}),
        ("sums of squared probabilities", of, {"square_sums": True}),
    ]
    for lacking, made, asked in refused:
        with pytest.raises(ValueError, match=f"the liger head does not do {lacking}: take"):
            run("liger", made, **asked)
    with pytest.raises(ValueError, match="a vocabulary split over ranks"):
        head = Head(weight_VD=of.weight, shard=shard)
        score_targets(of.hidden, head, of.targets, impl=HeadImpl.LIGER)
    with pytest.raises(
        ValueError, match=r"^the plain head does not split the vocabulary over ranks: take chunked, fused or triton$"
    ):
        score_targets(of.hidden, Head(weight_VD=of.weight, shard=shard), of.targets, impl=HeadImpl.PLAIN)


@needs_liger
def test_liger_without_rows() -> None:
    of = case().live()
    targets = torch.full((19,), -1)
    scored, total = run("liger", replace(of, targets=targets))
    total.backward()
    assert not scored.logprobs_N.any() and of.hidden.grad is not None and not of.hidden.grad.any()
