"""Norms, gated activation and rotary embedding: both forms against float64 definitions, values and gradients."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor
from transformers.models.llama.modeling_llama import LlamaRMSNorm, apply_rotary_pos_emb

from strop.ops import fused
from strop.ops.native import fused as native_fused
from strop.ops.native.build import kernel
from strop.ops.select import Impl

EPS = 1e-6
IMPLS = [Impl.TORCH, Impl.NATIVE]
Op = Callable[..., Tensor | tuple[Tensor, ...]]


def norm_reference(x: Tensor, weight: Tensor) -> Tensor:
    return x / (x.square().sum(-1, keepdim=True) / x.shape[-1] + EPS).sqrt() * weight


def turn_reference(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Each pair (c, c + C/2) as a complex number, written out channel by channel."""
    half = x.shape[-1] // 2
    c, s = cos.unsqueeze(-2), sin.unsqueeze(-2)
    first = x[..., :half] * c[..., :half] - x[..., half:] * s[..., :half]
    second = x[..., half:] * c[..., half:] + x[..., :half] * s[..., half:]
    return torch.stack((first, second), -2).flatten(-2)


class Case:
    """An op, its float64 definition, and inputs: those that need a gradient first, then constants."""

    def __init__(self, op: Op, reference: Op, shapes: list[tuple[int, ...]], constants: list[tuple[int, ...]]) -> None:
        self.op, self.reference, self.shapes, self.constants = op, reference, shapes, constants

    def inputs(self, dtype: torch.dtype) -> tuple[list[Tensor], list[Tensor]]:
        g = torch.Generator().manual_seed(3)
        made = [torch.randn(s, generator=g, dtype=torch.float64) for s in self.shapes + self.constants]
        made = [x.to(dtype) for x in made]
        return [x.requires_grad_() for x in made[: len(self.shapes)]], made[len(self.shapes) :]


def norm_rope_op(
    q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor, impl: Impl
) -> tuple[Tensor, ...]:
    return fused.norm_rope(q, k, qw, kw, eps=EPS, cos_TC=cos, sin_TC=sin, impl=impl)


def norm_rope_reference(q: Tensor, k: Tensor, qw: Tensor, kw: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, ...]:
    return turn_reference(norm_reference(q, qw), cos, sin), turn_reference(norm_reference(k, kw), cos, sin)


def rope_case(C: int, lead: tuple[int, ...] = (11,), H: int = 6, J: int = 2) -> Case:
    return Case(
        fused.rope,
        lambda q, k, cos, sin: (turn_reference(q, cos, sin), turn_reference(k, cos, sin)),
        [(*lead, H, C), (*lead, J, C)],
        [(*lead[-1:], C)] * 2,
    )


def norm_rope_case(C: int, T: int = 13, H: int = 4, J: int = 2) -> Case:
    return Case(norm_rope_op, norm_rope_reference, [(T, H, C), (T, J, C), (C,), (C,)], [(T, C)] * 2)


def norm_case(*shape: int) -> Case:
    return Case(lambda x, w, impl: fused.rms_norm(x, w, EPS, impl), norm_reference, [shape, shape[-1:]], [])


def add_norm_case(*shape: int) -> Case:
    return Case(
        lambda x, r, w, impl: fused.add_rms_norm(x, r, w, EPS, impl),
        lambda x, r, w: (norm_reference(x + r, w), x + r),
        [shape, shape, shape[-1:]],
        [],
    )


def swiglu_case(*shape: int) -> Case:
    return Case(fused.swiglu, lambda gate, up: gate / (1 + (-gate).exp()) * up, [shape, shape], [])


CASES = {
    "norm-256": norm_case(37, 256),
    "norm-576": norm_case(3, 5, 576),
    "norm-7": norm_case(9, 7),
    "norm-1": norm_case(4, 1),
    "norm-many-rows": norm_case(700, 40),
    "norm-no-tokens": norm_case(0, 16),
    "add-norm-512": add_norm_case(29, 512),
    "add-norm-13": add_norm_case(2, 3, 13),
    "add-norm-no-tokens": add_norm_case(0, 16),
    "swiglu-768": swiglu_case(21, 768),
    "swiglu-11": swiglu_case(2, 3, 11),
    "swiglu-no-tokens": swiglu_case(0, 16),
    **{f"rope-{C}": rope_case(C) for C in (2, 6, 20, 32, 64, 80, 128)},
    "rope-batched": rope_case(32, lead=(2, 7)),
    "rope-no-tokens": rope_case(32, lead=(0,)),
    **{f"norm-rope-{C}": norm_rope_case(C) for C in (2, 20, 32, 64, 80, 128)},
    "norm-rope-one-head": norm_rope_case(32, H=1, J=1),
    "norm-rope-many-tokens": norm_rope_case(16, T=600),
    "norm-rope-no-tokens": norm_rope_case(32, T=0),
}
cases = pytest.mark.parametrize("case", [pytest.param(case, id=name) for name, case in CASES.items()])
impls = pytest.mark.parametrize("impl", IMPLS)


def run(op: Op, inputs: list[Tensor], constants: list[Tensor], *rest: Impl) -> list[Tensor]:
    """Outputs, then the gradients of a fixed random combination of them."""
    out = op(*inputs, *constants, *rest)
    outs = list(out) if isinstance(out, tuple) else [out]
    g = torch.Generator().manual_seed(4)
    seeds = [torch.randn(o.shape, generator=g, dtype=torch.float64).to(o.dtype) for o in outs]
    return [o.detach() for o in outs] + list(torch.autograd.grad(outs, inputs, seeds))


@cases
@impls
def test_values_and_gradients_equal_the_definition(case: Case, impl: Impl) -> None:
    got = run(case.op, *case.inputs(torch.float32), impl)
    expected = run(case.reference, *case.inputs(torch.float64))
    for mine, true in zip(got, expected, strict=True):
        assert mine.dtype == torch.float32 and mine.shape == true.shape
        scale = max(1.0, float(true.abs().max()) if true.numel() else 0.0)
        torch.testing.assert_close(mine.double(), true, rtol=2e-6, atol=2e-6 * scale)


@cases
def test_torch_form_is_differentiated_right_in_float64(case: Case) -> None:
    inputs, constants = case.inputs(torch.float64)
    expected = run(case.reference, inputs, constants)
    for mine, true in zip(run(case.op, inputs, constants, Impl.TORCH), expected, strict=True):
        torch.testing.assert_close(mine, true, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "case", [norm_case(3, 5), add_norm_case(2, 4), swiglu_case(2, 3), rope_case(4, (3,)), norm_rope_case(4, 3)]
)
def test_torch_form_passes_gradcheck(case: Case) -> None:
    inputs, constants = case.inputs(torch.float64)
    assert torch.autograd.gradcheck(lambda *x: case.op(*x, *constants, Impl.TORCH), inputs)


@cases
def test_native_form_is_the_same_on_one_thread_and_two(case: Case) -> None:
    torch.set_num_threads(1)
    one = run(case.op, *case.inputs(torch.float32), Impl.NATIVE)
    torch.set_num_threads(2)
    two = run(case.op, *case.inputs(torch.float32), Impl.NATIVE)
    assert all(torch.equal(a, b) for a, b in zip(one, two, strict=True))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_torch_norm_is_transformers_norm_bit_for_bit(dtype: torch.dtype) -> None:
    theirs = LlamaRMSNorm(48, eps=EPS).to(dtype)
    torch.nn.init.normal_(theirs.weight)
    x = torch.randn(3, 7, 48, dtype=dtype)
    assert torch.equal(fused.rms_norm(x, theirs.weight, EPS, Impl.TORCH), theirs(x))


def test_torch_rope_is_transformers_rope_bit_for_bit() -> None:
    q, k, angles = torch.randn(1, 9, 6, 32), torch.randn(1, 9, 2, 32), torch.randn(1, 9, 16)
    cos, sin = torch.cat((angles, angles), -1).cos(), torch.cat((angles, angles), -1).sin()
    mine = fused.rope(q, k, cos, sin, Impl.TORCH)
    theirs = apply_rotary_pos_emb(q, k, cos, sin, unsqueeze_dim=2)
    assert torch.equal(mine[0], theirs[0]) and torch.equal(mine[1], theirs[1])


@impls
def test_inputs_of_any_memory_layout_are_made_right(impl: Impl) -> None:
    """A39: slices of a fused projection, transposed and expanded tensors give what plain ones give."""
    wide = torch.randn(5, 3, 2 * 24 + 8).requires_grad_()
    views: list[Callable[[Tensor], Tensor]] = [
        lambda w: w[..., 8:32],
        lambda w: w.transpose(0, 1)[..., 32:],
        lambda w: w[..., :24:1].flip(-1),
        lambda w: w[:1, :, 3:27].expand(4, 3, 24),
        lambda w: w[..., 0:48:2],
    ]
    weight = torch.randn(24)
    for view in views:
        for op in (
            lambda x: fused.rms_norm(x, weight, EPS, impl),
            lambda x: fused.swiglu(x, x * 0.5, impl),
            lambda x: fused.add_rms_norm(x, x, weight, EPS, impl)[0],
            lambda x: fused.rope(x, x, torch.ones(len(x), 24), torch.full((len(x), 24), 0.5), impl)[0],
        ):
            strided = op(view(wide))
            plain = op(view(wide).contiguous())
            torch.testing.assert_close(strided, plain, rtol=1e-6, atol=1e-7)
            seed = torch.randn(24, *plain.shape[:-1]).movedim(0, -1)  # a gradient that is not contiguous either
            (a,) = torch.autograd.grad(strided, wide, seed)
            (b,) = torch.autograd.grad(plain, wide, seed.contiguous())
            assert a.abs().sum() > 0
            torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


@impls
def test_heads_cut_from_one_fused_projection(impl: Impl) -> None:
    """A39: queries and keys as views into one [T, (H + 2J) C] product, and a weight that is itself a view."""
    qkv = torch.randn(7, 8, 16).requires_grad_()
    weights = torch.randn(16, 2)
    cos, sin = torch.randn(7, 16), torch.randn(7, 16)

    def both(cut: Callable[[Tensor], Tensor]) -> list[Tensor]:
        q, k = cut(qkv[:, :4]), cut(qkv[:, 4:6])
        norms = cut(weights[:, 0]), cut(weights[:, 1])
        out = fused.norm_rope(q, k, *norms, eps=EPS, cos_TC=cos, sin_TC=sin, impl=impl)
        return [*out, *torch.autograd.grad(out, qkv, [o.detach() * 3 for o in out])]

    assert all(torch.equal(a, b) for a, b in zip(both(lambda x: x), both(lambda x: x.contiguous()), strict=True))


@impls
def test_rows_with_nan_and_inf_stay_alone(impl: Impl) -> None:
    """A bad row is NaN itself, shows in its own gradient, and changes no bit of any other row."""
    x, r = torch.randn(6, 40), torch.randn(6, 40)
    w = torch.randn(40)

    def everything(x: Tensor) -> list[Tensor]:
        x = x.clone().requires_grad_()
        outs = [fused.rms_norm(x, w, EPS, impl), *fused.add_rms_norm(x, r, w, EPS, impl), fused.swiglu(x, r, impl)]
        return [o.detach() for o in outs] + [
            g for o in outs for g in torch.autograd.grad(o.sum(), x, retain_graph=True)
        ]

    clean = everything(x)
    for bad in (float("nan"), float("inf"), float("-inf")):
        poisoned = x.clone()
        poisoned[2, 5] = bad
        for dirty, good in zip(everything(poisoned), clean, strict=True):
            assert torch.equal(dirty[[0, 1, 3, 4, 5]], good[[0, 1, 3, 4, 5]])
        assert not everything(poisoned)[0][2, 5].isfinite()


def test_native_swiglu_has_torchs_values_at_the_ends() -> None:
    gate = torch.tensor([float("nan"), float("inf"), float("-inf"), 1000.0, -1000.0, 88.5, -88.5, 0.0, -0.0])
    up = torch.full_like(gate, 2.0)
    native, plain = (fused.swiglu(gate, up, impl) for impl in (Impl.NATIVE, Impl.TORCH))
    torch.testing.assert_close(native, plain, equal_nan=True, rtol=1e-6, atol=1e-35)


def test_a_frozen_input_costs_nothing_and_gets_no_gradient(monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel is told of no place to write the gradient of a weight, or of an input, that needs none."""
    calls: list[tuple[int | None, int | None]] = []
    real = kernel("rms_norm_backward")

    def recorded(*arguments: int | None) -> None:
        calls.append((arguments[8], arguments[9]))
        real(*arguments)

    monkeypatch.setattr(
        native_fused,
        "kernel",
        lambda name: recorded if name == "rms_norm_backward" else kernel(name),  # pyright: ignore
    )
    for x_needs, w_needs in ((True, False), (False, True), (True, True)):
        x, w = torch.randn(4, 8).requires_grad_(x_needs), torch.randn(8).requires_grad_(w_needs)
        fused.rms_norm(x, w, EPS, Impl.NATIVE).sum().backward()
        assert (x.grad is not None, w.grad is not None) == (x_needs, w_needs)
        assert (calls[-1][0] is not None, calls[-1][1] is not None) == (x_needs, w_needs)


@impls
def test_no_graph_is_kept_without_gradients(impl: Impl) -> None:
    x, w = torch.randn(4, 8).requires_grad_(), torch.randn(8).requires_grad_()
    with torch.no_grad():
        outs = [fused.rms_norm(x, w, EPS, impl), fused.swiglu(x, x, impl), *fused.add_rms_norm(x, x, w, EPS, impl)]
    assert not any(o.requires_grad for o in outs)


def test_only_one_output_of_the_fused_sum_used() -> None:
    """Either output of add_rms_norm may be left out of the loss."""
    for pick in (0, 1):
        grads: list[Tensor] = []
        for impl in IMPLS:
            g = torch.Generator().manual_seed(0)
            x, r, w = (torch.randn(s, generator=g).requires_grad_() for s in ((5, 16), (5, 16), (16,)))
            out = fused.add_rms_norm(x, r, w, EPS, impl)[pick]
            (out * torch.arange(16.0)).sum().backward()
            assert x.grad is not None and r.grad is not None
            assert torch.equal(x.grad, r.grad)
            grads.append(x.grad)
        torch.testing.assert_close(grads[0], grads[1], rtol=1e-5, atol=1e-5)


def test_native_form_refuses_what_it_would_misread() -> None:
    x, w = torch.randn(4, 8), torch.randn(8)
    with pytest.raises(TypeError, match=r"float32 tensors on the CPU, not torch\.float64"):
        fused.rms_norm(x.double(), w, EPS, Impl.NATIVE)
    with pytest.raises(ValueError, match="needs a weight of that size"):
        fused.rms_norm(x, w[:4], EPS, Impl.NATIVE)
    with pytest.raises(ValueError, match="differ in shape"):
        fused.swiglu(x, x[:2], Impl.NATIVE)
    with pytest.raises(ValueError, match="3 is odd"):
        fused.rope(x[:, None, :3], x[:, None, :3], x[:, :3], x[:, :3], Impl.NATIVE)


def test_native_form_says_that_it_is_differentiated_once() -> None:
    x, w = torch.randn(4, 8).requires_grad_(), torch.randn(8)
    (grad,) = torch.autograd.grad(fused.rms_norm(x, w, EPS, Impl.NATIVE).square().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.sum().backward()
