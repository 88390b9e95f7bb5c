"""The head: plain and chunked against an independent float64 reference, values and gradients."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from strop.ops import head_tiles
from strop.ops.logprobs import Entropy, Head, HeadImpl, score_targets

IMPLS = [HeadImpl.PLAIN, HeadImpl.CHUNKED]


@pytest.fixture(autouse=True)
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many tiles, the last ones not full."""
    monkeypatch.setattr(head_tiles, "COLUMNS", 5)


def inputs(n: int = 37, d: int = 5, v: int = 13, seed: int = 0) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    g = torch.Generator().manual_seed(seed)
    made = [torch.randn(*s, generator=g, dtype=torch.float64) for s in ((n, d), (v, d), (v,))]
    return *made, torch.randint(0, v, (n,), generator=g), torch.rand(n, generator=g, dtype=torch.float64) + 0.5  # pyright: ignore


def reference(
    hidden: np.ndarray, weight: np.ndarray, bias: np.ndarray, target: int, temperature: float, softcap: float | None
) -> tuple[float, float]:
    """One row in NumPy, from the definitions."""
    z = weight @ hidden + bias
    if softcap is not None:
        z = softcap * np.tanh(z / softcap)
    z = z / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    return float(np.log(p[target])), float(-(p * np.log(p)).sum())


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("softcap", [None, 1.5])
def test_values_are_the_definitions(impl: HeadImpl, softcap: float | None) -> None:
    hidden, weight, bias, targets, temperature = inputs()
    head = Head(weight_VD=weight, bias_V=bias, softcap=softcap)
    both = Entropy.GRADIENT
    scored = score_targets(hidden, head, targets, temperature_N=temperature, entropy=both, top_k=4, impl=impl)
    assert scored.entropy_N is not None and scored.top_k_ids_NK is not None and scored.top_k_logprobs_NK is not None
    for n in range(len(hidden)):
        args = hidden[n].numpy(), weight.numpy(), bias.numpy()
        t = float(temperature[n])
        logprob, entropy = reference(*args, int(targets[n]), t, softcap)
        assert float(scored.logprobs_N[n]) == pytest.approx(logprob, abs=1e-12)
        assert float(scored.entropy_N[n]) == pytest.approx(entropy, abs=1e-12)
        every = [reference(*args, v, t, softcap)[0] for v in range(13)]
        assert sorted(every, reverse=True)[:4] == pytest.approx(scored.top_k_logprobs_NK[n].tolist(), abs=1e-12)
        assert [every[i] for i in scored.top_k_ids_NK[n]] == pytest.approx(
            scored.top_k_logprobs_NK[n].tolist(), abs=1e-12
        )


@pytest.mark.parametrize("impl", IMPLS)
@pytest.mark.parametrize("softcap", [None, 1.5])
@pytest.mark.parametrize("with_bias", [False, True])
def test_gradients_are_finite_differences(impl: HeadImpl, softcap: float | None, with_bias: bool) -> None:
    hidden, weight, bias, targets, temperature = inputs(n=17)
    leaves = [t.clone().requires_grad_() for t in ([hidden, weight, bias] if with_bias else [hidden, weight])]

    def run(*leaves: Tensor) -> tuple[Tensor, ...]:
        head = Head(weight_VD=leaves[1], bias_V=leaves[2] if with_bias else None, softcap=softcap)
        scored = score_targets(leaves[0], head, targets, temperature_N=temperature, entropy=Entropy.GRADIENT, impl=impl)
        assert scored.entropy_N is not None
        return scored.logprobs_N, scored.entropy_N

    assert torch.autograd.gradcheck(run, leaves)


def grads(impl: HeadImpl, hidden: Tensor, weight: Tensor, targets: Tensor, **frozen: bool) -> list[Tensor | None]:
    hidden = hidden.detach().clone().requires_grad_(not frozen.get("body", False))
    weight = weight.detach().clone().requires_grad_(not frozen.get("head", False))
    scored = score_targets(hidden, Head(weight_VD=weight), targets, impl=impl)
    (scored.logprobs_N * torch.arange(len(targets)).to(scored.logprobs_N.dtype)).sum().backward()
    return [hidden.grad, weight.grad]


@pytest.mark.parametrize("impl", IMPLS)
def test_a_frozen_side_gets_no_gradient_and_the_other_is_the_same(impl: HeadImpl) -> None:
    hidden, weight, _, targets, _ = inputs()
    both = grads(impl, hidden, weight, targets)
    head, body = (grads(impl, hidden, weight, targets, **{side: True}) for side in ("head", "body"))
    assert head[1] is None and body[0] is None
    assert torch.equal(head[0], both[0]) and torch.equal(body[1], both[1])  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("impl", IMPLS)
def test_non_contiguous_inputs(impl: HeadImpl) -> None:
    """A39: a transposed hidden state still gets its gradient."""
    hidden, weight, _, targets, _ = inputs()
    base = hidden.t().contiguous().requires_grad_()
    tall = weight.t().contiguous()
    score_targets(base.t(), Head(weight_VD=tall.t()), targets, impl=impl).logprobs_N.sum().backward()
    expected = hidden.clone().requires_grad_()
    score_targets(expected, Head(weight_VD=weight), targets, impl=HeadImpl.PLAIN).logprobs_N.sum().backward()
    assert base.grad is not None and expected.grad is not None
    assert torch.allclose(base.grad.t(), expected.grad, atol=1e-12)


@pytest.mark.parametrize("impl", IMPLS)
def test_known_numbers(impl: HeadImpl) -> None:
    """A38: a vocabulary that fills no tile, all logits negative. A41: temperature divides logits. A49: uniform
    entropy."""
    eye = torch.eye(3, dtype=torch.float64)
    z = torch.tensor([[-20.0, -20.0, -17.0]], dtype=torch.float64)
    scored = score_targets(z, Head(weight_VD=eye), torch.tensor([2]), impl=impl)
    assert float(scored.logprobs_N[0]) == pytest.approx(-0.09492, abs=1e-5)
    uniform = score_targets(z * 0, Head(weight_VD=eye), torch.tensor([1]), entropy=Entropy.GRADIENT, impl=impl)
    assert float(uniform.logprobs_N[0]) == pytest.approx(-1.0986, abs=1e-4)
    two = torch.tensor([[2.0, 0.0]], dtype=torch.float64)
    half = torch.tensor([0.5])
    sharp = score_targets(two, Head(weight_VD=torch.eye(2).double()), torch.tensor([0]), temperature_N=half, impl=impl)
    assert float(sharp.logprobs_N[0]) == pytest.approx(-0.01815, abs=1e-5)
    four = score_targets(
        torch.zeros(1, 2).double(),
        Head(weight_VD=torch.zeros(4, 2).double()),
        torch.tensor([0]),
        entropy=Entropy.GRADIENT,
        impl=impl,
    )
    assert four.entropy_N is not None and float(four.entropy_N[0]) == pytest.approx(1.38629, abs=1e-5)


@pytest.mark.parametrize("impl", IMPLS)
def test_huge_logits_and_no_rows(impl: HeadImpl) -> None:
    hidden = torch.tensor([[1e4, -1e4]], requires_grad=True)
    scored = score_targets(hidden, Head(weight_VD=torch.eye(2)), torch.tensor([1]), entropy=Entropy.GRADIENT, impl=impl)
    scored.logprobs_N.sum().backward()
    assert scored.logprobs_N.item() == pytest.approx(-2e4) and hidden.grad is not None and hidden.grad.isfinite().all()
    assert scored.entropy_N is not None and scored.entropy_N.item() == 0.0
    none = score_targets(
        torch.zeros(0, 2), Head(weight_VD=torch.eye(2)), torch.zeros(0, dtype=torch.int64), top_k=1, impl=impl
    )
    assert none.logprobs_N.shape == (0,) and none.top_k_ids_NK is not None and none.top_k_ids_NK.shape == (0, 1)


def test_bfloat16_weights_accumulate_in_float32() -> None:
    hidden, weight, _, targets, _ = inputs(n=640, d=8)
    coarse = [t.to(torch.bfloat16) for t in (hidden, weight)]
    exact = grads(HeadImpl.PLAIN, coarse[0].double(), coarse[1].double(), targets)[1]
    got = grads(HeadImpl.CHUNKED, coarse[0], coarse[1], targets)[1]
    assert exact is not None and got is not None and got.dtype == torch.bfloat16
    assert float((got.double() - exact).abs().max() / exact.abs().max()) < 2e-2


def test_chunked_never_holds_all_logits() -> None:
    """The largest tensor that the chunked form makes is a chunk."""
    hidden, weight, _, targets, _ = inputs(n=160)
    largest = 0

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            nonlocal largest
            out = func(*args, **(kwargs or {}))
            if isinstance(out, Tensor):
                largest = max(largest, out.numel())
            return out

    hidden, weight = hidden.requires_grad_(), weight.requires_grad_()
    with Watch():
        score_targets(
            hidden, Head(weight_VD=weight), targets, entropy=Entropy.GRADIENT, impl=HeadImpl.CHUNKED
        ).logprobs_N.sum().backward()
    assert largest <= max(16 * 13, hidden.numel()) < 160 * 13


@pytest.mark.parametrize("impl", IMPLS)
def test_an_entropy_to_look_at_has_the_value_and_no_gradient(impl: HeadImpl) -> None:
    hidden, weight, _, targets, _ = inputs()
    hidden = hidden.requires_grad_()
    seen, live = (score_targets(hidden, Head(weight_VD=weight), targets, entropy=kind, impl=impl).entropy_N
                  for kind in (Entropy.VALUE, Entropy.GRADIENT))  # fmt: skip
    assert seen is not None and live is not None
    assert torch.equal(seen, live) and not seen.requires_grad and live.requires_grad
