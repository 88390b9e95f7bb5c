"""The packed causal convolution against a loop over tokens, in float64."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from strop.ops.causal_conv import causal_conv, conv_tails
from strop.types import Layout

LAYOUTS = {
    "one token": Layout((1,)),
    "shorter than the kernel": Layout((1, 2, 3, 4, 5)),
    "empty": Layout((0,)),
    "empty among others": Layout((0, 5, 0, 2)),
    "a shared prefix": Layout((6, 1, 2, 7), (-1, 0, 0, 0)),
    "a prefix shorter than the kernel": Layout((1, 4, 2, 0), (-1, 0, 0, 0)),
    "an empty prefix": Layout((0, 4, 2, 3), (-1, 0, 0, -1)),
    "several prefixes": Layout((9, 2, 3, 2, 1, 5), (-1, 0, -1, 2, 2, -1)),
}


def inputs(layout: Layout, F: int = 3, W: int = 4) -> list[Tensor]:
    generator = torch.Generator().manual_seed(0)
    shapes = (layout.num_tokens, F), (F, W), (len(layout.lengths), W - 1, F)
    return [torch.randn(*shape, generator=generator, dtype=torch.float64) for shape in shapes]


def by_definition(x_TF: Tensor, weight_FW: Tensor, tails_SWF: Tensor, layout: Layout) -> tuple[Tensor, Tensor]:
    """Outputs and tails, from whole texts written out."""
    W = weight_FW.shape[1]
    out, ends, texts = [], [], []
    for s, (first, length, parent) in enumerate(
        zip(layout.starts_S.tolist(), layout.lengths, layout.parents, strict=True)
    ):
        before = tails_SWF[s] if parent < 0 else texts[parent]
        text = torch.cat((before, x_TF[first : first + length]))
        texts.append(text)
        for t in range(len(before), len(text)):
            out.append((text[t - W + 1 : t + 1] * weight_FW.t()).sum(0))
        ends.append(text[len(text) - W + 1 :])
    return torch.stack(out) if out else x_TF * 1.0, torch.stack(ends)


@pytest.mark.parametrize("taps", [2, 4])
@pytest.mark.parametrize("name", LAYOUTS)
def test_values_gradients_and_tails(name: str, taps: int):
    layout = LAYOUTS[name]
    leaves = [x.requires_grad_() for x in inputs(layout, W=taps)]
    x_TF, weight_FW, start = leaves
    expected, ends = by_definition(x_TF, weight_FW, start, layout)
    got = causal_conv(leaves[0], leaves[1], layout, leaves[2])
    torch.testing.assert_close(got, expected, rtol=0, atol=1e-13)
    torch.testing.assert_close(conv_tails(leaves[0], layout, taps, leaves[2]), ends.detach(), rtol=0, atol=0)
    seed = torch.randn(got.shape, generator=torch.Generator().manual_seed(1), dtype=torch.float64)
    pairs = (torch.autograd.grad(y, leaves, seed, allow_unused=True, materialize_grads=True) for y in (got, expected))
    for a, b in zip(*pairs, strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=1e-12)


@pytest.mark.parametrize("name", ["shorter than the kernel", "several prefixes"])
def test_without_tails_nothing_lies_before(name: str):
    layout = LAYOUTS[name]
    x_TF, weight_FW, tails_SWF = inputs(layout)
    expected, ends = by_definition(x_TF, weight_FW, torch.zeros_like(tails_SWF), layout)
    torch.testing.assert_close(causal_conv(x_TF, weight_FW, layout), expected, rtol=0, atol=1e-13)
    assert torch.equal(conv_tails(x_TF, layout, 4), ends)


def test_gradcheck():
    layout = LAYOUTS["several prefixes"]
    leaves = [x.requires_grad_() for x in inputs(layout)]
    assert torch.autograd.gradcheck(lambda x, w, t: causal_conv(x, w, layout, t), leaves)


def test_neighbours_poison_does_not_leak():
    """A47: the others keep every bit, values and gradients."""
    layout = Layout((5, 6, 2, 3), (-1, -1, 1, 1))
    x_TF, weight_FW, tails_SWF = inputs(layout)
    kept = torch.ones(16, dtype=torch.bool)
    kept[:5] = kept[11:13] = False
    results: list[list[Tensor]] = []
    for value in (1.0, torch.nan):
        x, tails = x_TF.clone(), tails_SWF.clone()
        x[~kept] *= value
        tails[0] *= value
        x.requires_grad_()
        tails.requires_grad_()
        y = causal_conv(x, weight_FW, layout, tails)
        grads = torch.autograd.grad(y[kept].square().sum(), (x, tails))
        results.append([y[kept].detach(), grads[0][kept], grads[1][1]])
    assert all(torch.equal(a, b) and bool(a.any()) for a, b in zip(*results, strict=True))


def test_shapes_that_do_not_fit_are_refused():
    x_TF, weight_FW, tails_SWF = inputs(layout := Layout((4, 3)))
    for wrong in (
        (x_TF[:-1], weight_FW, tails_SWF),
        (x_TF, weight_FW[:2], tails_SWF),
        (x_TF, weight_FW, tails_SWF[:1]),
    ):
        with pytest.raises(ValueError, match=r"tokens|needed"):
            causal_conv(wrong[0], wrong[1], layout, wrong[2])
